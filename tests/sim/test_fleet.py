"""The real daemons through good and bad days on a virtual clock; laws are checked all along."""

from random import Random

import pytest
import trio
from trio.testing import MockClock

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import LocalError
from echo2_mesh.net import simulated
from echo2_mesh.testing import seeds
from echo2_node.learner.ledger import Ledger
from tests.sim.fleet_kit import open_world


def idle_share(world, *, first_step=2):
    """Share of the learner's time spent waiting for rollouts, from `first_step` on."""
    lines = [line for line in world.metrics() if line["step"] >= first_step]
    waited = sum(line["wait_s"] for line in lines)
    return waited / sum(line["wait_s"] + line["train_s"] + line["publish_s"] for line in lines)


def busy_share(world, names):
    """Share of the engines' lives in which they generated."""
    engines = [engine for name in names for engine in world.daemons[name].engines]
    lives = sum(trio.current_time() - engine.started_s for engine in engines)
    return sum(engine.busy_s for engine in engines) / lives


@pytest.mark.parametrize("seed", seeds())
async def test_a_steady_run_never_keeps_the_learner_waiting(
    autojump_clock, tmp_path, monkeypatch, seed
):
    monkeypatch.setattr(simulated, "GOSSIP_REPEAT_SHARE", 0.0)
    async with open_world(tmp_path, monkeypatch, seed=seed, steps=10) as world:
        world.start_learner()
        names = [world.start_actor(f"actor-{i}").name for i in range(3)]
        assert await world.wait_end(within_s=40) == "all steps done"
        for name in names:
            assert await world.wait_end(name, within_s=3) == "run ended"
        summary = await world.laws.check_end(world)
        assert idle_share(world) < 0.05, "engines are ten times faster than training"
        assert summary.refused == 0
        assert summary.duplicates == 0, "verdicts come before anybody repeats itself"
        assert world.laws.alive_max == 6, "all slots are used: (S + 1) * P"
        # What actors fetched beyond one copy of what changed in each version (3 of 4 chunks).
        fetched = sum(world.status(name)["counters"]["bytes_in_blobs"] for name in names)
        assert fetched / (3 * 11 * 3 * 4096) < 1.3


@pytest.mark.parametrize("seed", seeds())
async def test_engines_stay_busy_where_they_are_the_bottleneck(
    autojump_clock, tmp_path, monkeypatch, seed
):
    async with open_world(tmp_path, monkeypatch, seed=seed, step_s=0.2) as world:
        world.start_learner()
        names = [world.start_actor(f"actor-{i}", engine={"step_s": 1.0}).name for i in range(2)]
        await world.wait_end(within_s=120)
        await world.laws.check_end(world)
        assert busy_share(world, names) > 0.8


async def test_slow_installs_shrink_the_slots_and_the_flow_stays_steady(
    autojump_clock, tmp_path, monkeypatch
):
    async with open_world(tmp_path, monkeypatch, steps=12, limit_steps=3) as world:
        world.start_learner()
        for i in range(3):
            world.start_actor(f"actor-{i}", engine={"install_s": 1.5})
        await world.wait_end(within_s=60)
        summary = await world.laws.check_end(world)
        assert summary.refusals.get("stale", 0) == 0, "slots keep rollouts from being born stale"
        assert idle_share(world, first_step=3) < 0.15


@pytest.mark.parametrize("seed", seeds())
async def test_actors_come_late_and_crash_without_a_word(
    autojump_clock, tmp_path, monkeypatch, seed
):
    async with open_world(tmp_path, monkeypatch, seed=seed, steps=12) as world:
        world.start_learner()
        world.start_actor("actor-0")
        world.start_actor("actor-1", engine={"step_s": 0.5})
        await world.wait_step(2)
        await world.kill("actor-1")
        world.start_actor("actor-2")
        await world.wait_step(4)
        await world.kill("actor-0")
        world.start_actor("actor-1")
        await world.wait_step(7)
        await world.kill("actor-2")
        world.start_actor("actor-3")
        await world.wait_end(within_s=120)
        await world.laws.check_end(world)


async def test_the_leases_of_a_crashed_actor_are_free_before_their_time(
    autojump_clock, tmp_path, monkeypatch
):
    """Whether it stays away or comes back at once, knowing nothing of them."""
    async with open_world(tmp_path, monkeypatch, lease_ttl_s=100_000.0) as world:
        world.start_learner()
        world.start_actor("actor-0", groups_in_flight_max=16, engine={"step_s": 1000.0})
        await world.wait(lambda: world.laws.alive_max == 6)
        await world.kill("actor-0")
        world.start_actor("actor-0", groups_in_flight_max=16, engine={"step_s": 1000.0})
        counts = world.laws.counts
        # Its new incarnation and its first request both say that the leases are lost.
        await world.wait(
            lambda: counts["leases actor_gone"] + counts["leases returned"] == 6, within_s=15
        )
        await trio.sleep(5)
        await world.kill("actor-0")
        world.start_actor("actor-1")
        await world.wait_end(within_s=60)
        await world.laws.check_end(world)


