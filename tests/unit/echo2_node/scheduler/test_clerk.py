from __future__ import annotations

from random import Random

import pytest

from echo2_mesh.wire.types import Digest, NodeId, PolicyVersion, Reason
from echo2_node.scheduler import events, records
from echo2_node.scheduler.admission import Rules
from echo2_node.scheduler.clerk import Clerk
from echo2_node.scheduler.groups import TRANSITIONS, Phase, Shelf, advantages
from echo2_node.scheduler.waiters import WAITERS_MAX

ANN, BOB = NodeId("ann"), NodeId("bob")
MANIFEST = Digest(bytes(32))


class Bench:
    """A clerk and everything it said."""

    def __init__(self, **rules):
        settings = {"groups_per_step": 1, "group_size": 3, "staleness_limit_steps": 1, **rules}
        self.clerk = Clerk(Rules(**settings), Random(0))
        self.now_s = 0.0
        self.requests = 0
        self.facts = []
        self.feed(events.Published(version=PolicyVersion(0), manifest=MANIFEST))

    def feed(self, event):
        effects = self.clerk.handle(event, self.now_s)
        for effect in effects:
            if isinstance(effect, events.Write):
                self.facts += effect.records
        return effects

    def ask(self, actor=ANN, groups_max=1, version=0):
        self.requests += 1
        effects = self.feed(
            events.Requested(
                request=self.requests,
                actor=actor,
                version=PolicyVersion(version),
                groups_max=groups_max,
                until_s=self.now_s + 2,
            )
        )
        return [lease for e in effects if isinstance(e, events.Granted) for lease in e.leases]

    def hand_in(self, lease, index, *, version=None, reward=None, verdict=Reason.ADMITTED):
        effects = self.feed(
            events.Judged(
                actor=lease.actor,
                lease_id=lease.lease_id,
                index=index,
                verdict=verdict,
                digest=MANIFEST,
                version_oldest=lease.version_min if version is None else PolicyVersion(version),
                version_newest=lease.version_min,
                tokens=1,
                reward=float(index) if reward is None else reward,
            )
        )
        (answer,) = [e for e in effects if isinstance(e, events.Answered)]
        return answer.verdict

    def finish(self, lease, **changes):
        for index in lease.indices:
            self.hand_in(lease, index, **changes)

    def want(self, version=0):
        effects = self.feed(events.Wanted(version=PolicyVersion(version)))
        return [g for e in effects if isinstance(e, events.BatchReady) for g in e.groups]

    def train(self, step, groups, version):
        self.feed(
            events.Trained(
                step=step,
                group_ids=tuple(group.group_id for group in groups),
                version_before=PolicyVersion(version),
                skipped=False,
            )
        )
        self.feed(events.Published(version=PolicyVersion(version + 1), manifest=MANIFEST))

    def reasons(self):
        return [fact.reason for fact in self.facts if isinstance(fact, records.GroupDropped)]

    def wait(self, seconds):
        self.now_s += seconds
        return self.feed(events.Woke(key="deadline"))


def test_a_refill_is_for_exactly_the_missing_members():
    bench = Bench(lease_ttl_s=10)
    (lease,) = bench.ask()
    bench.hand_in(lease, 1)
    bench.wait(11)
    (refill,) = bench.ask(BOB)
    assert refill.group_id == lease.group_id
    assert refill.indices == (0, 2)
    assert refill.seed != lease.seed


def test_a_group_of_two_versions_is_as_old_as_its_oldest_member():
    bench = Bench(lease_ttl_s=10, staleness_limit_steps=2)
    first, other = bench.ask(groups_max=2)
    bench.hand_in(first, 0)
    bench.finish(other)
    bench.train(1, bench.want(), 0)
    bench.wait(11)
    (refill,) = bench.ask(BOB, version=1)
    bench.finish(refill)
    (group,) = bench.want(1)
    assert [member.version_oldest for member in group.members] == [0, 1, 1]


def test_a_group_lost_too_often_is_abandoned_and_its_slot_is_free_again():
    bench = Bench(lease_ttl_s=10, refills_per_group_max=2, staleness_limit_steps=0)
    for name in "xyz":
        (lease,) = bench.ask(NodeId(name))
        if 0 in lease.indices:
            bench.hand_in(lease, 0)
        bench.wait(11)
    assert bench.reasons() == [Reason.GROUP_ABANDONED]
    assert bench.clerk.shelf.alive == 0
    (fresh,) = bench.ask()
    assert fresh.item_index == lease.item_index + 1


