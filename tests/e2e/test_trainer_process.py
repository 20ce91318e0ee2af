"""The real trainer child over its pipes, on a tiny model."""

import os
import signal

import msgspec
import pytest
import torch
import trio

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import LocalError, UsageError
from echo2_node.learner.checkpoints import Checkpoints
from echo2_node.learner.models import load_model
from echo2_node.learner.trainer_process import open_trainer
from tests.samples import run_config, sampled_batch, write_trainable_folder

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return write_trainable_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def opened(folder, tmp_path):
    def start(resume_from=None, **learner):
        return open_trainer(
            run_config(folder, **learner),
            state_dir=tmp_path,
            store_dir=tmp_path / "chunks",
            resume_from=resume_from,
        )

    return start


@pytest.fixture(scope="module")
def samples(folder):
    return [sampled_batch(load_model(folder), seed=seed, noise=0.05) for seed in range(3)]


async def test_a_resumed_trainer_continues_bit_for_bit(opened, samples, tmp_path):
    checkpoints = Checkpoints(tmp_path / "checkpoints", kept=2)
    async with opened(lr_warmup_steps=4) as trainer:
        assert trainer.info.step == 0
        first = await trainer.export(0)
        report = await trainer.step(samples[0])
        assert not report.skipped
        assert report.metrics["grad_norm"] > 0
        await trainer.save(checkpoints.folder_of(1), step=1)
        saved = await trainer.export(1)
        reports = [await trainer.step(samples[1]), await trainer.step(samples[2])]
        ended = await trainer.export(3)
    store = ChunkStore(tmp_path / "chunks")
    assert all(store.has(chunk.digest) for chunk in ended.chunks)
    assert first.state_digest != saved.state_digest != ended.state_digest
    checkpoint = checkpoints.newest()
    assert checkpoint is not None
    async with opened(checkpoint.folder, lr_warmup_steps=4) as trainer:
        assert trainer.info.step == 1
        assert (await trainer.export(1)).state_digest == saved.state_digest
        again = [await trainer.step(samples[1]), await trainer.step(samples[2])]
        resumed = await trainer.export(3)
    assert [r.metrics for r in again] == [r.metrics for r in reports]
    assert resumed.state_digest == ended.state_digest
    assert resumed.probe == ended.probe
    assert resumed.files == ended.files
    os.truncate(checkpoint.folder / "masters.safetensors", 1000)
    with pytest.raises(LocalError, match=r"masters\.safetensors is damaged"):
        async with opened(checkpoint.folder):
            pass


async def test_a_killed_trainer_is_a_local_error_with_its_signal(opened, samples):
    async with opened() as trainer:
        os.kill(trainer.pid, signal.SIGKILL)
        with trio.fail_after(30), pytest.raises(LocalError, match="SIGKILL"):
            await trainer.step(samples[0])


async def test_an_error_is_told_and_the_trainer_lives_on_until_a_verb_is_cancelled(
    opened, samples, tmp_path
):
    bad = msgspec.structs.replace(samples[0][0], advantage=float("inf"))
    async with opened() as trainer:
        await trainer.save(tmp_path / "step-00000001", step=1)
        with pytest.raises(LocalError, match="already a checkpoint"):
            await trainer.save(tmp_path / "step-00000001", step=1)
        before = await trainer.export(0)
        report = await trainer.step((bad, *samples[0][1:]))
        assert report.skipped
        assert "not finite" in report.why_skipped
        assert (await trainer.export(1)).state_digest == before.state_digest
        assert not (await trainer.step(samples[0])).skipped
        # An unanswered question must not leave its answer to the next one.
        os.kill(trainer.pid, signal.SIGSTOP)
        with trio.move_on_after(0.05) as scope:
            await trainer.step(samples[0])
        assert scope.cancelled_caught
        with trio.fail_after(30), pytest.raises(LocalError, match="SIGKILL"):
            await trainer.export(0)


async def test_an_unknown_loss_is_a_usage_error_here_too(opened):
    with pytest.raises(UsageError, match="no loss 'nonsense'"):
        async with opened(loss="nonsense"):
            pass


async def test_a_truncated_weight_file_is_told_before_anything_heavy_loads(folder, tmp_path):
    broken = write_trainable_folder(tmp_path / "broken")
    os.truncate(broken / "model.safetensors", 1000)
    config = run_config(broken)
    with trio.fail_after(10), pytest.raises(UsageError, match=r"model\.safetensors is damaged"):
        async with open_trainer(
            config, state_dir=tmp_path, store_dir=tmp_path / "chunks", resume_from=None
        ):
            pass
