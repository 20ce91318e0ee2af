"""The real daemons through good and bad days on a virtual clock; laws are checked all along."""

import pytest
import trio

from echo2_mesh.testing import seeds
from tests.sim.fleet_kit import open_world


@pytest.mark.parametrize("seed", seeds())
async def test_a_steady_run_reaches_its_last_step(autojump_clock, tmp_path, monkeypatch, seed):
    async with open_world(tmp_path, monkeypatch, seed=seed) as world:
        world.start_learner()
        actors = [world.start_actor(f"actor-{i}") for i in range(3)]
        assert await world.wait_end(within_s=60) == "all steps done"
        for actor in actors:
            assert await world.wait_end(actor.name, within_s=5) == "run ended"
        summary = await world.laws.check_end(world)
        print(summary)
        for a in actors: print(a.engines[0].busy_s, trio.current_time() - a.engines[0].started_s, a.engines[0].installs)
        for m in world.metrics(): print(m)
