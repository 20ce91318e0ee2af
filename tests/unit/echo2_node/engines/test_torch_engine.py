"""What is peculiar to the torch engine: architectures, filters, prefill passes, refusals."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from transformers import Gemma2Config, GPT2Config, LlamaConfig, MistralConfig, PretrainedConfig

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.wire.messages import Manifest
from echo2_mesh.wire.types import ChunkKind
from echo2_node.engines import torch_model
from echo2_node.engines.registry import EngineSettings, load_engine
from echo2_node.engines.torch_engine import TorchEngine
from echo2_node.engines.weights import read_manifest, stage
from tests.engine_suite import ids_of, request, run
from tests.tiny_model import PROBE_IDS, logprobs_of, make_module, publish, write_model_folder

SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.2,
}
ARCHITECTURES: dict[str, PretrainedConfig] = {
    "llama, untied": LlamaConfig(**SMALL),
    "mistral, all layers sliding": MistralConfig(**SMALL, sliding_window=6),
    "gemma2, both kinds, softcapped": Gemma2Config(**SMALL, head_dim=16, sliding_window=6),
    "gpt2, learned positions": GPT2Config(
        vocab_size=64, n_embd=32, n_layer=2, n_head=2, n_positions=256, bos_token_id=None,
        eos_token_id=1, initializer_range=0.2,
    ),
}  # fmt: skip


def open_torch(folder: Path, store: ChunkStore, **changes: object) -> TorchEngine:
    settings = EngineSettings(
        model_folder=str(folder), store_dir=str(store.folder), device="cpu", sequences_max=8
    )
    engine = load_engine("torch", msgspec.structs.replace(settings, **changes))
    assert isinstance(engine, TorchEngine)
    return engine


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logprobs_are_exact_for_architecture(name: str, tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", config=ARCHITECTURES[name])
    store = ChunkStore(tmp_path / "chunks")
    module = make_module(folder, seed=4)
    engine = open_torch(folder, store)
    report = engine.install(publish(module, store, 0))
    probe = np.frombuffer(report.probe_logprobs, "<f4")
    assert np.abs(probe - logprobs_of(module, PROBE_IDS)).max() < 1e-4
    prompts = {"short": [7, 8], "long": [5, 9, 3, 7, 4, 12, 30, 31, 32, 33, 2]}
    for label, prompt in prompts.items():
        engine.submit(request(prompt, label, (0, 1, 2), tokens_max=16))
    for generation in run(engine):
        prompt = prompts[generation.request_id]
        true = logprobs_of(module, prompt + ids_of(generation.token_ids))[len(prompt) - 1 :]
        assert np.abs(true - np.frombuffer(generation.logprobs, "<f4")).max() < 1e-4


def test_a_model_with_recurrent_layers_is_refused(tmp_path: Path) -> None:
    folder = write_model_folder(tmp_path / "model", layer_types=["linear_attention"] * 2)
    with pytest.raises(UsageError, match="linear_attention"):
        open_torch(folder, ChunkStore(tmp_path / "chunks"))


def test_a_folder_that_is_no_model_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "no-such-thing"}')
    with pytest.raises(UsageError, match="cannot be built"):
        open_torch(tmp_path, ChunkStore(tmp_path / "chunks"))


def test_code_that_travels_with_a_model_is_never_run(tmp_path: Path) -> None:
    (tmp_path / "evil.py").write_text("raise SystemExit('ran')")
    (tmp_path / "config.json").write_text(
        '{"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForCausalLM": '
        '"evil.M"}}'
    )
    with pytest.raises(UsageError):
        open_torch(tmp_path, ChunkStore(tmp_path / "chunks"))


class World:
    """A tiny model with version 0 in a store."""

    def __init__(self, folder: Path) -> None:
        self.folder = write_model_folder(folder / "model")
        self.store = ChunkStore(folder / "chunks")
        self.module = make_module(self.folder, seed=1)
        self.digest = publish(self.module, self.store, 0)

    def manifest(self) -> Manifest:
        return read_manifest(self.store.folder, self.digest)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    torch.set_num_threads(1)
    return World(tmp_path_factory.mktemp("torch-engine"))


def test_prefill_in_many_passes_gives_the_same_logprobs(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_model, "PREFILL_TOKENS_MAX", 5)
    engine = open_torch(world.folder, world.store)
    engine.install(world.digest)
    prompts = {str(n): list(range(2, 2 + n)) for n in (1, 4, 5, 6, 17, 2)}
    for name, prompt in prompts.items():
        engine.submit(request(prompt, name, (0,)))
    ended = run(engine, steps=2)
    engine.install(world.digest)
    ended += run(engine)
    assert len(ended) == len(prompts)
    for generation in ended:
        prompt = prompts[generation.request_id]
        true = logprobs_of(world.module, prompt + ids_of(generation.token_ids))[len(prompt) - 1 :]
        assert np.abs(true - np.frombuffer(generation.logprobs, "<f4")).max() < 1e-4


def test_logprobs_are_after_top_k_and_top_p(world: World) -> None:
    """What vLLM calls processed log-probs: those of the distribution that was drawn from."""
    engine = open_torch(world.folder, world.store)
    engine.install(world.digest)
    prompt = [5, 9, 3]
    engine.submit(request(prompt, "greedy", (0,), top_k=1))
    engine.submit(request(prompt, "k", tuple(range(3)), top_k=4, temperature=0.8))
    engine.submit(request(prompt, "p", tuple(range(3)), top_p=0.7))
    for generation in run(engine):
        tokens = ids_of(generation.token_ids)
        claimed = np.frombuffer(generation.logprobs, "<f4")
        for place, token in enumerate(tokens):
            with torch.no_grad():
                logits = (
                    world.module(torch.tensor([prompt + tokens[:place]])).logits[0, -1].double()
                )
            p = torch.softmax(logits / (0.8 if generation.request_id == "k" else 1.0), -1).numpy()
            ranked = np.argsort(-p)
            counts = {"greedy": 1, "k": 4, "p": 1 + int((p[ranked].cumsum() < 0.7).sum())}
            kept = ranked[: counts[generation.request_id]]
            assert token in kept
            assert claimed[place] == pytest.approx(np.log(p[token] / p[kept].sum()), abs=1e-4)


def test_a_bfloat16_version_is_taken_by_a_float32_engine(world: World, tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "chunks")
    module = make_module(world.folder, seed=3)
    for parameter in module.parameters():  # not module.bfloat16(): that rounds rotary buffers too
        parameter.data = parameter.data.bfloat16()
    digest = publish(module, store, 5)
    engine = open_torch(world.folder, store)
    report = engine.install(digest)
    published = read_manifest(store.folder, digest).probe.logprobs
    difference = np.frombuffer(published, "<f4") - np.frombuffer(report.probe_logprobs, "<f4")
    assert np.abs(difference).max() < 1e-4


def test_a_tensor_of_another_shape_is_refused_by_name(world: World) -> None:
    engine = open_torch(world.folder, world.store)
    name = "model.layers.1.mlp.up_proj.weight"
    with pytest.raises(UsageError, match=r"up_proj\.weight \[128, 32, 2\]"):
        engine.install(publish(world.module, world.store, 1, reshape=name))


def test_a_probe_outside_the_vocabulary_is_refused(world: World) -> None:
    wide = make_module(write_model_folder(world.folder.parent / "wide", vocab_size=80), seed=1)
    digest = publish(wide, world.store, 1, probe_ids=[2, 79])
    narrow = open_torch(world.folder, world.store)
    with pytest.raises(UsageError, match="64"):
        narrow.install(digest)
    forged = publish(world.module, world.store, 2, probe_ids=[2, 63], claim_probe_ids=[2, 64])
    with pytest.raises(UsageError, match="probe"):
        narrow.install(forged)


def test_requests_before_the_first_version_are_refused(world: World) -> None:
    with pytest.raises(UsageError, match="first weights"):
        open_torch(world.folder, world.store).submit(request([2, 3]))


def test_a_missing_or_cut_chunk_is_a_local_error(world: World, tmp_path: Path) -> None:
    store = ChunkStore(tmp_path / "chunks")
    digest = publish(world.module, store, 0)
    victim = store.path(read_manifest(store.folder, digest).chunks[1].digest)
    victim.write_bytes(victim.read_bytes()[:-1])
    with pytest.raises(LocalError, match="is cut"):
        stage(store.folder, digest)
    victim.unlink()
    with pytest.raises(LocalError, match="cannot be read"):
        stage(store.folder, digest)


def test_a_blob_that_is_no_manifest_is_a_usage_error(world: World) -> None:
    ref = world.store.add(ChunkKind.FILE, b"not a manifest")
    with pytest.raises(UsageError, match="not a manifest"):
        stage(world.store.folder, ref.digest)


def test_seeds_draw_from_the_model_s_distribution(world: World) -> None:
    """Chi-square of 4000 first tokens against the model's own probabilities."""
    engine = open_torch(world.folder, world.store, sequences_max=500)
    engine.install(world.digest)
    prompt = [5, 9, 3]
    engine.submit(request(prompt, indices=tuple(range(4000)), tokens_max=1))
    counts = np.bincount([ids_of(g.token_ids)[0] for g in run(engine)], minlength=64)
    with torch.no_grad():
        p = torch.softmax(world.module(torch.tensor([prompt])).logits[0, -1], -1).double().numpy()
    common = p * 4000 > 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(p[common], p[~common].sum()) * 4000
    chi_square = ((observed - expected) ** 2 / np.maximum(expected, 1e-9)).sum()
    degrees = len(expected) - 1
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)
