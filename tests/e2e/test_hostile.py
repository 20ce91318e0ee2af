"""A hostile member against a real learner and actor, on loopback: refused, counted, harmless.

The attacker is a carrier and a mesh in this process with a key of its own; the victims are
`echo2-node` processes that all tests share, so each attack meets a run that has survived the ones
before. What was refused is read from the victims' status documents. At the end the run must stop
cleanly and its books must add up.
"""

import contextlib
import os
import random
import socket
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import trio

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore, digest_of
from echo2_mesh.errors import PeerError
from echo2_mesh.identity import Identity
from echo2_mesh.mesh import MeshSettings, open_mesh
from echo2_mesh.net import streams
from echo2_mesh.net.blobs import BLOB_PROTOCOL, HERE
from echo2_mesh.net.connections import peer_of
from echo2_mesh.net.libp2p_carrier import open_libp2p_carrier
from echo2_mesh.net.questions import ASK_PROTOCOL
from echo2_mesh.net.topics import topic_name, topics_of
from echo2_mesh.wire.codec import Envelope, seal
from echo2_mesh.wire.messages import (
    Announce,
    BlobAsk,
    ChunkRef,
    Cohort,
    Goodbye,
    LeaseRequest,
    LeaseReturn,
    RolloutBatch,
    TrajectoryHeader,
    VersionSpan,
)
from echo2_mesh.wire.ticket import read_ticket, write_ticket
from echo2_mesh.wire.types import ChunkKind, PolicyVersion, Reason, Role, StopReason
from echo2_node.actor.trajectories import make_trajectory
from echo2_node.engines.protocol import Generation
from echo2_node.tasks.registry import task_of
from echo2_node.tokens import TokenCodec
from tests.e2e.world import LOOPBACK, open_world

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(240)]

COHORT = Cohort(engine="hostile", dtype="float32", device="cpu")
WAIT_S = 30


@pytest.fixture(scope="module")
def victims(tmp_path_factory):
    """A learner that goes on for ever and one honest actor, both at work."""
    with open_world(tmp_path_factory.mktemp("hostile"), hidden=128, layers=2) as world:
        learner = world.learn(run={"steps": 1_000_000})
        actor = world.join(learner, "honest", fake={"step_s": 0.05})
        world.until(lambda: learner.step() >= 2, "two steps", alive=(learner, actor))
        ticket = read_ticket((learner.state_dir / "ticket.txt").read_text(), now_unix_s=0)
        yield SimpleNamespace(world=world, learner=learner, actor=actor, ticket=ticket)


@pytest.fixture
async def attacker(victims, tmp_path):
    """A member of the run with its own key, the newest manifest, and raw access to its carrier."""
    identity, ticket = Identity.generate(), victims.ticket
    home = tuple(f"{address}/p2p/{ticket.learner}" for address in ticket.addresses)
    settings = MeshSettings(
        run_id=ticket.run_id,
        role=Role.ACTOR,
        learner=ticket.learner,
        bootstrap=home,
        incarnation_unix_ms=1,
    )
    topics = topics_of(ticket.run_id, learner=True)
    async with (
        open_libp2p_carrier(identity, listen=(LOOPBACK,), bootstrap=home, topics=topics) as carrier,
        open_mesh(settings, identity, ChunkStore(tmp_path / "chunks"), carrier=carrier) as mesh,
    ):
        with trio.fail_after(WAIT_S):
            ready = await mesh.versions().receive()
        yield Attacker(victims, identity, carrier, mesh, ready.manifest)


