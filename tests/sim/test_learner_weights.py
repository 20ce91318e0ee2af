"""The learner's end of the weight plane: patches published, spread timed, a full disk outlived."""

import errno

import pytest
import trio

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.testing import seeds
from tests.sim.fleet_kit import open_world


@pytest.mark.parametrize("seed", seeds())
async def test_versions_travel_as_patches_and_their_spread_is_told(
    autojump_clock, tmp_path, monkeypatch, seed
):
    async with open_world(tmp_path, monkeypatch, seed=seed, steps=8) as world:
        world.start_learner()
        names = [world.start_actor(f"actor-{i}").name for i in range(3)]
        await world.wait_end(within_s=60)
        await world.laws.check_end(world)
        for name in names:
            counters = world.status(name)["counters"]
            assert counters["rebuilt_chunks"] >= 3 * 4
            assert counters.get("bad_rebuilds", 0) == 0
        spreads = world.spreads()
        assert {spread["version"] for spread in spreads} >= set(range(1, 7))
        for spread in spreads[1:]:
            # The run ends while its last versions spread: who has left by then is not counted.
            assert spread["actors"] == 3 or spread["version"] > 6
            assert 0 < spread["first_s"] <= spread["all_s"] < 5
            assert 0 < spread["patch_bytes"] < spread["full_bytes"] / 10
        shown = world.status("learner")["dissemination"]
        assert shown[-1]["version"] == spreads[-1]["version"]


async def test_patches_can_be_switched_off(autojump_clock, tmp_path, monkeypatch):
    async with open_world(tmp_path, monkeypatch, seed=1, steps=4, patch_steps_max=0) as world:
        world.start_learner()
        world.start_actor("actor-0")
        await world.wait_end(within_s=60)
        assert world.status("actor-0")["counters"].get("rebuilt_chunks", 0) == 0
        spreads = world.spreads()
        assert spreads
        assert all(spread["patch_bytes"] == 0 for spread in spreads)


@pytest.mark.parametrize("file_bytes", [4096, 0], ids=["data chunks", "anything"])
async def test_a_disk_that_is_full_for_a_while_pauses_the_run(
    autojump_clock, tmp_path, monkeypatch, file_bytes
):
    async with open_world(tmp_path, monkeypatch, seed=1, steps=6) as world:
        world.start_learner()
        world.start_actor("actor-0")
        await world.wait_step(2)
        write = ChunkStore._write_once
        full = True

        def write_once(store, digest, data):
            if full and "learner" in str(store.folder) and len(data) >= file_bytes:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(store, digest, data)

        monkeypatch.setattr(ChunkStore, "_write_once", write_once)
        await trio.sleep(30)
        assert "is full" in world.status("learner")["last_error"]
        stood = world.laws.step
        await trio.sleep(30)
        assert world.laws.step <= stood + 1
        full = False
        assert await world.wait_end(within_s=120) == "all steps done"
        assert world.status("learner")["last_error"] == ""
        await world.laws.check_end(world)


async def test_a_resumed_learner_begins_whole_and_patches_on(autojump_clock, tmp_path, monkeypatch):
    async with open_world(tmp_path, monkeypatch, seed=1, steps=8) as world:
        world.start_learner()
        world.start_actor("actor-0")
        await world.wait_step(5)
        await world.kill("learner")
        world.start_learner(resume=True)
        await world.wait_end(within_s=120)
        await world.laws.check_end(world)
        by_version = {spread["version"]: spread["patch_bytes"] for spread in world.spreads()}
        newest = max(by_version)
        assert by_version[newest] > 0
