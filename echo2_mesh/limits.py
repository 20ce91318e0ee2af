"""Every bound of the mesh, with its unit in the name; their relations are asserted at import.

Nothing here decides anything: rooms import the number they must obey. A limit that a peer can
run into is documented in `proto/`, so that another implementation refuses the same things.
"""

from __future__ import annotations

KIB = 1024
MIB = 1024 * KIB

NETWORK_VERSION = 1
"""Wire version; a ticket or an envelope of another version is refused before it is decoded."""

# --- sizes on the wire -------------------------------------------------------------------------
ENVELOPE_OVERHEAD_BYTES_MAX = 512
ASK_SIZE_BYTES_MAX = 1 * MIB
"""One request or reply of the ask protocol, envelope included."""
GOSSIP_SIZE_BYTES_MAX = 128 * KIB
"""One gossip message, envelope included; py-libp2p drops above 1 MiB without a word."""
INLINE_PAYLOAD_SIZE_BYTES_MAX = 8 * KIB
"""A trajectory up to this size rides inside its header; a larger one is pulled by digest."""
HEARTBEAT_SIZE_BYTES_MAX = 8 * KIB
"""One heartbeat, envelope included: every node keeps that of every other, to pass it on."""
CAUGHT_UP_SIZE_BYTES_MAX = 512 * KIB
"""Heartbeats in one answer to a late-comer."""
ROLLOUT_BATCH_SIZE_BYTES_MAX = 96 * KIB
"""Payload of one gossiped batch of headers (several announcements are cheaper as one)."""
ROLLOUT_BATCH_HEADERS_MAX = 256
CHUNK_SIZE_BYTES_DEFAULT = 4 * MIB
CHUNK_SIZE_BYTES_MAX = 16 * MIB
"""One content-addressed blob: weight chunk, manifest, model file part or trajectory."""
BLOB_FRAME_OVERHEAD_BYTES = 16
TICKET_CHARACTERS_MAX = 8192
PAYLOAD_TOKENS_MAX = 262_144
"""Tokens (prompt and completion) of one trajectory."""
MANIFEST_CHUNKS_MAX = 65_536
MANIFEST_TENSORS_MAX = 65_536
MANIFEST_PATCHES_MAX = 32
"""Steps and skips between older versions that a manifest lists."""
MANIFEST_FILES_MAX = 64
ADDRESSES_MAX = 16
ADDRESS_CHARACTERS_MAX = 256
LEASES_PER_GRANT_MAX = 64
LEASES_NAMED_MAX = 1024
"""Lease ids in one request's list of what the asker still holds."""
GROUP_SIZE_MAX = 256
PROMPT_TOKENS_MAX = 131_072
PROBE_TOKENS_MAX = 64
VERDICTS_PER_MESSAGE_MAX = 1024
CATCH_UP_HEARTBEATS_MAX = 128

# --- queues ------------------------------------------------------------------------------------
GOSSIP_QUEUE_MESSAGES_MAX = 512
EVENT_QUEUE_MAX = 1024
INBOUND_ASKS_MAX = 64
"""Asks being served at once; more are answered with a busy refusal."""
INBOUND_ASKS_PER_PEER_MAX = 16
INBOUND_BLOBS_MAX = 32
MEMBERS_MAX = 4096

# --- connections -------------------------------------------------------------------------------
CONNECTIONS_MAX = 300
CONNECTIONS_HIGH_WATERMARK = 200
CONNECTIONS_LOW_WATERMARK = 16
CONNECTIONS_MIN = 8

# --- reach -------------------------------------------------------------------------------------
RELAYS_WANTED = 2
"""A node that nobody can dial keeps a place at so many relays."""
RELAY_RESERVATIONS_MAX = 64
RELAY_RESERVATIONS_PER_IP_MAX = 16
"""Several homes may share one address; no address takes every place."""
RELAY_RESERVATION_S = 600.0
RELAY_CIRCUITS_MAX = 64
RELAY_CIRCUITS_PER_NODE_MAX = 16
"""Relayed connections of one node, at either end, that one relay carries at once."""
RELAY_CIRCUIT_BYTES_MAX = 4 * 1024 * MIB
RELAY_CIRCUIT_S_MAX = 3600.0
"""A circuit ends after so many bytes or seconds; both ends may open the next at once."""
RELAY_BYTES_PER_S_MAX = 16 * MIB
"""All circuits of one relay together, both directions: a volunteer's line is not for others."""
RELAY_HANDSHAKE_TIMEOUT_S = 10.0
CIRCUITS_INBOUND_MAX = 32
"""Relayed connections that one node accepts at once."""
DIAL_BACK_TIMEOUT_S = 3.0
DIAL_BACK_ADDRESSES_MAX = 4
DIAL_BACK_INTERVAL_S = 60.0
"""A peer that asks more often than this is told what is seen of it, and not dialled."""
DIAL_BACKS_MAX = 4
PUNCH_TRIES_MAX = 3
"""Hole punches towards one peer before it stays on the relay."""
PUNCH_WINDOW_S = 5.0
PUNCH_ADDRESSES_MAX = 4

