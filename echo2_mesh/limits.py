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
CHUNK_SIZE_BYTES_DEFAULT = 1 * MIB
CHUNK_SIZE_BYTES_MAX = 16 * MIB
"""One content-addressed blob: weight chunk, manifest, model file part or trajectory."""
BLOB_FRAME_OVERHEAD_BYTES = 16
TICKET_CHARACTERS_MAX = 8192
PAYLOAD_TOKENS_MAX = 262_144
"""Tokens (prompt and completion) of one trajectory."""
MANIFEST_CHUNKS_MAX = 65_536
MANIFEST_TENSORS_MAX = 65_536
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
FETCH_IN_FLIGHT_MAX = 8
FETCH_IN_FLIGHT_PER_PEER_MAX = 3
BLAMES_BEFORE_BAN = 3
"""Bad or late answers from one peer within a version before nothing more is asked of it."""

# --- disk --------------------------------------------------------------------------------------
DISK_RESERVE_SHARE = 10
"""A tenth of the disk stays free: older blobs go before the next version finds no room."""
STORE_QUOTA_BYTES_DEFAULT = 200 * 1024 * MIB
KEPT_VERSIONS = 2
"""The installed version and the one before it are never evicted."""

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
assert FETCH_IN_FLIGHT_PER_PEER_MAX <= FETCH_IN_FLIGHT_MAX
assert CONNECTIONS_MIN < CONNECTIONS_LOW_WATERMARK < CONNECTIONS_HIGH_WATERMARK < CONNECTIONS_MAX
