"""From whom one chunk can be had now: its parent, a known holder, or whom the forest names.

Kept by `core.queues` for one version. The learner is left aside wherever another may have it.
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random

from echo2_mesh.core.forest import Forest
from echo2_mesh.core.swarm import MANIFEST_INDEX, Holder, Target
from echo2_mesh.wire.types import NodeId

OTHERS_LOOKED_AT = 8


class Sources:
    """The sources of one version.

    Args:
        holders: kept by the fetch machine; those who are asked first are added.
    """

    def __init__(
        self,
        forest: Forest,
        node: NodeId,
        target: Target,
        holders: dict[NodeId, Holder],
        rng: Random,
    ) -> None:
        self._forest = forest
        self._node = node
        self._target = target
        self._holders = holders
        self._rng = rng
        self.keepers: dict[NodeId, Holder] = {}
        """Peers beside the learner that are known to hold the whole version."""
        self.sharers: dict[NodeId, Holder] = {}
        """Peers that said they hold some of it."""
        self.at_a_loss = False
        """For some chunk there was nobody to ask."""

    def knows(self, holder: Holder) -> None:
        """What `holder` says it has was just changed."""
        if holder.peer == self._forest.learner:
            return
        for group, fits in ((self.keepers, holder.complete), (self.sharers, bool(holder.holds))):
            if fits:
                group[holder.peer] = holder
            else:
                group.pop(holder.peer, None)

    def forget(self, peer: NodeId) -> None:
        """It is not known any more what `peer` holds."""
        self.keepers.pop(peer, None)
        self.sharers.pop(peer, None)

    def has(self, holder: Holder, index: int) -> bool:
        """It said so, or made the version."""
        learner = self._forest.learner
        if index == MANIFEST_INDEX:
            return holder.peer == learner
        return holder.has(index, float("inf"), learner, patch=self._target.is_patch(index))

    def of(
        self, index: int, tried: Collection[NodeId], now_s: float, *, missed: bool
    ) -> NodeId | None:
        """Whom to ask for `index` now; None if there is nobody."""
        learner = self._forest.learner
        parent = self._forest.parent_of(self._node, index)
        if parent != learner and parent not in tried and self.well(parent, now_s):
            return parent
        other = self.other(index, tried, now_s)
        if other is not None:
            return other.peer
        source: NodeId | None = None
        if missed:
            source = self._forest.alternate_of(
                index, lambda peer: peer not in tried and self.well(peer, now_s)
            )
            if source in (None, self._node):
                source = learner
        if source is None:
            source = self._forest.source_of(
                self._node, index, lambda peer: peer not in tried and self.well(peer, now_s)
            )
        if source == learner and (learner in tried or not self.well(learner, now_s)):
            self.at_a_loss = True
            return self._anybody(tried, now_s) if index == MANIFEST_INDEX else None
        return source

    def _anybody(self, tried: Collection[NodeId], now_s: float) -> NodeId | None:
        """Who else may have the manifest: nobody says so before it is read."""
        fit = [
            peer
            for peer, holder in self._holders.items()
            if holder.connected and peer not in tried and self.well(peer, now_s)
        ]
        return self._rng.choice(fit) if fit else None

    def other(self, index: int, tried: Collection[NodeId], now_s: float) -> Holder | None:
        """The least asked of a few that are known to hold `index`, the learner left aside; nodes
        that the forest spares only where nobody else has it."""
        if index == MANIFEST_INDEX or not (self.keepers or self.sharers):
            return None
        known = list(self.sharers.values())
        if not self._target.is_patch(index):
            known += self.keepers.values()
        if len(known) > OTHERS_LOOKED_AT:
            known = self._rng.sample(known, OTHERS_LOOKED_AT)
        learner = self._forest.learner
        fit = [
            holder
            for holder in known
            if holder.peer not in tried
            and holder.has(index, now_s, learner, patch=self._target.is_patch(index))
            and self.well(holder.peer, now_s)
        ]

        def burden(holder: Holder) -> tuple[bool, int]:
            peer = holder.peer
            return not self._forest.forwards(peer), self._target.flights_count(peer)

        return min(fit, key=burden, default=None)

    def well(self, peer: NodeId, now_s: float) -> bool:
        """Worth waiting for."""
        holder = self._holders.get(peer)
        return holder is None or (now_s >= holder.away_until_s and not self._target.banned(peer))

    def holder(self, peer: NodeId) -> Holder:
        """What is known of `peer`."""
        holder = self._holders.get(peer)
        if holder is None:
            holder = self._holders[peer] = Holder(peer, connected=False)
        return holder
