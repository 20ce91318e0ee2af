"""What a task is: items made from a seed, and a pure score. No clock, no disk, no network.

Actors score to fill the trajectory; the learner scores again from the tokens and believes only
itself. Both must run the same code with the same arguments: `TaskSpec.digest` says so, and a
lease request with another digest is refused.
"""

from __future__ import annotations

import random
from typing import Protocol

import msgspec


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt with what is needed to judge an answer.

    `prompt` is plain text, put through the chat template only if the model has one. `answer` is
    whatever the task's `score` needs; it never leaves the host it was made on.
    """

    index: int
    prompt: str
    answer: object


class Score(msgspec.Struct, frozen=True, kw_only=True):
    """`reward` is finite; `metrics` are for people."""

    reward: float
    metrics: dict[str, float] = {}


class Task(Protocol):
    """Built by `registry.make_task(task_id, args)`; stateless.

    Each is a frozen msgspec struct whose fields are its arguments.
    """

    @property
    def task_id(self) -> str: ...

    @property
    def version(self) -> int:
        """Raised when the meaning of an item or a score changes; part of the digest."""
        ...

    def item(self, seed: int, index: int) -> Item:
        """Item `index` of the run's `seed`: the same on every host."""
        ...

    def score(self, item: Item, completion: str, *, finished: bool) -> Score:
        """Judge a decoded completion (special tokens removed).

        Args:
            finished: the model ended the sequence itself (False: cut at the token limit).
        """
        ...

    def demonstration(self, item: Item, rng: random.Random, *, skill: float) -> str | None:
        """A completion for supervised warm-up, right with probability `skill`; None if none."""
        ...

    def alphabet(self) -> str | None:
        """Every character of prompts and answers, for tiny character models; None if open."""
        ...