@pytest.mark.parametrize("seed", seeds())
async def test_loss_repeats_and_latency_only_slow_the_run_down(
    autojump_clock, tmp_path, monkeypatch, seed
):
    network = {"loss": 0.2, "latency_s": 0.15, "bandwidth_bytes_per_s": 50_000}
    async with open_world(tmp_path, monkeypatch, seed=seed, network=network) as world:
        world.start_learner()
        for i in range(3):
            world.start_actor(f"actor-{i}")
        await world.wait_end(within_s=120)
        await world.laws.check_end(world)


@pytest.mark.parametrize("seed", seeds())
async def test_a_learner_cut_off_for_a_while_goes_on_when_it_is_back(
    autojump_clock, tmp_path, monkeypatch, seed
):
    async with open_world(tmp_path, monkeypatch, seed=seed) as world:
        world.start_learner()
        for i in range(3):
            world.start_actor(f"actor-{i}")
        await world.wait_step(2)
        world.network.partition(frozenset({world.learner.node}))
        await trio.sleep(8)
        assert world.status("actor-0")["state"] in ("learner away", "generating")
        await trio.sleep(52)
        assert world.laws.step <= 2 + 3
        world.network.partition()
        await world.wait_end(within_s=60)
        await world.laws.check_end(world)


@pytest.mark.parametrize("disk_s", [0.0, 0.2])
@pytest.mark.parametrize("seed", seeds())
async def test_a_killed_learner_resumes_where_its_books_say(
    autojump_clock, tmp_path, monkeypatch, seed, disk_s
):
    """Killed at whatever it is doing to its disk, again and again."""
    chance = Random(f"{seed} {disk_s}")
    async with open_world(tmp_path, monkeypatch, seed=seed, steps=10) as world:
        world.host.disk_s = disk_s
        world.start_learner()
        for i in range(3):
            world.start_actor(f"actor-{i}")
        await world.wait(lambda: (tmp_path / "learner" / "ledger.sqlite").exists())
        for _ in range(5):
            world.host.kill_at(chance.randrange(1, 120), lambda: world.kill_nowait("learner"))
            await world.learner.ended.wait()
            if world.learner.why is not None:
                break
            await trio.sleep(chance.uniform(0.1, 40.0))
            world.start_learner(resume=True)
        world.host.kill_at(10**9, lambda: None)
        await world.wait_end(within_s=200)
        summary = await world.laws.check_end(world)
        assert summary.resumes > 0


async def test_nothing_accepted_is_generated_again_after_a_kill(
    autojump_clock, tmp_path, monkeypatch
):
    async with open_world(
        tmp_path, monkeypatch, checkpoint_every_steps=1, limit_steps=4, step_s=5.0
    ) as world:
        world.start_learner()
        world.start_actor("actor-0")
        await world.wait_step(3)
        await trio.sleep(3)
        await world.kill("learner")
        await world.kill("actor-0")
        async with world.ledger() as ledger:
            ready = sum(not group.leases for group in ledger.pending_groups())
        assert ready > 2
        world.start_learner(resume=True)
        await world.wait_step(4, within_s=10)
        async with world.ledger() as ledger:
            assert ledger.verify() == []
        world.start_actor("actor-1")
        await world.wait_end(within_s=100)
        await world.laws.check_end(world)


async def test_a_dead_trainer_ends_the_learner_with_its_reason_and_a_resume_mends_it(
    autojump_clock, tmp_path, monkeypatch
):
    async with open_world(tmp_path, monkeypatch) as world:
        world.trainer_dies_at = [3]
        world.start_learner()
        world.start_actor("actor-0")
        with pytest.raises(LocalError, match="SIGKILL"):
            await world.wait_end(within_s=60)
        world.start_learner(resume=True)
        await world.wait_end(within_s=60)
        await world.laws.check_end(world)


@pytest.mark.parametrize("seed", seeds())
async def test_a_slow_actor_does_not_slow_the_run_down(autojump_clock, tmp_path, monkeypatch, seed):
    async with open_world(
        tmp_path, monkeypatch, seed=seed, steps=10, groups_per_step=4, lease_ttl_s=30.0
    ) as world:
        world.start_learner()
        world.start_actor("slow", groups_in_flight_max=2, engine={"step_s": 1.0})
        for i in range(2):
            world.start_actor(f"actor-{i}", engine={"step_s": 0.1})
        await world.wait_end(within_s=60)
        await world.laws.check_end(world)
        assert idle_share(world) < 0.2


