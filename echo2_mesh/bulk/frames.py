"""The frames of a lane: one fixed header, and after `DATA` that many bytes.

A lane is a TLS connection on which both sides may ask and both answer (proto/bulk.md). Before
the first frame the side that is TLS client shows its token: `HELLO` and 32 bytes, to which the
other says `HELLO`. Values only; `bulk.lane` reads and writes them.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

from echo2_mesh.wire.types import ChunkKind

HELLO = b"echo2-lane/1\n"
HEADER = struct.Struct("!BBBxIII32s")
"""kind, status, blob kind, request id, size in bytes, wait in milliseconds, digest."""
HEADER_BYTES = HEADER.size
_NO_DIGEST = bytes(32)


class Kind(IntEnum):
    ASK = 1
    """Send me the blob `digest` of `size` bytes; it may take `wait` to come to you."""
    ANSWER = 2
    """`status`; after `HERE` exactly `size` bytes follow in `DATA` frames."""
    DATA = 3
    CANCEL = 4
    """Nobody waits for `request` any more: send no more of it."""


class Status(IntEnum):
    HERE = 0
    MISSING = 1
    BUSY = 2
    ILLEGAL = 3


BLOB_KINDS: tuple[ChunkKind, ...] = (
    ChunkKind.FULL,
    ChunkKind.PATCH,
    ChunkKind.MANIFEST,
    ChunkKind.TRAJECTORY,
    ChunkKind.FILE,
)
"""Blob kinds by their number in a header. They are the asker's word and only counted."""


class Frame(NamedTuple):
    """One header."""

    kind: int
    status: int
    blob_kind: int
    request: int
    size_bytes: int
    wait_ms: int
    digest: bytes


def unpack(header: bytes | bytearray) -> Frame:
    """The frame in `HEADER_BYTES` bytes; its values are not checked."""
    return Frame._make(HEADER.unpack(header))


def ask(request: int, digest: bytes, size_bytes: int, wait_s: float, blob_kind: int = 0) -> bytes:
    return HEADER.pack(Kind.ASK, 0, blob_kind, request, size_bytes, int(wait_s * 1000), digest)


def answer(request: int, status: Status, size_bytes: int = 0) -> bytes:
    return HEADER.pack(Kind.ANSWER, status, 0, request, size_bytes, 0, _NO_DIGEST)


def data(request: int, size_bytes: int) -> bytes:
    return HEADER.pack(Kind.DATA, 0, 0, request, size_bytes, 0, _NO_DIGEST)


def cancel(request: int) -> bytes:
    return HEADER.pack(Kind.CANCEL, 0, 0, request, 0, 0, _NO_DIGEST)
