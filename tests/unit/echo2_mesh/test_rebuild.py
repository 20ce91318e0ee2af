"""Data chunks made from a base and patches: what is right is stored, what is not is named."""

import errno

import pytest

from echo2_mesh.chunks import ChunkStore, digest_of
from echo2_mesh.delta.codec import Slice, encode_chunk
from echo2_mesh.delta.patches import write_patch
from echo2_mesh.rebuild import Job, Part, rebuild
from echo2_mesh.wire.messages import ChunkRef, PatchChunk
from echo2_mesh.wire.types import ChunkKind

SIZE = 512


@pytest.fixture
def store(tmp_path):
    return ChunkStore(tmp_path / "chunks", quota_bytes=None)


def altered(data, *places):
    new = bytearray(data)
    for place in places:
        new[place] ^= 0x55
    return bytes(new)


def named(data):
    return ChunkRef(kind=ChunkKind.FULL, digest=digest_of(data), size_bytes=len(data))


def patch(store, first, *pairs):
    """A patch blob for consecutive chunks, each given as (old, new)."""
    blob = write_patch(
        [encode_chunk(old, new, (Slice(size_bytes=len(old), item_bytes=2),)) for old, new in pairs]
    )
    return PatchChunk(ref=store.add(ChunkKind.PATCH, blob), first=first, count=len(pairs))


def part(store, index, base, new):
    store.add(ChunkKind.FULL, base)
    return Part(index=index, ref=named(new), base=digest_of(base))


def test_a_chain_is_applied_in_order_and_the_result_is_in_the_store(store):
    old = [bytes([i]) * SIZE for i in (1, 2, 3)]
    middle = [altered(old[0], 5), old[1], altered(old[2], 7)]
    new = [altered(middle[0], 5, 9), old[1], altered(middle[2], 8)]
    first = patch(store, 0, *zip(old, middle, strict=True))
    second = patch(store, 2, (middle[2], new[2]))
    third = patch(store, 0, (middle[0], new[0]))
    job = Job(
        number=7,
        parts=(part(store, 0, old[0], new[0]), part(store, 2, old[2], new[2])),
        patches=(first, second, third),
    )
    outcome = rebuild(store, job)
    assert outcome.number == 7
    assert outcome.made == (0, 2)
    assert outcome.bytes_written == 2 * SIZE
    assert store.read(digest_of(new[0])) == new[0]
    assert store.read(digest_of(new[2])) == new[2]


def test_what_is_there_already_is_not_written_again(store):
    old, new = bytes(SIZE), altered(bytes(SIZE), 3)
    store.add(ChunkKind.FULL, new)
    job = Job(number=1, parts=(part(store, 0, old, new),), patches=(patch(store, 0, (old, new)),))
    outcome = rebuild(store, job)
    assert outcome.made == (0,)
    assert outcome.bytes_written == 0


def test_a_patch_for_another_base_is_bad_and_its_result_is_not_stored(store):
    old, new, foreign = bytes(SIZE), altered(bytes(SIZE), 3), b"\x07" * SIZE
    wrong = patch(store, 0, (foreign, altered(foreign, 4)))
    outcome = rebuild(store, Job(number=1, parts=(part(store, 0, old, new),), patches=(wrong,)))
    assert outcome.bad == (0,)
    assert not outcome.made
    assert not store.has(digest_of(new))


@pytest.mark.parametrize("cut", [0, 1, 3, 4, -1])
def test_a_truncated_patch_is_bad_for_all_that_it_covers(store, cut):
    old, new = bytes(SIZE), altered(bytes(SIZE), 3)
    whole = store.read(patch(store, 0, (old, new), (old, new)).ref.digest)
    ref = store.add(ChunkKind.PATCH, whole[:cut])
    job = Job(
        number=1,
        parts=(part(store, 0, old, new), part(store, 1, old, new)),
        patches=(PatchChunk(ref=ref, first=0, count=2),),
    )
    assert rebuild(store, job).bad == (0, 1)


def test_a_base_that_is_gone_or_damaged_is_lost_and_not_the_patch_s_fault(store):
    gone, damaged = b"\x01" * SIZE, b"\x02" * SIZE
    parts = (
        part(store, 0, gone, altered(gone, 1)),
        part(store, 1, damaged, altered(damaged, 1)),
    )
    chunk = patch(store, 0, (gone, altered(gone, 1)), (damaged, altered(damaged, 1)))
    store.path(digest_of(gone)).unlink()
    store.path(digest_of(damaged)).write_bytes(bytes(SIZE))
    outcome = rebuild(store, Job(number=1, parts=parts, patches=(chunk,)))
    assert outcome.lost == (0, 1)
    assert not store.has(digest_of(damaged)), "a damaged blob is dropped"


def test_a_patch_that_vanished_meanwhile_is_lost(store):
    old, new = bytes(SIZE), altered(bytes(SIZE), 3)
    chunk = patch(store, 0, (old, new))
    store.remove(chunk.ref.digest)
    outcome = rebuild(store, Job(number=1, parts=(part(store, 0, old, new),), patches=(chunk,)))
    assert outcome.lost == (0,)


def test_a_full_disk_leaves_the_rest_undone_and_says_so(store, monkeypatch):
    olds = [bytes([i]) * SIZE for i in range(3)]
    news = [altered(old, 3) for old in olds]
    chunk = patch(store, 0, *zip(olds, news, strict=True))
    parts = tuple(part(store, i, olds[i], news[i]) for i in range(3))
    write = ChunkStore._write_once
    written = []

    def write_once(self, digest, data):
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        written.append(digest)
        write(self, digest, data)

    monkeypatch.setattr(ChunkStore, "_write_once", write_once)
    outcome = rebuild(store, Job(number=1, parts=parts, patches=(chunk,)))
    assert outcome.made == (0,)
    assert outcome.undone == (1, 2)
    assert "is full" in outcome.failure
