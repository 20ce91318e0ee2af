"""A name in the store means that the bytes hash to it, whoever wrote and whatever crashed."""

import gc
import os
import shutil
import subprocess
import sys
import threading
from types import SimpleNamespace

import numpy
import pytest

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore, digest_of
from echo2_mesh.errors import LocalError, PeerError
from echo2_mesh.wire.messages import ChunkRef
from echo2_mesh.wire.types import ChunkKind, Digest
from tests.limited import files_at_most


def ref_of(data):
    return ChunkRef(kind=ChunkKind.FULL, digest=digest_of(data), size_bytes=len(data))


@pytest.fixture
def store(tmp_path):
    return ChunkStore(tmp_path / "chunks")


def names(store):
    return sorted(os.listdir(store.folder))


def age(store, digest, seconds):
    """Make a blob look as if it was last used so long ago."""
    state = store.path(digest).stat()
    past = state.st_mtime_ns - seconds * 1_000_000_000
    os.utime(store.path(digest), ns=(past, past))


def view_of(store, digest):
    with store.view(digest) as view:
        return bytes(view)


def test_what_was_put_is_read_back(store):
    store.put(ref_of(b"hello"), b"hello")
    ref = store.add(ChunkKind.FILE, bytearray(b"world"))
    assert store.read(digest_of(b"hello")) == b"hello"
    with store.view(ref.digest) as view:
        assert bytes(view) == b"world"
    assert store.used_bytes == 10


def test_an_empty_blob_is_a_blob(store):
    ref = store.add(ChunkKind.FILE, b"")
    assert store.has(ref.digest)
    assert store.read(ref.digest) == b""
    with store.view(ref.digest) as view:
        assert len(view) == 0


def test_bytes_that_do_not_hash_to_their_name_are_never_stored(store):
    with pytest.raises(PeerError, match="does not hash"):
        store.put(ref_of(b"hello"), b"hellO")
    assert names(store) == []
    assert not store.has(digest_of(b"hello"))


@pytest.mark.parametrize("data", [b"hell", b"hello!", b""])
def test_bytes_of_another_size_are_never_stored(store, data):
    with pytest.raises(PeerError, match="promised"):
        store.put(ref_of(b"hello"), data)
    assert names(store) == []


def test_an_array_is_measured_in_bytes_not_in_entries(store):
    tokens = numpy.arange(10, dtype="<i4")
    ref = store.add(ChunkKind.FULL, memoryview(tokens))
    assert ref.size_bytes == 40
    assert store.used_bytes == 40
    store.remove(ref.digest)
    store.put(ref, memoryview(tokens))
    assert store.read(ref.digest) == tokens.tobytes()


def test_a_blob_above_the_limit_is_refused(store):
    with pytest.raises(LocalError, match="above the chunk limit"):
        store.add(ChunkKind.FULL, bytes(limits.CHUNK_SIZE_BYTES_MAX + 1))


def test_what_is_not_here_is_a_key_error(store):
    with pytest.raises(KeyError):
        store.read(digest_of(b"nothing"))
    with pytest.raises(KeyError), store.view(digest_of(b"nothing")):
        pass
    store.remove(digest_of(b"nothing"))


@pytest.mark.parametrize("damage", [b"", b"hell", b"hellO", b"hello\0"])
@pytest.mark.parametrize("look", [ChunkStore.read, view_of])
def test_a_blob_damaged_on_disk_is_not_here_any_more(store, damage, look):
    """After a power cut a renamed file may be empty: it must be fetched again, not served."""
    digest = store.add(ChunkKind.FULL, b"hello").digest
    store.path(digest).write_bytes(damage)
    with pytest.raises(KeyError):
        look(store, digest)
    assert not store.has(digest)
    store.put(ref_of(b"hello"), b"hello")
    assert store.read(digest) == b"hello"


def test_an_array_may_outlive_its_view(store):
    digest = store.add(ChunkKind.FULL, bytes(range(16))).digest
    with store.view(digest) as view:
        array = numpy.frombuffer(view, dtype=numpy.uint8)
    store.remove(digest)
    gc.collect()
    assert array.sum() == sum(range(16))


