"""Which blobs of a manifest somebody holds: one numbering, one bitmap, one reading of it.

Blobs are numbered data chunks first, then the files' chunks, then the patches' chunks, each in
order; bit i is bit `i % 8` of byte `i // 8`. An empty bitmap means "nothing". Carries sets,
decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from echo2_mesh.errors import PeerError
from echo2_mesh.wire.messages import ChunkRef, Manifest


def blobs_of(manifest: Manifest) -> tuple[ChunkRef, ...]:
    """Every blob that the manifest names, in the bitmap's order."""
    files = (ref for file in manifest.files for ref in file.chunks)
    patches = (chunk.ref for patch in manifest.patches for chunk in patch.chunks)
    return (*manifest.chunks, *files, *patches)


def needed_of(manifest: Manifest) -> int:
    """How many blobs make the version: data and files come first in the numbering."""
    return len(manifest.chunks) + sum(len(file.chunks) for file in manifest.files)


def bitmap_of(held: Iterable[int], count: int) -> bytes:
    """The bitmap of the indices `held` out of `count`; empty where nothing is held."""
    bits = bytearray((count + 7) // 8)
    nothing = True
    for index in held:
        if not 0 <= index < count:
            raise ValueError(f"index {index} of {count}")
        bits[index // 8] |= 1 << (index % 8)
        nothing = False
    return b"" if nothing else bytes(bits)


def held_in(bitmap: bytes, count: int) -> frozenset[int]:
    """The indices a peer says it holds.

    Raises:
        PeerError: the bitmap is not as long as `count` blobs need, or says something of blobs
            that do not exist.
    """
    if not bitmap:
        return frozenset()
    if len(bitmap) != (count + 7) // 8:
        raise PeerError(f"Holdings of {len(bitmap)} bytes; {count} blobs need {(count + 7) // 8}.")
    if count % 8 and bitmap[-1] >> (count % 8):
        raise PeerError(f"Holdings name blobs beyond the last of {count}.")
    return frozenset(i for i in range(count) if bitmap[i // 8] >> (i % 8) & 1)
