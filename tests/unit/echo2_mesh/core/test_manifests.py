"""Manifests that contradict themselves are refused before a chunk is asked for."""

import msgspec
import pytest

from echo2_mesh.core.manifests import check_manifest
from echo2_mesh.errors import PeerError
from echo2_mesh.wire.messages import (
    ChunkRef,
    FileRef,
    Manifest,
    Patch,
    PatchChunk,
    Probe,
    TaskSpec,
    TensorSpan,
)
from echo2_mesh.wire.types import ChunkKind, Digest, PolicyVersion


def ref(size, kind=ChunkKind.FULL, name=0):
    return ChunkRef(kind=kind, digest=Digest(bytes([name]) * 32), size_bytes=size)


def span(name, offset, *, shape=(4,), dtype="F32", size=None):
    return TensorSpan(
        name=name, dtype=dtype, shape=shape, offset_bytes=offset, size_bytes=size or 16
    )


GOOD = Manifest(
    run_id="run-1",
    version=PolicyVersion(3),
    chunks=(ref(20), ref(12, name=1)),
    tensors=(span("a", 0), span("b", 16)),
    tied=(("head", "a"),),
    files=(FileRef(name="config.json", chunks=(ref(5, ChunkKind.FILE, 2),)),),
    state_digest=Digest(bytes(32)),
    tokenizer_digest=Digest(bytes(32)),
    template_digest=Digest(bytes(32)),
    task=TaskSpec(task_id="sort", args_json="{}", digest=Digest(bytes(32))),
    probe=Probe(token_ids=bytes(8), logprobs=bytes(4)),
)


def test_a_consistent_manifest_passes():
    check_manifest(GOOD)


@pytest.mark.parametrize(
    "change",
    [
        {"chunks": (ref(20),)},
        {"chunks": (ref(20), ref(13, name=1))},
        {"tensors": (span("a", 0), span("a", 16))},
        {"tensors": (span("a", 0), span("b", 8))},
        {"tensors": (span("a", 0), span("b", 32))},
        {"tensors": (span("a", 0), span("b", 16, shape=(5,)))},
        {"tensors": (span("a", 0), span("b", 16, dtype="F31"))},
        {"tied": (("head", "c"),)},
        {"tied": (("a", "b"),)},
        {"tied": (("head", "a"), ("head", "b"))},
        {"files": GOOD.files * 2},
        {"files": (FileRef(name="config.json", chunks=(ref(5, ChunkKind.FULL, 2),)),)},
        {"chunks": (), "tensors": (), "tied": (), "files": ()},
        {"chunks": (ref(20, ChunkKind.PATCH), ref(12, name=1))},
        {"chunks": (ref(20, ChunkKind.TRAJECTORY), ref(12, name=1))},
    ],
)
def test_a_contradictory_manifest_is_refused(change):
    with pytest.raises(PeerError):
        check_manifest(msgspec.structs.replace(GOOD, **change))


def patch(*chunks, base=2, version=3, state=bytes(32)):
    return Patch(
        base=base, base_digest=b"b" * 32, version=version, state_digest=state, chunks=chunks
    )


def piece(first, count, kind=ChunkKind.PATCH):
    return PatchChunk(ref=ref(7, kind, 9), first=first, count=count)


def with_patches(*patches):
    return msgspec.structs.replace(GOOD, patches=patches)


def test_patches_lead_forward_and_rewrite_chunks_that_exist():
    check_manifest(with_patches(patch(piece(0, 1), piece(1, 1)), patch(piece(0, 2), base=0)))
    older = patch(piece(0, 1), base=1, version=2, state=b"s" * 32)
    check_manifest(with_patches(patch(), older))
    # A step that changed nothing: versions 2 and 3 have the same weights.
    check_manifest(with_patches(patch(piece(0, 1), base=1, version=2)))


@pytest.mark.parametrize(
    "bad",
    [
        patch(base=3, version=3),
        patch(base=4, version=3),
        patch(base=3, version=4),
        patch(state=b"other weights".ljust(32)),
        patch(piece(0, 1, ChunkKind.FULL)),
        patch(piece(0, 3)),
        patch(piece(2, 1)),
        patch(piece(0, 2), piece(1, 1)),
        patch(piece(1, 1), piece(0, 1)),
    ],
)
def test_a_patch_that_leads_nowhere_is_refused(bad):
    with pytest.raises(PeerError):
        check_manifest(with_patches(bad))