class Attacker:
    """What an attacker can say and make."""

    def __init__(self, victims, identity, carrier, mesh, manifest):
        self.victims, self.identity = victims, identity
        self.carrier, self.mesh, self.manifest = carrier, mesh, manifest
        self.learner, self.run_id = victims.ticket.learner, victims.ticket.run_id
        self.node = identity.node
        self.codec = TokenCodec.load(victims.world.model)

    async def ask(self, message):
        """Ask the learner; like an actor, once more where a connection was just replaced."""
        try:
            return await self.mesh.ask(self.learner, message)
        except PeerError as error:
            if error.code:
                raise
            return await self.mesh.ask(self.learner, message)

    async def leases(self, count):
        """Leases of its own, honestly asked for, and the run's seed."""
        found, versions = [], self.mesh.versions()
        with trio.fail_after(WAIT_S):
            while len(found) < count:
                with contextlib.suppress(trio.WouldBlock):
                    self.manifest = versions.receive_nowait().manifest
                request = LeaseRequest(
                    version=self.manifest.version,
                    groups_max=count - len(found),
                    cohort=COHORT,
                    tokenizer_digest=self.manifest.tokenizer_digest,
                    template_digest=self.manifest.template_digest,
                    task_digest=self.manifest.task.digest,
                )
                grant = await self.ask(request)
                found += grant.leases
                if not grant.leases:
                    await trio.sleep(0.1)
        return found, grant.run_seed

    def truth(self, lease, seed, index=0):
        """Member `index` of a lease as an honest actor would make it."""
        task = task_of(self.manifest.task)
        item = task.item(seed, lease.item_index)
        eos = np.array([next(iter(self.codec.eos_ids))], "<i4").tobytes()
        tokens = self.codec.encode_prompt(item.answer) + eos
        count = len(tokens) // 4
        generation = Generation(
            request_id=lease.lease_id,
            index=index,
            token_ids=tokens,
            logprobs=np.full(count, -0.5, "<f4").tobytes(),
            segments=(VersionSpan(version=lease.version_min, start=0, end=count),),
            stop_reason=StopReason.STOP,
        )
        return make_trajectory(
            lease,
            generation,
            run_id=self.run_id,
            reward=task.score(item, item.answer, finished=True).reward,
            metrics={},
            cohort=COHORT,
            manifest=self.manifest,
        )

    def sealed(self, trajectory):
        return self.mesh.seal(trajectory)

    async def hand_in(self, trajectory, raw, ref=None):
        """The verdict on a payload announced as `trajectory`."""
        ref = ref or ChunkRef(kind=ChunkKind.TRAJECTORY, digest=digest_of(raw), size_bytes=len(raw))
        header = TrajectoryHeader(
            lease_id=trajectory.lease_id,
            group_id=trajectory.group_id,
            index=trajectory.index,
            version_min=trajectory.segments[0].version,
            version_max=trajectory.segments[-1].version,
            tokens=len(trajectory.loss_mask),
            reward=trajectory.reward,
            payload=ref,
            inline=raw,
        )
        reply = await self.ask(RolloutBatch(headers=(header,)))
        return reply.notes[0].verdict

    async def stream_to_learner(self, protocol, first=b""):
        connection = self.carrier._connections.live(peer_of(self.learner))[0]
        return await streams.open_stream(connection, protocol, first)


def counted(node, name):
    return node.status().get("counters", {}).get(name, 0)


async def until(true, what):
    with trio.move_on_after(WAIT_S):
        while not true():  # the condition lives in another process
            await trio.sleep(0.05)
        return
    pytest.fail(f"waited {WAIT_S} s for {what}")


async def goes_on(victims):
    """Both victims live, unharmed, and the run takes further steps."""
    before = victims.learner.step()
    await until(lambda: victims.learner.step() > before + 1, "further steps")
    for node in (victims.learner, victims.actor):
        assert node.process.poll() is None
        assert "Traceback" not in node.text()


@contextlib.asynccontextmanager
async def refused_as(victims, reason, times=1):
    """The block makes the learner refuse at least `times` rollouts for `reason`."""
    before = victims.learner.status()["refusals"].get(reason.value, 0)
    yield
    await until(
        lambda: victims.learner.status()["refusals"].get(reason.value, 0) >= before + times,
        f"{times} refusals as {reason.value}",
    )


