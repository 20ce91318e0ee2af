"""Running counts of verdicts for status and metrics, from the facts as they are decided.

Starts from the ledger's summary, so counts survive a restart. Decides nothing. The desk owns it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import assert_never

from echo2_mesh.wire.types import Reason
from echo2_node.learner.audit import Summary
from echo2_node.learner.entries import OTHERS, STRAY_ACTORS_MAX
from echo2_node.scheduler import records
from echo2_node.scheduler.records import Record


class Tallies:
    """Accepted, refused by reason, age of what was trained."""

    def __init__(self, summary: Summary) -> None:
        self.accepted = summary.accepted
        self.refusals = dict(summary.refusals)
        self.by_actor: dict[str, dict[str, int]] = {
            row.actor: {**row.reasons, Reason.ADMITTED.value: row.accepted}
            for row in summary.actors
        }
        self.duplicates = summary.duplicates
        self.ages = dict(summary.staleness_histogram)
        self.groups_dropped = dict(summary.groups_dropped)
        self.announcements_dropped = 0
        self._rewards: list[float] = []

    @property
    def refused(self) -> int:
        return sum(self.refusals.values())

    @property
    def zero_variance_groups(self) -> int:
        return self.groups_dropped.get(Reason.ZERO_VARIANCE.value, 0)

    @property
    def commonest_refusal(self) -> Reason | None:
        """The reason for most refusals; None if nothing was refused."""
        if not self.refusals:
            return None
        return Reason(max(self.refusals, key=lambda reason: (self.refusals[reason], reason)))

    def take_reward_mean(self) -> float | None:
        """Mean reward of everything admitted since the last call; None if nothing was.

        Groups with equal rewards are never trained, so the mean over what is trained says less
        and less about the policy as it learns; this one counts them.
        """
        rewards, self._rewards = self._rewards, []
        return sum(rewards) / len(rewards) if rewards else None

    def count_age(self, steps: int) -> None:
        """A trajectory of this age was trained."""
        self.ages[steps] = self.ages.get(steps, 0) + 1

    def count(self, facts: Sequence[Record]) -> None:
        """Take facts into the counts."""
        for fact in facts:
            match fact:
                case records.Submission(actor=actor, verdict=verdict, reward=reward):
                    self._count_verdict(actor, verdict)
                    if verdict is Reason.ADMITTED:
                        self._rewards.append(reward)
                case records.StrayRefused(actor=actor, reason=reason):
                    known = actor in self.by_actor or len(self.by_actor) < STRAY_ACTORS_MAX
                    self._count_verdict(actor if known else OTHERS, reason)
                case records.DuplicateSeen():
                    self.duplicates += 1
                case records.GroupDropped(reason=reason):
                    dropped = self.groups_dropped
                    dropped[reason.value] = dropped.get(reason.value, 0) + 1
                case (
                    records.GroupOpened()
                    | records.LeaseGranted()
                    | records.LeaseEnded()
                    | records.StepTaken()
                    | records.VersionPublished()
                ):
                    pass
                case _:
                    assert_never(fact)

    def _count_verdict(self, actor: str, verdict: Reason) -> None:
        mine = self.by_actor.setdefault(actor, {})
        mine[verdict.value] = mine.get(verdict.value, 0) + 1
        if verdict is Reason.ADMITTED:
            self.accepted += 1
        else:
            self.refusals[verdict.value] = self.refusals.get(verdict.value, 0) + 1
