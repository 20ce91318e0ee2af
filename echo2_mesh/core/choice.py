"""Whom to ask where no forest is planned: the rule that spares the learner's uplink.

Holders beside the learner come first, the least asked of them. The learner serves what nobody else
holds, and steps in for the rest only when nothing else is on its way. A value for one moment, made
and used by `core.fetch`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from random import Random

from echo2_mesh import limits
from echo2_mesh.core.swarm import MANIFEST_INDEX, Holder, Target
from echo2_mesh.wire.types import NodeId

BUSY_UPLINK_S = 0.25
"""A chunk of the learner's that takes longer has queued on the uplink that everybody wants."""


HOLDINGS_PEERS_PER_ROUND = 6


def neighbours_to_ask(
    target: Target, holders: Iterable[Holder], learner: NodeId, rng: Random, now_s: float
) -> list[Holder]:
    """Who should say what they hold by now: a few, the longest unasked first."""
    patches = target.needed < len(target.refs)
    askable = [
        holder
        for holder in holders
        if holder.connected
        and holder.peer != learner
        and (patches or not holder.complete)
        and now_s >= max(holder.cool_until_s, holder.away_until_s)
        and not target.banned(holder.peer)
    ]
    rng.shuffle(askable)
    askable.sort(key=lambda holder: holder.polled_s)
    return askable[:HOLDINGS_PEERS_PER_ROUND]


class Choice:
    """The choices open at `now_s`."""

    def __init__(
        self,
        target: Target,
        holders: dict[NodeId, Holder],
        learner: NodeId,
        rng: Random,
        now_s: float,
    ) -> None:
        self._target = target
        self._holders = holders
        self._learner = learner
        self._rng = rng
        self._now_s = now_s

    def due(self) -> Iterator[tuple[int, Holder, float]]:
        """(index, whom to ask, 0), each to be asked before the next is taken."""
        target = self._target
        queue = target.queue(self._holders.values(), self._learner, self._rng, self._now_s)
        for index in queue:
            if len(target.flights) >= limits.SWARM_IN_FLIGHT_MAX:
                break
            holder = self.holder_for(index)
            if holder is not None:
                yield index, holder, 0.0
            elif not self.anyone_free():
                break

    def anyone_free(self) -> bool:
        """Somebody could be asked something."""
        return any(self._free(holder) for holder in self._holders.values())

    def holder_for(self, index: int) -> Holder | None:
        """The holder to ask for blob `index`, or None for not now."""
        learner: Holder | None = None
        others: list[Holder] = []
        held_elsewhere = False
        patch = self._target.is_patch(index)
        for holder in self._holders.values():
            if not holder.connected:
                continue
            if not holder.has(index, self._now_s, self._learner, patch=patch):
                continue
            if self._target.banned(holder.peer):
                continue
            if holder.peer == self._learner:
                learner = holder if self._free(holder) else None
                continue
            held_elsewhere = held_elsewhere or self._now_s >= holder.cool_until_s
            if self._free(holder):
                others.append(holder)
        if index == MANIFEST_INDEX and learner is not None:
            # Who else has the manifest is not known before it is read; proven holders first.
            others = [holder for holder in others if holder.complete]
        if others:
            self._rng.shuffle(others)
            return min(others, key=lambda holder: self._target.flights_count(holder.peer))
        return learner if not held_elsewhere or not self._target.flights else None

    def _free(self, holder: Holder) -> bool:
        """May be asked something now."""
        return (
            holder.connected
            and self._now_s >= holder.cool_until_s
            and not self._target.banned(holder.peer)
            and self._target.flights_count(holder.peer) < self._share(holder)
        )

    def _share(self, holder: Holder) -> int:
        """Chunks awaited of one peer at once: one of a busy learner where others can serve."""
        spared = holder.peer == self._learner and len(self._holders) > 1
        if spared and (holder.took_s is None or holder.took_s > BUSY_UPLINK_S):
            return 1
        return limits.SWARM_IN_FLIGHT_PER_PEER_MAX