@pytest.mark.parametrize("seed", seeds())
async def test_engines_die_and_their_leases_are_offered_again_at_once(
    autojump_clock, tmp_path, monkeypatch, seed
):
    async with open_world(tmp_path, monkeypatch, seed=seed, lease_ttl_s=1000.0) as world:
        world.start_learner()
        world.start_actor("frail", dies_every_s=4.0, engine={"step_s": 1.0})
        world.start_actor("sound", engine={"step_s": 1.0})
        await world.wait_step(4)
        await world.wait_end(within_s=80)
        summary = await world.laws.check_end(world)
        assert len(world.daemons["frail"].engines) >= 2
        assert summary.lease_ends.get("returned", 0) > 0
        assert "expired" not in summary.lease_ends


async def test_an_actor_whose_engine_never_starts_says_so_at_once(
    autojump_clock, tmp_path, monkeypatch
):
    async with open_world(tmp_path, monkeypatch) as world:
        world.start_learner()
        sick = world.start_actor("sick", dies_every_s=0)
        with pytest.raises(LocalError, match="no GPU"):
            await world.wait_end("sick", within_s=10)
        assert len(sick.engines) == 1


async def test_an_actor_whose_engine_never_lives_gives_up_and_says_why(
    autojump_clock, tmp_path, monkeypatch
):
    async with open_world(tmp_path, monkeypatch, lease_ttl_s=1000.0) as world:
        world.start_learner()
        world.start_actor("sick", dies_every_s=0.3, engine={"step_s": 1.0})
        with pytest.raises(LocalError, match="SIGKILL"):
            await world.wait_end("sick", within_s=120)
        world.start_actor("sound")
        await world.wait_end(within_s=60)
        await world.laws.check_end(world)


async def test_a_blob_that_an_actors_disk_damaged_is_fetched_again(
    autojump_clock, tmp_path, monkeypatch
):
    async with open_world(tmp_path, monkeypatch, steps=30) as world:
        world.start_learner()
        world.start_actor("actor-0")
        world.start_actor("actor-1")
        await world.wait_step(3)
        await world.kill("actor-0")
        for blob in (tmp_path / "actor-0" / "chunks").iterdir():
            blob.write_bytes(blob.read_bytes()[:-1] + b"?")
        step = world.laws.step
        actor = world.start_actor("actor-0")
        await world.wait(lambda: actor.engines and actor.engines[0].installs > 0, within_s=20)
        await world.wait(lambda: world.status("actor-0")["version"] is not None, within_s=10)
        assert world.laws.step <= step + 12


async def test_full_disks_stop_nothing_for_longer_than_they_are_full(
    autojump_clock, tmp_path, monkeypatch
):
    full = set()
    real_put, real_apply = ChunkStore.put, Ledger.apply

    def put(store, ref, data):
        if store.folder.parent.name in full:
            raise LocalError("The disk is full.")
        real_put(store, ref, data)

    def apply(ledger, facts, payloads, **options):
        if "learner" in full:
            raise LocalError("The ledger's disk is full.")
        real_apply(ledger, facts, payloads, **options)

    monkeypatch.setattr(ChunkStore, "put", put)
    monkeypatch.setattr(Ledger, "apply", apply)
    async with open_world(tmp_path, monkeypatch, steps=16) as world:
        world.start_learner()
        world.start_actor("actor-0")
        await world.wait_step(2)
        full.add("actor-0")
        await trio.sleep(20)
        assert "disk is full" in world.status("actor-0")["last_error"]
        full.clear()
        await world.wait_step(world.laws.step + 3, within_s=40)
        full.add("learner")
        step = world.laws.step
        await trio.sleep(30)
        assert "disk is full" in world.status("learner")["last_error"]
        assert world.laws.step == step, "nothing is done that is not recorded"
        full.clear()
        await world.wait_end(within_s=90)
        await world.laws.check_end(world)
        assert world.status("learner")["last_error"] == ""


def test_the_same_seed_gives_the_same_run(tmp_path, monkeypatch):
    """Every committed fact, the summary and the virtual time: crash, loss and all."""

    async def once(folder):
        network = {"loss": 0.1, "latency_s": 0.05}
        with monkeypatch.context() as patch:
            async with open_world(folder, patch, seed=11, network=network) as world:
                world.start_learner()
                for i in range(2):
                    world.start_actor(f"actor-{i}")
                await world.wait_step(3)
                await world.kill("learner")
                world.start_learner(resume=True)
                await world.wait_end(within_s=120)
                summary = await world.laws.check_end(world)
                return world.laws.commits, summary, trio.current_time()

    runs = []
    for part in ("once", "again"):
        (tmp_path / part).mkdir()
        runs.append(trio.run(once, tmp_path / part, clock=MockClock(autojump_threshold=0)))
    first, second = runs
    for number, pair in enumerate(zip(first[0], second[0], strict=False)):
        assert pair[0] == pair[1], f"commit {number} differs"
    assert first[1:] == second[1:]
