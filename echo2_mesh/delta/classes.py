"""Items sorted into classes of small weights: where changes are likely.

The gap between neighbouring floats grows with the number, so the same step of the optimiser
changes a small weight far more often than a large one, and the receiver holds the old weights.
Each of the smallest exponents is a class of its own, with its members in their order; a change is
then named by its number within its class, and a class with few members needs few bits for it.
`delta.sparse` uses it on both sides. Items are BF16 patterns; others merely gain less.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from echo2_mesh.delta.places import Whole, true_places

Items = npt.NDArray[Any]

CLASSES_MAX = 16
EXPONENT_BITS = 7
"""A magnitude >> 7 is the exponent of a BF16 item."""
MAGNITUDE = np.uint16(0x7FFF)
_HOT_SHARE = 0.045
"""More members cost time on both sides and save little (scripts/bench_delta.py)."""
_SAMPLE_ITEMS = 2048


def members_of(items: Items, below: int, count: int) -> list[Whole]:
    """Places of the members of `count` classes, each ascending.

    Class i holds the items with exponent `below - 1 - i`; the last one also those further down.

    Args:
        items: the old items of the run, uint16 [N].
        below: 1 to 255; items from this exponent up are in no class.
        count: 1 to `CLASSES_MAX`.
    """
    magnitudes = items & MAGNITUDE
    places = true_places(magnitudes < np.uint16(below << EXPONENT_BITS))
    magnitudes = magnitudes.take(places)
    classes: list[Whole] = []
    for index in range(1, count):
        lower = magnitudes < np.uint16(max(below - index, 0) << EXPONENT_BITS)
        classes.append(places.take(np.flatnonzero(~lower)))
        rest = np.flatnonzero(lower)
        places, magnitudes = places.take(rest), magnitudes.take(rest)
    classes.append(places)
    return classes


def best_below(items: Items) -> int:
    """The highest exponent with at most `_HOT_SHARE` of the items below; 0 where none has any."""
    sample = items[:: max(1, len(items) // _SAMPLE_ITEMS)] & MAGNITUDE
    counts = np.cumsum(np.bincount(sample >> EXPONENT_BITS, minlength=256))
    below = int(np.searchsorted(counts, _HOT_SHARE * len(sample), side="right"))
    return below if below and counts[below - 1] else 0