# --- time --------------------------------------------------------------------------------------
CONNECT_TIMEOUT_S = 10.0
STREAM_OPEN_TIMEOUT_S = 5.0
ASK_TIMEOUT_S = 15.0
BLOB_TIMEOUT_S = 60.0
HEARTBEAT_INTERVAL_S = 2.0
SUSPECT_AFTER_S = 3 * HEARTBEAT_INTERVAL_S
GONE_AFTER_S = 10 * HEARTBEAT_INTERVAL_S
DISCOVERY_INTERVAL_S = 15.0
HOLDINGS_INTERVAL_S = 0.5
"""How often a node that is still fetching asks its neighbours which chunks they hold."""
CHUNK_DEADLINE_S = 20.0
"""A chunk not delivered within this time is asked from another holder and the first is blamed."""
CLOSE_TIMEOUT_S = 3.0

# --- fetching ----------------------------------------------------------------------------------
FETCH_IN_FLIGHT_MAX = 64
"""Chunks awaited at once of all parents in the forest together."""
FETCH_IN_FLIGHT_PER_PEER_MAX = 16
FETCH_IN_FLIGHT_PER_PEER_MIN = 2
FETCH_WINDOW_BYTES = 4 * MIB
"""Awaited of one parent at once, in chunks between the two numbers above: a stripe of a long fat
line stays busy, and what a liar or a staller holds up is little."""
SWARM_IN_FLIGHT_MAX = 8
"""The same where there is no forest and chunks are fetched rarest first."""
SWARM_IN_FLIGHT_PER_PEER_MAX = 3
CHUNK_WAIT_S_MIN = 1.5
"""A parent that is itself waiting for a chunk holds the question at least so long."""
CHUNK_WAIT_S_MAX = 15.0
CHUNK_SLACK_S_MIN = 4.0
"""A peer that says nothing for so much longer than it may wait is late."""
MISSING_PATIENCE_S = 6.0
"""A parent that says for so long that it still waits is gone around."""
PASS_OVER_LONGEST_S = 60.0
"""The longest time for which a parent that failed is gone around before it is tried again."""
REBUILD_PATIENCE_S = 120.0
"""Patches are here and nothing was made of them for so long: full chunks are fetched instead."""
BLAMES_BEFORE_BAN = 3
"""Bad or late answers from one peer within a version before nothing more is asked of it."""

# --- bulk lanes --------------------------------------------------------------------------------
LANE_TOKEN_BYTES = 32
LANE_PLACES_MAX = 8
"""Addresses of a bulk port that are told and tried."""
LANES_MAX = 256
LANES_PER_PEER_MAX = 4
LANE_ASKS_MAX = 64
"""Unanswered asks on one lane in one direction; more are answered with busy."""
LANE_PIECE_BYTES_MAX = 256 * KIB
"""Bytes of a blob in one frame: what an answer that was cancelled may still cost."""
LANE_STRAY_BYTES_MAX = 64 * MIB
"""Bytes of answers that nobody waits for any more, in a row, before a lane is closed."""
LANE_HALF_OPEN_MAX = 64
LANE_HALF_OPEN_PER_ADDRESS_MAX = 16
"""Connections that have not shown a token yet."""
LANE_HANDSHAKE_TIMEOUT_S = 5.0
LANE_DIAL_TIMEOUT_S = 2.0
LANE_PUNCH_TIMEOUT_S = 5.0
LANE_IDLE_S = 300.0
LANE_TICKET_LIFETIME_S = 20.0
LANE_TICKETS_MAX = 1024
LANE_TICKETS_PER_PEER_MAX = 8
LANE_UNEXPECTED_WAIT_S = 1.0
"""How long an ask waits for a blob that the holder does not expect (it may hear of it any time)."""
LANE_BUFFERS_BYTES_MAX = 256 * MIB
"""Blobs being received or written by the bulk process; above it lanes are not read."""
LANE_PATIENCE_S = 6.0
"""How long a fetch waits for a lane before it takes the control connection."""
LANE_RETRY_SOON_S = 1.0
"""After a question about a lane was lost or met a host that was just starting."""
LANE_RETRY_S = 30.0
LANE_RETRY_S_MAX = 600.0
"""After every way failed nothing is tried for this long, doubled each time."""
BULK_RESTART_S = 0.5
BULK_RESTART_S_MAX = 30.0
EXCHANGE_BLOB_BYTES_MAX = 32 * KIB
"""A blob up to this size does not wait for a lane to be made."""
TRAFFIC_PEERS_MAX = 1024
EXPECTED_DIGESTS_MAX = 2 * MANIFEST_CHUNKS_MAX

