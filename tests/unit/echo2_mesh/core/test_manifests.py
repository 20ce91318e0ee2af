"""Manifests that contradict themselves are refused before a chunk is asked for."""

import msgspec
import pytest

from echo2_mesh.core.manifests import check_manifest
from echo2_mesh.errors import PeerError
from echo2_mesh.wire.messages import ChunkRef, FileRef, Manifest, Probe, TaskSpec, TensorSpan
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


def test_patch_chunks_need_a_base_and_may_be_of_any_size():
    check_manifest(
        msgspec.structs.replace(
            GOOD, base_version=PolicyVersion(2), chunks=(ref(7, ChunkKind.PATCH),)
        )
    )
