"""Which groups an asking actor gets: refills first, then returned prompts, then new ones.

Takes from the shelf and enters into the book what the clerk then announces; it decides nothing
about requests that must wait. Called by the clerk alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from random import Random

from echo2_mesh.wire.types import NodeId, PolicyVersion
from echo2_node.scheduler import admission
from echo2_node.scheduler.admission import Rules
from echo2_node.scheduler.events import Requested
from echo2_node.scheduler.groups import Group, Phase, Shelf
from echo2_node.scheduler.leases import LeaseBook
from echo2_node.scheduler.records import GroupOpened, LeaseGranted, OpenLease, Record
from echo2_node.scheduler.shares import Shares

_SEED_BITS = 48


class Grants:
    """Makes leases.

    Args:
        rng: lease ids, group ids and sampling seeds.
        cursor: item index of the next new prompt.
    """

    def __init__(
        self, rules: Rules, shelf: Shelf, book: LeaseBook, rng: Random, *, cursor: int
    ) -> None:
        self._rules = rules
        self._shelf = shelf
        self._book = book
        self._rng = rng
        self._cursor = cursor
        self._shares = Shares()
        self._records: list[Record] = []

    def leases_for(
        self,
        request: Requested,
        *,
        version: PolicyVersion,
        groups_max: int,
        waiting: Collection[NodeId],
        now_s: float,
    ) -> tuple[tuple[OpenLease, ...], tuple[Record, ...]]:
        """Leases for one request (may be none), and the facts to keep.

        Args:
            version: what the learner trains next.
            groups_max: no more than these.
            waiting: actors whose requests wait, this one's included: what is free is shared
                among them, and with those that lately went away with nothing.
        """
        refills = self._refills_for(version, request.version)
        free = self._slots(version, request.version)
        share = -(-(free + len(refills)) // len(waiting))
        fair = self._shares.left_for(
            request.actor, free + len(refills), held=self._held(), waiting=waiting, now_s=now_s
        )
        wanted = min(groups_max, share, fair)
        chosen = refills[:wanted]
        prompts = [group for group in self._shelf.wanting() if group.phase is Phase.WAITING]
        for _ in range(min(wanted - len(chosen), free)):
            chosen.append(prompts.pop(0) if prompts else self._open_group())
        leases = tuple(self._lease(group, request, now_s) for group in chosen)
        self._shares.served(request.actor, len(leases), now_s)
        facts, self._records = tuple(self._records), []
        return leases, facts

    def _held(self) -> Counter[NodeId]:
        return Counter(lease.actor for lease in self._book.live.values())

    def _slots(self, version: PolicyVersion, actor: PolicyVersion, *, without: int = 0) -> int:
        return admission.slots(
            self._rules, learner=version, actor=actor, alive=self._shelf.alive - without
        )

    def _refills_for(self, version: PolicyVersion, actor: PolicyVersion) -> list[Group]:
        """Groups with some members that this actor may complete; they hold their slot already.

        An actor older than the group would make it older: then the group must fit its slots anew.
        """
        fresh = admission.is_fresh(self._rules, trained=version, oldest=actor)
        return [
            group
            for group in self._shelf.wanting()
            if group.phase is Phase.OPEN
            and fresh
            and (actor >= group.oldest or self._slots(version, actor, without=1) > 0)
        ]

    def _open_group(self) -> Group:
        group = self._shelf.open(
            self._new_id(), item_index=self._cursor, size=self._rules.group_size
        )
        self._cursor += 1
        self._records.append(
            GroupOpened(group_id=group.group_id, item_index=group.item_index, size=group.size)
        )
        return group

    def _lease(self, group: Group, request: Requested, now_s: float) -> OpenLease:
        """Everything that `group` misses, for one actor."""
        assert group.lease_id is None
        lease = OpenLease(
            lease_id=self._new_id(),
            group_id=group.group_id,
            actor=request.actor,
            indices=group.missing(),
            item_index=group.item_index,
            version_min=request.version,
            seed=self._rng.getrandbits(_SEED_BITS),
        )
        self._book.add(lease, deadline_s=now_s + self._rules.lease_ttl_s)
        group.lease_id = lease.lease_id
        self._shelf.move(group, Phase.OPEN)
        self._records.append(
            LeaseGranted(
                lease_id=lease.lease_id,
                group_id=lease.group_id,
                actor=lease.actor,
                indices=lease.indices,
                version_min=lease.version_min,
                seed=lease.seed,
            )
        )
        return lease

    def _new_id(self) -> str:
        return f"{self._rng.getrandbits(128):032x}"
