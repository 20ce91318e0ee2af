"""The sparse method: which items of a run changed, and by how many steps.

Positions are gaps in Rice codes: between places in the run, or, for the smallest weights, between
places in the class of their exponent (`delta.classes`), which a receiver knows from the old
weights. Steps: nine in ten items move to a neighbouring number, so each has one bit for the
direction; where the old weight is small (*wide*) the distance is a Rice code whose shift grows as
its exponent falls; elsewhere the few longer distances are listed.

Everything is decided on the old items, and all arithmetic is on integers modulo the item's size,
so any bit pattern comes back. `delta.codec` calls it for each run and takes another method where
that is smaller. `proto/deltas.md` has the bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from echo2_mesh.delta.classes import (
    CLASSES_MAX,
    EXPONENT_BITS,
    MAGNITUDE,
    Items,
    best_below,
    members_of,
)
from echo2_mesh.delta.fields import Fields, refuse, varint
from echo2_mesh.delta.places import Whole
from echo2_mesh.delta.rice import (
    SHIFT_MAX,
    best_shift,
    low_size_bytes,
    read_low,
    read_ragged,
    read_unary,
    write_low,
    write_ragged,
    write_unary,
)

CHANGED_SHARE = 4
"""At most a quarter of the items: beyond, byte planes are smaller."""
UNARY_BITS_PER_ITEM_MAX = 4
UNARY_BITS_SPARE = 64
_WIDE_SHIFT_MAX = 15
_CLASSED_CHANGES_MIN = 256
"""With fewer changes the classes cost more than they save."""
_WIDE_FAR_SHARE = 0.35
"""Wide are the exponents at which this share of the changes goes more than one step."""
_WIDE_FAR_MIN = 4
_SAMPLE_ITEMS = 2048


def steps_between(old: Items, new: Items) -> Items:
    """Signed steps from old to new in the order of the numbers, seen from the sign of the old.

    For 2- and 4-byte floats the numbers of the old one's sign count up from zero, those of the
    other sign down from -1; other items are subtracted. Modulo the item's size, unsigned.
    """
    if old.itemsize == 1:
        return np.subtract(new, old)
    top, signed = _top(old)
    sign = old & top
    line: Items = new ^ sign
    line ^= (line.view(signed) >> _last_bit(old)).view(old.dtype) & ~top
    line -= old ^ sign
    return line


def stepped(old: Items, steps: Items) -> Items:
    """The inverse of `steps_between`: the new items. Changes `steps` in place."""
    if old.itemsize == 1:
        return np.add(old, steps)
    top, signed = _top(old)
    sign = old & top
    steps += old ^ sign
    steps ^= (steps.view(signed) >> _last_bit(old)).view(old.dtype) & ~top
    steps ^= sign
    return steps


def _top(items: Items) -> tuple[Any, Any]:
    if items.itemsize == 2:
        return np.uint16(0x8000), np.int16
    return np.uint32(0x80000000), np.int32


def _last_bit(items: Items) -> Any:
    return np.int16(15) if items.itemsize == 2 else np.int32(31)


def write_sparse(old: Items, new: Items, changed: Whole, *, classes: int) -> bytes | None:
    """Encode what makes `old` [N] into `new` [N].

    Args:
        changed: where they differ, ascending.
        classes: into how many classes the smallest items are sorted; 0 is fastest.

    Returns:
        None where the method does not fit.
    """
    if len(changed) * CHANGED_SHARE > len(old):
        return None
    if old.itemsize != 2 or len(changed) < _CLASSED_CHANGES_MIN:
        classes = 0
    below = best_below(old) if classes else 0
    places: list[Whole] = [changed]
    columns: list[Whole] = []
    if below:
        places, columns = _classed(old, changed, below, min(classes, CLASSES_MAX))
        changed = np.concatenate(places)
    columns.insert(0, np.diff(places[0], prepend=-1) - 1)
    before = old.take(changed)
    steps = steps_between(before, new.take(changed))
    up = steps.view(f"i{steps.itemsize}") > 0
    beyond = np.where(up, steps, -steps).astype(np.int64)
    beyond -= 1
    wide_below = _best_wide_below(before, beyond)
    shifts, wide = _wide_places(before, wide_below)
    listed = beyond > 0
    listed[wide] = False
    odd = np.flatnonzero(listed)
    columns += [np.diff(odd, prepend=-1) - 1, beyond.take(odd) - 1]
    column_shifts = [best_shift(column) for column in columns]
    distances = beyond.take(wide)
    pairs = list(zip(columns, column_shifts, strict=True))
    unary = write_unary([v >> k if k else v for v, k in pairs] + [distances >> shifts])
    if len(unary) * 8 > UNARY_BITS_PER_ITEM_MAX * len(old) + UNARY_BITS_SPARE:
        return None
    counts = [len(places[0]), len(odd), len(unary), *map(len, places[1:])]
    return b"".join(
        [
            bytes((wide_below, below, len(places) - 1)),
            *map(varint, counts),
            bytes(column_shifts),
            unary,
            *(write_low(v, k) for v, k in pairs),
            np.packbits(up, bitorder="little").tobytes(),
            write_ragged(distances, shifts),
        ]
    )


def _classed(
    old: Items, changed: Whole, below: int, classes: int
) -> tuple[list[Whole], list[Whole]]:
    """(changed places: of no class, then of each class; gaps of the numbers within each class)."""
    flags = np.zeros(len(old), np.bool_)
    flags[changed] = True
    outside = (old.take(changed) & MAGNITUDE) >= np.uint16(below << EXPONENT_BITS)
    places, gaps = [changed.take(np.flatnonzero(outside))], []
    for members in members_of(old, below, classes):
        numbers = np.flatnonzero(flags.take(members))
        places.append(members.take(numbers))
        gaps.append(np.diff(numbers, prepend=-1) - 1)
    return places, gaps


def _best_wide_below(before: Items, beyond: Whole) -> int:
    """The exponent from which down changes are often further than one step; 0 for none."""
    if before.itemsize != 2:
        return 0
    every = max(1, len(before) // _SAMPLE_ITEMS)
    exponents = (before[::every] & MAGNITUDE) >> EXPONENT_BITS
    far = np.bincount(exponents[beyond[::every] > 0], minlength=256)
    share = far / np.maximum(np.bincount(exponents, minlength=256), 1)
    often = np.flatnonzero((share > _WIDE_FAR_SHARE) & (far >= _WIDE_FAR_MIN))
    return min(int(often[-1]) + 1, 255) if len(often) else 0


def _wide_places(old: Items, below: int) -> tuple[Whole, Whole]:
    """(shifts, places) of the items whose exponent is below `below`."""
    if not below:
        return np.zeros(0, np.int64), np.zeros(0, np.int64)
    magnitudes = old & MAGNITUDE
    places = np.flatnonzero(magnitudes < np.uint16(below << EXPONENT_BITS))
    exponents = magnitudes.take(places).astype(np.int64) >> EXPONENT_BITS
    return np.minimum(below - 1 - exponents, _WIDE_SHIFT_MAX), places


class _Head(NamedTuple):
    """What a sparse record says before its numbers."""

    wide_below: int
    below: int
    counts: tuple[int, ...]
    """Changes of no class, then of each class."""
    odd: int
    shifts: tuple[int, ...]
    """Of the columns: gaps of each count, gaps of the listed steps, their distances."""
    unary: memoryview


def apply_sparse(items: Items, fields: Fields) -> None:
    """Change the old items of a run, in place, as a sparse record says.

    Errors:
        PeerError: the record is malformed or does not fit these items.
    """
    head = _read_head(items, fields)
    counts = (*head.counts, head.odd, head.odd)
    known, total = sum(counts), sum(head.counts)
    quotients = read_unary(head.unary, known + total)
    if len(quotients) < known:
        refuse("it has too few numbers")
    columns: list[Whole] = []
    start = 0
    for count, shift in zip(counts, head.shifts, strict=True):
        column = quotients[start : start + count]
        start += count
        if shift and count:
            column <<= shift
            column |= read_low(fields.take(low_size_bytes(count, shift)), count, shift)
        columns.append(column)
    changed = _places(items, head, columns)
    up = np.frombuffer(fields.take((total + 7) // 8), np.uint8)
    old = items.take(changed)
    steps = _steps(old, head, columns[-2:], quotients[known:], fields)
    down = np.unpackbits(up, count=total, bitorder="little").astype(items.dtype)
    down -= down.dtype.type(1)
    steps ^= down
    steps -= down
    items[changed] = stepped(old, steps)


def _read_head(items: Items, fields: Fields) -> _Head:
    wide_below, below, classes = fields.octet(), fields.octet(), fields.octet()
    if classes > CLASSES_MAX or (below > 0) != (classes > 0):
        refuse("its classes do not fit its exponent")
    if (below or wide_below) and items.itemsize != 2:
        refuse("classes of items that have no exponent")
    outside, odd, unary_size_bytes = fields.varint(), fields.varint(), fields.varint()
    counts = (outside, *(fields.varint() for _ in range(classes)))
    if sum(counts) * CHANGED_SHARE > len(items) or odd > sum(counts):
        refuse("more changes than a sparse record may have")
    if unary_size_bytes * 8 > UNARY_BITS_PER_ITEM_MAX * len(items) + UNARY_BITS_SPARE:
        refuse("its numbers are longer than the chunk")
    shifts = tuple(fields.take(len(counts) + 2))
    if max(shifts) > SHIFT_MAX:
        refuse("a shift is too large")
    return _Head(wide_below, below, counts, odd, shifts, fields.take(unary_size_bytes))


def _places(items: Items, head: _Head, columns: Sequence[Whole]) -> Whole:
    """Where the changed items are, in the order in which the record names them."""
    outside = _from_gaps(columns[0], len(items))
    if not head.below:
        return outside
    found = [outside]
    classes = members_of(items, head.below, len(head.counts) - 1)
    for members, gaps in zip(classes, columns[1:], strict=False):
        found.append(members.take(_from_gaps(gaps, len(members))))
    return np.concatenate(found)


def _from_gaps(gaps: Whole, count: int) -> Whole:
    """Ascending numbers below `count`. Changes `gaps` in place."""
    gaps += 1
    np.cumsum(gaps, out=gaps)
    gaps -= 1
    # No sum overflows: quotients add up to less than 2^27, shifts are at most 31.
    if len(gaps) and gaps[-1] >= count:
        refuse("a change beyond the last item")
    return gaps


def _steps(
    old: Items, head: _Head, listed: Sequence[Whole], quotients: Whole, fields: Fields
) -> Items:
    """The distance of each change, still without its direction."""
    steps = np.ones(len(old), old.dtype)
    shifts, wide = _wide_places(old, head.wide_below)
    if len(quotients) != len(wide):
        refuse("the wrong number of wide steps")
    distances = (quotients << shifts) | read_ragged(fields.take(fields.left_bytes), shifts)
    if len(wide):
        steps[wide] = (distances + 1).astype(old.dtype)
    if head.odd:
        gaps, beyond = listed
        steps[_from_gaps(gaps, len(old))] = (beyond + 2).astype(old.dtype)
    return steps
