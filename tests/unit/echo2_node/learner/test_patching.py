"""Patches made while a version is written: right, small, listed while they help, never fatal."""

import errno

import msgspec
import numpy as np
import pytest

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.core.manifests import check_manifest
from echo2_mesh.delta.codec import apply_chunk
from echo2_mesh.delta.patches import read_patch
from echo2_mesh.errors import DiskFull
from echo2_mesh.wire.messages import ChunkRef, Patch, PatchChunk
from echo2_mesh.wire.types import ChunkKind
from echo2_node.learner import patching
from echo2_node.learner.export import write_chunks
from echo2_node.learner.patching import Patcher, worth_listing
from echo2_node.learner.tensorfile import Entry
from tests.route_kit import History, digest

CHUNK_BYTES = 4096


@pytest.fixture
def store(tmp_path):
    return ChunkStore(tmp_path / "chunks", quota_bytes=None)


class Model:
    """Three bf16 tensors, one of them larger than a chunk, and one that never changes."""

    def __init__(self, seed=1):
        self.rng = np.random.default_rng(seed)
        self.tensors = {
            name: self.rng.integers(0, 2**16, count, dtype=np.uint16)
            for name, count in (("frozen", 1500), ("large", 5000), ("small", 300))
        }

    def step(self, share=0.02):
        for name, values in self.tensors.items():
            if name != "frozen":
                at = self.rng.random(values.size) < share
                values[at] += 1

    def entries(self):
        for name, values in self.tensors.items():
            data = memoryview(values.copy()).cast("B")
            yield Entry(name=name, dtype="BF16", shape=(values.size,), read=lambda d=data: d)


def publish(model, patcher, store, version):
    patcher.begin()
    section = write_chunks(model.entries(), store, CHUNK_BYTES, patcher.take)
    return section, patcher.finish(version, section.chunks, section.state_digest)


def applied(store, chunks, patch):
    """The data chunks after `patch`, as a receiver makes them."""
    data = [store.read(ref.digest) for ref in chunks]
    for chunk in patch.chunks:
        pieces = read_patch(store.read(chunk.ref.digest), chunk.count)
        for index, piece in enumerate(pieces, start=chunk.first):
            if len(piece):
                data[index] = bytes(apply_chunk(data[index], piece))
    return data


@pytest.mark.parametrize("threads", [1, 3])
def test_every_listed_patch_gives_its_version_bit_for_bit(store, threads):
    model, patcher = Model(), Patcher(store, steps_max=16, threads=threads)
    sections = []
    for version in range(9):
        section, patches = publish(model, patcher, store, version)
        sections.append(section)
        model.step()
    spans = [(patch.base, patch.version) for patch in patches]
    assert [span for span in spans if span[1] == 8] == [(7, 8), (6, 8), (4, 8), (0, 8)]
    assert {(v - 1, v) for v in range(1, 9)} <= set(spans)
    for patch in patches:
        made = applied(store, sections[patch.base].chunks, patch)
        wanted = [store.read(ref.digest) for ref in sections[patch.version].chunks]
        assert made == wanted
        assert patch.state_digest == sections[patch.version].state_digest
        assert patch.base_digest == sections[patch.base].state_digest
        size_bytes = sum(chunk.ref.size_bytes for chunk in patch.chunks)
        assert size_bytes < sum(ref.size_bytes for ref in section.chunks) / 2
    named = {i for c in patches[0].chunks for i in range(c.first, c.first + c.count)}
    assert 0 not in named, "the frozen tensor fills the first chunk"


def test_the_first_version_has_none_and_zero_steps_make_none(store):
    model = Model()
    patcher = Patcher(store, steps_max=16)
    assert publish(model, patcher, store, 0)[1] == ()
    none = Patcher(store, steps_max=0)
    for version in (1, 2):
        model.step()
        assert publish(model, none, store, version)[1] == ()


def test_a_step_that_changed_nothing_needs_no_patch_and_breaks_no_chain(store):
    model, patcher = Model(), Patcher(store, steps_max=16)
    publish(model, patcher, store, 0)
    model.step()
    publish(model, patcher, store, 1)
    _, patches = publish(model, patcher, store, 2)
    assert [(patch.base, patch.version) for patch in patches] == [(0, 2), (0, 1)]
    model.step()
    section, patches = publish(model, patcher, store, 3)
    assert patches[0].base == 2
    assert (0, 1) in {(patch.base, patch.version) for patch in patches}
    check_manifest(
        msgspec.structs.replace(
            History(1, [{0}]).manifest(1),
            version=3,
            chunks=section.chunks,
            tensors=section.tensors,
            patches=patches,
            state_digest=section.state_digest,
        )
    )


