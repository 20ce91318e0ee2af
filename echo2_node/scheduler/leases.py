"""The lease book: who may generate which members of which group, and until when.

A lease lives until its last member has a verdict, its deadline passes on the learner's clock, it
is handed back, its actor is gone, or its group is dropped: whichever is first, once. Ended leases
are remembered for a while, so that late and repeated results get the right answer; older ones are
recalled from the ledger. The book decides nothing about groups; the clerk owns it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from echo2_mesh.wire.types import NodeId, PolicyVersion, Reason
from echo2_node.scheduler.records import OpenLease

ENDED_LEASES_KEPT = 4096


class HeldLease:
    """One lease of the book. `pending` are the members without a verdict."""

    def __init__(
        self, lease: OpenLease, *, deadline_s: float, pending: Iterable[int], ended: bool = False
    ) -> None:
        self.lease_id = lease.lease_id
        self.group_id = lease.group_id
        self.actor: NodeId = lease.actor
        self.indices = lease.indices
        self.item_index = lease.item_index
        self.version_min: PolicyVersion = lease.version_min
        self.seed = lease.seed
        self.verdicts: dict[int, Reason] = dict(lease.verdicts)
        self.pending = set(pending)
        self.deadline_s = deadline_s
        self.ended = ended
        self.faulty = False
        """Something handed in on it cannot have come from an honest actor."""


class LeaseBook:
    """Live leases by id, and the most recently ended ones."""

    def __init__(self) -> None:
        self.live: dict[str, HeldLease] = {}
        self._ended: OrderedDict[str, HeldLease] = OrderedDict()

    def find(self, lease_id: str) -> HeldLease | None:
        """A live or remembered lease; None means: look in the ledger."""
        return self.live.get(lease_id) or self._ended.get(lease_id)

    def add(self, lease: OpenLease, *, deadline_s: float) -> HeldLease:
        """Enter a granted lease, or one restored from the ledger."""
        assert self.find(lease.lease_id) is None, f"lease {lease.lease_id} was granted twice"
        pending = [index for index in lease.indices if index not in lease.verdicts]
        assert pending, f"lease {lease.lease_id} has nothing left to do"
        held = HeldLease(lease, deadline_s=deadline_s, pending=pending)
        self.live[lease.lease_id] = held
        return held

    def recall(self, lease: OpenLease) -> None:
        """Remember an ended lease again, as the ledger has it."""
        if self.find(lease.lease_id) is None:
            self._remember(HeldLease(lease, deadline_s=0.0, pending=(), ended=True))

    def end(self, held: HeldLease) -> None:
        """End a live lease, once."""
        assert not held.ended, f"lease {held.lease_id} ended twice"
        assert self.live.pop(held.lease_id, None) is held
        held.ended = True
        self._remember(held)

    def expired(self, now_s: float) -> list[HeldLease]:
        """Live leases whose deadline has passed, earliest first."""
        due = [held for held in self.live.values() if held.deadline_s <= now_s]
        return sorted(due, key=lambda held: held.deadline_s)

    def of_actor(self, actor: NodeId) -> list[HeldLease]:
        """The live leases of one actor."""
        return [held for held in self.live.values() if held.actor == actor]

    def next_deadline_s(self) -> float | None:
        """When the next live lease expires."""
        return min((held.deadline_s for held in self.live.values()), default=None)

    def _remember(self, held: HeldLease) -> None:
        self._ended[held.lease_id] = held
        while len(self._ended) > ENDED_LEASES_KEPT:
            self._ended.popitem(last=False)
