"""Patches over real sockets: rebuilt in a child process, which may be killed."""

import os
import signal
import time
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest
import trio

from echo2_mesh.chunks import ChunkStore, digest_of
from echo2_mesh.mesh import MeshSettings, open_mesh
from echo2_mesh.testing import identity_of, make_patch, make_version
from echo2_mesh.wire.types import PolicyVersion, Role

pytestmark = pytest.mark.e2e
CHUNK_BYTES = 64 * 1024


@asynccontextmanager
async def node(folder: Path, name: str, *, know=()):
    identity = identity_of(name)
    settings = MeshSettings(
        run_id="run-1",
        role=Role.LEARNER if name == "learner" else Role.ACTOR,
        learner=identity_of("learner").node,
        name=name,
        listen=("/ip4/127.0.0.1/tcp/0",),
        bootstrap=know,
        mdns=False,
        incarnation_unix_ms=int(time.time() * 1000),
        members_path=folder / name / "members.json",
        versions_path=folder / name / "versions.jsonl",
    )
    async with open_mesh(settings, identity, ChunkStore(folder / name / "chunks")) as mesh:
        yield mesh


class Model:
    """Versions of a few chunks, each a small step from the one before."""

    def __init__(self, mesh, chunks=12):
        self.mesh = mesh
        self.version = -1
        self.patches = ()
        self.pieces = [os.urandom(CHUNK_BYTES) for _ in range(chunks)]

    async def publish(self):
        before, self.version = self.version, self.version + 1
        if self.version:
            old, self.pieces = self.pieces, [altered(piece) for piece in self.pieces]
            patch = make_patch(
                self.mesh.store,
                (PolicyVersion(before), old),
                (PolicyVersion(self.version), self.pieces),
            )
            self.patches = (patch, *self.patches)
        ref, size = make_version(
            self.mesh, PolicyVersion(self.version), self.pieces, patches=self.patches
        )
        await self.mesh.announce_version(ref, PolicyVersion(self.version), size)


def altered(piece):
    at = 2 * int.from_bytes(os.urandom(2), "big") % len(piece)
    return piece[:at] + os.urandom(2) + piece[at + 2 :]


async def wait_version(mesh, version):
    with trio.fail_after(30):
        while (ready := await mesh.versions().receive()).version != version:
            pass
    data = b"".join(mesh.store.read(chunk.digest) for chunk in ready.manifest.chunks)
    assert digest_of(data) == ready.manifest.state_digest
    mesh.set_state(version=version)
    return ready


def rebuilder(folder):
    """The child that works on the store of `folder`."""
    for child in psutil.Process().children():
        words = child.cmdline()
        if "echo2_mesh.rebuild" in words and str(folder / "chunks") in words:
            return child
    raise AssertionError("there is no rebuilding child")


async def test_versions_are_rebuilt_in_a_child_that_may_be_killed_and_after_a_restart(tmp_path):
    async with node(tmp_path, "learner") as learner:
        model = Model(learner)
        async with node(tmp_path, "actor", know=learner.addresses()) as actor:
            await model.publish()
            await wait_version(actor, 0)
            await model.publish()
            ready = await wait_version(actor, 1)
            assert ready.fetched_full_bytes == 0
            assert 0 < ready.fetched_patch_bytes < CHUNK_BYTES
            rebuilder(tmp_path / "actor").send_signal(signal.SIGKILL)
            await model.publish()
            await wait_version(actor, 2)
            assert actor.counters["rebuilt_chunks"] == 24
            assert actor.counters["bad_rebuilds"] == 0
        await model.publish()
        await model.publish()
        async with node(tmp_path, "actor", know=learner.addresses()) as actor:
            ready = await wait_version(actor, 4)
            assert ready.fetched_full_bytes == 0
            assert actor.counters["rebuilt_chunks"] == 12
    assert not [c for c in psutil.Process().children() if "echo2_mesh.rebuild" in c.cmdline()]