@contextlib.asynccontextmanager
async def counts(node, name, times=1):
    """The block makes `node` count at least `times` more of `name`."""
    before = counted(node, name)
    yield
    await until(lambda: counted(node, name) >= before + times, f"{name} to be counted")


# --- bytes -------------------------------------------------------------------------------------


async def test_random_bytes_on_the_port_are_dropped_and_counted(victims):
    rng = random.Random(1)
    host, port = victims.ticket.addresses[0].split("/")[2::2][:2]
    held = []
    async with counts(victims.learner, "handshakes_failed", 3):
        for size in (1, 40, 3000, 200_000):
            with contextlib.suppress(OSError):
                stranger = socket.create_connection((host, int(port)), timeout=5)
                held.append(stranger)
                stranger.sendall(rng.randbytes(size))
        await goes_on(victims)
        for stranger in held:
            stranger.close()
    await goes_on(victims)


async def test_frames_above_the_limits_are_refused_unread_and_counted(victims, attacker):
    async with counts(victims.learner, "exchanges_refused_large", 4):
        for protocol in (ASK_PROTOCOL, BLOB_PROTOCOL):
            for size in (limits.ASK_SIZE_BYTES_MAX + 1, 0xFFFF_FEFF):
                stream = await attacker.stream_to_learner(protocol, size.to_bytes(4, "big"))
                await streams.wait_agreed(stream, protocol)
                with pytest.raises(PeerError, match="size"):
                    await streams.receive_length(stream)
                await stream.reset()
    await goes_on(victims)


async def test_rubbish_in_a_frame_is_no_question(victims, attacker):
    async with (
        counts(victims.learner, "bad_envelopes", 3),
        counts(victims.learner, "bad_blob_asks", 1),
    ):
        deep = b"\x91" * 100_000
        for request in (b"", os.urandom(5000), deep):
            with pytest.raises(PeerError):
                await attacker.carrier.exchange(
                    attacker.learner, ASK_PROTOCOL, request, reply_bytes_max=9999, timeout_s=10
                )
        reply = await attacker.carrier.exchange(
            attacker.learner, BLOB_PROTOCOL, os.urandom(99), reply_bytes_max=9, timeout_s=10
        )
        assert reply[:1] != HERE
    await goes_on(victims)


async def test_a_question_in_anothers_name_is_refused(victims, attacker):
    honest = victims.actor.node
    stolen = LeaseReturn(lease_ids=("0" * 32,))
    genuine = seal(
        stolen, run_id=attacker.run_id, sender=attacker.node, sign=attacker.identity.sign
    )
    false = seal(stolen, run_id=attacker.run_id, sender=honest, sign=attacker.identity.sign)
    async with counts(victims.learner, "bad_envelopes"):
        with pytest.raises(PeerError):
            await attacker.carrier.exchange(
                attacker.learner, ASK_PROTOCOL, false, reply_bytes_max=9999, timeout_s=10
            )
    # What is truly signed, but by somebody else than the connection's peer.
    other = Identity.generate()
    async with (
        counts(victims.learner, "foreign_asks"),
        open_libp2p_carrier(other, topics=("x",)) as carrier,
    ):
        await carrier.connect(attacker.learner, victims.ticket.addresses)
        with pytest.raises(PeerError):
            await carrier.exchange(
                attacker.learner, ASK_PROTOCOL, genuine, reply_bytes_max=9999, timeout_s=10
            )
    await goes_on(victims)


async def test_leases_of_another_cannot_be_handed_back(victims, attacker):
    def held():
        return victims.learner.query(
            "SELECT lease_id FROM leases WHERE actor = ? AND lease_id NOT IN "
            "(SELECT lease_id FROM lease_ends)",
            victims.actor.node,
        )

    await until(held, "leases of the honest actor")
    ids = tuple(lease for (lease,) in held())
    with contextlib.suppress(PeerError):
        await attacker.mesh.ask(attacker.learner, LeaseReturn(lease_ids=ids))
    marks = ", ".join("?" * len(ids))
    ends = victims.learner.query(
        f"SELECT how FROM lease_ends WHERE lease_id IN ({marks}) AND how = 'returned'", *ids
    )
    assert ends == []
    await goes_on(victims)


