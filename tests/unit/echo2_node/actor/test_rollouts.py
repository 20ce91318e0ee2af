"""Leases become acknowledged trajectories; what cannot be finished goes back at once."""

import contextlib

import msgspec
import pytest
import trio

from echo2_mesh.chunks import digest_of
from echo2_mesh.errors import LocalError, PeerError, UsageError
from echo2_mesh.wire.codec import unseal
from echo2_mesh.wire.messages import LeaseRequest, Verdicts
from echo2_mesh.wire.types import ChunkKind, PolicyVersion, Reason
from echo2_node.actor.asking import RunEnded
from echo2_node.actor.outbox import HEADERS_MAX
from echo2_node.actor.rollouts import Rollouts
from echo2_node.actor.weights import Weights
from echo2_node.config import ActorConfig
from echo2_node.errors import leaves
from tests.actor_kit import RUN_ID, TASK, Engine, Mesh, Metrics, lease, open_tokenizer, publish


class Actor:
    """Rollouts with a proved version, ready to generate."""

    def __init__(self, folder, **config):
        self.mesh = Mesh(folder)
        self.codec = open_tokenizer(folder / "model")
        self.weights = Weights(self.mesh, Metrics())
        self.ready = publish(self.mesh, folder, 0)
        self.weights.newest = self.weights.installed = self.ready
        self.rollouts = Rollouts(
            self.mesh,
            self.weights,
            config=ActorConfig(**{"drain_s": 5.0, "groups_in_flight_max": 2, **config}),
            task=TASK,
            codec=self.codec,
            admission=b"proof",
        )

    async def engine(self, **settings):
        engine = Engine(self.mesh.store, **settings)
        await engine.install(self.ready.manifest_ref.digest)
        return engine

    @contextlib.asynccontextmanager
    async def generating(self, **settings):
        async with trio.open_nursery() as nursery:
            engine = await self.engine(**settings)
            nursery.start_soon(self.rollouts.announce_for_ever)
            nursery.start_soon(self.rollouts.generate_for_ever, engine)
            yield engine
            nursery.cancel_scope.cancel()


async def test_a_lease_becomes_signed_scored_trajectories_announced_by_gossip(
    autojump_clock, tmp_path
):
    actor = Actor(tmp_path)
    actor.mesh.grants = [(lease(1, actor.codec),)]
    async with actor.generating():
        await trio.sleep(2)
    (batch,) = actor.mesh.gossiped
    assert [header.index for header in batch.headers] == [0, 1]
    for header in batch.headers:
        assert header.payload.digest == digest_of(header.inline)
        opened = unseal(header.inline, run_id=RUN_ID, verify=lambda *_: True, size_bytes_max=2**20)
        assert opened.sender == actor.mesh.node
        assert opened.message.reward == header.reward
        assert opened.message.token_ids.startswith(lease(1, actor.codec).prompt_ids)
    first = next(message for message in actor.mesh.asked if isinstance(message, LeaseRequest))
    assert (first.groups_max, first.version, first.admission) == (2, 0, b"proof")


async def test_without_a_verdict_it_is_told_directly_until_there_is_one(autojump_clock, tmp_path):
    actor = Actor(tmp_path)
    actor.mesh.grants = [(lease(1, actor.codec),)]
    async with actor.generating():
        await trio.sleep(6)
        assert len(actor.rollouts.outbox) == 0
        assert actor.rollouts.tally.accepted == 2
        assert len(actor.mesh.announced()) == 4, "once by gossip, once directly"


async def test_a_pushed_verdict_is_taken_from_the_learner_alone(autojump_clock, tmp_path):
    actor = Actor(tmp_path)
    actor.mesh.grants = [(lease(1, actor.codec),)]
    async with actor.generating():
        await trio.sleep(1.5)
        notes = actor.mesh.notes(actor.mesh.announced())
        with pytest.raises(PeerError):
            await actor.mesh.handlers[Verdicts]("12D3stranger", Verdicts(notes=notes))
        await actor.mesh.handlers[Verdicts](actor.mesh.learner, Verdicts(notes=notes))
        await actor.mesh.handlers[Verdicts](actor.mesh.learner, Verdicts(notes=notes))
    assert actor.rollouts.tally.accepted == 2, "a repeated verdict counts once"


