"""Weights over lanes between real meshes: how they come about, and what happens without them."""

import os
import signal
import time
from contextlib import asynccontextmanager

import pytest
import trio

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import LocalError, PeerError
from echo2_mesh.mesh import BulkSettings, MeshSettings, open_mesh
from echo2_mesh.net import lanes
from echo2_mesh.net.lane_places import places_of
from echo2_mesh.net.traffic import Flow
from echo2_mesh.testing import identity_of, make_version
from echo2_mesh.wire.messages import LaneAsk, LaneOffer, LaneWay
from echo2_mesh.wire.types import ChunkKind, PolicyVersion, Role

pytestmark = pytest.mark.e2e
LISTEN = ("/ip4/127.0.0.1/tcp/0",)
BLOB = os.urandom(600_000)


@asynccontextmanager
async def node(folder, name, *, know=(), listen=LISTEN, bulk_listen=None, **bulk):
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
        bulk=BulkSettings(listen=bulk_listen, **bulk),
    )
    async with open_mesh(settings, identity, ChunkStore(folder / name / "chunks")) as mesh:
        yield mesh


async def wait_until(true, timeout_s=30):
    with trio.fail_after(timeout_s):
        while not true():
            await trio.sleep(0.02)


def flow(flows, key):
    return flows.get(key, Flow())


async def wait_bulk(*meshes):
    await wait_until(lambda: all(mesh._lanes._process.up for mesh in meshes))


async def fetch(target, source, data=BLOB, kind=ChunkKind.FULL):
    ref = source.store.add(kind, data)
    await target.fetch_blob(ref, [source.node], timeout_s=20)
    assert target.store.read(ref.digest) == data
    return ref


async def test_a_version_goes_over_lanes_and_is_counted_by_kind_and_peer(tmp_path):
    async with (
        node(tmp_path, "learner") as learner,
        node(tmp_path, "actor", know=learner.addresses()) as actor,
    ):
        await wait_bulk(learner, actor)
        ref, size = make_version(learner, PolicyVersion(0), [os.urandom(300_000) for _ in range(6)])
        await learner.announce_version(ref, PolicyVersion(0), size)
        with trio.fail_after(30):
            assert (await actor.versions().receive()).version == 0
        assert actor.traffic().lanes == {learner.node: "dialled"}
        await wait_until(lambda: flow(actor.traffic().kinds, ChunkKind.FULL).in_bytes == 1_800_000)
        await wait_until(lambda: flow(learner.traffic().peers, actor.node).out_bytes >= 1_800_000)
        assert actor.counters["bulk_fallbacks"] == 0


async def test_a_node_that_only_dials_out_dials_its_asker_too(tmp_path):
    async with (
        node(tmp_path, "learner") as learner,
        node(tmp_path, "shy", know=learner.addresses(), listen=()) as shy,
    ):
        await wait_bulk(learner, shy)
        await wait_until(lambda: shy.node in learner.connected())
        await fetch(learner, shy)
        assert learner.traffic().lanes == {shy.node: "reverse"}
        await fetch(shy, learner, BLOB[::-1])  # over the same lane
        assert shy.traffic().lanes == {learner.node: "reverse"}
        assert learner.counters["bulk_fallbacks"] + shy.counters["bulk_fallbacks"] == 0


async def test_two_that_nobody_can_dial_meet_in_the_middle_or_use_the_control_connection(
    tmp_path, monkeypatch
):
    async with (
        node(tmp_path, "learner", listen=LISTEN) as learner,
        node(tmp_path, "a", know=learner.addresses(), listen=LISTEN) as a,
    ):
        await wait_bulk(learner, a)
        await wait_until(lambda: a.node in learner.connected())
        for mesh in (learner, a):  # as behind NATs: own addresses lead nowhere
            monkeypatch.setattr(mesh._lanes, "_advertise", lambda own: ())
            monkeypatch.setattr(mesh._lanes, "_observed", lambda: None)
        await fetch(learner, a)
        assert learner.traffic().lanes == {}
        assert learner.counters["bulk_fallbacks"] == 1
        assert learner.counters["unreached_lanes"] == 1
        for mesh in (learner, a):
            monkeypatch.setattr(mesh._lanes, "_observed", lambda: "127.0.0.1")
        await fetch(learner, a, BLOB[1:])
        assert learner.traffic().lanes == {}  # it rests: the failed ways are not tried again
        learner._lanes._peers.clear()
        await fetch(learner, a, BLOB[2:])
        assert learner.traffic().lanes == {a.node: "punched"}


