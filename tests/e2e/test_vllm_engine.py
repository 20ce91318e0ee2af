"""The shared suite against the real vLLM, and in a child process. Skipped where it is missing."""

import os
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import UsageError
from echo2_node.config import ActorConfig
from echo2_node.engines.fingerprint import compare
from echo2_node.engines.process import open_engine
from echo2_node.engines.protocol import Engine
from echo2_node.engines.registry import EngineSettings, load_engine
from echo2_node.engines.weights import read_manifest
from tests.engine_suite import CHECKS, Case, request, wrongness
from tests.tiny_model import EOS_ID, logprobs_of, make_module, publish, write_model_folder

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.filterwarnings("ignore")]
PROMPT = [5, 9, 3, 7, 4, 12]


@pytest.fixture(scope="module")
def vllm_case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """One engine for the whole file: vLLM takes ten seconds to start."""
    pytest.importorskip("vllm", reason="the vllm extra is not installed", exc_type=ImportError)
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("vllm")
    model = write_model_folder(
        folder / "model", hidden_size=128, head_dim=32, intermediate_size=256
    )
    store = ChunkStore(folder / "chunks")
    modules = {version: make_module(model, seed=version) for version in (1, 2)}
    versions = {version: publish(module, store, version) for version, module in modules.items()}

    def truth(version: int, prompt: list[int], tokens: list[int], temperature: float) -> np.ndarray:
        return logprobs_of(modules[version], prompt + tokens, temperature)[len(prompt) - 1 :]

    settings = EngineSettings(
        model_folder=str(model),
        store_dir=str(store.folder),
        device="cpu",
        dtype="float32",
        threads=1,
        sequences_max=8,
    )
    engine: Engine = load_engine("vllm", settings)
    with pytest.raises(UsageError, match="first weights"):
        engine.submit(request(PROMPT))
    return Case(
        engine=engine,
        versions=versions,
        broken=publish(modules[2], store, 3, drop="model.norm.weight"),
        truth=truth,
        prompt=PROMPT,
        eos_id=EOS_ID,
    )


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_vllm_keeps_the_engine_protocol(check: Callable[[Case], None], vllm_case: Case) -> None:
    vllm_case.engine.install(vllm_case.versions[1])
    check(vllm_case)


def test_the_probe_sees_each_new_version(vllm_case: Case) -> None:
    """Tied output head included: its packed copy must not stay that of the version before."""
    for version in (1, 2, 1):
        digest = vllm_case.versions[version]
        report = vllm_case.engine.install(digest)
        store_dir: Path = vllm_case.engine._store_dir  # type: ignore[attr-defined]
        published = read_manifest(store_dir, digest).probe.logprobs
        found = compare(published, report.probe_logprobs, dtype="float32")
        assert found.maximum < 1e-4, found.why


def test_a_head_that_stays_packed_with_old_weights_is_noticed(
    vllm_case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The planted fault: vLLM's own reload on a CPU, without our repair."""
    vllm_case.engine.install(vllm_case.versions[1])
    monkeypatch.setattr("echo2_node.engines.vllm_plugin._repack_heads", lambda model: None)
    digest = vllm_case.versions[2]
    report = vllm_case.engine.install(digest)
    store_dir: Path = vllm_case.engine._store_dir  # type: ignore[attr-defined]
    published = read_manifest(store_dir, digest).probe.logprobs
    assert not compare(published, report.probe_logprobs, dtype="float32").matches


async def test_vllm_generates_in_a_child(vllm_case: Case, tmp_path: Path) -> None:
    engine = vllm_case.engine
    store_dir: Path = engine._store_dir  # type: ignore[attr-defined]
    config = ActorConfig(engine="vllm", device="cpu", sequences_max=8)
    async with open_engine(
        store_dir.parent / "model",
        store_dir,
        config=config,
        log_path=tmp_path / "log",
        extra_env={"PYTHONPATH": os.getcwd()},
    ) as child:
        assert child.info.cohort == msgspec.structs.replace(child.info.cohort, engine="vllm")
        await child.install(vllm_case.versions[2])
        ended = await child.generate(request(PROMPT))
        assert len(ended) == 4
        assert max(wrongness(vllm_case, g, PROMPT, 1.0) for g in ended) < vllm_case.tolerance
