"""Leaving well: leases finish or go back at once, what was generated counts, goodbyes are heard."""

import pytest
import trio
from structlog.testing import capture_logs

from echo2_mesh.testing import seeds
from tests.sim.fleet_kit import open_world


def standing(world, name, seen_by="learner"):
    """How `seen_by` sees a node: "up", "suspect" or "gone"; None if it never heard of it."""
    node = world.daemons[name].node
    rows = world.status(seen_by).get("members", ())
    return next((row["standing"] for row in rows if row["node"] == node), None)


@pytest.mark.parametrize("seed", seeds())
async def test_running_generations_finish_and_count(autojump_clock, tmp_path, monkeypatch, seed):
    async with open_world(tmp_path, monkeypatch, seed=seed, lease_ttl_s=1000.0) as world:
        world.start_learner()
        actor = world.start_actor("actor-0", engine={"step_s": 0.5})
        await world.wait_step(1)
        await world.wait(lambda: actor.engines[0].running)
        began_s = trio.current_time()
        actor.stop.set()
        assert await world.wait_end("actor-0", within_s=6) == "stopped"
        await world.wait(lambda: standing(world, "actor-0") == "gone", within_s=1.5)
        async with world.ledger() as ledger:
            summary = ledger.summary()
        # What was granted to the question that was on its way goes back untouched.
        assert set(summary.lease_ends) <= {"completed", "returned"}
        assert summary.accepted == 4 * summary.lease_ends["completed"]
        assert sum(summary.lease_ends.values()) == summary.leases
        assert trio.current_time() - began_s < 6
        world.start_actor("actor-1")
        await world.wait_end(within_s=60)
        await world.laws.check_end(world)


@pytest.mark.parametrize("seed", seeds())
async def test_generations_that_take_too_long_are_offered_to_others_at_once(
    autojump_clock, tmp_path, monkeypatch, seed
):
    async with open_world(tmp_path, monkeypatch, seed=seed, lease_ttl_s=10_000.0) as world:
        world.start_learner()
        world.start_actor("slow", groups_in_flight_max=16, engine={"step_s": 1000.0})
        await world.wait(lambda: world.laws.alive_max == 6)
        world.start_actor("actor-1")
        await trio.sleep(10)
        assert world.laws.step == 0
        world.daemons["slow"].stop.set()
        assert await world.wait_end("slow", within_s=6.5) == "stopped"
        assert world.laws.counts["leases returned"] == 6
        await world.wait_step(1, within_s=5)
        await world.wait_end(within_s=60)
        await world.laws.check_end(world)


async def test_leaving_needs_no_learner(autojump_clock, tmp_path, monkeypatch):
    async with open_world(tmp_path, monkeypatch) as world:
        world.start_learner()
        world.start_actor("early")
        world.start_actor("working", engine={"step_s": 0.5})
        await world.wait_step(2)
        await world.kill("learner")
        for name in ("early", "working"):
            await trio.sleep(3)
            world.daemons[name].stop.set()
            # Drain, hand back, last announcement, goodbye: each has its own bound.
            assert await world.wait_end(name, within_s=5 + 3 + 5 + 1 + 1) == "stopped"


async def test_leaving_before_the_first_version_is_immediate(autojump_clock, tmp_path, monkeypatch):
    async with open_world(tmp_path, monkeypatch) as world:
        world.start_learner()
        await world.kill("learner")
        with capture_logs() as lines:
            world.start_actor("actor-0")
            await trio.sleep(30)
        assert world.status("actor-0")["state"] == "fetching"
        assert "nothing from the learner yet" in [line["event"] for line in lines]
        world.daemons["actor-0"].stop.set()
        assert await world.wait_end("actor-0", within_s=2) == "stopped"


async def test_an_actor_that_cannot_prove_a_version_takes_no_leases_and_still_leaves(
    autojump_clock, tmp_path, monkeypatch
):
    async with open_world(tmp_path, monkeypatch) as world:
        world.start_learner()
        world.start_actor("actor-0", engine={"probe_error": 3.0})
        await trio.sleep(30)
        assert world.laws.alive_max == 0
        status = world.status("actor-0")
        assert status["state"] == "installing"
        assert "not what the learner published" in status["last_error"]
        assert status["version"] is None
        world.daemons["actor-0"].stop.set()
        assert await world.wait_end("actor-0", within_s=2) == "stopped"


async def test_a_stopped_learner_keeps_its_step_and_actors_wait_for_it(
    autojump_clock, tmp_path, monkeypatch
):
    async with open_world(tmp_path, monkeypatch, checkpoint_every_steps=100) as world:
        world.start_learner()
        world.start_actor("actor-0")
        await world.wait_step(3)
        world.learner.stop.set()
        assert await world.wait_end(within_s=5) == "stopped"
        assert world.status("learner")["state"] == "stopped"
        step = world.laws.step
        await trio.sleep(40)
        assert not world.daemons["actor-0"].ended.is_set()
        assert world.status("actor-0")["state"] == "learner away"
        world.start_learner(resume=True)
        await world.wait_end(within_s=60)
        summary = await world.laws.check_end(world)
        assert summary.steps_undone == 0, "a stop checkpoints"
        assert step < 8


async def test_a_stop_while_waiting_for_rollouts_ends_the_learner_at_once(
    autojump_clock, tmp_path, monkeypatch
):
    async with open_world(tmp_path, monkeypatch) as world:
        world.start_learner()
        await trio.sleep(10)
        assert world.status("learner")["state"] == "waiting for rollouts"
        world.learner.stop.set()
        assert await world.wait_end(within_s=2) == "stopped"


async def test_the_end_of_the_run_sends_everybody_home_in_the_middle_of_a_generation(
    autojump_clock, tmp_path, monkeypatch
):
    async with open_world(tmp_path, monkeypatch, groups_per_step=4) as world:
        world.start_learner()
        world.start_actor("slow", groups_in_flight_max=1, engine={"step_s": 4.0})
        world.start_actor("actor-1")
        await world.wait_end(within_s=120)
        for name in ("slow", "actor-1"):
            assert await world.wait_end(name, within_s=3) == "run ended"
        summary = await world.laws.check_end(world)
        assert summary.lease_ends["run_ended"] > 0
