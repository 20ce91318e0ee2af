"""What differs between two versions whose blobs both lie in the chunk store, element by element.

Compares bit patterns, never floats: +0 and -0 differ, and a NaN is equal to itself. Equal chunks
are known by their digests and not read; of the others both sides are read and hashed, since a
damaged base would spoil the result without anybody noticing. Works a chunk at a time in numpy,
which lets generation go on in the meantime. It knows no tensor library and writes nothing. Called
by engines while they prepare an install, in the worker process.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import accumulate
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from echo2_mesh.errors import LocalError
from echo2_mesh.wire.messages import Manifest, TensorSpan
from echo2_node.engines.weights import ITEM_SIZE_BYTES, read_chunk

WHOLE_TENSOR_SHARE = 4
"""From a quarter of its elements on a tensor is replaced whole: an index would cost more."""
_VIEWS: dict[int, np.dtype[Any]] = {2: np.dtype("<u2"), 4: np.dtype("<u4")}


class Change(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor's changed elements, as bit patterns in the published dtype."""

    span: TensorSpan
    positions: np.ndarray | None
    """int64[C], rising, in the flattened tensor; None: all elements."""
    old: np.ndarray
    """uint16 or uint32 [C]."""
    new: np.ndarray

    @property
    def held_bytes(self) -> int:
        """Memory of this change."""
        places = 0 if self.positions is None else self.positions.nbytes
        return places + self.old.nbytes + self.new.nbytes


def find_changes(store_dir: Path, base: Manifest, target: Manifest) -> tuple[Change, ...] | None:
    """Every tensor that is not the same in both versions, in the order of the data.

    Returns:
        None where only a full install can lead from one to the other: other tensors or other cuts,
        a blob of the base gone or damaged, or too much changed to be worth it.

    Raises:
        LocalError: a blob of the target is missing or damaged.
    """
    if not _alike(base, target):
        return None
    pair = _Pair(store_dir, base, target)
    changes = []
    held_bytes = 0
    for span in sorted(target.tensors, key=lambda one: one.offset_bytes):
        try:
            change = _change(pair, span)
        except _BaseLost:
            return None
        if change is not None:
            changes.append(change)
            held_bytes += change.held_bytes
            if held_bytes > pair.size_bytes:  # then the version itself is less to hold
                return None
    return tuple(changes)


class _BaseLost(Exception):
    """A blob of the base is not here any more."""


class _Pair:
    """Two data sections that are cut alike, read a chunk at a time."""

    def __init__(self, store_dir: Path, base: Manifest, target: Manifest) -> None:
        self._store_dir = store_dir
        self._base = base
        self._target = target
        self._read: tuple[int, np.ndarray, np.ndarray] | None = None
        """The chunk that was read last: small tensors share it."""
        self._cuts = [0, *accumulate(chunk.size_bytes for chunk in target.chunks)]
        pairs = zip(base.chunks, target.chunks, strict=True)
        self._differs = [a.digest != b.digest for a, b in pairs]
        self.size_bytes = self._cuts[-1]

    def pieces(self, span: TensorSpan) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """(offset in the tensor, old, new) for the parts that lie in chunks that differ: uint8."""
        for index in self._chunks(span):
            if self._differs[index]:
                yield self._piece(span, index)

    def whole(self, span: TensorSpan) -> tuple[np.ndarray, np.ndarray]:
        """(old, new) of a whole tensor: uint8[size_bytes], copied."""
        parts = [self._piece(span, index) for index in self._chunks(span)]
        return np.concatenate([p[1] for p in parts]), np.concatenate([p[2] for p in parts])

    def splits_an_element(self, span: TensorSpan, item_bytes: int) -> bool:
        """True where a cut between two chunks goes through an element of this tensor."""
        inner = (self._cuts[index] for index in self._chunks(span)[1:])
        return any((cut - span.offset_bytes) % item_bytes for cut in inner)

    def _chunks(self, span: TensorSpan) -> range:
        if not span.size_bytes:
            return range(0)
        end = span.offset_bytes + span.size_bytes
        first = bisect_right(self._cuts, span.offset_bytes) - 1
        return range(first, bisect_left(self._cuts, end))

    def _piece(self, span: TensorSpan, index: int) -> tuple[int, np.ndarray, np.ndarray]:
        old, new = self._chunk(index)
        cut = self._cuts[index]
        start = max(span.offset_bytes, cut) - cut
        end = min(span.offset_bytes + span.size_bytes, self._cuts[index + 1]) - cut
        return cut + start - span.offset_bytes, old[start:end], new[start:end]

    def _chunk(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        if self._read is None or self._read[0] != index:
            self._read = None
            new = read_chunk(self._store_dir, self._target.chunks[index])
            try:
                same = not self._differs[index]
                old = new if same else read_chunk(self._store_dir, self._base.chunks[index])
            except LocalError as error:
                raise _BaseLost from error
            self._read = (index, old, new)
        return self._read[1], self._read[2]


def _alike(base: Manifest, target: Manifest) -> bool:
    """Same tensors at the same places, cut at the same places."""
    return (
        base.tensors == target.tensors
        and base.tied == target.tied
        and [c.size_bytes for c in base.chunks] == [c.size_bytes for c in target.chunks]
    )


def _change(pair: _Pair, span: TensorSpan) -> Change | None:
    """What became of one tensor; None if nothing."""
    item_bytes = ITEM_SIZE_BYTES[span.dtype]
    view = _VIEWS[item_bytes]
    pieces: Iterator[tuple[int, np.ndarray, np.ndarray]] = pair.pieces(span)
    if pair.splits_an_element(span, item_bytes):
        pieces = iter([(0, *pair.whole(span))])
    positions, olds, news = [], [], []
    count = 0
    for offset, old_bytes, new_bytes in pieces:
        old, new = old_bytes.view(view), new_bytes.view(view)
        places = np.flatnonzero(old != new)
        count += len(places)
        if WHOLE_TENSOR_SHARE * count * item_bytes >= span.size_bytes:
            old_bytes, new_bytes = pair.whole(span)
            return Change(
                span=span, positions=None, old=old_bytes.view(view), new=new_bytes.view(view)
            )
        if len(places):
            olds.append(old[places])
            news.append(new[places])
            positions.append(places + offset // item_bytes)
    if not count:
        return None
    return Change(
        span=span,
        positions=np.concatenate(positions),
        old=np.concatenate(olds),
        new=np.concatenate(news),
    )
