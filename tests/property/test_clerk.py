"""The clerk under arbitrary histories: actors of any honesty, lateness, versions and crashes."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from echo2_mesh.wire.types import Digest, NodeId, PolicyVersion, Reason
from echo2_node.scheduler import events, records
from echo2_node.scheduler.admission import Rules, alive_max
from echo2_node.scheduler.clerk import Clerk

ACTORS = [NodeId(name) for name in ("ann", "bob", "eve")]
TTL_S = 10.0
MANIFEST = Digest(bytes(32))


class History(RuleBasedStateMachine):
    """Drives one clerk and keeps books of its own, from effects and records alone."""

    @initialize(
        groups_per_step=st.integers(1, 3),
        group_size=st.integers(2, 3),
        limit=st.integers(0, 3),
        kappa=st.integers(1, 2),
        seed=st.integers(0, 2**16),
    )
    def begin(self, groups_per_step, group_size, limit, kappa, seed):
        self.rules = Rules(
            groups_per_step=groups_per_step,
            group_size=group_size,
            staleness_limit_steps=limit,
            lease_ttl_s=TTL_S,
            refills_per_group_max=2,
            zero_variance_groups_max=10**6,
        )
        self.kappa = min(kappa, limit + 1)
        self.clerk = Clerk(self.rules, Random(seed))
        self.now_s = 0.0
        self.version = 0
        self.step = 0
        self.requests = 0
        self.leases: dict[str, records.LeaseGranted] = {}
        self.ends: list[str] = []
        self.first: dict[tuple[str, int], Reason] = {}
        self.admitted: dict[tuple[str, int], int] = {}
        self.trained: list[str] = []
        self.training: events.BatchReady | None = None
        self.wanting = False
        self.installed = dict.fromkeys(ACTORS, 0)
        self.feed(events.Published(version=PolicyVersion(0), manifest=MANIFEST))

    def feed(self, event):
        effects = self.clerk.handle(event, self.now_s)
        for effect in effects:
            match effect:
                case events.Write(records=facts):
                    for fact in facts:
                        self.note(fact)
                case events.BatchReady():
                    assert self.wanting
                    self.training, self.wanting = effect, False
        return effects

    def note(self, fact):
        match fact:
            case records.LeaseGranted():
                assert fact.lease_id not in self.leases
                self.leases[fact.lease_id] = fact
                lag = self.version - fact.version_min
                assert lag <= self.rules.staleness_limit_steps
                # Nothing is born stale: counted by the group's own version.
                assert self.alive() <= max(self.before, self.bound())
            case records.LeaseEnded():
                assert fact.lease_id in self.leases
                assert fact.lease_id not in self.ends
                self.ends.append(fact.lease_id)
            case records.Submission():
                key = (fact.lease_id, fact.index)
                assert key not in self.first
                self.first[key] = fact.verdict
                if fact.verdict is Reason.ADMITTED:
                    member = (fact.group_id, fact.index)
                    assert member not in self.admitted
                    self.admitted[member] = fact.version_oldest

    def alive(self):
        return self.clerk.shelf.alive

    def bound(self):
        return (self.rules.staleness_limit_steps + 1) * self.rules.groups_per_step

    def ask(self, actor, groups_max=2):
        self.before = self.alive()
        self.requests += 1
        return self.feed(
            events.Requested(
                request=self.requests,
                actor=actor,
                version=PolicyVersion(self.installed[actor]),
                groups_max=groups_max,
                until_s=self.now_s + 2.0,
            )
        )

    def hand_in(self, actor, lease, index, verdict=Reason.ADMITTED, reward=None, version=None):
        return self.feed(
            events.Judged(
                actor=actor,
                lease_id=lease.lease_id,
                index=index,
                verdict=verdict,
                digest=Digest(bytes(32)),
                version_oldest=PolicyVersion(lease.version_min if version is None else version),
                version_newest=PolicyVersion(self.installed[actor]),
                tokens=4,
                reward=float(index) if reward is None else reward,
            )
        )

    before = 0

    @rule(actor=st.sampled_from(ACTORS), groups_max=st.integers(1, 4))
    def request(self, actor, groups_max):
        self.before = self.alive()
        self.ask(actor, groups_max)

    @rule(actor=st.sampled_from(ACTORS))
    def install(self, actor):
        self.installed[actor] = self.clerk.published

    @precondition(lambda self: self.leases)
    @rule(
        data=st.data(),
        verdict=st.sampled_from([Reason.ADMITTED] * 6 + [Reason.MALFORMED]),
        reward=st.sampled_from([None, None, None, 1.0]),
        thief=st.sampled_from([None] * 5 + ACTORS),
    )
    def submit(self, data, verdict, reward, thief):
        self.before = self.alive()
        lease = data.draw(st.sampled_from(list(self.leases.values())[-8:]))
        index = data.draw(st.sampled_from(lease.indices))
        key, over = (lease.lease_id, index), lease.lease_id in self.ends
        known = self.first.get(key)
        effects = self.hand_in(thief or lease.actor, lease, index, verdict, reward)
        (answer,) = [effect for effect in effects if isinstance(effect, events.Answered)]
        if thief not in (None, lease.actor):
            assert answer.verdict is Reason.WRONG_ACTOR
        else:
            assert answer.verdict is self.first[key]
            assert answer.first is (known is None)
            if known is not None:
                assert answer.verdict is known
            elif over:
                assert answer.verdict is Reason.LATE

    @rule()
    def finish_everything(self):
        """All leases end well: most of a real run, and what makes histories long."""
        self.before = self.alive()
        for held in list(self.clerk.book.live.values()):
            for index in sorted(held.pending):
                self.hand_in(held.actor, self.leases[held.lease_id], index)

    @precondition(lambda self: self.training is None)
    @rule(steps=st.integers(1, 5))
    def step_while_the_oldest_lease_lags(self, steps):
        """One slow actor, everybody else quick: how results come to be too old."""
        for _ in range(steps):
            if self.training is None and not self.wanting:
                self.want()
            self.installed[ACTORS[0]] = self.clerk.published
            self.ask(ACTORS[0], 4)
            for held in list(self.clerk.book.live.values())[1:]:
                for index in sorted(held.pending):
                    self.before = self.alive()
                    self.hand_in(held.actor, self.leases[held.lease_id], index)
            if self.training is not None:
                self.train(False)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), actor=st.sampled_from(ACTORS))
    def hand_back(self, data, actor):
        self.before = self.alive()
        lease = data.draw(st.sampled_from(list(self.leases)))
        self.feed(events.Returned(actor=actor, lease_ids=(lease,)))

    @rule(actor=st.sampled_from(ACTORS))
    def depart(self, actor):
        self.before = self.alive()
        self.feed(events.Departed(actor=actor))

    @rule(seconds=st.sampled_from([0.5, 3.0, TTL_S + 1]))
    def wait(self, seconds):
        self.before = self.alive()
        self.now_s += seconds
        self.feed(events.Woke(key="deadline"))

    @precondition(lambda self: not self.wanting and self.training is None)
    @rule()
    def want(self):
        self.before = self.alive()
        self.wanting = True
        self.feed(events.Wanted(version=PolicyVersion(self.version)))

    @precondition(lambda self: self.training is not None)
    @rule(skipped=st.sampled_from([False, False, True]))
    def train(self, skipped):
        self.before = self.alive()
        batch, self.training = self.training, None
        assert len(batch.groups) == self.rules.groups_per_step
        for group in batch.groups:
            assert group.group_id not in self.trained
            self.trained.append(group.group_id)
            assert [member.index for member in group.members] == list(range(self.rules.group_size))
            assert len({member.reward for member in group.members}) > 1
            for member in group.members:
                age = self.version - self.admitted[(group.group_id, member.index)]
                assert age <= self.rules.staleness_limit_steps, "a stale trajectory was trained"
        self.step += 1
        ids = tuple(group.group_id for group in batch.groups)
        before = PolicyVersion(self.version)
        self.version += not skipped
        self.feed(
            events.Trained(step=self.step, group_ids=ids, version_before=before, skipped=skipped)
        )
        if self.version % self.kappa == 0 and not skipped:
            self.feed(events.Published(version=PolicyVersion(self.version), manifest=MANIFEST))

    @invariant()
    def alive_is_bounded_and_true(self):
        if not hasattr(self, "clerk"):
            return
        assert self.alive() <= self.bound() == alive_max(self.rules)
        groups = list(self.clerk.shelf)
        for group in groups:
            self.clerk.shelf.check(group)
        held = {lease.group_id for lease in self.clerk.book.live.values()}
        training = self.training.groups if self.training else ()
        working = {g.group_id for g in groups if g.members} | held
        assert working == {g.group_id for g in groups if g.phase.value != "waiting"}
        assert self.alive() == len(working | {g.group_id for g in training})

    @invariant()
    def each_lease_is_live_or_ended(self):
        if hasattr(self, "clerk"):
            assert set(self.leases) == set(self.ends) | set(self.clerk.book.live)
            assert not set(self.ends) & set(self.clerk.book.live)

    def teardown(self):
        """Liveness: from any state, one honest actor alone brings the next step about."""
        if not hasattr(self, "clerk"):
            return
        if self.training is not None:
            self.train(False)
        if not self.wanting:
            self.want()
        for _ in range(200):
            if self.training is not None:
                return
            self.wait(TTL_S + 1)
            self.installed[ACTORS[0]] = self.clerk.published
            for effect in self.ask(ACTORS[0], 2):
                if isinstance(effect, events.Granted):
                    for lease in effect.leases:
                        for index in lease.indices:
                            self.hand_in(ACTORS[0], lease, index)
        pytest.fail("no step happened although an honest actor works")


TestHistory = History.TestCase
TestHistory.settings = settings(
    max_examples=60,
    stateful_step_count=60,
    deadline=None,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),  # shrinking takes minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