# --- trajectories ------------------------------------------------------------------------------


async def test_a_forged_trajectory_is_refused_with_its_reason(victims, attacker):
    (lease,), seed = await attacker.leases(1)
    mallory = Identity.generate()

    truth = attacker.truth(lease, seed, 0)
    raw = attacker.sealed(truth)
    promised = ChunkRef(kind=ChunkKind.TRAJECTORY, digest=digest_of(raw), size_bytes=len(raw))
    async with refused_as(victims, Reason.MALFORMED):
        altered = raw[:-1] + bytes((raw[-1] ^ 1,))
        assert await attacker.hand_in(truth, altered, promised) is Reason.MALFORMED

    truth = attacker.truth(lease, seed, 1)
    async with refused_as(victims, Reason.BAD_SIGNATURE):
        envelope = msgspec.msgpack.decode(attacker.sealed(truth), type=Envelope)
        better = msgspec.msgpack.encode(msgspec.structs.replace(truth, logprobs=truth.logprobs))
        worse = better.replace(truth.logprobs[-4:], np.array([-9.0], "<f4").tobytes())
        assert worse != better
        forged = msgspec.msgpack.encode(msgspec.structs.replace(envelope, payload=worse))
        assert await attacker.hand_in(truth, forged) is Reason.BAD_SIGNATURE

    truth = attacker.truth(lease, seed, 2)
    async with refused_as(victims, Reason.WRONG_ACTOR):
        foreign = seal(truth, run_id=attacker.run_id, sender=mallory.node, sign=mallory.sign)
        assert await attacker.hand_in(truth, foreign) is Reason.WRONG_ACTOR

    truth = attacker.truth(lease, seed, 3)
    async with refused_as(victims, Reason.REWARD_MISMATCH):
        lie = msgspec.structs.replace(truth, reward=truth.reward + 1)
        verdict = await attacker.hand_in(lie, attacker.sealed(lie))
        assert verdict is Reason.REWARD_MISMATCH
    await goes_on(victims)


async def test_a_trajectory_counts_once_however_often_it_is_sent(victims, attacker):
    (lease,), seed = await attacker.leases(1)
    truth = attacker.truth(lease, seed)
    raw = attacker.sealed(truth)
    assert await attacker.hand_in(truth, raw) is Reason.ADMITTED
    for _ in range(3):
        assert await attacker.hand_in(truth, raw) is Reason.ADMITTED, "the same verdict again"
    ((members, duplicates),) = victims.learner.query(
        "SELECT count(*), sum(duplicates) FROM submissions WHERE actor = ?", attacker.node
    )
    assert (members, duplicates >= 3) == (1, True)
    await goes_on(victims)


async def test_what_another_generated_cannot_be_handed_in_again(victims, attacker):
    overheard = []

    async def listen(raw):
        message = attacker.mesh.unseal(raw).message
        if isinstance(message, RolloutBatch):
            overheard.extend((raw, header) for header in message.headers)

    await attacker.carrier.subscribe(topic_name(attacker.run_id, "rollouts"), listen)
    await until(lambda: overheard, "gossip of the honest actor")
    envelope, header = overheard[0]
    async with refused_as(victims, Reason.WRONG_ACTOR):
        reply = await attacker.ask(RolloutBatch(headers=(header,)))
        assert reply.notes[0].verdict is Reason.WRONG_ACTOR
    unknown = msgspec.structs.replace(header, lease_id="e" * 32)
    async with refused_as(victims, Reason.UNKNOWN_LEASE):
        reply = await attacker.ask(RolloutBatch(headers=(unknown,)))
        assert reply.notes[0].verdict is Reason.UNKNOWN_LEASE
    await attacker.carrier.publish(topic_name(attacker.run_id, "rollouts"), envelope)
    await goes_on(victims)
    admitted = victims.learner.query(
        "SELECT group_id, member, count(*) FROM submissions WHERE verdict = 'admitted' "
        "GROUP BY 1, 2 HAVING count(*) > 1"
    )
    assert admitted == []


