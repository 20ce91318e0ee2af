"""Engines in real child processes: replies, concurrent calls, installs, and sudden death."""

import os
import signal
from pathlib import Path

import msgspec
import numpy as np
import pytest
import trio

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.wire.types import Digest
from echo2_node.config import ActorConfig
from echo2_node.engines import process
from echo2_node.engines.fake import FAKE_VARIABLE, FakeSettings
from echo2_node.engines.fingerprint import compare
from echo2_node.engines.process import default_threads, open_engine
from echo2_node.engines.protocol import Generation
from echo2_node.engines.weights import read_manifest
from tests.engine_suite import ids_of, request
from tests.tiny_model import logprobs_of, make_module, publish, write_model_folder

pytestmark = pytest.mark.e2e
PROMPT = [5, 9, 3, 7, 4, 12]
FAKE = ActorConfig(engine="fake", device="cpu")


def slow_fake(**changes: float) -> dict[str, str]:
    settings = FakeSettings(skill_start=0.0, skill_per_version=0.0, **changes)
    return {FAKE_VARIABLE: msgspec.json.encode(settings).decode()}


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ChunkStore, dict[int, Digest]]:
    folder = tmp_path_factory.mktemp("engine-process")
    model = write_model_folder(folder / "model")
    store = ChunkStore(folder / "chunks")
    return model, store, {v: publish(make_module(model, seed=v), store, v) for v in (1, 2)}


async def test_the_torch_engine_generates_and_changes_weights_in_a_child(
    world: tuple, tmp_path: Path
) -> None:
    model, store, versions = world
    config = ActorConfig(engine="torch", device="cpu", sequences_max=16)
    log = tmp_path / "logs" / "engine.log"
    async with open_engine(model, store.folder, config=config, log_path=log) as engine:
        assert engine.info.cohort.engine == "torch"
        with pytest.raises(UsageError, match="first weights"):
            await engine.generate(request(PROMPT))
        report = await engine.install(versions[1])
        truth = read_manifest(store.folder, versions[1]).probe.logprobs
        assert compare(truth, report.probe_logprobs, dtype="float32").matches
        results: dict[str, tuple[Generation, ...]] = {}

        async def one(name: str) -> None:
            results[name] = await engine.generate(request(PROMPT, name, tokens_max=400))

        async with trio.open_nursery() as nursery:
            for number in range(6):
                nursery.start_soon(one, f"r{number}")
            assert (await engine.install(versions[2])).version == 2
        assert {g.segments[-1].version for r in results.values() for g in r} <= {1, 2}
        for name, generations in results.items():
            assert [g.index for g in generations] == [0, 1, 2, 3]
            assert all(g.request_id == name for g in generations)
        with pytest.raises(UsageError, match="vocabulary"):
            await engine.generate(request([4000], "bad"))
        last = (await engine.generate(request(PROMPT, "last", (0,))))[0]
        true = logprobs_of(make_module(model, seed=2), PROMPT + ids_of(last.token_ids))
        assert np.abs(true[5:] - np.frombuffer(last.logprobs, "<f4")).max() < 1e-4


async def test_a_killed_engine_fails_every_call_at_once_and_says_so(
    world: tuple, tmp_path: Path
) -> None:
    model, store, versions = world
    errors: list[str] = []
    async with open_engine(
        model,
        store.folder,
        config=FAKE,
        log_path=tmp_path / "log",
        extra_env=slow_fake(step_s=0.05),
    ) as engine:
        await engine.install(versions[1])

        async def one(name: str) -> None:
            with pytest.raises(LocalError) as caught:
                await engine.generate(request(PROMPT, name, tokens_max=1000))
            errors.append(str(caught.value))

        with trio.fail_after(5):
            async with trio.open_nursery() as nursery:
                for number in range(4):
                    nursery.start_soon(one, str(number))
                await trio.testing.wait_all_tasks_blocked(0.2)
                os.kill(engine.pid, signal.SIGKILL)
        assert len(errors) == 4
        assert all("SIGKILL" in error for error in errors)
        assert not engine.alive
        with pytest.raises(LocalError):
            await engine.install(versions[2])


async def test_cancelling_the_caller_frees_the_engine(world: tuple, tmp_path: Path) -> None:
    model, store, versions = world
    config = ActorConfig(engine="fake", device="cpu", sequences_max=1)
    async with open_engine(
        model,
        store.folder,
        config=config,
        log_path=tmp_path / "log",
        extra_env=slow_fake(step_s=0.01),
    ) as engine:
        await engine.install(versions[1])
        with trio.move_on_after(0.1):
            await engine.generate(request([5, 2], "endless", (0, 1, 2), tokens_max=4000))
        with trio.fail_after(5):
            assert len(await engine.generate(request([5, 2], "next", (0,), tokens_max=1))) == 1
        async with trio.open_nursery() as nursery:

            async def doomed() -> None:
                with pytest.raises(LocalError, match="was cancelled"):
                    await engine.generate(request([5, 2], "doomed", (0,), tokens_max=4000))

            nursery.start_soon(doomed)
            await trio.testing.wait_all_tasks_blocked(0.05)
            engine.cancel_nowait("doomed")


async def test_an_engine_that_falls_silent_is_killed(
    world: tuple, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SILENCE_S_MAX", 2.0)
    model, store, versions = world
    async with open_engine(
        model, store.folder, config=FAKE, log_path=tmp_path / "log", extra_env=slow_fake(step_s=600)
    ) as engine:
        await engine.install(versions[1])
        with trio.fail_after(10), pytest.raises(LocalError, match="said nothing"):
            await engine.generate(request(PROMPT))


async def test_tokens_per_second_are_counted(world: tuple, tmp_path: Path) -> None:
    model, store, versions = world
    async with open_engine(
        model,
        store.folder,
        config=FAKE,
        log_path=tmp_path / "log",
        extra_env=slow_fake(step_s=0.02),
    ) as engine:
        await engine.install(versions[1])
        assert engine.tokens_per_s == 0.0
        with trio.move_on_after(20):
            count = 0
            while engine.tokens_per_s == 0.0:
                count += 1
                await engine.generate(request(PROMPT, str(count), tokens_max=8))
        assert 1.0 < engine.tokens_per_s < 4 / 0.02


async def test_an_engine_that_cannot_load_says_why(world: tuple, tmp_path: Path) -> None:
    _, store, _ = world
    config = ActorConfig(engine="torch", device="cpu")
    with pytest.raises(UsageError, match="cannot be built"):
        async with open_engine(tmp_path, store.folder, config=config, log_path=tmp_path / "log"):
            pass
    with pytest.raises(UsageError, match="Did you mean 'torch'"):
        async with open_engine(
            tmp_path, store.folder, config=ActorConfig(engine="troch"), log_path=tmp_path / "log"
        ):
            pass


async def test_a_crash_in_a_step_is_told_with_its_last_words(world: tuple, tmp_path: Path) -> None:
    model, store, versions = world
    env = {FAKE_VARIABLE: '{"vocabulary": 1}'}
    async with open_engine(
        model, store.folder, config=FAKE, log_path=tmp_path / "log", extra_env=env
    ) as engine:
        await engine.install(versions[1])
        with trio.fail_after(10), pytest.raises(LocalError, match=r"code 1\.[^!]*ZeroDivision"):
            await engine.generate(request([0]))


def test_small_hosts_get_one_thread() -> None:
    assert [default_threads(cores) for cores in (1, 2, 4, 8, 64)] == [1, 1, 1, 4, 32]
