"""The rebuilding child: jobs in, events out, and life goes on when it dies."""

import os
import signal
from collections import Counter
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore, digest_of
from echo2_mesh.core.fetching import Made, WantMore
from echo2_mesh.core.routes import Base, cheapest
from echo2_mesh.net import rebuilding as shell
from echo2_mesh.net.blobs import Workers
from echo2_mesh.net.driver import Guard
from echo2_mesh.net.rebuilding import Rebuilding
from echo2_mesh.rebuild import Outcome
from echo2_mesh.testing import make_patch
from echo2_mesh.wire.messages import ChunkRef, Manifest, Probe, TaskSpec, TensorSpan
from echo2_mesh.wire.types import ChunkKind, Digest, PolicyVersion

SIZE = 4096
NAME = Digest(b"m" * 32)


class World:
    """A store with a base in it, a manifest one step ahead, and what was posted."""

    def __init__(self, folder, count=6):
        self.store = ChunkStore(folder / "chunks")
        self.old = [bytes([i]) * SIZE for i in range(count)]
        self.new = [piece[:-1] + b"\xff" for piece in self.old]
        self.patch = make_patch(
            self.store, (PolicyVersion(0), self.old), (PolicyVersion(1), self.new)
        )
        refs = tuple(
            ChunkRef(kind=ChunkKind.FULL, digest=digest_of(piece), size_bytes=SIZE)
            for piece in self.new
        )
        self.manifest = Manifest(
            run_id="run-1",
            version=PolicyVersion(1),
            chunks=refs,
            patches=(self.patch,),
            tensors=(
                TensorSpan(
                    name="w",
                    dtype="U8",
                    shape=(count * SIZE,),
                    offset_bytes=0,
                    size_bytes=count * SIZE,
                ),
            ),
            files=(),
            state_digest=digest_of(b"".join(self.new)),
            tokenizer_digest=Digest(bytes(32)),
            template_digest=Digest(bytes(32)),
            task=TaskSpec(task_id="sort", args_json="{}", digest=Digest(bytes(32))),
            probe=Probe(token_ids=bytes(8), logprobs=bytes(4)),
        )
        base = Base(
            state_digest=digest_of(b"".join(self.old)),
            chunks=tuple(self.store.add(ChunkKind.FULL, piece) for piece in self.old),
            here=frozenset(range(count)),
        )
        self.patch_blobs = frozenset(range(count, count + len(self.patch.chunks)))
        self.route = cheapest(self.manifest, (base,), frozenset())
        self.counters = Counter()
        self.landed = []
        self.send, self.posted = trio.open_memory_channel(100)

    async def events(self, indices):
        """Events until each of `indices` was in one."""
        found = []
        with trio.fail_after(30):
            while not set(indices) <= {i for event in found for i in event.indices}:
                found.append(await self.posted.receive())
        return found


@asynccontextmanager
async def opened(world, log_path, **fields):
    async with trio.open_nursery() as nursery:
        rebuilding = Rebuilding(
            store=world.store,
            workers=Workers(),
            guard=Guard(nursery, world.counters),
            post=world.send.send,
            landed=world.landed.extend,
            log_path=log_path,
            **fields,
        )
        nursery.start_soon(rebuilding.run)
        yield rebuilding
        nursery.cancel_scope.cancel()


def child_of(log_path):
    """The process id of this test's rebuilding child."""
    own = os.getpid()
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        words = path.read_bytes().split(b"\0")
        stat = path.with_name("stat").read_text().rsplit(")", 1)[1].split()
        if b"echo2_mesh.rebuild" in words and int(stat[1]) == own:
            return int(path.parent.name)
    raise AssertionError("there is no child")


@pytest.mark.parametrize("in_child", [False, True])
async def test_chunks_are_made_as_their_patches_come(tmp_path, in_child):
    world = World(tmp_path)
    log_path = tmp_path / "logs" / "rebuild.log" if in_child else None
    async with opened(world, log_path) as rebuilding:
        rebuilding.begin(NAME, world.manifest, world.route, frozenset())
        for blob in sorted(world.patch_blobs):
            rebuilding.arrived(blob)
        events = await world.events(range(6))
    assert all(isinstance(event, Made) and event.manifest == NAME for event in events)
    assert [world.store.read(ref.digest) for ref in world.manifest.chunks] == world.new
    assert sorted(world.landed) == sorted(ref.digest for ref in world.manifest.chunks)
    assert world.counters["rebuilt_chunks"] == 6


