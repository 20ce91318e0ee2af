"""Which losses exist and what their arguments are called: the registry's names without its tensors.

So that a typo in a run file is told in a moment, before a trainer has loaded torch. A loss is
built, and its arguments' bounds are checked, by `learner.losses`; a test holds the two together.
Called by the command line.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from echo2_mesh.errors import UsageError

_CLIPPED = ("clip_low", "clip_high", "ratio_cap", "advantage_std")
LOSS_ARGUMENTS: dict[str, tuple[str, ...]] = {
    "dppo": (
        "tau",
        "ratio_cap",
        "pull",
        "sequence_ratio_min",
        "sequence_ratio_max",
        "negative_drift_max",
        "advantage_std",
    ),
    "dapo": _CLIPPED,
    "grpo": _CLIPPED,
}


def check_loss(name: str, arguments: Iterable[str]) -> None:
    """Nothing, if there is such a loss and it has such arguments.

    Raises:
        UsageError: there is none; names the nearest and what is known.
    """
    known = LOSS_ARGUMENTS.get(name)
    if known is None:
        raise UsageError(f"There is no loss '{name[:64]}'.", _nearest(name, LOSS_ARGUMENTS))
    for argument in arguments:
        if argument not in known:
            raise UsageError(
                f"The loss '{name}' has no argument '{argument[:64]}'.", _nearest(argument, known)
            )


def _nearest(word: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return (f"Did you mean '{near[0]}'? " if near else "") + f"Known: {', '.join(known)}."