def test_an_error_inside_a_view_is_not_hidden_by_its_closing(store):
    digest = store.add(ChunkKind.FULL, b"hello").digest
    kept = []

    def fail_with_a_live_slice():
        with store.view(digest) as view:
            kept.append(view[1:])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_with_a_live_slice()
    assert bytes(kept[0]) == b"ello"


def test_a_view_cannot_be_written(store):
    digest = store.add(ChunkKind.FULL, b"hello").digest
    with store.view(digest) as view, pytest.raises(TypeError):
        view[0] = 1


def test_unfinished_writes_of_a_dead_process_are_removed(store):
    (store.folder / f"{digest_of(b'x').hex()}.{os.getpid()}.0.part").write_bytes(b"half")
    (store.folder / "README").write_text("not a blob")
    kept = store.add(ChunkKind.FULL, b"kept")
    again = ChunkStore(store.folder)
    assert names(again) == sorted(["README", kept.digest.hex()])
    assert again.used_bytes == 4


def test_an_unfinished_write_of_a_living_process_is_left_alone(store):
    """The daemon, the trainer and the engine open the same folder in any order."""
    code = (
        "import fcntl, sys; f = open(sys.argv[1], 'xb'); fcntl.flock(f, fcntl.LOCK_EX)\n"
        "f.write(b'half'); f.flush(); print(flush=True); sys.stdin.read()"
    )
    part = store.folder / f"{digest_of(b'x').hex()}.1.0.part"
    with subprocess.Popen(
        [sys.executable, "-c", code, str(part)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        child.stdout.readline()
        ChunkStore(store.folder)
        assert part.exists()
        child.stdin.close()
    ChunkStore(store.folder)
    assert not part.exists()


def test_the_least_recently_used_blobs_go_first(tmp_path):
    store = ChunkStore(tmp_path, quota_bytes=1000)
    digests = [store.add(ChunkKind.FULL, bytes([n]) * 300).digest for n in range(3)]
    for n, digest in enumerate(digests):
        age(store, digest, 100 - n)
    store.read(digests[0])
    store.add(ChunkKind.FULL, b"x" * 300)
    assert [store.has(digest) for digest in digests] == [True, False, True]
    assert store.used_bytes <= 1000


def test_pinned_blobs_are_never_evicted_nor_removed(tmp_path):
    store = ChunkStore(tmp_path, quota_bytes=1000)
    first, second = (store.add(ChunkKind.FULL, bytes([n]) * 400).digest for n in range(2))
    store.pin("installed", [first])
    store.pin("fetching", [first, second])
    store.add(ChunkKind.FULL, b"x" * 900)
    assert store.has(first)
    assert store.has(second)
    store.remove(first)
    assert store.has(first)
    store.unpin("installed")
    store.pin("fetching", [second])
    store.trim()
    assert not store.has(first)
    assert store.has(second)


def test_what_is_needed_is_stored_even_if_all_is_pinned(tmp_path):
    store = ChunkStore(tmp_path, quota_bytes=100)
    digests = []
    for n in range(20):
        digests.append(store.add(ChunkKind.FULL, bytes([n]) * 50).digest)
        store.pin("all", digests)
    assert all(map(store.has, digests))
    assert store.used_bytes == 1000
    store.unpin("all")
    store.trim()
    assert store.used_bytes <= 100


def test_what_another_process_wrote_is_counted_and_evicted(tmp_path):
    daemon, trainer = ChunkStore(tmp_path, quota_bytes=1000), ChunkStore(tmp_path, quota_bytes=None)
    kept = daemon.add(ChunkKind.FULL, b"kept").digest
    daemon.pin("installed", [kept])
    age(daemon, kept, 1000)
    for n in range(10):
        trainer.add(ChunkKind.FULL, bytes([n]) * 300)
    assert trainer.has(kept)
    daemon.trim()
    assert daemon.used_bytes <= 1000
    assert daemon.has(kept)
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) == daemon.used_bytes


def test_a_store_without_a_quota_never_evicts(tmp_path):
    store = ChunkStore(tmp_path, quota_bytes=None)
    digests = [store.add(ChunkKind.FULL, n.to_bytes(4, "big")).digest for n in range(600)]
    store.trim()
    assert all(map(store.has, digests))


def test_a_full_disk_is_said_so_and_harms_nothing(store):
    kept = store.add(ChunkKind.FULL, b"kept").digest
    with (
        files_at_most(1000),
        pytest.raises(LocalError, match=r"disk of .* is full") as caught,
    ):
        store.put(ref_of(b"x" * 5000), b"x" * 5000)
    assert "Free space" in caught.value.hint
    assert names(store) == [kept.hex()]
    assert store.used_bytes == 4
    assert store.read(kept) == b"kept"


def test_old_blobs_go_before_the_disk_is_full_and_pinned_ones_stay(store, monkeypatch):
    pinned = store.add(ChunkKind.FULL, b"p" * 1000).digest
    store.pin("version", [pinned])
    old = [store.add(ChunkKind.FULL, bytes([i]) * 1000).digest for i in range(4)]
    for seconds, digest in enumerate(old):
        age(store, digest, 100 - seconds)
    usage = SimpleNamespace(total=10_000, free=0)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    store.trim()
    assert store.has(pinned)
    assert [store.has(digest) for digest in old] == [False, False, True, True]


@pytest.mark.root
def test_a_full_file_system_is_said_so(tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("needs the right to mount")
    try:
        store = ChunkStore(tmp_path)
        kept = store.add(ChunkKind.FULL, b"kept").digest
        with pytest.raises(LocalError, match=r"disk of .* is full"):
            store.add(ChunkKind.FULL, bytes(200_000))
        assert names(store) == [kept.hex()]
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_folder_that_cannot_be_made_is_a_local_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LocalError, match="cannot be used"):
        ChunkStore(tmp_path / "file")


def test_threads_that_store_the_same_blobs_agree_on_the_bytes_used(store):
    blobs = [n.to_bytes(4, "big") * 25 for n in range(40)]

    def write():
        for n, blob in enumerate(blobs):
            store.put(ref_of(blob), blob)
            store.pin(f"owner {n}", [digest_of(blob)])

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert store.used_bytes == 100 * len(blobs)
    assert len(names(store)) == len(blobs)


def test_a_name_of_another_length_is_no_blob(store):
    (store.folder / ("AB " * 21 + "a")).write_text("64 characters, not a digest")
    assert ChunkStore(store.folder).used_bytes == 0
    assert not store.has(Digest(b""))


def test_an_unverified_view_gives_what_lies_there_and_nothing_where_nothing_does(tmp_path):
    store = ChunkStore(tmp_path)
    ref = store.add(ChunkKind.FULL, b"as it was")
    store.path(ref.digest).write_bytes(b"damaged!!")
    with store.view_unverified(ref.digest) as view:
        assert bytes(view) == b"damaged!!"
    store.remove(ref.digest)
    with pytest.raises(KeyError), store.view_unverified(ref.digest):
        pass


def test_what_another_process_stored_counts_towards_the_quota(tmp_path):
    store = ChunkStore(tmp_path, 3000)
    old = store.add(ChunkKind.FULL, b"o" * 1000)
    os.utime(store.path(old.digest), ns=(1, 1))
    other = ChunkStore(tmp_path, None)
    for letter in b"abc":
        other.add(ChunkKind.FULL, bytes([letter]) * 1000)
    store.landed(3000)
    assert store.used_bytes <= 3000
    assert not store.has(old.digest)


def test_many_are_removed_at_once_the_pinned_excepted(tmp_path):
    store = ChunkStore(tmp_path)
    refs = [store.add(ChunkKind.FULL, bytes([i]) * 10) for i in range(3)]
    store.pin("somebody", {refs[1].digest})
    assert store.pinned() == {refs[1].digest}
    store.remove_all([ref.digest for ref in refs])
    assert [store.has(ref.digest) for ref in refs] == [False, True, False]
    assert store.last_used_ns(refs[0].digest) == 0
    assert store.last_used_ns(refs[1].digest) > 0
