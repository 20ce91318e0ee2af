"""The clerk: leases out, verdicts in, batches on. One machine, `handle(event, now_s) -> effects`.

It composes the lease book, the shelf of groups and the two staleness guards, and decides
everything between an actor's request and a training batch. It holds no socket, clock, payload or
database: the learner's desk owns it, feeds it and performs what it returns. After every event at
most `alive_max` groups are alive (unless a roll-back brought more), every lease has ended at most
once, and no (group, index) has been admitted twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random
from typing import assert_never

from echo2_mesh.wire.types import PolicyVersion, Reason
from echo2_node.scheduler import admission, events, records
from echo2_node.scheduler.admission import Rules
from echo2_node.scheduler.conduct import Conduct
from echo2_node.scheduler.events import ClerkEffect, ClerkEvent
from echo2_node.scheduler.grants import Grants
from echo2_node.scheduler.groups import Group, Phase, Shelf
from echo2_node.scheduler.leases import HeldLease, LeaseBook
from echo2_node.scheduler.records import LeaseEnd, Member, OpenGroup, Record
from echo2_node.scheduler.waiters import Waiters

RETRY_AFTER_S = 0.5
"""What an actor is told when there is no slot for it."""
_NOT_ITS_FAULT = frozenset({Reason.ADMITTED, Reason.DUPLICATE, Reason.STALE})


class Clerk:
    """See the module.

    Args:
        rules: the run's settings.
        rng: makes lease ids, group ids and sampling seeds.
        cursor: the next prompt's item index.
    """

    def __init__(self, rules: Rules, rng: Random, *, cursor: int = 0) -> None:
        self.rules = rules
        self.version = PolicyVersion(0)
        """The version that the next step will train."""
        self.published: PolicyVersion | None = None
        self.shelf = Shelf()
        self.book = LeaseBook()
        self.ended = False
        self.zero_variance_row = 0
        self._conduct = Conduct()
        self._grants = Grants(rules, self.shelf, self.book, rng, cursor=cursor)
        self._waiters = Waiters()
        self._wanted = False
        self._freed = False
        """Something happened that may let a waiting request be served."""
        self._records: list[Record] = []
        self._effects: list[ClerkEffect] = []
        self._touched: set[Group] = set()

    def handle(self, event: ClerkEvent, now_s: float) -> tuple[ClerkEffect, ...]:
        """Decide one event; the facts come first in the answer."""
        alive_before = self.shelf.alive
        deadline_before = self._next_alarm_s()
        self._dispatch(event, now_s)
        if self._freed:
            self._offer(now_s)
            self._freed = False
        self._check(alive_before)
        effects: list[ClerkEffect] = []
        if self._records:
            effects.append(events.Write(records=tuple(self._records)))
        effects += self._effects
        alarm_s = self._next_alarm_s()
        if alarm_s is not None and (alarm_s != deadline_before or isinstance(event, events.Woke)):
            effects.append(events.Arm(key="deadline", at_s=alarm_s))
        self._records, self._effects, self._touched = [], [], set()
        return tuple(effects)

    def restore(self, groups: Sequence[OpenGroup], now_s: float) -> tuple[ClerkEffect, ...]:
        """Take over what the ledger knows to be unfinished; leases get their whole time again."""
        assert len(self.shelf) == 0, "restore belongs before the first event"
        for known in groups:
            group = self.shelf.open(known.group_id, item_index=known.item_index, size=known.size)
            group.losses = known.losses
            group.members = {member.index: member for member in known.members}
            for lease in known.leases:
                self.book.add(lease, deadline_s=now_s + self.rules.lease_ttl_s)
                group.lease_id = lease.lease_id
            if group.members or group.lease_id is not None:
                self.shelf.move(group, Phase.OPEN)
            if group.full:
                self.shelf.move(group, Phase.READY)
            self.shelf.check(group)
        alarm_s = self._next_alarm_s()
        return () if alarm_s is None else (events.Arm(key="deadline", at_s=alarm_s),)

    def newest_legal_version(self) -> PolicyVersion:
        """No honest trajectory can be of a newer version."""
        return self.version if self.published is None else max(self.version, self.published)

    # --- events ---------------------------------------------------------------------------------

    def _dispatch(self, event: ClerkEvent, now_s: float) -> None:
        match event:
            case events.Requested():
                self._refuse_requests(self._waiters.add(event))
                self._freed = True
            case events.Withdrawn(request=request):
                self._waiters.remove(request)
            case events.Returned(actor=actor, lease_ids=lease_ids, delivered=delivered):
                for held in self.book.of_actor(actor):
                    if held.lease_id in lease_ids:
                        self._end_lease(held, LeaseEnd.RETURNED)
                        if delivered:
                            self._failed(held, now_s)
            case events.Departed(actor=actor):
                for held in self.book.of_actor(actor):
                    self._end_lease(held, LeaseEnd.ACTOR_GONE)
                    self._failed(held, now_s)
            case events.Recalled(lease=lease):
                self.book.recall(lease)
            case events.Judged():
                self._judged(event, now_s)
            case events.Wanted(version=version):
                assert not self._wanted, "one batch at a time"
                self._wanted = True
                self._advance(version)
            case events.Unwanted():
                self._wanted = False
            case events.Trained():
                self._trained(event)
            case events.Published(version=version, manifest=manifest):
                self._records.append(records.VersionPublished(version=version, manifest=manifest))
                self.published = max(version, self.published or version)
                self._advance(max(version, self.version))
            case events.Ended():
                self._end_run()
            case events.Woke():
                for held in self.book.expired(now_s):
                    self._end_lease(held, LeaseEnd.EXPIRED)
                    self._failed(held, now_s)
                self._refuse_requests(self._waiters.overdue(now_s))
            case _:
                assert_never(event)
        self._fill_batch()

    def _judged(self, event: events.Judged, now_s: float) -> None:
        held = self.book.find(event.lease_id)
        if held is None:
            self._stray(event, Reason.UNKNOWN_LEASE)
        elif held.actor != event.actor:
            self._stray(event, Reason.WRONG_ACTOR)
        elif event.index not in held.indices:
            self._stray(event, Reason.MALFORMED)
        elif event.index in held.verdicts:
            first = held.verdicts[event.index]
            seen = records.DuplicateSeen(lease_id=event.lease_id, index=event.index)
            self._records.append(seen)
            self._answer(event, first, first=False)
        else:
            self._judge_first(held, event, now_s)

    def _judge_first(self, held: HeldLease, event: events.Judged, now_s: float) -> None:
        """Give (lease, index) its one verdict."""
        group = self.shelf.find(held.group_id)
        verdict = event.verdict
        if self.ended:
            verdict = Reason.RUN_ENDED
        elif held.ended or group is None:
            verdict = Reason.LATE
        elif verdict is Reason.ADMITTED and event.index in group.members:
            verdict = Reason.DUPLICATE
        elif verdict is Reason.ADMITTED and not admission.is_fresh(
            self.rules, trained=self.version, oldest=event.version_oldest
        ):
            verdict = Reason.STALE
        held.verdicts[event.index] = verdict
        held.pending.discard(event.index)
        self._records.append(
            records.Submission(
                lease_id=event.lease_id,
                index=event.index,
                group_id=held.group_id,
                actor=event.actor,
                verdict=verdict,
                digest=event.digest,
                version_oldest=event.version_oldest,
                version_newest=event.version_newest,
                tokens=event.tokens,
                reward=event.reward,
            )
        )
        self._answer(event, verdict, first=True)
        if verdict is Reason.ADMITTED:
            assert group is not None
            self._admit(group, event)
        held.faulty |= verdict not in _NOT_ITS_FAULT
        if not held.ended and not held.pending:
            self._end_lease(held, LeaseEnd.COMPLETED)
            if held.faulty:
                self._failed(held, now_s)
            else:
                self._conduct.delivered(held.actor)

    def _admit(self, group: Group, event: events.Judged) -> None:
        assert event.index not in group.members, "a member was admitted twice"
        group.members[event.index] = Member(
            index=event.index,
            lease_id=event.lease_id,
            actor=event.actor,
            digest=event.digest,
            version_oldest=event.version_oldest,
            reward=event.reward,
        )
        self._touched.add(group)

    def _trained(self, event: events.Trained) -> None:
        for group_id in event.group_ids:
            group = self.shelf.find(group_id)
            assert group is not None, f"group {group_id} was trained but is not here"
            assert group.phase is Phase.TRAINING
            assert admission.is_fresh(
                self.rules, trained=event.version_before, oldest=group.oldest
            ), f"group {group_id} was trained beyond the staleness limit"
            self.shelf.move(group, Phase.GONE)
        self._records.append(
            records.StepTaken(
                step=event.step,
                version_before=event.version_before,
                skipped=event.skipped,
                group_ids=event.group_ids,
            )
        )
        self._effects.append(events.Freed(group_ids=event.group_ids))
        after = event.version_before + (0 if event.skipped else 1)
        self._advance(PolicyVersion(max(after, self.version)))

    def _end_run(self) -> None:
        self.ended = self._freed = True
        for held in list(self.book.live.values()):
            self._end_lease(held, LeaseEnd.RUN_ENDED)
        self._refuse_requests(self._waiters.clear())

    # --- groups ---------------------------------------------------------------------------------

    def _end_lease(self, held: HeldLease, how: LeaseEnd) -> None:
        """End a lease; a group that it leaves incomplete waits for a refill, or is given up."""
        self.book.end(held)
        group = self.shelf.find(held.group_id)
        lost = 0
        if group is not None:
            assert group.lease_id == held.lease_id
            group.lease_id = None
            lost = sum(index not in group.members for index in held.indices)
        self._records.append(records.LeaseEnded(lease_id=held.lease_id, how=how, lost=lost))
        if group is None or how is LeaseEnd.GROUP_DROPPED:
            return
        self._touched.add(group)
        if lost == 0:
            self._complete(group)
            return
        if how is LeaseEnd.RUN_ENDED:
            self._settle(group)
            return
        group.losses += 1
        if group.losses > self.rules.refills_per_group_max:
            self._drop(group, Reason.GROUP_ABANDONED)
        else:
            self._settle(group)

    def _settle(self, group: Group) -> None:
        """An incomplete group without a lease: it keeps its slot only if it has members."""
        self._freed = True
        self.shelf.move(group, Phase.OPEN if group.members else Phase.WAITING)

    def _complete(self, group: Group) -> None:
        """A whole group: worth training if its rewards differ."""
        assert group.full
        if group.varied:
            self.zero_variance_row = 0
            self.shelf.move(group, Phase.READY)
            return
        self._drop(group, Reason.ZERO_VARIANCE)
        self.zero_variance_row += 1
        if self.zero_variance_row == self.rules.zero_variance_groups_max:
            self._effects.append(events.NothingToLearn(groups=self.zero_variance_row))

    def _drop(self, group: Group, reason: Reason) -> None:
        """Give a group up for good; a lease still on it ends with it."""
        self._freed = True
        held = None if group.lease_id is None else self.book.find(group.lease_id)
        if held is not None:
            self._end_lease(held, LeaseEnd.GROUP_DROPPED)
        self.shelf.move(group, Phase.GONE)
        self._records.append(records.GroupDropped(group_id=group.group_id, reason=reason))
        self._effects.append(events.Freed(group_ids=(group.group_id,)))

    def _advance(self, version: PolicyVersion) -> None:
        """Groups that became too old to be trained go at once; their slots are free again."""
        assert version >= self.version, "the learner's version never goes back"
        self.version = version
        self._freed = True
        for group in list(self.shelf):
            if (
                group.phase in (Phase.OPEN, Phase.READY)
                and group.members
                and not admission.is_fresh(self.rules, trained=version, oldest=group.oldest)
            ):
                self._drop(group, Reason.STALE)

    def _fill_batch(self) -> None:
        """Answer a wanted batch with the P oldest ready groups, if there are as many."""
        if not self._wanted:
            return
        chosen = self.shelf.ready()[: self.rules.groups_per_step]
        if len(chosen) < self.rules.groups_per_step:
            return
        self._wanted = False
        for group in chosen:
            assert admission.is_fresh(self.rules, trained=self.version, oldest=group.oldest)
            self.shelf.move(group, Phase.TRAINING)
        self._effects.append(
            events.BatchReady(
                version=self.version,
                groups=tuple(
                    events.BatchGroup(
                        group_id=group.group_id,
                        item_index=group.item_index,
                        members=tuple(group.members[index] for index in range(group.size)),
                    )
                    for group in chosen
                ),
            )
        )

    # --- offers ---------------------------------------------------------------------------------

    def _offer(self, now_s: float) -> None:
        """Serve those who wait, first come first served, sharing what is free."""
        if self.ended:
            self._refuse_requests(self._waiters.clear())
            return
        limits = [(held, self._may_have(held, now_s)) for held in self._waiters.in_order()]
        waiting = [(request, may_have) for request, may_have in limits if may_have > 0]
        for place, (request, may_have) in enumerate(waiting):
            leases, facts = self._grants.leases_for(
                request,
                version=self.version,
                groups_max=may_have,
                waiting=[later.actor for later, _ in waiting[place:]],
                now_s=now_s,
            )
            self._records += facts
            if leases:
                self._touched.update(self.shelf.get(lease.group_id) for lease in leases)
                self._waiters.remove(request.request)
                self._effects.append(
                    events.Granted(request=request.request, leases=leases, retry_after_s=0.0)
                )

    def _may_have(self, request: events.Requested, now_s: float) -> int:
        """Leases that `request` may get if there are slots; a claim to the future gets none."""
        if self.published is None or request.version > self.published:
            return 0
        allowed = self._conduct.allowed(request.actor, now_s)
        return min(request.groups_max, allowed - len(self.book.of_actor(request.actor)))

    def _failed(self, held: HeldLease, now_s: float) -> None:
        left = len(self.book.of_actor(held.actor))
        self._conduct.failed(held.actor, now_s, left=left)

    # --- small parts ----------------------------------------------------------------------------

    def _refuse_requests(self, refused: Iterable[events.Requested]) -> None:
        for request in refused:
            self._effects.append(
                events.Granted(request=request.request, leases=(), retry_after_s=RETRY_AFTER_S)
            )

    def _stray(self, event: events.Judged, reason: Reason) -> None:
        self._records.append(records.StrayRefused(actor=event.actor, reason=reason))
        self._answer(event, reason, first=True)

    def _answer(self, event: events.Judged, verdict: Reason, *, first: bool) -> None:
        self._effects.append(
            events.Answered(
                lease_id=event.lease_id, index=event.index, verdict=verdict, first=first
            )
        )

    def _next_alarm_s(self) -> float | None:
        alarms = [self.book.next_deadline_s(), self._waiters.next_deadline_s()]
        return min((alarm for alarm in alarms if alarm is not None), default=None)

    def _check(self, alive_before: int) -> None:
        """What must hold after every event."""
        bound = admission.alive_max(self.rules)
        assert self.shelf.alive <= max(bound, alive_before), "more groups alive than slots"
        for group in self._touched:
            self.shelf.check(group)