def test_a_base_that_is_gone_costs_its_patch_alone(store):
    model, patcher = Model(), Patcher(store, steps_max=16)
    publish(model, patcher, store, 0)
    model.step()
    section, _ = publish(model, patcher, store, 1)
    store.remove(section.chunks[1].digest)
    model.step()
    _, patches = publish(model, patcher, store, 2)
    assert [(patch.base, patch.version) for patch in patches] == [(0, 2)]
    model.step()
    _, patches = publish(model, patcher, store, 3)
    assert (2, 3) in {(patch.base, patch.version) for patch in patches}


def test_another_layout_or_weights_all_new_start_afresh(store):
    patcher = Patcher(store, steps_max=16)
    publish(Model(), patcher, store, 0)
    assert publish(Model(seed=2), patcher, store, 1)[1] == (), "noise does not get smaller"
    other = Model()
    other.tensors["small"] = np.zeros(900, dtype=np.uint16)
    assert publish(other, patcher, store, 2)[1] == ()
    other.step()
    assert len(publish(other, patcher, store, 3)[1]) == 1


def test_a_codec_that_fails_costs_the_patch_and_not_the_version(store, monkeypatch):
    model, patcher = Model(), Patcher(store, steps_max=16)
    publish(model, patcher, store, 0)
    model.step()

    def broken(*_):
        raise ZeroDivisionError

    monkeypatch.setattr(patching, "encode_chunk", broken)
    section, patches = publish(model, patcher, store, 1)
    assert patches == ()
    assert all(store.has(ref.digest) for ref in section.chunks)


def test_a_full_disk_is_told_and_the_next_try_is_whole(store, monkeypatch):
    model, patcher = Model(), Patcher(store, steps_max=16)
    publish(model, patcher, store, 0)
    model.step()
    write = ChunkStore._write_once

    def full(self, digest, data):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(ChunkStore, "_write_once", full)
    with pytest.raises(DiskFull):
        publish(model, patcher, store, 1)
    monkeypatch.setattr(ChunkStore, "_write_once", write)
    _, patches = publish(model, patcher, store, 1)
    assert [(patch.base, patch.version) for patch in patches] == [(0, 1)]


def test_blobs_grow_with_the_patch_within_bounds(store, monkeypatch):
    monkeypatch.setattr(patching, "BLOB_BYTES_MIN", 256)
    monkeypatch.setattr(patching, "BLOB_BYTES_MAX", 1024)
    model, patcher = Model(), Patcher(store, steps_max=16)
    for version in range(4):
        _, patches = publish(model, patcher, store, version)
        model.step(0.3)
    sizes = [chunk.ref.size_bytes for chunk in patches[0].chunks]
    assert len(sizes) > 1
    for chunk in patches[0].chunks:
        assert chunk.count == 1 or chunk.ref.size_bytes <= 1024 + 64


# --- what is listed ----------------------------------------------------------------------------


def chain(*sizes, digest_of=lambda v: digest("state", v)):
    """Single steps 0 -> 1 -> ... of so many bytes."""
    return [
        Patch(
            base=v,
            base_digest=digest_of(v),
            version=v + 1,
            state_digest=digest_of(v + 1),
            chunks=(
                PatchChunk(
                    ref=ChunkRef(kind=ChunkKind.PATCH, digest=digest("patch", v), size_bytes=size),
                    first=0,
                    count=1,
                ),
            ),
        )
        for v, size in enumerate(sizes)
    ]


def listed(patches, newest, **bounds):
    bounds = {"full_bytes": 1000, "steps_max": 16, "blobs_max": 100, **bounds}
    found = worth_listing(patches, digest("state", newest), **bounds)
    return [(patch.base, patch.version) for patch in found]


def test_steps_are_listed_while_their_chain_is_smaller_than_the_whole():
    assert listed(chain(300, 300, 300, 300), 4) == [(3, 4), (2, 3), (1, 2)]


def test_steps_patches_and_blobs_are_bounded():
    assert listed(chain(1, 1, 1, 1), 4, steps_max=2) == [(3, 4), (2, 3)]
    assert listed(chain(1, 1, 1, 1), 4, blobs_max=3) == [(3, 4), (2, 3), (1, 2)]
    many = chain(*[1] * 50)
    assert len(listed(many, 50, steps_max=50)) == 32


def test_a_broken_chain_is_not_listed_beyond_the_break():
    steps = chain(1, 1, 1, 1)
    assert listed([steps[3], steps[1], steps[0]], 4) == [(3, 4)]
    assert listed(steps, 9) == []
