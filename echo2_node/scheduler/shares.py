"""How much of what is free an actor may take, when others have lately gone away with nothing.

While the learner is the bottleneck every freed slot goes to whoever has the newest version first;
without a reserve the same quick actors would take all of them and a late or slower one would
never work. Where slots are plenty nobody goes away with nothing, and nothing is held back.
Decides only for the grants, which own it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping

from echo2_mesh.wire.types import NodeId

HUNGRY_S = 5.0
"""Who asked in vain is expected back for so long; actors ask about every two seconds."""
ACTORS_MAX = 4096


class Shares:
    """Actors whose last request got nothing, and when that was."""

    def __init__(self) -> None:
        self._hungry: OrderedDict[NodeId, float] = OrderedDict()

    def served(self, actor: NodeId, leases: int, now_s: float) -> None:
        """A request of `actor` was looked at and got `leases`."""
        self._hungry.pop(actor, None)
        if leases == 0:
            self._hungry[actor] = now_s
            if len(self._hungry) > ACTORS_MAX:
                self._hungry.popitem(last=False)

    def left_for(
        self,
        actor: NodeId,
        free: int,
        *,
        held: Mapping[NodeId, int],
        waiting: Collection[NodeId],
        now_s: float,
    ) -> int:
        """Groups of `free` that `actor` may take; at least one for an actor that holds nothing.

        Args:
            held: live leases by actor.
            waiting: whoever is being served now needs no reserve.
        """
        while self._hungry and now_s - next(iter(self._hungry.values())) > HUNGRY_S:
            self._hungry.popitem(last=False)
        absent = [other for other in self._hungry if other != actor and other not in waiting]
        if not absent:
            return free
        fair = -(-(free + sum(held.values())) // len({actor, *absent, *held}))
        reserve = sum(max(0, fair - held.get(other, 0)) for other in absent)
        return max(free - reserve, 0 if held.get(actor, 0) else 1)