# --- disk --------------------------------------------------------------------------------------
DISK_RESERVE_SHARE = 10
"""A tenth of the disk stays free: older blobs go before the next version finds no room."""
STORE_QUOTA_BYTES_DEFAULT = 200 * 1024 * MIB
KEPT_VERSIONS = 2
"""The installed version and the one before it are never evicted."""
RETENTION_GRACE_S = 30.0
"""Older versions, and patches that nobody lists any more, go so long after their last use."""
SHELF_VERSIONS_MAX = 8
"""Versions whose holdings are answered; the older of them lose their blobs one by one."""
VERSION_LINES_MAX = 20_000
"""Lines of `versions.jsonl` that are read, and kept when it has grown to twice as many."""

# --- rebuilding --------------------------------------------------------------------------------
REBUILD_JOB_BYTES_MAX = 32 * MIB
"""Data chunks made in one job, together; every thread has at most two such jobs ahead of it."""
REBUILD_THREADS_MAX = 8
REBUILD_DEATHS_MAX = 3
"""Deaths of the rebuilding child in a row, after which what it should make is fetched whole."""

assert INLINE_PAYLOAD_SIZE_BYTES_MAX < ROLLOUT_BATCH_SIZE_BYTES_MAX
assert ROLLOUT_BATCH_SIZE_BYTES_MAX + ENVELOPE_OVERHEAD_BYTES_MAX < GOSSIP_SIZE_BYTES_MAX
assert (
    CAUGHT_UP_SIZE_BYTES_MAX + 2 * HEARTBEAT_SIZE_BYTES_MAX + GOSSIP_SIZE_BYTES_MAX
    < ASK_SIZE_BYTES_MAX
)
assert GOSSIP_SIZE_BYTES_MAX < 1 * MIB, "py-libp2p's outbound queue drops RPCs above 1 MiB"
assert CHUNK_SIZE_BYTES_DEFAULT <= CHUNK_SIZE_BYTES_MAX
assert (ADDRESSES_MAX * ADDRESS_CHARACTERS_MAX + 512) * 8 // 5 < TICKET_CHARACTERS_MAX
assert SUSPECT_AFTER_S < GONE_AFTER_S
assert FETCH_IN_FLIGHT_PER_PEER_MIN <= FETCH_IN_FLIGHT_PER_PEER_MAX <= FETCH_IN_FLIGHT_MAX
assert SWARM_IN_FLIGHT_PER_PEER_MAX <= SWARM_IN_FLIGHT_MAX <= FETCH_IN_FLIGHT_MAX
assert CHUNK_WAIT_S_MIN <= CHUNK_WAIT_S_MAX < CHUNK_DEADLINE_S <= BLOB_TIMEOUT_S
assert CONNECTIONS_MIN < CONNECTIONS_LOW_WATERMARK < CONNECTIONS_HIGH_WATERMARK < CONNECTIONS_MAX
assert RELAY_CIRCUITS_PER_NODE_MAX <= RELAY_CIRCUITS_MAX
assert RELAY_RESERVATIONS_PER_IP_MAX < RELAY_RESERVATIONS_MAX
assert LANE_TICKETS_PER_PEER_MAX * 2 <= LANE_TICKETS_MAX
assert LANE_DIAL_TIMEOUT_S < LANE_PATIENCE_S
assert CHUNK_SIZE_BYTES_MAX * 4 <= LANE_BUFFERS_BYTES_MAX