async def test_a_killed_bulk_process_is_replaced_and_nobody_waits_for_it(tmp_path):
    async with (
        node(tmp_path, "learner") as learner,
        node(tmp_path, "actor", know=learner.addresses()) as actor,
    ):
        await wait_bulk(learner, actor)
        await fetch(actor, learner)
        first = actor.bulk_pid
        os.kill(first, signal.SIGKILL)
        await wait_until(lambda: actor.bulk_pid is None)
        await fetch(actor, learner, BLOB[1:])  # over the control connection
        assert actor.counters["bulk_deaths"] == 1
        assert actor.counters["bulk_fallbacks"] == 1
        await wait_until(lambda: actor._lanes._process.up)
        assert actor.bulk_pid != first
        await fetch(actor, learner, BLOB[2:])
        assert actor.traffic().lanes == {learner.node: "dialled"}
        os.kill(learner.bulk_pid, signal.SIGKILL)  # the other side's death is noticed too
        await wait_until(lambda: actor.traffic().lanes == {})
        await wait_until(lambda: learner._lanes._process.up)
        await fetch(actor, learner, BLOB[3:])


async def test_a_blob_that_is_on_its_way_to_the_holder_is_waited_for_on_either_road(tmp_path):
    async with (
        node(tmp_path, "learner") as learner,
        node(tmp_path, "actor", know=learner.addresses()) as actor,
    ):
        await wait_bulk(learner, actor)
        for data in (BLOB, BLOB[:1000]):  # over a lane, and small enough for the other road
            elsewhere = ChunkStore(tmp_path / "elsewhere")
            ref = elsewhere.add(ChunkKind.FULL, data)
            learner._blobs.expect([ref.digest])

            async def get(ref=ref):
                await actor._blobs.fetch_from(learner.node, ref, timeout_s=20, wait_s=15)

            async with trio.open_nursery() as nursery:
                nursery.start_soon(get)
                await trio.sleep(limits.LANE_UNEXPECTED_WAIT_S + 0.5)
                learner.store.put(ref, data)
                learner._blobs.landed([ref.digest])
            assert actor.store.read(ref.digest) == data


async def test_a_far_peer_with_much_to_send_gets_several_lanes(tmp_path, monkeypatch):
    monkeypatch.setattr(lanes, "LONG_PATH_S", 0.0)
    monkeypatch.setattr(lanes, "WIDEN_INTERVAL_S", 0.05)
    async with (
        node(tmp_path, "learner", uplink_bytes_per_s=4_000_000.0) as learner,
        node(tmp_path, "actor", know=learner.addresses()) as actor,
    ):
        await wait_bulk(learner, actor)
        refs = [learner.store.add(ChunkKind.FULL, os.urandom(200_000)) for _ in range(40)]
        room = trio.CapacityLimiter(12)

        async def get(ref):
            async with room:
                await actor.fetch_blob(ref, [learner.node])

        async with trio.open_nursery() as nursery:
            for ref in refs:
                nursery.start_soon(get, ref)
        assert len(actor._lanes._peers[learner.node].ways) == limits.LANES_PER_PEER_MAX
        assert all(actor.store.has(ref.digest) for ref in refs)
        assert actor.traffic().uplink_bytes_per_s == 0.0
        assert learner.traffic().uplink_bytes_per_s == 4_000_000.0


async def test_a_node_without_lanes_is_served_all_the_same(tmp_path):
    async with (
        node(tmp_path, "learner", enabled=False) as learner,
        node(tmp_path, "actor", know=learner.addresses()) as actor,
    ):
        await wait_bulk(actor)
        await fetch(actor, learner)
        assert actor.counters["bulk_fallbacks"] == 1
        assert learner.bulk_pid is None


async def test_lanes_are_agreed_by_signed_questions_alone(tmp_path):
    async with (
        node(tmp_path, "learner") as learner,
        node(tmp_path, "actor", know=learner.addresses()) as actor,
    ):
        await wait_bulk(learner, actor)
        ask = LaneAsk(way=LaneWay.DIAL, certificate=bytes(32), token=bytes(32))
        offers = [await actor.ask(learner.node, ask) for _ in range(2)]
        assert all(isinstance(offer, LaneOffer) for offer in offers)
        assert offers[0].token != offers[1].token
        assert offers[0].places == learner._lanes.addresses()
        nowhere = LaneAsk(
            way=LaneWay.REVERSE,
            places=("/ip4/127.0.0.1/tcp/1", "/dns4/somewhere/tcp/5", "nonsense"),
            certificate=bytes(32),
            token=bytes(32),
        )
        with pytest.raises(PeerError) as caught:
            await actor.ask(learner.node, nowhere)
        assert caught.value.code == "unreachable"


async def test_a_bulk_port_that_is_taken_is_said_at_once(tmp_path):
    async with node(tmp_path, "learner") as learner:
        await wait_bulk(learner)
        taken = learner._lanes.addresses()
        with pytest.raises(LocalError, match="bulk port"):
            async with node(tmp_path, "actor", bulk_listen=taken):
                await trio.sleep(20)


def test_only_plain_addresses_are_dialled():
    given = ("/ip4/192.0.2.1/tcp/9", "/ip6/::1/tcp/7", "/dns4/a/tcp/1", "/ip4/1/tcp/2", "x", "")
    given += ("/ip6/fe80::1%eth0/tcp/9", "/ip4/::1/tcp/9", "/ip6/192.0.2.1/tcp/9")
    assert places_of(given) == (("192.0.2.1", 9), ("::1", 7))