async def test_a_long_trajectory_waits_in_the_store_until_its_verdict(autojump_clock, tmp_path):
    actor = Actor(tmp_path)
    actor.mesh.verdict = Reason.STALE
    actor.mesh.grants = [(lease(1, actor.codec, indices=(0,), tokens_max=2000),)]
    async with actor.generating(step_s=0.0, endless=True):
        await trio.sleep(1.0)
        (header,) = actor.mesh.announced()
        assert header.inline is None
        assert header.payload.kind is ChunkKind.TRAJECTORY
        assert actor.mesh.store.has(header.payload.digest)
        await trio.sleep(5)
        assert not actor.mesh.store.has(header.payload.digest)
    assert actor.rollouts.tally.by_reason == {Reason.STALE: 1}


async def test_no_more_is_held_than_configured(autojump_clock, tmp_path):
    actor = Actor(tmp_path)
    actor.mesh.grants = [tuple(lease(n, actor.codec) for n in (1, 2)), (lease(3, actor.codec),)]
    async with actor.generating(step_s=10.0):
        await trio.sleep(5)
        assert actor.rollouts.leases_held == 2
        assert len(actor.mesh.grants) == 1, "it does not ask while it has no room"


async def test_a_newer_version_is_asked_with_before_the_older_question_is_answered(
    autojump_clock, tmp_path
):
    """Slots of an old version get fewer: a question must not wait on in its name."""
    actor = Actor(tmp_path)
    actor.mesh.hold_s = 100.0
    async with actor.generating() as engine, trio.open_nursery() as nursery:
        nursery.start_soon(actor.weights.follow, engine)
        await trio.sleep(1)
        await actor.mesh.send.send(publish(actor.mesh, tmp_path, 1))
        await trio.sleep(1)
        asked = [m.version for m in actor.mesh.asked if isinstance(m, LeaseRequest)]
        assert asked == [PolicyVersion(0), PolicyVersion(1)]
        nursery.cancel_scope.cancel()


async def test_a_dead_engine_gives_its_leases_back_at_once(autojump_clock, tmp_path):
    actor = Actor(tmp_path)
    actor.mesh.grants = [tuple(lease(n, actor.codec) for n in (1, 2))]
    engine = await actor.engine(step_s=1.0)

    async def kill():
        await trio.sleep(1.5)
        engine.die()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(kill)
        with pytest.raises(BaseExceptionGroup) as caught:
            await actor.rollouts.generate_for_ever(engine)
    assert all(isinstance(error, LocalError) for error in leaves(caught.value))
    assert sorted(actor.mesh.returned()) == [f"{n:032x}" for n in (1, 2)]
    assert actor.rollouts.leases_held == 0


async def test_on_stop_running_leases_finish_and_the_late_ones_go_back(autojump_clock, tmp_path):
    actor = Actor(tmp_path)
    short = lease(1, actor.codec, tokens_max=2)
    actor.mesh.grants = [(short, lease(2, actor.codec, tokens_max=60))]
    async with actor.generating(step_s=1.0, endless=True):
        await trio.sleep(1)
        actor.rollouts.stopping.set()
        await trio.sleep(6)
        assert actor.rollouts.leases_held == 0
    assert actor.mesh.returned() == [f"{2:032x}"]
    assert {header.lease_id for header in actor.mesh.announced()} == {short.lease_id}


async def test_a_grant_that_comes_after_the_stop_goes_back_untouched(autojump_clock, tmp_path):
    actor = Actor(tmp_path)
    async with actor.generating():
        await trio.sleep(1)
        actor.rollouts.stopping.set()
        actor.mesh.grants = [(lease(1, actor.codec),)]
        await trio.sleep(3)
    assert actor.mesh.returned() == [f"{1:032x}"]
    assert actor.mesh.announced() == []


