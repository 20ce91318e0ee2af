from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2_mesh.wire.types import Digest, NodeId, PolicyVersion, Reason
from echo2_node.scheduler import events, records
from echo2_node.scheduler.admission import Rules, alive_max, is_fresh, slots
from echo2_node.scheduler.clerk import Clerk


def rules(**changes):
    return Rules(**{"groups_per_step": 4, "group_size": 2, "staleness_limit_steps": 3, **changes})


@pytest.mark.parametrize(
    ("learner", "actor", "alive", "free"),
    [
        (0, 0, 0, 16),
        (0, 0, 15, 1),
        (0, 0, 16, 0),
        (5, 4, 11, 1),
        (5, 4, 12, 0),
        (5, 2, 3, 1),
        (5, 2, 4, 0),
        (5, 1, 0, 0),
    ],
)
def test_slots_are_what_can_be_trained_in_time(learner, actor, alive, free):
    assert slots(rules(), learner=learner, actor=actor, alive=alive) == free


def test_limit_zero_leases_exactly_one_batch():
    strict = rules(staleness_limit_steps=0)
    assert slots(strict, learner=7, actor=7, alive=0) == 4
    assert slots(strict, learner=7, actor=6, alive=0) == 0


def test_the_filter_lets_exactly_the_limit_pass():
    assert is_fresh(rules(), trained=10, oldest=7)
    assert not is_fresh(rules(), trained=10, oldest=6)


def test_discard_leases_more_but_never_to_an_actor_beyond_the_limit():
    free = rules(policy="discard")
    assert slots(free, learner=5, actor=3, alive=16) > 0
    assert slots(free, learner=5, actor=1, alive=0) == 0
    assert alive_max(free) > alive_max(rules())


@given(
    seed=st.integers(0, 2**32),
    groups_per_step=st.integers(1, 4),
    limit=st.integers(0, 4),
    kappa=st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_nothing_is_born_stale_when_leases_end_before_their_batch(
    seed, groups_per_step, limit, kappa
):
    """Actors fill every slot they get at old and new versions; each step waits for all leases."""
    rng = Random(seed)
    kappa = min(kappa, limit + 1)
    clerk = Clerk(rules(groups_per_step=groups_per_step, staleness_limit_steps=limit), Random(seed))
    manifest = Digest(bytes(32))
    clerk.handle(events.Published(version=PolicyVersion(0), manifest=manifest), 0.0)
    version, ages, facts = 0, [], []

    def feed(event):
        effects = clerk.handle(event, 0.0)
        for effect in effects:
            if isinstance(effect, events.Write):
                facts.extend(effect.records)
        return effects

    def finish(lease):
        for index in lease.indices:
            feed(
                events.Judged(
                    actor=lease.actor,
                    lease_id=lease.lease_id,
                    index=index,
                    verdict=Reason.ADMITTED,
                    digest=manifest,
                    version_oldest=lease.version_min,
                    version_newest=lease.version_min,
                    tokens=1,
                    reward=float(index),
                )
            )

    for step in range(1, 12):
        for number in range(6):
            installed = rng.randint(max(0, version - limit), clerk.published)
            request = events.Requested(
                request=100 * step + number,
                actor=NodeId(f"actor {number}"),
                version=PolicyVersion(installed),
                groups_max=rng.randint(1, 8),
                until_s=0.0,
            )
            for effect in feed(request):
                if isinstance(effect, events.Granted):
                    for lease in effect.leases:
                        finish(lease)
        for effect in feed(events.Wanted(version=PolicyVersion(version))):
            if isinstance(effect, events.BatchReady):
                ages += [version - group.members[0].version_oldest for group in effect.groups]
                ids = tuple(group.group_id for group in effect.groups)
                feed(
                    events.Trained(
                        step=step,
                        group_ids=ids,
                        version_before=PolicyVersion(version),
                        skipped=False,
                    )
                )
                version += 1
                if version % kappa == 0:
                    feed(events.Published(version=PolicyVersion(version), manifest=manifest))
                break
        else:
            feed(events.Unwanted())
    assert not [fact for fact in facts if isinstance(fact, records.GroupDropped)]
    assert max(ages, default=0) <= limit
    assert ages
