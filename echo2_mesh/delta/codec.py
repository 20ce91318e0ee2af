"""Lossless difference between two data chunks of the same layout, and back.

The learner's export encodes each chunk against the same chunk of an older version; whoever
rebuilds a version applies. A chunk is a row of runs, each with the smallest of four methods:
nothing changed, the sparse list of `delta.sparse`, byte planes of the steps or of the new items
under zstd, or the raw bytes. Integer views only: -0, infinities and NaN payloads come back. It
touches no disk and starts no thread. The bytes are described in `proto/deltas.md`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import zstandard

from echo2_mesh import limits
from echo2_mesh.delta.classes import Items
from echo2_mesh.delta.fields import Fields, refuse, varint
from echo2_mesh.delta.places import Whole, true_places
from echo2_mesh.delta.sparse import (
    CHANGED_SHARE,
    apply_sparse,
    stepped,
    steps_between,
    write_sparse,
)

Buffer = bytes | bytearray | memoryview | np.ndarray
Octets = npt.NDArray[np.uint8]

CLASSES_FAST, CLASSES_SMALL = 0, 6
"""Classes of small weights: with six a patch is a quarter smaller and takes about three times
the work on both sides (scripts/bench_delta.py). The reader needs not be told."""
_SAME, _SPARSE, _STEP_PLANES, _NEW_PLANES, _RAW = range(5)
_METHOD_BITS = 3
_ITEM_TYPES = {1: "<u1", 2: "<u2", 4: "<u4"}
_RUN_SIZE_BYTES_MIN = 128 * 1024
"""Runs below this size join their neighbours: what a run costs would outweigh its own method."""
_DENSITY_RATIO = 8
_DENSE_SHARE = 16
"""From one item in sixteen on, planes are tried as well."""
_ZSTD_LEVEL = 1


class Slice(NamedTuple):
    """A run of one tensor inside a data chunk; 2 bytes an item for BF16 and F16, 4 F32, else 1."""

    size_bytes: int
    item_bytes: int


class _Run(NamedTuple):
    start: int
    size_bytes: int
    item_bytes: int
    changed: Whole
    """Places of the changed items, ascending."""


def encode_chunk(
    base: Buffer, new: Buffer, slices: Sequence[Slice], *, classes: int = CLASSES_FAST
) -> bytes:
    """What turns `base` into `new`; empty where they are equal.

    Never longer than `new` by more than a few bytes for each slice. The same arguments give the
    same bytes.

    Args:
        base, new: the old and the new chunk, of the same size.
        slices: the runs of tensors in the chunk, in order; their sizes add up to the chunk's.
        classes: see `CLASSES_FAST`.
    """
    old, fresh = np.frombuffer(base, np.uint8), np.frombuffer(new, np.uint8)
    if len(old) != len(fresh) or sum(part.size_bytes for part in slices) != len(old):
        raise ValueError("base, new and slices are not of one size")
    records = []
    for run in _runs(old, fresh, slices):
        method, payload = _encode_run(old, fresh, run, classes)
        tag = method | run.item_bytes << _METHOD_BITS
        records.append(bytes((tag,)) + varint(run.size_bytes) + varint(len(payload)) + payload)
    if all(record[0] & (1 << _METHOD_BITS) - 1 == _SAME for record in records):
        return b""
    return b"".join(records)


def apply_chunk(base: Buffer, encoded: Buffer) -> Octets:
    """`base` with the change made: a new array of the same size.

    Allocates a bounded multiple of the chunk's size whatever `encoded` says.

    Errors:
        PeerError: `encoded` is malformed, or was made for a chunk of another size.
    """
    out: Octets = np.frombuffer(base, np.uint8).copy()
    fields = Fields(np.frombuffer(encoded, np.uint8).data)
    start = runs = 0
    while fields.left_bytes:
        runs += 1
        tag, size_bytes, payload_size_bytes = fields.octet(), fields.varint(), fields.varint()
        method, item_bytes = tag & (1 << _METHOD_BITS) - 1, tag >> _METHOD_BITS
        payload = fields.take(payload_size_bytes)
        part = out[start : start + size_bytes]
        start += size_bytes
        if not size_bytes or runs > limits.MANIFEST_TENSORS_MAX:
            refuse("runs of nothing, or more of them than tensors")  # work without end
        if item_bytes not in _ITEM_TYPES or start > len(out) or size_bytes % item_bytes:
            refuse(f"a run of {size_bytes} bytes in a chunk of {len(out)}")
        _apply_run(part.view(_ITEM_TYPES[item_bytes]), method, payload)
    if start != (len(out) if len(encoded) else 0):
        refuse(f"it is for a chunk of {start} bytes, not {len(out)}")
    return out


def _runs(old: Octets, fresh: Octets, slices: Sequence[Slice]) -> Iterator[_Run]:
    """Slices of one item size whose density of changes is alike, joined."""
    start = 0
    for size_bytes, item_bytes, members in _neighbours(slices):
        stop = start + size_bytes
        kind = _ITEM_TYPES[item_bytes]
        changed = _changed(old[start:stop].view(kind), fresh[start:stop].view(kind))
        borders = np.cumsum([0, *members]) // item_bytes
        counts = np.diff(np.searchsorted(changed, borders)).tolist()
        joined_bytes = joined_count = 0
        for size, count in zip(members, counts, strict=True):
            if joined_bytes and _differ(joined_bytes, joined_count, size, count):
                yield _Run(start, joined_bytes, item_bytes, changed[:joined_count])
                changed = changed[joined_count:] - joined_bytes // item_bytes
                start += joined_bytes
                joined_bytes = joined_count = 0
            joined_bytes, joined_count = joined_bytes + size, joined_count + count
        yield _Run(start, joined_bytes, item_bytes, changed)
        start = stop


def _neighbours(slices: Sequence[Slice]) -> Iterator[tuple[int, int, list[int]]]:
    """(bytes, item bytes, sizes of the members) of neighbouring slices with items of one size."""
    members: list[int] = []
    item_bytes = 0
    for part in slices:
        kind = part.item_bytes if part.item_bytes in _ITEM_TYPES else 1
        kind = kind if part.size_bytes % kind == 0 else 1
        if members and kind != item_bytes:
            yield sum(members), item_bytes, members
            members = []
        item_bytes = kind
        if part.size_bytes:
            members.append(part.size_bytes)
    if members:
        yield sum(members), item_bytes, members


def _differ(size_a: int, count_a: int, size_b: int, count_b: int) -> bool:
    """Two neighbours are each worth a record of their own."""
    if min(size_a, size_b) < _RUN_SIZE_BYTES_MIN:
        return False
    low, high = sorted((count_a * size_b, count_b * size_a))
    return high > _DENSITY_RATIO * low


def _changed(old: Items, fresh: Items) -> Whole:
    """Places of the items that differ, ascending; compares eight bytes at a time."""
    shift = {1: 3, 2: 2, 4: 1}[old.itemsize]
    rows_all = len(old) >> shift
    whole = rows_all << shift
    rows = true_places(old[:whole].view("<u8") != fresh[:whole].view("<u8"))
    if len(rows) * 2 > rows_all:
        return np.flatnonzero(old != fresh)
    differ = old[:whole].view("<u8").take(rows).view(old.dtype)
    differ = differ != fresh[:whole].view("<u8").take(rows).view(old.dtype)
    lanes = np.flatnonzero(differ)
    rows <<= shift
    places = rows.take(lanes >> shift)
    lanes &= (1 << shift) - 1
    places += lanes
    tail = np.flatnonzero(old[whole:] != fresh[whole:])
    return np.concatenate((places, tail + whole)) if len(tail) else places


def _encode_run(old: Octets, fresh: Octets, run: _Run, classes: int) -> tuple[int, bytes]:
    if not len(run.changed):
        return _SAME, b""
    span = slice(run.start, run.start + run.size_bytes)
    before = old[span].view(_ITEM_TYPES[run.item_bytes])
    after = fresh[span].view(_ITEM_TYPES[run.item_bytes])
    found: list[tuple[int, bytes]] = []
    if len(run.changed) * CHANGED_SHARE <= len(before):
        sparse = write_sparse(before, after, run.changed, classes=classes)
        if sparse is not None:
            found.append((_SPARSE, sparse))
    if not found or len(run.changed) * _DENSE_SHARE > len(before):
        found.append((_STEP_PLANES, _planes(_zigzag(steps_between(before, after)))))
        if len(found[-1][1]) * 2 > run.size_bytes:
            found.append((_NEW_PLANES, _planes(after)))
    best = min(found, key=lambda pair: len(pair[1]))
    return best if len(best[1]) < run.size_bytes else (_RAW, after.tobytes())


def _apply_run(items: Items, method: int, payload: memoryview) -> None:
    if method == _SAME and not payload:
        return
    if method == _SPARSE:
        apply_sparse(items, Fields(payload))
    elif method == _STEP_PLANES:
        items[:] = stepped(items, _unzigzag(_read_planes(payload, items)))
    elif method == _NEW_PLANES:
        items[:] = _read_planes(payload, items)
    elif method == _RAW and len(payload) == items.nbytes:
        items[:] = np.frombuffer(payload, items.dtype)
    else:
        refuse(f"method {method} with {len(payload)} bytes")


def _zigzag(steps: Items) -> Items:
    """0, -1, 1, -2, 2 ... become 0, 1, 2, 3, 4 ...: small steps leave the high bytes zero."""
    signed = steps.view(f"i{steps.itemsize}")
    negative: Items = (signed >> (8 * steps.itemsize - 1)).view(steps.dtype)
    negative ^= steps << steps.dtype.type(1)
    return negative


def _unzigzag(coded: Items) -> Items:
    one = coded.dtype.type(1)
    steps: Items = -(coded & one)
    steps ^= coded >> one
    return steps


def _planes(items: Items) -> bytes:
    planes = np.ascontiguousarray(items.view(np.uint8).reshape(-1, items.itemsize).T)
    return zstandard.ZstdCompressor(level=_ZSTD_LEVEL).compress(planes.data)


def _read_planes(payload: memoryview, items: Items) -> Items:
    """Items of the same number and type as `items`."""
    try:
        if zstandard.frame_content_size(payload) != items.nbytes:
            refuse("planes of another size")
        reader = zstandard.ZstdDecompressor(max_window_size=limits.CHUNK_SIZE_BYTES_MAX)
        raw = reader.decompress(payload, max_output_size=items.nbytes, allow_extra_data=False)
    except (zstandard.ZstdError, ValueError) as error:
        refuse(f"planes that zstd does not read: {error}")
    planes = np.frombuffer(raw, np.uint8).reshape(items.itemsize, -1)
    if planes.size != items.nbytes:
        refuse("planes of another size")
    return np.ascontiguousarray(planes.T).view(items.dtype).ravel()