async def test_stopping_needs_neither_learner_nor_proved_version(autojump_clock, tmp_path):
    actor = Actor(tmp_path)
    actor.mesh.away = True
    engine = await actor.engine()
    for installed in (actor.ready, None):
        actor.weights.installed = installed
        actor.rollouts.stopping = trio.Event()
        with trio.fail_after(10):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(actor.rollouts.generate_for_ever, engine)
                await trio.sleep(0.5)
                actor.rollouts.stopping.set()


async def test_what_nobody_heard_of_yet_is_announced_on_leaving(autojump_clock, tmp_path):
    actor = Actor(tmp_path)
    actor.mesh.grants = [(lease(1, actor.codec),)]
    engine = await actor.engine()
    with trio.move_on_after(1.5):
        await actor.rollouts.generate_for_ever(engine)
    assert actor.mesh.announced() == []
    await actor.rollouts.announce_the_rest()
    assert actor.rollouts.tally.accepted == 2


async def test_leaving_does_not_wait_for_a_learner_that_is_away(autojump_clock, tmp_path):
    actor = Actor(tmp_path)
    actor.mesh.grants = [(lease(1, actor.codec),)]
    engine = await actor.engine()
    with trio.move_on_after(1.5):
        await actor.rollouts.generate_for_ever(engine)
    actor.mesh.away = True
    with trio.fail_after(6):
        await actor.rollouts.announce_the_rest()


async def test_a_full_outbox_takes_no_leases_until_the_learner_has_answered(
    autojump_clock, tmp_path
):
    actor = Actor(tmp_path)
    actor.mesh.grants = [(lease(1, actor.codec, indices=(0,)),)]
    async with actor.generating():
        await trio.sleep(1)
        (header,) = actor.mesh.announced()
        for index in range(1, HEADERS_MAX + 1):
            one = msgspec.structs.replace(header, index=index)
            actor.rollouts.outbox.add(one, trio.current_time() + 20, expires_s=500.0)
        await trio.sleep(2.1)
        asked = len(actor.mesh.asked)
        await trio.sleep(15)
        assert not any(isinstance(m, LeaseRequest) for m in actor.mesh.asked[asked:])
        await trio.sleep(60)
        assert any(isinstance(m, LeaseRequest) for m in actor.mesh.asked[asked:])


@pytest.mark.parametrize(
    ("code", "error"),
    [("run-ended", RunEnded), ("not-admitted", UsageError), ("wrong-digests", UsageError)],
)
async def test_refusals_that_waiting_cannot_mend_end_the_generating(
    autojump_clock, tmp_path, code, error
):
    actor = Actor(tmp_path)

    async def refuse(node, message, *, timeout_s=1.0):
        await trio.lowlevel.checkpoint()
        raise PeerError("No.", code=code)

    actor.mesh.ask = refuse
    with pytest.raises(BaseExceptionGroup) as caught:
        await actor.rollouts.generate_for_ever(await actor.engine())
    assert [type(leaf) for leaf in leaves(caught.value)] == [error]


async def test_a_prompt_that_the_engine_cannot_take_goes_back(autojump_clock, tmp_path):
    actor = Actor(tmp_path)
    actor.mesh.grants = [(lease(1, actor.codec, tokens_max=5000), lease(2, actor.codec))]
    async with actor.generating():
        await trio.sleep(2)
    assert actor.mesh.returned() == [f"{1:032x}"]
    assert {header.lease_id for header in actor.mesh.announced()} == {f"{2:032x}"}


async def test_a_full_disk_pauses_the_leases_and_says_so(autojump_clock, tmp_path, monkeypatch):
    actor = Actor(tmp_path, groups_in_flight_max=1)
    long = lease(1, actor.codec, indices=(0,), tokens_max=2000)
    actor.mesh.grants = [(long,), (lease(2, actor.codec),)]

    def full(kind, data):
        raise LocalError("The disk is full.")

    monkeypatch.setattr(actor.mesh.store, "add", full)
    async with actor.generating(step_s=0.0, endless=True):
        await trio.sleep(5)
        assert actor.rollouts.last_error == "The disk is full."
        assert actor.mesh.returned() == [long.lease_id]
        assert len(actor.mesh.grants) == 1
        await trio.sleep(15)
        assert actor.rollouts.last_error == ""
