"""The whole mesh on the real carrier, on loopback: the same story the simulation tells."""

import time
from contextlib import asynccontextmanager

import pytest
import trio

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.core.members import Standing
from echo2_mesh.mesh import MeshSettings, open_mesh
from echo2_mesh.testing import identity_of, make_version
from echo2_mesh.wire.messages import CatchUp, CaughtUp
from echo2_mesh.wire.types import ChunkKind, PolicyVersion, Role

pytestmark = pytest.mark.e2e
LISTEN = ("/ip4/127.0.0.1/tcp/0",)


@asynccontextmanager
async def node(folder, name, *, know=(), listen=LISTEN):
    identity = identity_of(name)
    settings = MeshSettings(
        run_id="run-1",
        role=Role.LEARNER if name == "learner" else Role.ACTOR,
        learner=identity_of("learner").node,
        name=name,
        listen=listen,
        bootstrap=know,
        mdns=False,
        incarnation_unix_ms=int(time.time() * 1000),
        members_path=folder / f"{name}.json",
    )
    async with open_mesh(settings, identity, ChunkStore(folder / name)) as mesh:
        yield mesh


async def publish(mesh, version):
    ref, size = make_version(mesh, PolicyVersion(version), [bytes([i]) * 50_000 for i in range(6)])
    await mesh.announce_version(ref, PolicyVersion(version), size)


async def wait_version(mesh, version):
    with trio.fail_after(30):
        while (await mesh.versions().receive()).version != version:
            pass


async def wait_until(true):
    with trio.fail_after(30):
        while not true():
            await trio.sleep(0.02)


async def test_a_version_reaches_a_listener_and_a_dialler_and_a_new_learner_is_found(tmp_path):
    async with node(tmp_path, "actor") as actor:
        async with (
            node(tmp_path, "learner", know=actor.addresses()) as learner,
            node(tmp_path, "shy", know=actor.addresses(), listen=()) as shy,
        ):
            await publish(learner, 0)
            await wait_version(actor, 0)
            await wait_version(shy, 0)
            await wait_until(lambda: shy.node in learner.connected())
            assert isinstance(await learner.ask(shy.node, CatchUp()), CaughtUp)
            ref = shy.store.add(ChunkKind.TRAJECTORY, b"pulled over a connection it opened")
            await learner.fetch_blob(ref, [shy.node], timeout_s=5)
            await wait_until(lambda: len(learner.members()) == 2)
            await shy.say_goodbye("done")
            await wait_until(lambda: Standing.GONE in [m.standing for m in learner.members()])
            await wait_until((tmp_path / "learner.json").exists)
        async with node(tmp_path, "learner", know=()) as learner:
            assert learner.addresses()
            await publish(learner, 1)
            await wait_version(actor, 1)
