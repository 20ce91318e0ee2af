"""Both ends of walk (a) without the network: what the trainer exports, the engine proves."""

from pathlib import Path

import numpy as np
import pytest
import torch

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.identity import Identity
from echo2_mesh.wire.codec import seal
from echo2_mesh.wire.messages import Manifest, TaskSpec
from echo2_mesh.wire.types import ChunkKind, Digest
from echo2_node.config import ActorConfig
from echo2_node.engines.fingerprint import compare
from echo2_node.engines.process import open_engine
from echo2_node.learner.models import load_model
from echo2_node.learner.port import Exported
from echo2_node.learner.trainer_process import open_trainer
from tests.engine_suite import request
from tests.samples import run_config, sampled_batch, write_trainable_folder

pytestmark = pytest.mark.e2e


def manifest_of(exported: Exported, store: ChunkStore) -> Digest:
    manifest = Manifest(
        run_id="run-test",
        version=exported.version,
        chunks=exported.chunks,
        tensors=exported.tensors,
        tied=exported.tied,
        files=exported.files,
        state_digest=exported.state_digest,
        tokenizer_digest=exported.tokenizer_digest,
        template_digest=exported.template_digest,
        task=TaskSpec(task_id="sort_digits", args_json="{}", digest=Digest(bytes(32))),
        probe=exported.probe,
    )
    identity = Identity(bytes(32))
    raw = seal(manifest, run_id="run-test", sender=identity.node, sign=identity.sign)
    return store.add(ChunkKind.MANIFEST, raw).digest


async def test_an_engine_proves_every_version_a_trainer_exports(tmp_path: Path) -> None:
    torch.set_num_threads(1)
    folder = write_trainable_folder(tmp_path / "model")
    store = ChunkStore(tmp_path / "chunks")
    async with open_trainer(
        run_config(folder), state_dir=tmp_path, store_dir=store.folder, resume_from=None
    ) as trainer:
        exports = [await trainer.export(0)]
        for version in (1, 2):
            await trainer.step(sampled_batch(load_model(folder), seed=version, noise=0.05))
            exports.append(await trainer.export(version))
    config = ActorConfig(engine="torch", device="cpu")
    async with open_engine(
        folder, store.folder, config=config, log_path=tmp_path / "engine.log"
    ) as engine:
        seen = []
        for exported in exports:
            report = await engine.install(manifest_of(exported, store))
            found = compare(exported.probe.logprobs, report.probe_logprobs, dtype="float32")
            assert found.matches, found.why
            seen.append(np.frombuffer(report.probe_logprobs, "<f4"))
            ended = await engine.generate(request([3, 4, 5], str(exported.version)))
            assert {s.version for g in ended for s in g.segments} == {exported.version}
        assert not np.array_equal(seen[0], seen[2])
