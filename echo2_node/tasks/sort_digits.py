"""Sort the digits of a number: the smallest task that a tiny model can visibly learn.

Prompt `925013=`, right completion `012359`. Pure; made by `registry.make_task` from the run's
arguments, called by actors (to fill trajectories) and by the learner (who believes only itself).
"""

from __future__ import annotations

from random import Random
from typing import Annotated, ClassVar

import msgspec
from msgspec import Meta

from echo2_node.tasks.protocol import Item, Score


class SortDigits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The task; its fields are its arguments."""

    task_id: ClassVar[str] = "sort_digits"
    version: ClassVar[int] = 1

    digits: Annotated[int, Meta(ge=1, le=32)] = 6
    """How many digits a prompt has."""

    def item(self, seed: int, index: int) -> Item:
        """Item `index` of `seed`: only `random()` is drawn, which Python keeps reproducible."""
        rng = Random(f"{seed}:{index}:{self.task_id}")
        digits = "".join(str(int(rng.random() * 10)) for _ in range(self.digits))
        return Item(index=index, prompt=f"{digits}=", answer="".join(sorted(digits)))

    def score(self, item: Item, completion: str, *, finished: bool) -> Score:
        """Share of right positions; 0 where the length is wrong or the end was cut off."""
        answer = str(item.answer)
        well_formed = finished and len(completion) == len(answer)
        right = sum(a == b for a, b in zip(completion, answer, strict=False)) if well_formed else 0
        return Score(
            reward=right / len(answer),
            metrics={"well_formed": float(well_formed), "exact": float(right == len(answer))},
        )

    def demonstration(self, item: Item, rng: Random, *, skill: float) -> str:
        """The answer with probability `skill`, else its digits in another order.

        A wrong demonstration still teaches the format. Where no other order exists (all digits
        equal) the answer is the only demonstration.
        """
        answer = str(item.answer)
        if rng.random() < skill or len(set(answer)) == 1:
            return answer
        shuffled = list(answer)
        while "".join(shuffled) == answer:
            rng.shuffle(shuffled)
        return "".join(shuffled)

    def alphabet(self) -> str:
        return "0123456789="