async def test_a_bad_chunk_is_wanted_whole_and_the_others_are_made(tmp_path):
    world = World(tmp_path)
    world.store.remove(digest_of(world.old[3]))
    world.store.path(digest_of(world.old[4])).write_bytes(bytes(SIZE))
    async with opened(world, None) as rebuilding:
        rebuilding.begin(NAME, world.manifest, world.route, world.patch_blobs)
        events = await world.events(range(6))
    wanted = {i for event in events if isinstance(event, WantMore) for i in event.indices}
    assert wanted == {3, 4}
    assert world.counters["lost_bases"] == 2


async def test_a_child_that_dies_is_started_again_and_nothing_is_lost(tmp_path, monkeypatch):
    monkeypatch.setattr(shell, "RETRY_FIRST_S", 0.01)
    world = World(tmp_path)
    log_path = tmp_path / "logs" / "rebuild.log"
    async with opened(world, log_path) as rebuilding:
        rebuilding.begin(NAME, world.manifest, world.route, frozenset())
        first, *rest = sorted(world.patch_blobs)
        rebuilding.arrived(first)
        await world.events(range(2))
        os.kill(child_of(log_path), signal.SIGKILL)
        for blob in rest:
            rebuilding.arrived(blob)
        await world.events(range(2, 6))
    assert world.counters["rebuild_deaths"] >= 1
    assert world.counters["rebuilt_chunks"] == 6


async def test_where_the_child_keeps_dying_the_rest_is_wanted_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(shell, "RETRY_FIRST_S", 0.001)
    monkeypatch.setattr(shell.sys, "executable", "/bin/false")
    world = World(tmp_path)
    async with opened(world, tmp_path / "logs" / "rebuild.log") as rebuilding:
        rebuilding.begin(NAME, world.manifest, world.route, world.patch_blobs)
        events = await world.events(range(6))
    assert all(isinstance(event, WantMore) for event in events)
    assert world.counters["rebuild_deaths"] == limits.REBUILD_DEATHS_MAX


async def test_a_version_that_was_dropped_has_no_say_any_more(tmp_path):
    world = World(tmp_path)
    async with opened(world, None) as rebuilding:
        rebuilding.begin(NAME, world.manifest, world.route, frozenset())
        rebuilding.forget()
        for blob in world.patch_blobs:
            rebuilding.arrived(blob)
        await trio.testing.wait_all_tasks_blocked()
        with pytest.raises(trio.WouldBlock):
            world.posted.receive_nowait()


async def test_a_full_disk_holds_up_no_later_version(tmp_path, monkeypatch):
    """The pause belongs to the version that could not be stored, not to the next."""
    world = World(tmp_path)
    real, full = shell.worker.rebuild, [True]

    def rebuild(store, job):
        if full[0]:
            undone = tuple(part.index for part in job.parts)
            return Outcome(number=job.number, undone=undone, failure="The disk is full.")
        return real(store, job)

    monkeypatch.setattr(shell.worker, "rebuild", rebuild)
    monkeypatch.setattr(shell, "RETRY_FIRST_S", 3600.0)
    monkeypatch.setattr(shell, "RETRY_LONGEST_S", 3600.0)
    async with opened(world, None) as rebuilding:
        rebuilding.begin(NAME, world.manifest, world.route, world.patch_blobs)
        with trio.fail_after(30):
            while not world.counters["store_failures"]:
                await trio.lowlevel.checkpoint()
        assert rebuilding.last_error == "The disk is full."
        full[0] = False
        later = Digest(b"n" * 32)
        rebuilding.begin(later, world.manifest, world.route, world.patch_blobs)
        events = await world.events(range(6))
    assert {event.manifest for event in events} == {later}
