"""Frames on libp2p streams: four bytes of big-endian length, then the bytes; all with deadlines.

It opens a stream on a given connection, names the protocol, and moves whole frames. It never
decides what a frame means. `net.libp2p_carrier` calls it. Three rules of the library shape it:

- A cancelled write may leave half a Noise frame on the socket and so ruin every stream of that
  connection. Writes are therefore shielded, small, and bounded by a deadline of their own; a write
  that misses it has found a dead connection, which the caller closes.
- yamux resets a stream whose reader takes nothing for 5 seconds, so frames are read as they come.
- A half-open peer never answers and never fails: nothing here waits without a bound.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any

import trio

from echo2_mesh import limits
from echo2_mesh.errors import PeerError

PIECE_SIZE_BYTES = 64 * limits.KIB - 12
"""One yamux frame: a deadline is then kept to within one frame's time on the wire."""
READ_SIZE_BYTES = 1 * limits.MIB
WRITE_TIMEOUT_S = 5.0
"""For one piece; the same 5 seconds after which yamux itself gives up on a full window."""
ROOM_POLL_S = 0.01
RELAYED_PATIENCE = 4
"""A relayed connection shares a slow line with others: its writes may take so many times longer."""
MULTISTREAM = "/multistream/1.0.0"
REFUSAL_LENGTH_MIN = 0xFFFFFF00
"""Lengths from here on are no lengths but a `Refusal` in the lowest byte."""

assert limits.CHUNK_SIZE_BYTES_MAX < REFUSAL_LENGTH_MIN


class Refusal(IntEnum):
    """Why a peer answered with no reply."""

    BUSY = 1
    TOO_LARGE = 2
    FAILED = 3


class DeadConnection(Exception):
    """The connection under a stream takes no bytes any more; close it."""


def _line(text: str) -> bytes:
    body = text.encode() + b"\n"
    assert len(body) < 128, "a protocol id whose length needs more than one varint byte"
    return bytes((len(body),)) + body


async def open_stream(connection: Any, protocol: str, first: bytes = b"") -> Any:
    """Open a stream, propose `protocol` and send `first` without waiting for consent.

    One round trip is saved against asking first; a peer that does not speak `protocol` says so in
    `wait_agreed`, having ignored the rest.
    """
    stream = await connection.new_stream()
    await write(stream, _line(MULTISTREAM) + _line(protocol) + first)
    return stream


async def wait_agreed(stream: Any, protocol: str) -> None:
    """Read the peer's consent.

    Raises:
        PeerError: it does not speak `protocol`, or not multistream at all.
    """
    for expected in (MULTISTREAM, protocol):
        size = (await read_exactly(stream, 1))[0]
        if size >= 128:
            raise PeerError("The peer's answer to a protocol proposal is malformed.")
        answer = await read_exactly(stream, size)
        if answer.rstrip(b"\n") != expected.encode():
            raise PeerError(f"The peer does not speak {protocol}.")


async def write(stream: Any, data: bytes) -> None:
    """Write all of `data`.

    Raises:
        DeadConnection: the peer's side took nothing for `WRITE_TIMEOUT_S`.
    """
    view = memoryview(data)
    relayed = stream.muxed_conn.get_remote_address() is None
    timeout_s = WRITE_TIMEOUT_S * (RELAYED_PATIENCE if relayed else 1)
    for start in range(0, len(data), PIECE_SIZE_BYTES):
        await trio.lowlevel.checkpoint_if_cancelled()
        with trio.move_on_after(timeout_s) as scope:
            scope.shield = True
            await stream.write(bytes(view[start : start + PIECE_SIZE_BYTES]))
        if scope.cancelled_caught:
            raise DeadConnection


async def write_patiently(stream: Any, data: bytes) -> None:
    """Write all of `data` as the reader makes room, for a stream with no other writer.

    yamux itself gives up after 5 s without room, which a line through a relay may well take.

    Raises:
        DeadConnection: there was no room for `RELAYED_PATIENCE` times as long.
    """
    view = memoryview(data)
    while view:
        polls_left = int(RELAYED_PATIENCE * WRITE_TIMEOUT_S / ROOM_POLL_S)
        while (room := stream.muxed_stream.send_window) <= 0:
            polls_left -= 1
            if polls_left < 0 or stream.muxed_stream.closed:
                raise DeadConnection
            await trio.sleep(ROOM_POLL_S)
        piece = view[: min(room, PIECE_SIZE_BYTES)]
        await write(stream, bytes(piece))
        view = view[len(piece) :]


async def read_exactly(stream: Any, size_bytes: int) -> bytes:
    """Read `size_bytes`, taking what is there as it comes."""
    received = bytearray()
    while len(received) < size_bytes:
        piece = await stream.read(min(size_bytes - len(received), READ_SIZE_BYTES))
        if not piece:
            raise PeerError(f"A stream ended {size_bytes - len(received)} bytes early.")
        received += piece
    return bytes(received)


def frame(data: bytes) -> bytes:
    """`data` with its length before it."""
    return struct.pack(">I", len(data)) + data


async def send_refusal(stream: Any, refusal: Refusal) -> None:
    """Say why there will be no reply."""
    await write(stream, struct.pack(">I", REFUSAL_LENGTH_MIN | refusal))


async def receive_length(stream: Any) -> int:
    """The length of the frame to come.

    Raises:
        PeerError: the peer refuses instead.
    """
    (length,) = struct.unpack(">I", await read_exactly(stream, 4))
    if length >= REFUSAL_LENGTH_MIN:
        reasons = {
            Refusal.BUSY: "is busy with other requests",
            Refusal.TOO_LARGE: "refuses a request of this size",
            Refusal.FAILED: "failed to answer this request",
        }
        code = length & 0xFF
        known = code in Refusal._value2member_map_
        raise PeerError(f"The peer {reasons[Refusal(code)] if known else 'refuses the request'}.")
    return int(length)


async def receive_frame(stream: Any, size_bytes_max: int) -> bytes:
    """One frame of at most `size_bytes_max`.

    Raises:
        PeerError: it is larger (nothing of it is read), or the peer refuses.
    """
    length = await receive_length(stream)
    if length > size_bytes_max:
        raise PeerError(f"A reply of {length} bytes was announced, {size_bytes_max} are allowed.")
    return await read_exactly(stream, length)
