"""A desk and several actors on a simulated network with loss, repeats, churn and one liar."""

from __future__ import annotations

import random

import msgspec
import pytest
import trio

from echo2_mesh.chunks import digest_of
from echo2_mesh.errors import PeerError
from echo2_mesh.testing import open_fleet
from echo2_mesh.wire.messages import (
    ChunkRef,
    Done,
    LeaseGrant,
    RolloutBatch,
    TrajectoryHeader,
    Verdicts,
)
from echo2_mesh.wire.types import ChunkKind, PolicyVersion, Reason
from echo2_node.learner.desk import RolloutDesk
from echo2_node.learner.ledger import Ledger
from tests.desk_kit import MANIFEST, Run, lease_request, make_trajectory

STEPS = 8


class FleetActor:
    """Leases, pretends to generate, announces by gossip and then directly, until acknowledged."""

    def __init__(self, fleet, node, run, rng, *, liar=False):
        self.mesh, self.run, self.rng, self.liar = node.mesh, run, rng, liar
        self.learner = fleet.learner.node
        self.unsaid: dict[tuple[str, int], TrajectoryHeader] = {}
        self.verdicts: list[Reason] = []
        self.version = PolicyVersion(0)
        self.mesh.answer(Verdicts, self.hear)

    async def hear(self, _sender, verdicts):
        for note in verdicts.notes:
            if self.unsaid.pop((note.lease_id, note.index), None) is not None:
                self.verdicts.append(note.verdict)
        return Done()

    async def work(self, versions):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.announce)
            while True:
                self.version = versions[-1]
                try:
                    request = lease_request(self.run, version=self.version, groups_max=3)
                    grant = await self.mesh.ask(self.learner, request)
                except PeerError:
                    await trio.sleep(1.0)
                    continue
                assert isinstance(grant, LeaseGrant)
                for lease in grant.leases:
                    nursery.start_soon(self.generate, lease)
                await trio.sleep(grant.retry_after_s + 0.5)

    async def generate(self, lease):
        await trio.sleep(self.rng.uniform(0.2, 6.0))
        for index in lease.indices:
            trajectory = make_trajectory(self.run, lease, index, right=self.rng.random() < 0.5)
            if self.liar:
                trajectory = msgspec.structs.replace(trajectory, reward=1.0)
            sealed = self.mesh.seal(trajectory)
            inline = self.rng.random() < 0.5
            ref = ChunkRef(
                kind=ChunkKind.TRAJECTORY, digest=digest_of(sealed), size_bytes=len(sealed)
            )
            if not inline:
                self.mesh.store.add(ChunkKind.TRAJECTORY, sealed)
            self.unsaid[(lease.lease_id, index)] = TrajectoryHeader(
                lease_id=lease.lease_id,
                group_id=lease.group_id,
                index=index,
                version_min=lease.version_min,
                version_max=lease.version_min,
                tokens=len(trajectory.loss_mask),
                reward=trajectory.reward,
                payload=ref,
                inline=sealed if inline else None,
            )

    async def announce(self):
        while True:
            await trio.sleep(1.0)
            headers = tuple(self.unsaid.values())[:16]
            if not headers:
                continue
            message = RolloutBatch(headers=headers)
            if self.rng.random() < 0.5:
                await self.mesh.gossip(message)
                continue
            try:
                reply = await self.mesh.ask(self.learner, message)
            except PeerError:
                continue
            await self.hear(self.learner, reply)


async def learn(run, mesh, path, versions, *, steps, first):
    """A learner without a model: every batch is one step, every step is published."""
    ages = []
    with Ledger.open(path) as ledger:
        if first > 1:
            ledger.roll_back(first - 1)
        desk = RolloutDesk(
            run.config,
            mesh,
            ledger,
            task=run.task,
            codec=run.codec,
            model_folder=run.model,
            rng=random.Random(first),
            inline_work=True,
        )
        async with trio.open_nursery() as nursery:
            await nursery.start(desk.run)
            version = PolicyVersion(ledger.version_max() + 1)
            for step in range(first, first + steps):
                await desk.published(version, MANIFEST)
                versions.append(version)
                batch = await desk.next_batch(version)
                assert desk.groups_alive <= desk.groups_alive_max
                await trio.sleep(0.5)
                await desk.trained(batch, step=step, version_before=version, skipped=False)
                ages += batch.staleness_steps
                version = PolicyVersion(version + 1)
            nursery.cancel_scope.cancel()  # as a kill does: nothing is closed or flushed
    return ages


@pytest.mark.parametrize("seed", range(3))
async def test_a_fleet_with_loss_churn_and_a_liar_trains_on_and_the_books_add_up(
    seed, autojump_clock, tmp_path
):
    rng = random.Random(seed)
    run = Run(tmp_path, run_id="run-1", limit_steps=2, lease_ttl_s=20.0, group_size=3)
    path = tmp_path / "ledger.sqlite"
    with trio.fail_after(3600):
        async with open_fleet(tmp_path, seed=seed, loss=0.1) as fleet:
            learner = await fleet.start("learner")
            versions: list[PolicyVersion] = []
            actors = {}
            async with trio.open_nursery() as nursery:

                async def start(name, *, liar=False):
                    node = await fleet.start(name)
                    actor = FleetActor(fleet, node, run, random.Random(name), liar=liar)
                    actors[name] = actor
                    while not versions:
                        await trio.sleep(0.1)
                    nursery.start_soon(actor.work, versions)

                async def churn():
                    await trio.sleep(rng.uniform(5, 15))
                    await fleet.crash("ann")
                    await start("late")

                for name in ("ann", "bob", "eve"):
                    nursery.start_soon(lambda name=name: start(name, liar=name == "eve"))
                nursery.start_soon(churn)
                ages = await learn(run, learner.mesh, path, versions, steps=STEPS, first=1)
                # The learner is killed and resumes from a checkpoint two steps back.
                await fleet.crash("learner")
                learner = await fleet.start("learner", know=tuple(fleet.nodes))
                ages += await learn(run, learner.mesh, path, versions, steps=4, first=STEPS - 1)
                nursery.cancel_scope.cancel()
    assert max(ages) <= 2
    with Ledger.open(path) as ledger:
        assert ledger.verify() == []
        summary = ledger.summary()
    assert (summary.steps, summary.steps_undone) == (STEPS + 2, 2)
    assert summary.consumed == summary.steps * 2 * 3
    assert Reason.REWARD_MISMATCH in actors["eve"].verdicts
    assert summary.refusals["reward_mismatch"] > 0
    assert Reason.ADMITTED in actors["late"].verdicts