# --- gossip and weights ------------------------------------------------------------------------


async def test_gossip_that_is_rubbish_is_dropped_and_counted(victims, attacker):
    async with counts(victims.learner, "bad_envelopes", 2), counts(victims.actor, "bad_envelopes"):
        for name in ("control", "rollouts"):
            for data in (b"", os.urandom(500), b"\x91" * 50_000):
                await attacker.carrier.publish(topic_name(attacker.run_id, name), data)
    await goes_on(victims)


async def test_an_announcement_by_another_key_leads_nobody_astray(victims, attacker):
    poison = attacker.mesh.store.add(ChunkKind.MANIFEST, b"poison")
    message = Announce(
        version=PolicyVersion(2**40),
        manifest=poison,
        size_bytes=6,
        incarnation_unix_ms=2**50,
    )
    for victim in (victims.learner, victims.actor):
        async with counts(victim, "forged_announces"):
            await attacker.mesh.gossip(message)
    # And one that claims the learner's name, under a signature that it never gave.
    forged = seal(
        message, run_id=attacker.run_id, sender=attacker.learner, sign=attacker.identity.sign
    )
    async with counts(victims.actor, "bad_envelopes"):
        await attacker.carrier.publish(topic_name(attacker.run_id, "control"), forged)
    await goes_on(victims)
    assert victims.actor.status()["version"] < 2**40


async def test_a_goodbye_in_the_learners_name_ends_nothing(victims, attacker):
    goodbye = Goodbye(incarnation_unix_ms=2**50, why="run ended")
    forged = seal(
        goodbye, run_id=attacker.run_id, sender=attacker.learner, sign=attacker.identity.sign
    )
    async with counts(victims.actor, "bad_envelopes"):
        await attacker.carrier.publish(topic_name(attacker.run_id, "control"), forged)
    await attacker.mesh.gossip(goodbye)
    await goes_on(victims)


async def test_a_chunk_that_is_not_what_it_is_called_is_refused_and_fetched_elsewhere(
    victims, attacker, tmp_path
):
    asked = 0

    async def lie(peer, request):
        nonlocal asked
        asked += 1
        size_bytes = msgspec.msgpack.decode(request, type=BlobAsk).size_bytes
        return HERE + os.urandom(size_bytes)

    attacker.carrier.serve(BLOB_PROTOCOL, lie, request_bytes_max=256)
    # A newcomer who knows the attacker from the start and still needs everything.
    invitation = msgspec.structs.replace(
        victims.ticket, addresses=(*attacker.mesh.addresses(), *victims.ticket.addresses)
    )
    (tmp_path / "ticket.txt").write_text(write_ticket(invitation))
    newcomer = victims.world.join(
        victims.learner, "newcomer", listen="", ticket=tmp_path / "ticket.txt"
    )
    await until(lambda: counted(newcomer, "bad_chunks"), "a bad chunk to be counted")
    await until(lambda: newcomer.own_row().get("accepted"), "rollouts of the newcomer")
    assert asked > 0
    await goes_on(victims)
    newcomer.terminate()
    assert await trio.to_thread.run_sync(newcomer.wait_exit) == 0


def test_the_run_ends_cleanly_and_its_books_add_up(victims):
    victims.learner.terminate()
    assert victims.learner.wait_exit() == 0
    victims.actor.terminate()
    assert victims.actor.wait_exit() == 0
    document = victims.world.verify(victims.learner)
    honest = next(row for row in document["actors"] if row["actor"] == victims.actor.node)
    # A straggler may be overtaken; nothing else is ever held against an honest actor.
    assert set(honest["reasons"]) <= {Reason.STALE.value, Reason.LATE.value}
