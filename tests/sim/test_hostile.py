"""One actor that lies, among honest ones: every lie has its reason, and the run does not notice."""

from contextlib import asynccontextmanager
from random import Random

import msgspec
import numpy as np
import pytest

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore, digest_of
from echo2_mesh.errors import PeerError
from echo2_mesh.identity import Identity, verify
from echo2_mesh.mesh import MeshSettings, open_mesh
from echo2_mesh.net.topics import topic_name
from echo2_mesh.testing import identity_of, seeds
from echo2_mesh.wire.codec import Envelope, seal, signed_bytes, unseal
from echo2_mesh.wire.messages import (
    Announce,
    ChunkRef,
    Cohort,
    Goodbye,
    LeaseRequest,
    RolloutBatch,
    Trajectory,
    TrajectoryHeader,
    VersionSpan,
)
from echo2_mesh.wire.types import ChunkKind, PolicyVersion, Reason, Role, StopReason
from echo2_node.tasks.registry import task_digest
from echo2_node.tokens import TokenCodec, template_digest, tokenizer_digest
from tests.sim.fleet_kit import RUN_ID, open_world

COHORT = Cohort(engine="fake", dtype="float32", device="cpu")
NAN = np.full(1, np.nan, dtype="<f4").tobytes()


class Hostile:
    """A member of the mesh with a script for a daemon; it hears all rollouts, as anybody can."""

    def __init__(self, world, mesh, identity):
        self.world = world
        self.mesh = mesh
        self.identity = identity
        self.codec = TokenCodec.load(world.model)
        self.overheard = []
        self.carrier = None

    async def listen(self, carrier):
        async def hear(raw):
            opened = unseal(
                raw,
                run_id=RUN_ID,
                verify=lambda *_: True,
                size_bytes_max=limits.GOSSIP_SIZE_BYTES_MAX,
            )
            if isinstance(opened.message, RolloutBatch) and opened.sender != self.mesh.node:
                self.overheard += opened.message.headers

        self.carrier = carrier
        await carrier.subscribe(topic_name(RUN_ID, "rollouts"), hear)

    async def leases(self, count):
        """Leases of the newest version, and the run's seed."""
        version = max(self.world.weights, default=0)
        request = LeaseRequest(
            version=PolicyVersion(version),
            groups_max=count,
            cohort=COHORT,
            tokenizer_digest=tokenizer_digest(self.world.model),
            template_digest=template_digest(self.world.model),
            task_digest=task_digest(self.world.task),
        )
        grant = await self.mesh.ask(self.world.learner.node, request)
        assert len(grant.leases) == count
        return grant.leases, grant.run_seed

    def honest(self, lease, run_seed, index=0):
        """What an honest actor would hand in."""
        item = self.world.task.item(run_seed, lease.item_index)
        eos = next(iter(self.codec.eos_ids))
        completion = self.codec.encode_prompt(item.answer) + np.array([eos], "<i4").tobytes()
        prompt, count = len(lease.prompt_ids) // 4, len(completion) // 4
        score = self.world.task.score(item, item.answer, finished=True)
        return Trajectory(
            run_id=RUN_ID,
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            index=index,
            item_index=lease.item_index,
            token_ids=lease.prompt_ids + completion,
            prompt_length=prompt,
            loss_mask=bytes(prompt) + b"\x01" * count,
            logprobs=np.array([0.0] * prompt + [-0.5] * count, "<f4").tobytes(),
            segments=(VersionSpan(version=lease.version_min, start=prompt, end=prompt + count),),
            reward=score.reward,
            stop_reason=StopReason.STOP,
            sampling=lease.sampling,
            cohort=COHORT,
            tokenizer_digest=tokenizer_digest(self.world.model),
            template_digest=template_digest(self.world.model),
            task_digest=task_digest(self.world.task),
        )

    def header(self, trajectory, raw=None):
        raw = raw if raw is not None else self.mesh.seal(trajectory)
        ref = ChunkRef(kind=ChunkKind.TRAJECTORY, digest=digest_of(raw), size_bytes=len(raw))
        return TrajectoryHeader(
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

    async def hand_in(self, header):
        """The verdict on one header."""
        reply = await self.mesh.ask(self.world.learner.node, RolloutBatch(headers=(header,)))
        return reply.notes[0].verdict


@asynccontextmanager
async def open_hostile(tmp_path, monkeypatch, seed=1, **settings):
    settings = {"groups_per_step": 4, "limit_steps": 3, **settings}
    async with open_world(tmp_path, monkeypatch, seed=seed, **settings) as world:
        world.start_learner()
        await world.wait(lambda: world.laws.commits)
        identity = identity_of("hostile")
        carrier = world.network.carrier(identity)
        mesh_settings = MeshSettings(
            run_id=RUN_ID,
            role=Role.ACTOR,
            learner=world.learner.node,
            name="hostile",
            bootstrap=(f"{world.learner.carrier.addresses()[0]}/p2p/{world.learner.node}",),
            incarnation_unix_ms=1,
        )
        store = ChunkStore(tmp_path / "hostile")
        opening = open_mesh(mesh_settings, identity, store, carrier=carrier, rng=Random(seed))
        async with opening as mesh:
            hostile = Hostile(world, mesh, identity)
            await hostile.listen(carrier)
            await world.wait(lambda: world.learner.node in mesh.connected(), within_s=5)
            yield world, hostile
            world.network.crash(identity.node)


def with_bad_signature(hostile, trajectory):
    other = Identity(b"\x07" * 32)
    return seal(trajectory, run_id=RUN_ID, sender=hostile.mesh.node, sign=other.sign)


def signed_by_another(hostile, trajectory):
    other = Identity(b"\x07" * 32)
    return seal(trajectory, run_id=RUN_ID, sender=other.node, sign=other.sign)


def of_another_run(hostile, trajectory):
    node, sign = hostile.mesh.node, hostile.identity.sign
    return seal(trajectory, run_id="sim-ffffffff", sender=node, sign=sign)


LIES = {
    "inflated reward": (lambda t: {"reward": t.reward + 0.5}, Reason.REWARD_MISMATCH),
    "a log-prob that is no number": (
        lambda t: {"logprobs": t.logprobs[:-4] + NAN},
        Reason.NON_FINITE,
    ),
    "another prompt": (
        lambda t: {"token_ids": t.token_ids[4:8] + t.token_ids[:4] + t.token_ids[8:]},
        Reason.WRONG_PROMPT,
    ),
    "another item": (lambda t: {"item_index": t.item_index + 1}, Reason.WRONG_PROMPT),
    "a version nobody has": (
        lambda t: {"segments": (msgspec.structs.replace(t.segments[0], version=999),)},
        Reason.FROM_THE_FUTURE,
    ),
    "another task": (lambda t: {"task_digest": bytes(32)}, Reason.WRONG_DIGESTS),
    "more tokens than leased": (
        lambda t: {
            "token_ids": t.token_ids + t.token_ids[-4:] * 8,
            "logprobs": t.logprobs + t.logprobs[-4:] * 8,
            "loss_mask": t.loss_mask + b"\x01" * 8,
        },
        Reason.OVER_LONG,
    ),
    "another run inside": (lambda t: {"run_id": "sim-ffffffff"}, Reason.MALFORMED),
}
FORGERIES = {
    "a bad signature": (with_bad_signature, Reason.BAD_SIGNATURE),
    "another's signature": (signed_by_another, Reason.WRONG_ACTOR),
    "an envelope of another run": (of_another_run, Reason.MALFORMED),
}


@pytest.mark.parametrize("seed", seeds())
async def test_lies_are_refused_with_their_reason_and_the_run_goes_on(
    autojump_clock, tmp_path, monkeypatch, seed
):
    async with open_hostile(tmp_path, monkeypatch, seed) as (world, hostile):
        leases, run_seed = await hostile.leases(len(LIES) + len(FORGERIES))
        world.start_actor("honest")
        for lease, (name, (change, reason)) in zip(leases, LIES.items(), strict=False):
            honest = hostile.honest(lease, run_seed)
            lie = msgspec.structs.replace(honest, **change(honest))
            assert await hostile.hand_in(hostile.header(lie)) is reason, name
            # One verdict a member: the truth, told afterwards, changes nothing.
            assert await hostile.hand_in(hostile.header(honest)) is reason, name
        for lease, (name, (forge, reason)) in zip(
            leases[len(LIES) :], FORGERIES.items(), strict=True
        ):
            honest = hostile.honest(lease, run_seed)
            header = hostile.header(honest, forge(hostile, honest))
            verdict = await hostile.hand_in(header)
            assert verdict is reason, f"{name}: {verdict}"
        await world.wait_end(within_s=200)
        summary = await world.laws.check_end(world)
        rows = {row.actor: row for row in summary.actors}
        assert rows[hostile.mesh.node].consumed == 0
        assert rows[hostile.mesh.node].refused == len(LIES) + len(FORGERIES)
        assert rows[hostile.mesh.node].duplicates == len(LIES)
        assert rows[world.daemons["honest"].node].refused == 0


async def test_what_others_generated_cannot_be_replayed(autojump_clock, tmp_path, monkeypatch):
    async with open_hostile(tmp_path, monkeypatch) as (world, hostile):
        (lease,), run_seed = await hostile.leases(1)
        world.start_actor("honest")
        await world.wait(lambda: hostile.overheard)
        stolen = hostile.overheard[0]
        assert await hostile.hand_in(stolen) is Reason.WRONG_ACTOR
        mine = hostile.honest(lease, run_seed)
        header = hostile.header(mine, stolen.inline)
        assert await hostile.hand_in(header) is Reason.WRONG_ACTOR
        # Its own, twice: the second time counts as a repeat and not as another member.
        again = hostile.header(hostile.honest(lease, run_seed, index=1))
        assert await hostile.hand_in(again) is Reason.ADMITTED
        assert await hostile.hand_in(again) is Reason.ADMITTED
        unknown = msgspec.structs.replace(mine, lease_id="f" * 32)
        assert await hostile.hand_in(hostile.header(unknown)) is Reason.UNKNOWN_LEASE
        async with world.ledger() as ledger:
            row = next(r for r in ledger.summary().actors if r.actor == hostile.mesh.node)
        assert (row.accepted, row.duplicates) == (1, 1)


async def test_a_claim_to_a_newer_version_gets_no_lease_and_other_digests_are_told_so(
    autojump_clock, tmp_path, monkeypatch
):
    async with open_hostile(tmp_path, monkeypatch) as (world, hostile):
        honest = LeaseRequest(
            version=PolicyVersion(0),
            groups_max=1,
            cohort=COHORT,
            tokenizer_digest=tokenizer_digest(world.model),
            template_digest=template_digest(world.model),
            task_digest=task_digest(world.task),
        )
        future = msgspec.structs.replace(honest, version=PolicyVersion(10_000))
        grant = await hostile.mesh.ask(world.learner.node, future)
        assert grant.leases == ()
        other = msgspec.structs.replace(honest, tokenizer_digest=bytes(32))
        with pytest.raises(PeerError) as caught:
            await hostile.mesh.ask(world.learner.node, other)
        assert caught.value.code == "wrong-digests"


async def test_an_announcement_by_an_actor_leads_nobody_astray(
    autojump_clock, tmp_path, monkeypatch
):
    async with open_hostile(tmp_path, monkeypatch) as (world, hostile):
        ref = hostile.mesh.store.add(ChunkKind.MANIFEST, b"poison")
        world.start_actor("honest")
        await world.wait_step(1)
        await hostile.mesh.gossip(
            Announce(
                version=PolicyVersion(500),
                manifest=ref,
                size_bytes=6,
                incarnation_unix_ms=2**50,
            )
        )
        await world.wait_end(within_s=200)
        await world.laws.check_end(world)
        assert max(world.weights) <= 8
        assert world.status("honest")["counters"]["forged_announces"] >= 1


async def test_the_goodbye_of_an_earlier_life_ends_nobodys_work(
    autojump_clock, tmp_path, monkeypatch
):
    async with open_hostile(tmp_path, monkeypatch) as (world, hostile):
        world.start_actor("honest")
        await world.wait_step(1)
        identity = Identity.load(world.folder / "learner" / "key")
        incarnation = next(
            member.heartbeat.incarnation_unix_ms
            for member in hostile.mesh.members()
            if member.node == world.learner.node
        )
        old = Goodbye(incarnation_unix_ms=incarnation - 1, why="run ended")
        raw = seal(old, run_id=RUN_ID, sender=identity.node, sign=identity.sign)
        await hostile.carrier.publish(topic_name(RUN_ID, "control"), raw)
        await world.wait_end(within_s=200)
        await world.laws.check_end(world)


async def test_a_heartbeat_that_was_padded_is_neither_kept_nor_passed_on(
    autojump_clock, tmp_path, monkeypatch
):
    async with open_hostile(tmp_path, monkeypatch) as (world, hostile):
        fat = identity_of("fat")
        beat = hostile.mesh.heartbeat()
        padded = msgspec.msgpack.encode({**msgspec.structs.asdict(beat), "padding": bytes(100_000)})
        to_sign = signed_bytes("heartbeat", RUN_ID, fat.node, padded)
        raw = msgspec.msgpack.encode(
            Envelope(
                v=1,
                kind="heartbeat",
                run_id=RUN_ID,
                sender=fat.node,
                payload=padded,
                signature=fat.sign(to_sign),
            )
        )
        opened = unseal(raw, run_id=RUN_ID, verify=verify, size_bytes_max=len(raw))
        assert opened.message == beat, "but for its length it is legal"
        await hostile.carrier.publish(topic_name(RUN_ID, "control"), raw)
        world.start_actor("honest")
        await world.wait_step(1)
        assert fat.node not in {row["node"] for row in world.status("learner")["members"]}
        await world.wait_end(within_s=200)
