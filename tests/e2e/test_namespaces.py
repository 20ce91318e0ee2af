"""A learner and four actors on five hosts of their own, each behind 20 Mbit/s: no shortcut."""

import pytest

from tests.e2e.hosts import namespaces_left, open_hosts, why_not
from tests.e2e.world import open_world

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(420)]

STEPS = 8
ACTORS = 4
MBIT_PER_S = 20


def test_a_run_over_slow_links_between_hosts_ends_well(tmp_path):
    if reason := why_not():
        pytest.skip(f"network namespaces: {reason}")
    with (
        open_hosts(1 + ACTORS, mbit_per_s=MBIT_PER_S) as hosts,
        # Large enough that weights show on the wire.
        open_world(tmp_path / "world", hidden=192, layers=3) as world,
    ):
        home, *others = hosts
        learner = world.learn(
            prefix=home.prefix,
            run={"steps": STEPS},
            mesh={"listen": [home.listen], "chunk_size_bytes": 65536},
        )
        actors = [
            world.join(
                learner,
                f"actor-{number}",
                # The last one can only dial out, as behind a home router.
                listen=host.listen if number < ACTORS else "",
                prefix=host.prefix,
                fake={"step_s": 0.05},
            )
            for number, host in enumerate(others, 1)
        ]
        world.until(lambda: learner.step() >= 2, "two steps", timeout_s=150, alive=(learner,))
        seen = {other for _, other in home.connections()}
        neighbours = [{other for _, other in host.connections()} for host in others]
        assert learner.wait_exit(200) == 0, learner.last_words()
        assert [actor.wait_exit() for actor in actors] == [0] * ACTORS
        moved = {host.address: host.bytes_moved() for host in hosts}

        books = world.verify(learner)
        assert books["steps"] == STEPS
        assert books["staleness_steps_max"] <= 2
        assert sum(row["consumed"] > 0 for row in books["actors"]) >= 2

        # No loopback: every actor is seen at its own address and nowhere else.
        assert seen == {host.address for host in others}
        assert not any(other.startswith("127.") for reached in neighbours for other in reached)
        # Weights travel between actors: some are connected, and somebody served chunks.
        listening = {host.address for host in others[:-1]}
        assert any(reached & listening for reached in neighbours)
        served = [actor.status()["counters"].get("bytes_out_blobs", 0) for actor in actors]
        fetched = [actor.status()["counters"].get("bytes_in_blobs", 0) for actor in actors]
        assert sum(served) > 0, "every actor fetched everything from the learner"
        from_learner = learner.status()["counters"]["bytes_out_blobs"]
        assert from_learner < sum(fetched)
        # The links carried it all.
        assert moved[home.address][1] > from_learner
    assert namespaces_left() == ()
