"""Rice codes for whole arrays: the quotients in unary, the remainders as bit planes.

A value v with shift k is written as v >> k zeros and a one, and its k low bits; for gaps between
independent events that is within a few hundredths of a bit of the entropy, and needs no table
(Golomb, Run-length encodings, 1966; Rice, 1979). `delta.sparse` uses it. Bits are packed lowest
first. Arrays are int64 and not negative.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from echo2_mesh.delta.fields import refuse
from echo2_mesh.delta.places import Whole

Octets = npt.NDArray[np.uint8]
SHIFT_MAX = 31
_LN2 = 0.6931


def best_shift(values: Whole) -> int:
    """The shift that codes `values` in the fewest bits."""
    if not len(values):
        return 0
    total = int(values.sum())
    shift = max(0, int(_LN2 * total / len(values)).bit_length() - 1)
    if shift >= SHIFT_MAX:
        return SHIFT_MAX
    longer = values >> (shift + 1)
    quotients = int((values >> shift).sum()) if shift else total
    return shift + (quotients > len(values) + int(longer.sum()))


def write_unary(quotients: Sequence[Whole]) -> bytes:
    """All quotients in order: that many zeros, then a one; the last byte padded with zeros."""
    ends = np.concatenate(quotients)
    ends += 1
    np.cumsum(ends, out=ends)
    if not len(ends):
        return b""
    ends -= 1
    bits = np.zeros(int(ends[-1]) + 1, np.uint8)
    bits[ends] = 1
    return np.packbits(bits, bitorder="little").tobytes()


def read_unary(view: memoryview, count_max: int) -> Whole:
    """The quotients in `view`, at most `count_max` of them.

    Errors:
        PeerError: there are more of them.
    """
    bits = np.unpackbits(np.frombuffer(view, np.uint8), bitorder="little").view(np.bool_)
    if np.count_nonzero(bits) > count_max:
        refuse("more numbers than the chunk has items")
    ends = np.flatnonzero(bits)
    quotients = np.empty_like(ends)
    if len(ends):
        quotients[0] = ends[0]
        np.subtract(ends[1:], ends[:-1], out=quotients[1:])
        quotients[1:] -= 1
    return quotients


def low_size_bytes(count: int, shift: int) -> int:
    return (count + 7) // 8 * shift


def write_low(values: Whole, shift: int) -> bytes:
    """The lowest `shift` bits of every value: bit 0 of all, bit 1 of all, each in whole bytes."""
    planes = []
    for start in range(0, shift, 8):
        octets = (values >> start).astype(np.uint8)
        for bit in range(min(8, shift - start)):
            planes.append(np.packbits(octets & np.uint8(1 << bit), bitorder="little"))
    return b"".join(plane.tobytes() for plane in planes)


def read_low(view: memoryview, count: int, shift: int) -> Whole | Octets:
    """What `write_low` wrote: `count` values; `view` has `low_size_bytes(count, shift)` bytes."""
    planes = np.unpackbits(np.frombuffer(view, np.uint8), bitorder="little").reshape(shift, -1)
    planes = planes[:, :count]
    values: Whole | Octets = _octets(planes[shift & ~7 :]) if shift & 7 else planes[0]
    for start in range((shift - 1 if shift & 7 else shift) // 8 * 8 - 8, -1, -8):
        low = _octets(planes[start : start + 8])
        values = low if start + 8 == shift else values.astype(np.int64) << 8 | low
    return values


def _octets(planes: Octets) -> Octets:
    """At most eight bit planes, the lowest first, as one byte for each value."""
    values: Octets = planes[-1].copy()
    for plane in planes[-2::-1]:
        values += values
        values |= plane
    return values


def write_ragged(values: Whole, shifts: Whole) -> bytes:
    """The lowest `shifts[i]` bits of value i, one after the other."""
    ends = np.cumsum(shifts)
    if not len(ends) or not ends[-1]:
        return b""
    owner = np.repeat(np.arange(len(values)), shifts)
    places = np.arange(int(ends[-1])) - (ends - shifts)[owner]
    bits = (values[owner] >> places & 1).astype(np.uint8)
    return np.packbits(bits, bitorder="little").tobytes()


def read_ragged(view: memoryview, shifts: Whole) -> Whole:
    """What `write_ragged` wrote; no shift is above 16.

    Errors:
        PeerError: `view` is not as long as `shifts` say.
    """
    ends = np.cumsum(shifts)
    total = int(ends[-1]) if len(ends) else 0
    if len(view) != (total + 7) // 8:
        refuse("its last part has the wrong length")
    if not total:
        return np.zeros(len(shifts), np.int64)
    octets = np.zeros(len(view) + 3, np.uint32)
    octets[:-3] = np.frombuffer(view, np.uint8)
    windows = octets[:-2] | octets[1:-1] << np.uint32(8) | octets[2:] << np.uint32(16)
    starts = ends - shifts
    low: Whole = windows[starts >> 3].astype(np.int64)
    low >>= starts & 7
    low &= (1 << shifts) - 1
    return low