def test_a_refused_member_is_leased_again_when_its_lease_is_over():
    bench = Bench()
    (lease,) = bench.ask()
    bench.hand_in(lease, 0)
    bench.hand_in(lease, 1, verdict=Reason.REWARD_MISMATCH)
    assert bench.hand_in(lease, 2) is Reason.ADMITTED
    (refill,) = bench.ask(BOB)
    assert refill.indices == (1,)


def test_a_group_without_any_member_frees_its_slot_and_keeps_its_prompt():
    bench = Bench(staleness_limit_steps=0)
    (lease,) = bench.ask()
    bench.feed(events.Departed(actor=ANN))
    assert bench.clerk.shelf.alive == 0
    (again,) = bench.ask(BOB)
    assert (again.group_id, again.item_index) == (lease.group_id, lease.item_index)


def test_the_oldest_version_is_trained_first():
    bench = Bench(staleness_limit_steps=3)
    old, slow = bench.ask(groups_max=2)
    bench.finish(old)
    bench.train(1, bench.want(), 0)
    (new,) = bench.ask(BOB, version=1)
    bench.finish(new)
    bench.finish(slow)
    (group,) = bench.want(1)
    assert group.group_id == slow.group_id


def test_a_group_that_became_too_old_is_dropped_and_its_late_members_too():
    bench = Bench(staleness_limit_steps=0)
    (lease,) = bench.ask()
    bench.hand_in(lease, 0)
    bench.feed(events.Published(version=PolicyVersion(1), manifest=MANIFEST))
    assert bench.reasons() == [Reason.STALE]
    assert bench.hand_in(lease, 1) is Reason.LATE
    ends = [fact.how for fact in bench.facts if isinstance(fact, records.LeaseEnded)]
    assert ends == [records.LeaseEnd.GROUP_DROPPED]


def test_a_result_exactly_at_the_limit_is_admitted_and_one_older_is_not():
    bench = Bench(staleness_limit_steps=1)
    (lease,) = bench.ask()
    bench.feed(events.Published(version=PolicyVersion(1), manifest=MANIFEST))
    assert bench.hand_in(lease, 0, version=0) is Reason.ADMITTED
    bench = Bench(staleness_limit_steps=1)
    (late,) = bench.ask()
    bench.feed(events.Published(version=PolicyVersion(2), manifest=MANIFEST))
    assert bench.hand_in(late, 0, version=0) is Reason.STALE


def test_zero_variance_in_a_row_is_said_once_and_a_varied_group_starts_the_count_anew():
    bench = Bench(zero_variance_groups_max=2)
    said = []
    for rewards in (1.0, None, 1.0, 1.0):
        (lease,) = bench.ask(version=bench.clerk.version)
        for index in lease.indices:
            effects = bench.feed(
                events.Judged(
                    actor=ANN,
                    lease_id=lease.lease_id,
                    index=index,
                    verdict=Reason.ADMITTED,
                    digest=MANIFEST,
                    version_oldest=lease.version_min,
                    version_newest=lease.version_min,
                    tokens=1,
                    reward=float(index) if rewards is None else rewards,
                )
            )
            said += [e.groups for e in effects if isinstance(e, events.NothingToLearn)]
    assert bench.reasons() == [Reason.ZERO_VARIANCE] * 3
    assert said == [2]


def test_waiting_requests_share_what_becomes_free():
    bench = Bench(groups_per_step=4, staleness_limit_steps=0)
    held = bench.ask(groups_max=4)
    assert bench.ask(BOB, groups_max=4) == []
    assert bench.ask(NodeId("cid"), groups_max=4) == []
    effects = bench.feed(
        events.Returned(actor=ANN, lease_ids=tuple(lease.lease_id for lease in held))
    )
    granted = [len(e.leases) for e in effects if isinstance(e, events.Granted)]
    assert granted == [2, 2]


def test_a_request_that_waited_long_enough_is_answered_empty():
    bench = Bench(staleness_limit_steps=0)
    bench.ask()
    assert bench.ask(BOB) == []
    (answer,) = [e for e in bench.wait(2.5) if isinstance(e, events.Granted)]
    assert answer.leases == ()
    assert answer.retry_after_s > 0


