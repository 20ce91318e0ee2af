"""What py-libp2p 0.8.1 does far too often, done as often as it is needed; put on by `net.host`.

Found by counting in an idle fleet of thirteen nodes, whose control traffic took 1.6 cores:

- `thrifty_windows`   a stream gives credit back after every single read, even of one byte; a gossip
                      message is read in three pieces, so each cost three frames more in the other
                      direction, two thirds of all frames. Yamux wants an update when half of the
                      window is used up: the sender has the other half until then;
- `thrifty_records`   every gossip message carries its sender's signed addresses, which are made,
                      parsed and verified each time though they hardly ever change;
- `thrifty_writes`    and which were a quarter of what such a message weighs: they are sent once
                      on each stream, and again when they change or have to be verified anew;
- `thrifty_probes`    a connection that was just heard needs no ping: `heard_s` says when that was.

Nothing here changes what is said; a host without it understands a host with it.
"""

from __future__ import annotations

import time
from typing import Any

import libp2p.pubsub.gossipsub as gossipsub
import libp2p.pubsub.pubsub as pubsub
import trio
from libp2p.security.secure_session import SecureSession
from libp2p.stream_muxer.yamux.yamux import YamuxStream

RECORD_MADE_S = 1.0
"""Own addresses are looked up at most so often."""
RECORD_TRUSTED_S = 600.0
"""A record is sent again, and verified anew, after so long; the library keeps it two hours."""
RECORDS_MAX = 4096


def be_thrifty() -> None:
    """Mend the library, once a process."""
    if not getattr(YamuxStream, "thrifty", False):
        YamuxStream.thrifty = True
        thrifty_windows()
        thrifty_records()
        thrifty_writes()
        thrifty_probes()


def thrifty_windows() -> None:
    """Hold credit back until half of a stream's window is used."""
    give = YamuxStream._auto_tune_and_send_window_update

    async def give_in_halves(stream: Any, *, bytes_read: int = 0) -> None:
        buffered = len(stream.conn.stream_buffers.get(stream.stream_id, b""))
        unsaid = stream.target_recv_window - (stream.recv_window + buffered)
        if unsaid >= stream._grow_threshold():
            await give(stream, bytes_read=bytes_read)

    YamuxStream._auto_tune_and_send_window_update = give_in_halves


def thrifty_records() -> None:
    """Make the own record once a second, and take a known one of a peer as read."""
    make, consume = pubsub.env_to_send_in_RPC, pubsub.maybe_consume_signed_record
    made: dict[Any, tuple[float, tuple[bytes, bool]]] = {}
    known: dict[tuple[Any, Any], tuple[float, bytes]] = {}

    def make_now_and_then(host: Any) -> tuple[bytes, bool]:
        at_s, record = made.get(host.get_id(), (0.0, (b"", False)))
        now_s = time.monotonic()
        if not record[0] or now_s - at_s > RECORD_MADE_S:
            record = make(host)
            made[host.get_id()] = (now_s, record)
        return record

    def consume_news(message: Any, host: Any, peer: Any) -> bool:
        if not message.HasField("senderRecord"):
            return True
        key, now_s = (host.get_id(), peer), time.monotonic()
        at_s, record = known.get(key, (0.0, b""))
        if record == message.senderRecord and now_s - at_s < RECORD_TRUSTED_S:
            return True
        if not consume(message, host, peer):
            return False
        known.pop(key, None)
        known[key] = (now_s, message.senderRecord)
        if len(known) > RECORDS_MAX:
            del known[next(iter(known))]
        return True

    for module in (pubsub, gossipsub):
        module.env_to_send_in_RPC = make_now_and_then
        module.maybe_consume_signed_record = consume_news


def thrifty_writes() -> None:
    """Leave out of a gossip message the record that the same stream carried not long ago."""
    write = pubsub.Pubsub.write_msg

    async def write_news(self: Any, stream: Any, rpc: Any) -> bool:
        record, now_s = rpc.senderRecord, time.monotonic()
        told, told_s = getattr(stream, "told_record", (b"", now_s))
        told_lately = told == record and now_s - told_s < RECORD_TRUSTED_S
        if record and told_lately:
            without = type(rpc)()
            without.CopyFrom(rpc)  # others are sent the same message
            without.ClearField("senderRecord")
            rpc = without
        written: bool = await write(self, stream, rpc)
        if written and record and not told_lately:
            stream.told_record = (record, now_s)
        return written

    pubsub.Pubsub.write_msg = write_news


def thrifty_probes() -> None:
    """Note when each connection was last heard."""
    read = SecureSession.read

    async def read_and_note(self: Any, n: int | None = None) -> bytes:
        data: bytes = await read(self, n)
        self.heard_s = trio.current_time()
        return data

    SecureSession.read = read_and_note


def heard_s(connection: Any) -> float:
    """When anything last came over a connection of the swarm, on trio's clock."""
    session = getattr(connection.muxed_conn, "secured_conn", None)
    return float(getattr(session, "heard_s", float("-inf")))
