"""Complete versions: what is kept, what is given back and when, and what a restart remembers."""

import os

import pytest
import trio

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore
from echo2_mesh.core.holdings import held_in
from echo2_mesh.errors import PeerError
from echo2_mesh.net.blobs import Workers
from echo2_mesh.net.shelf import Shelf
from echo2_mesh.versionlog import PatchSize, read_versions
from echo2_mesh.wire.messages import ChunkRef
from echo2_mesh.wire.types import ChunkKind
from tests.route_kit import History

GRACE_S = limits.RETENTION_GRACE_S


class World:
    """A history whose blobs are files of a few bytes; a manifest's blob is its version."""

    def __init__(self, folder, **settings):
        self.folder = folder
        self.store = ChunkStore(folder / "chunks")
        self.history = History(3, [{0}, {1}, {0, 2}, {1}, {2}])
        self.shelf = self.make_shelf(**settings)

    def make_shelf(self, **settings):
        return Shelf(
            self.store,
            Workers(inline=True),
            path=self.folder / "versions.jsonl",
            open_manifest=self.open_manifest,
            **{"kept": 2, **settings},
        )

    def manifest(self, version):
        steps = tuple(p for p in self.history.patches if p.version in (version, version - 1))
        return self.history.manifest(version, steps)

    def open_manifest(self, raw, version):
        if raw != b"manifest %d" % version:
            raise PeerError("not signed by the learner")
        return self.manifest(version)

    async def complete(self, version):
        manifest = self.manifest(version)
        ref = self.store.add(ChunkKind.MANIFEST, b"manifest %d" % version)
        for blob in self.blobs(version):
            self.store.path(blob.digest).write_bytes(b"x")
        self.shelf.add(ref, manifest)
        assert await self.shelf.record(ref, manifest, fetched_bytes=7)
        await self.shelf.look(ref.digest)
        return ref

    def blobs(self, version):
        manifest = self.manifest(version)
        files = [chunk for file in manifest.files for chunk in file.chunks]
        patches = [chunk.ref for patch in manifest.patches for chunk in patch.chunks]
        return [*manifest.chunks, *files, *patches]

    def here(self, version):
        return {blob.digest for blob in self.blobs(version) if self.store.has(blob.digest)}


async def let_pass(shelf, seconds):
    for _ in range(int(seconds / 5) + 1):
        await trio.sleep(5)
        await shelf.sweep()


async def test_kept_versions_and_listed_patches_stay_and_the_rest_goes_after_the_grace(
    autojump_clock, tmp_path
):
    world = World(tmp_path)
    refs = [await world.complete(version) for version in range(5)]
    needed = {blob.digest for version in (3, 4) for blob in world.history.refs(version)}
    listed = {c.ref.digest for p in world.manifest(4).patches for c in p.chunks}
    old = {digest for version in range(4) for digest in world.here(version) - needed - listed} - {
        world.manifest(4).files[0].chunks[0].digest
    }
    assert old
    await let_pass(world.shelf, GRACE_S - 10)
    assert all(world.store.has(digest) for digest in old)
    await let_pass(world.shelf, 2 * GRACE_S)
    assert not any(world.store.has(digest) for digest in old)
    assert all(world.store.has(digest) for digest in needed | listed)
    assert [world.store.has(ref.digest) for ref in refs] == [False, False, False, True, True]


async def test_what_is_being_used_or_pinned_is_not_deleted(autojump_clock, tmp_path):
    world = World(tmp_path)
    for version in range(5):
        await world.complete(version)
    served, pinned, other = (blob.digest for blob in world.history.refs(0))
    world.store.pin("somebody", {pinned})
    for step in range(20):
        await trio.sleep(5)
        stamp = 1_000_000_000 + step
        os.utime(world.store.path(served), ns=(stamp, stamp))
        await world.shelf.sweep()
    assert world.store.has(served)
    assert world.store.has(pinned)
    assert not world.store.has(other)


async def test_holdings_say_what_is_really_here(autojump_clock, tmp_path):
    world = World(tmp_path)
    ref = await world.complete(1)
    count = len(world.blobs(1))
    assert held_in(world.shelf.bitmap(ref.digest), count) == frozenset(range(count))
    patch = world.manifest(1).patches[0].chunks[0].ref
    world.store.path(patch.digest).unlink()
    await world.shelf.look(ref.digest)
    assert held_in(world.shelf.bitmap(ref.digest), count) == frozenset(range(count - 1))
    assert world.shelf.bitmap(b"?" * 32) == b""


async def test_a_restart_knows_its_versions_and_what_it_lost_of_them(autojump_clock, tmp_path):
    world = World(tmp_path)
    for version in range(3):
        await world.complete(version)
    lost = world.history.refs(2)[1].digest
    world.store.path(lost).unlink()
    with (tmp_path / "versions.jsonl").open("ab") as file:
        file.write(b'{"torn')
    shelf = world.make_shelf()
    await shelf.recall()
    newest, *older = shelf.bases()
    assert newest.state_digest == world.history.state_digest(2)
    assert newest.here == {0, 2}
    assert len(older) == 2
    assert world.history.refs(2)[0].digest in world.store.pinned()
    lines = read_versions(tmp_path / "versions.jsonl")
    assert [line.version for line in lines] == [0, 1, 2]
    assert lines[2].patches == (PatchSize(base=1, size_bytes=10),)
    assert lines[2].fetched_bytes == 7


async def test_a_list_that_names_what_is_no_manifest_is_not_believed(autojump_clock, tmp_path):
    world = World(tmp_path)
    await world.complete(1)
    forged = world.store.add(ChunkKind.MANIFEST, b"manifest of somebody else")
    await world.shelf.record(
        ChunkRef(kind=ChunkKind.MANIFEST, digest=forged.digest, size_bytes=25),
        world.manifest(2),
        0,
    )
    shelf = world.make_shelf()
    await shelf.recall()
    assert [base.state_digest for base in shelf.bases()] == [world.history.state_digest(1)]


async def test_a_disk_that_takes_no_line_costs_the_line_alone(tmp_path):
    world = World(tmp_path)
    (tmp_path / "versions.jsonl").mkdir()
    manifest = world.manifest(0)
    ref = world.store.add(ChunkKind.MANIFEST, b"manifest 0")
    world.shelf.add(ref, manifest)
    assert await world.shelf.record(ref, manifest, 0) is False
    await world.shelf.recall()


@pytest.mark.parametrize("lines", [10])
async def test_the_list_does_not_grow_for_ever(tmp_path, monkeypatch, lines):
    monkeypatch.setattr(limits, "VERSION_LINES_MAX", lines)
    world = World(tmp_path)
    manifest = world.manifest(1)
    ref = world.store.add(ChunkKind.MANIFEST, b"manifest 1")
    world.shelf.add(ref, manifest)
    for _ in range(5 * lines):
        await world.shelf.record(ref, manifest, 0)
    assert len((tmp_path / "versions.jsonl").read_bytes().splitlines()) <= 2 * lines + 1
    assert len(read_versions(tmp_path / "versions.jsonl")) == lines