def test_more_requests_than_the_bound_push_out_the_oldest():
    bench = Bench(staleness_limit_steps=0)
    bench.ask()
    pushed = []
    for number in range(WAITERS_MAX + 3):
        before = bench.requests
        effects = bench.feed(
            events.Requested(
                request=1000 + number,
                actor=NodeId(f"actor {number}"),
                version=PolicyVersion(0),
                groups_max=1,
                until_s=9.0,
            )
        )
        assert bench.requests == before
        pushed += [e.request for e in effects if isinstance(e, events.Granted)]
    assert pushed == [1000, 1001, 1002]


def test_two_clerks_with_the_same_seed_say_the_same():
    def history():
        bench = Bench()
        for lease in bench.ask(groups_max=2):
            bench.finish(lease)
        return bench.facts

    assert history() == history()


def test_only_the_transitions_of_the_table_exist():
    for phase, targets in TRANSITIONS.items():
        for target in Phase:
            if target in targets or target is phase:
                continue
            shelf = Shelf()
            group = shelf.open("g", item_index=0, size=2)
            group.phase = phase
            with pytest.raises(AssertionError):
                shelf.move(group, target)


def test_advantages_are_distances_from_the_mean():
    assert advantages([1.0, 0.0, 0.5]) == (0.5, -0.5, 0.0)


def test_who_takes_every_slot_and_answers_nothing_leaves_them_to_others_the_next_time():
    bench = Bench(lease_ttl_s=10, staleness_limit_steps=3)
    assert len(bench.ask(ANN, groups_max=64)) == 4
    assert bench.ask(BOB) == []
    bench.wait(11)
    assert bench.ask(ANN, groups_max=64) == []
    bench.wait(2)
    assert len(bench.ask(ANN, groups_max=64)) == 1
    assert len(bench.ask(BOB, groups_max=64)) == 3


@pytest.mark.parametrize("how", ["hands back", "hands in rubbish", "goes and comes"])
def test_leases_cannot_be_burnt_as_fast_as_they_can_be_asked_for(how):
    bench = Bench(staleness_limit_steps=3)
    burnt = 0
    for _ in range(600):
        for lease in bench.ask(ANN, groups_max=64):
            burnt += 1
            if how == "hands back":
                bench.feed(events.Returned(actor=ANN, lease_ids=(lease.lease_id,)))
            elif how == "hands in rubbish":
                bench.finish(lease, verdict=Reason.REWARD_MISMATCH)
        if how == "goes and comes":
            bench.feed(events.Departed(actor=ANN))
        bench.wait(0.1)
    assert burnt <= 4 + 6


def test_an_actor_that_broke_down_is_back_at_work_in_a_few_rounds():
    bench = Bench(lease_ttl_s=10, staleness_limit_steps=7)
    bench.ask(ANN, groups_max=8)
    bench.feed(events.Departed(actor=ANN))
    bench.wait(1.5)
    sizes = []
    for _ in range(4):
        leases = bench.ask(ANN, groups_max=8)
        sizes.append(len(leases))
        for lease in leases:
            bench.finish(lease, reward=0.0)
    assert sizes == [1, 2, 4, 8]


def test_losing_one_lease_of_many_costs_little_and_an_undelivered_grant_nothing():
    bench = Bench(lease_ttl_s=100, staleness_limit_steps=7)
    lost, *_ = bench.ask(ANN, groups_max=8)
    bench.feed(events.Returned(actor=ANN, lease_ids=(lost.lease_id,), delivered=False))
    (lost,) = bench.ask(ANN, groups_max=8)
    bench.feed(events.Returned(actor=ANN, lease_ids=(lost.lease_id,)))
    assert bench.ask(ANN, groups_max=8) == []
    bench.wait(1.5)
    for lease in list(bench.clerk.book.live.values())[:3]:
        bench.finish(lease, reward=0.0)
    bench.ask(ANN, groups_max=8)
    assert len(bench.clerk.book.of_actor(ANN)) == 8


def test_requests_that_can_get_nothing_leave_the_slots_to_the_others():
    bench = Bench(staleness_limit_steps=7)
    taken = bench.ask(ANN, groups_max=8)
    assert bench.ask(BOB, groups_max=8) == []
    for number in range(20):
        assert bench.ask(NodeId(f"liar {number}"), version=2**40) == []
    ids = tuple(lease.lease_id for lease in taken)
    effects = bench.feed(events.Returned(actor=ANN, lease_ids=ids))
    (granted,) = [effect for effect in effects if isinstance(effect, events.Granted)]
    assert [lease.actor for lease in granted.leases] == [BOB] * 8
