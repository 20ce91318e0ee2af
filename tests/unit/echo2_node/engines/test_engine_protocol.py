"""The shared suite, for the fake and for the torch engine on a tiny model."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.wire.messages import Manifest
from echo2_mesh.wire.types import Digest
from echo2_node.engines.fake import FakeEngine, FakeSettings, sort_rule
from echo2_node.engines.registry import EngineSettings, load_engine
from echo2_node.engines.weights import read_manifest
from tests.engine_suite import CHECKS, Case
from tests.tiny_model import EOS_ID, logprobs_of, make_module, publish, write_model_folder

PROMPT = [5, 9, 3, 7, 4, 12]


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("engines")
    model = write_model_folder(folder / "model")
    store = ChunkStore(folder / "chunks")
    modules = {version: make_module(model, seed=version) for version in (1, 2)}
    return {
        "model": model,
        "store": store,
        "modules": modules,
        "versions": {
            version: publish(module, store, version) for version, module in modules.items()
        },
        "broken": publish(modules[2], store, 3, drop="model.norm.weight"),
    }


@pytest.fixture
def torch_case(published: dict) -> Case:
    def truth(version: int, prompt: list[int], tokens: list[int], temperature: float) -> np.ndarray:
        whole = logprobs_of(published["modules"][version], prompt + tokens, temperature)
        return whole[len(prompt) - 1 :]

    engine = load_engine(
        "torch",
        EngineSettings(
            model_folder=str(published["model"]),
            store_dir=str(published["store"].folder),
            device="cpu",
            threads=1,
            sequences_max=8,
        ),
    )
    engine.install(published["versions"][1])
    return Case(
        engine=engine,
        versions=published["versions"],
        broken=published["broken"],
        truth=truth,
        prompt=PROMPT,
        eos_id=EOS_ID,
    )


@pytest.fixture
def fake_case(published: dict) -> Case:
    settings = FakeSettings(skill_start=0.2, skill_per_version=0.3, vocabulary=13)

    def truth(version: int, prompt: list[int], tokens: list[int], temperature: float) -> np.ndarray:
        answer = sort_rule(EOS_ID)(tuple(prompt))
        skill = 0.2 + 0.3 * version
        result = []
        for place, token in enumerate(tokens):
            right = answer[place] if place < len(answer) else EOS_ID
            p = np.full(13, (1 - skill) / 12)
            p[right] = skill
            p = p ** (1 / temperature)
            result.append(np.log(p[token] / p.sum()))
        return np.array(result)

    read: Callable[[Digest], Manifest] = partial(read_manifest, published["store"].folder)
    engine = FakeEngine(read, settings, sequences_max=8)
    engine.install(published["versions"][1])
    return Case(
        engine=engine,
        versions=published["versions"],
        broken=Digest(bytes(32)),
        truth=truth,
        prompt=PROMPT,
        eos_id=EOS_ID,
    )


@pytest.mark.parametrize("kind", ["fake", "torch"])
@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_an_engine_keeps_the_protocol(
    check: Callable[[Case], None], kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    check(request.getfixturevalue(f"{kind}_case"))
