"""One patch blob: the encoded differences of several consecutive data chunks, side by side.

`echo2_node.learner.export` writes them, whoever rebuilds a version reads them; what is inside
each part is the business of `delta.codec`. Pure: bytes in, bytes out. The bytes are described
in `proto/deltas.md`.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

import numpy as np

from echo2_mesh import limits
from echo2_mesh.delta.codec import Buffer
from echo2_mesh.errors import PeerError

_HINT = "The chunk is fetched whole."


def write_patch(encoded: Sequence[bytes]) -> bytes:
    """The blob for `len(encoded)` consecutive data chunks: their sizes, then their bytes.

    Args:
        encoded: what `encode_chunk` gave for each chunk, in order; empty where nothing changed.
    """
    sizes = struct.pack(f"<{len(encoded)}I", *map(len, encoded))
    return sizes + b"".join(encoded)


def read_patch(blob: Buffer, count: int) -> tuple[memoryview, ...]:
    """The parts of a patch blob, without a copy; empty ones stand for unchanged data chunks.

    Args:
        count: how many data chunks the manifest says it rewrites.

    Errors:
        PeerError: the blob is not exactly `count` parts.
    """
    view = np.frombuffer(blob, np.uint8).data
    start = 4 * count
    if not 1 <= count <= limits.MANIFEST_CHUNKS_MAX or len(view) < start:
        raise PeerError(f"A patch of {len(view)} bytes cannot hold {count} parts.", _HINT)
    sizes = struct.unpack_from(f"<{count}I", view)
    if start + sum(sizes) != len(view):
        raise PeerError(
            f"A patch of {len(view)} bytes names {count} parts of {sum(sizes)} bytes in all.",
            _HINT,
        )
    parts = []
    for size_bytes in sizes:
        parts.append(view[start : start + size_bytes])
        start += size_bytes
    return tuple(parts)
