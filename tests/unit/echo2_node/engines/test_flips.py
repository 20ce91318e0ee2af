"""An install that writes only what differs ends where a full one does, or goes back."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import LocalError
from echo2_mesh.wire.messages import Manifest
from echo2_mesh.wire.types import Digest
from echo2_node.engines import torch_engine
from echo2_node.engines.differences import find_changes
from echo2_node.engines.registry import EngineSettings, load_engine
from echo2_node.engines.torch_engine import TorchEngine
from echo2_node.engines.weights import read_manifest
from tests.engine_suite import ids_of, request, run
from tests.tiny_model import logprobs_of, make_module, publish, write_model_folder


class World:
    """A tiny model whose versions are published one after the other into one store."""

    def __init__(self, folder: Path, *, dtype: torch.dtype = torch.bfloat16) -> None:
        self.folder = write_model_folder(folder / "model")
        self.store = ChunkStore(folder / "chunks")
        self.module = make_module(self.folder, seed=1)
        self.dtype = dtype
        self.random = np.random.default_rng(3)

    def nudge(self, share: float) -> None:
        """Move about `share` of all weights to a neighbour in the published dtype."""
        for parameter in self.module.parameters():
            bits = parameter.data.to(self.dtype).contiguous()
            view = bits.view(torch.int16 if self.dtype == torch.bfloat16 else torch.int32)
            chosen = self.random.random(tuple(view.shape)) < share
            view += torch.from_numpy(chosen).to(view.dtype)
            parameter.data = bits.float()

    def publish(self, version: int, **options: object) -> Digest:
        for parameter in self.module.parameters():
            parameter.data = parameter.data.to(self.dtype)
        digest = publish(self.module, self.store, version, **options)
        self.module.float()
        return digest

    def open(self, **settings: object) -> TorchEngine:
        engine = load_engine(
            "torch",
            EngineSettings(
                model_folder=str(self.folder), store_dir=str(self.store.folder), device="cpu",
                sequences_max=8, threads=1, **settings,
            ),
        )  # fmt: skip
        assert isinstance(engine, TorchEngine)
        return engine

    def manifest(self, digest: Digest) -> Manifest:
        return read_manifest(self.store.folder, digest)


@pytest.fixture
def world(tmp_path: Path) -> World:
    torch.set_num_threads(1)
    return World(tmp_path)


def bits_of(engine: TorchEngine) -> dict[str, bytes]:
    state = engine._model._module.state_dict()
    return {n: t.contiguous().view(torch.uint8).numpy().tobytes() for n, t in state.items()}


def full(world: World, digest: Digest, **settings: object) -> dict[str, bytes]:
    fresh = world.open(**settings)
    assert fresh.install(digest).changed is None
    return bits_of(fresh)


@pytest.mark.parametrize(
    ("dtype", "engine_dtype", "chunk_size_bytes"),
    [
        (torch.bfloat16, "float32", 50_000),
        (torch.bfloat16, "bfloat16", 50_000),
        (torch.bfloat16, "float32", 49_999),
        (torch.float32, "float32", 49_998),
    ],
)
def test_five_flips_give_what_a_full_install_gives(
    tmp_path: Path, dtype: torch.dtype, engine_dtype: str, chunk_size_bytes: int
) -> None:
    world = World(tmp_path, dtype=dtype)
    engine = world.open(dtype=engine_dtype)
    assert engine.install(world.publish(0, chunk_size_bytes=chunk_size_bytes)).changed is None
    total = sum(p.numel() for p in world.module.parameters())
    for version, share in enumerate((0.01, 0.0, 0.001, 0.1, 0.02), start=1):
        world.nudge(share)
        digest = world.publish(version, chunk_size_bytes=chunk_size_bytes)
        engine.prepare(digest)
        report = engine.install(digest)
        assert report.changed is not None
        assert report.changed == pytest.approx(share * total, rel=0.2, abs=10)
        assert report.version == version
    assert bits_of(engine) == full(world, digest, dtype=engine_dtype)


def test_a_tensor_that_changed_much_is_replaced_whole_beside_sparse_ones(world: World) -> None:
    engine = world.open()
    first = world.publish(0)
    engine.install(first)
    world.nudge(0.01)
    norms = [p for p in world.module.parameters() if p.dim() == 1]
    for norm in norms:
        norm.data += 0.5
    second = world.publish(1)
    changes = find_changes(world.store.folder, world.manifest(first), world.manifest(second))
    assert changes is not None
    whole = [change for change in changes if change.positions is None]
    assert len(whole) == len(norms) < len(changes)
    assert engine.install(second).changed == sum(len(change.new) for change in changes)
    assert bits_of(engine) == full(world, second)


def test_patterns_that_floats_cannot_tell_apart_are_carried_over(world: World) -> None:
    digests = []
    for row in ([0.5, 1.0, 2.0, 4.0], [0.0, -0.0, 1e-40, 4.0], [-0.0, 0.0, -1e-40, 4.0]):
        world.module.model.layers[0].mlp.up_proj.weight.data[0, :4] = torch.tensor(row)
        digests.append(world.publish(len(digests)))
    first, second, third = digests
    changes = find_changes(world.store.folder, world.manifest(second), world.manifest(third))
    assert changes is not None
    assert [len(change.new) for change in changes] == [3]
    engine = world.open()
    for digest in (first, second, third):
        engine.install(digest)
    assert bits_of(engine) == full(world, third)


def test_too_much_change_another_cut_and_a_lost_base_mean_a_full_install(world: World) -> None:
    first = world.publish(0)
    engine = world.open()
    engine.install(first)
    world.nudge(0.01)
    cut = world.publish(1, chunk_size_bytes=30_000)
    assert engine.install(cut).changed is None
    world.nudge(0.9)
    much = world.publish(2, chunk_size_bytes=30_000)
    assert engine.install(much).changed is None
    world.nudge(0.01)
    near = world.publish(3, chunk_size_bytes=30_000)
    world.store.remove(world.manifest(much).chunks[1].digest)
    assert engine.install(near).changed is None
    assert bits_of(engine) == full(world, near)


def test_a_base_that_the_disk_damaged_is_noticed_and_a_damaged_target_refused(
    world: World,
) -> None:
    first = world.publish(0)
    engine = world.open()
    engine.install(first)
    world.nudge(0.01)
    second = world.publish(1)
    flip_a_bit(world, first)
    assert engine.install(second).changed is None
    world.nudge(0.01)
    third = world.publish(2)
    flip_a_bit(world, third)
    with pytest.raises(LocalError, match="damaged on the disk"):
        engine.install(third)
    assert bits_of(engine) == full(world, second)


def test_the_version_before_is_back_without_the_disk_and_the_next_one_is_read_whole(
    world: World,
) -> None:
    engine = world.open()
    digests = []
    for version in range(3):
        world.nudge(0.01)
        digests.append(world.publish(version))
        engine.install(digests[-1])
    for digest in digests:
        for chunk in world.manifest(digest).chunks:
            world.store.path(chunk.digest).rename(world.store.path(chunk.digest).with_suffix(".x"))
    report = engine.install(digests[1])
    assert (report.version, report.changed is None) == (1, False)
    for path in world.store.folder.glob("*.x"):
        path.rename(path.with_suffix(""))
    assert bits_of(engine) == full(world, digests[1])
    assert engine.install(digests[2]).changed is None
    assert bits_of(engine) == full(world, digests[2])


def test_a_flip_that_fails_its_proof_is_taken_back_before_the_next_token(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = world.publish(0)
    engine = world.open()
    engine.install(first)
    before = bits_of(engine)
    truth = make_module(world.folder, seed=9)
    truth.load_state_dict(world.module.state_dict())
    world.nudge(0.01)
    second = world.publish(1)
    prompt = [5, 9, 3]
    engine.submit(request(prompt, indices=(0, 1), tokens_max=12))
    ended = run(engine, steps=2)
    with monkeypatch.context() as patched:
        probe = np.frombuffer(world.manifest(second).probe.logprobs, "<f4")
        wrong = (probe - 3).astype("<f4").tobytes()
        patched.setattr(engine._model, "probe", lambda ids, between: draw_some(between) or wrong)
        with pytest.raises(LocalError, match="version 0 goes on"):
            engine.install(second)
    assert bits_of(engine) == before
    ended += run(engine)
    assert len(ended) == 2
    for generation in ended:
        assert [span.version for span in generation.segments] == [0]
        true = logprobs_of(truth, prompt + ids_of(generation.token_ids))[len(prompt) - 1 :]
        assert np.abs(true - np.frombuffer(generation.logprobs, "<f4")).max() < 1e-4
    assert engine.install(second).changed is None, "read whole the next time"
    assert bits_of(engine) == full(world, second)


def test_a_flip_that_breaks_half_way_leaves_the_old_weights(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = world.open()
    engine.install(world.publish(0))
    before = bits_of(engine)
    world.nudge(0.01)
    second = world.publish(1)
    engine.prepare(second)
    prepared = engine._prepared
    assert isinstance(prepared, torch_engine.Flip)
    step = prepared._steps[5]
    broken = type(step)(
        target=step.target, positions=step.positions, old=step.old, new=step.new.double()
    )
    prepared._steps = (*prepared._steps[:5], broken, *prepared._steps[6:])
    with pytest.raises(RuntimeError):
        engine.install(second)
    assert bits_of(engine) == before
    assert engine.install(second).changed is not None
    assert bits_of(engine) == full(world, second)


def test_running_sequences_go_on_exactly_under_flipped_weights(world: World) -> None:
    engine = world.open()
    modules = {}
    for version in range(2):
        digest = world.publish(version)
        modules[version] = make_module(world.folder, seed=9)
        modules[version].load_state_dict(world.module.state_dict())
        if version == 0:
            engine.install(digest)
            world.nudge(0.1)
    prompt = [5, 9, 3, 7]
    engine.submit(request(prompt, indices=tuple(range(6)), tokens_max=10))
    ended = run(engine, steps=3)
    assert engine.install(digest).changed is not None
    ended += run(engine)
    assert any([s.version for s in g.segments] == [0, 1] for g in ended)
    for generation in ended:
        claimed = np.frombuffer(generation.logprobs, "<f4")
        for span in generation.segments:
            ids = prompt + ids_of(generation.token_ids)
            true = logprobs_of(modules[span.version], ids)[len(prompt) - 1 :]
            assert np.abs(true - claimed)[span.start : span.end].max() < 1e-4


def draw_some(draw: Callable[[], None]) -> None:
    """So many tokens that sequences end while the version is on probation."""
    for _ in range(12):
        draw()


def flip_a_bit(world: World, digest: Digest) -> None:
    path = world.store.path(world.manifest(digest).chunks[0].digest)
    data = bytearray(path.read_bytes())
    data[7] ^= 1
    path.write_bytes(data)
