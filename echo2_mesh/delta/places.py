"""Where flags are true: `np.flatnonzero`, faster for rare ones. `codec` and `classes` call it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Whole = npt.NDArray[np.int64]


def true_places(flags: npt.NDArray[np.bool_]) -> Whole:
    """The same as `np.flatnonzero(flags)`, by looking at eight flags at a time first."""
    whole = len(flags) >> 3 << 3
    octets = flags[:whole].view("<u8")
    rows = np.flatnonzero(octets != 0)
    lanes = np.flatnonzero(octets.take(rows).view(np.bool_))
    rows <<= 3
    places = rows.take(lanes >> 3)
    lanes &= 7
    places += lanes
    if whole == len(flags):
        return places
    return np.concatenate((places, np.flatnonzero(flags[whole:]) + whole))
