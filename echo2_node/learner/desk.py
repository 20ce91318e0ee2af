"""The desk: everything between mesh messages and a training batch.

Wires offers, intake, clerk and journal over a mesh: it answers lease requests, judges what actors
announce, wakes the clerk, and hands whole batches to the learner, oldest version first. It
decides nothing itself: the clerk decides, the ledger remembers. `learner.daemon` owns it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import structlog
import trio

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import LocalError, PeerError, UsageError
from echo2_mesh.wire.messages import (
    ChunkRef,
    Done,
    LeaseGrant,
    LeaseRequest,
    LeaseReturn,
    Message,
    Refusal,
    RolloutBatch,
    VerdictNote,
    Verdicts,
)
from echo2_mesh.wire.types import Digest, NodeId, PolicyVersion, Reason
from echo2_node.config import RunConfig
from echo2_node.learner.acks import Acknowledger
from echo2_node.learner.intake import Intake
from echo2_node.learner.keeper import Batch, Keeper, NoSignal
from echo2_node.learner.ledger import Ledger
from echo2_node.learner.offers import Offers, Terms
from echo2_node.learner.prompts import Prompts
from echo2_node.scheduler import admission, events
from echo2_node.scheduler.admission import Rules
from echo2_node.tasks.protocol import Task
from echo2_node.tasks.registry import task_digest
from echo2_node.tokens import TokenCodec, template_digest, tokenizer_digest

__all__ = ["Batch", "DeskMesh", "NoSignal", "RolloutDesk", "rules_of"]

log = structlog.get_logger()

GOSSIP_BATCHES_MAX = 128
"""Announcements waiting for intake; more are dropped, actors announce again."""
INTAKE_TASKS = 96
INTAKE_PER_ACTOR_MAX = 24
"""Announcements of one actor at once: its payloads that never come block nobody else's."""
ANSWER_TIMEOUT_S = 12.0
"""An announcement made as a question is answered by then, with the verdicts that exist."""
GONE_CHECK_INTERVAL_S = 1.0
FLUSH_TIMEOUT_S = 10.0
_STRAY = (Reason.UNKNOWN_LEASE, Reason.WRONG_ACTOR)

assert ANSWER_TIMEOUT_S < limits.ASK_TIMEOUT_S


class DeskMesh(Protocol):
    """What the desk needs of `echo2_mesh.mesh.Mesh`."""

    run_id: str
    store: ChunkStore

    async def ask(self, node: NodeId, message: Any, *, timeout_s: float = ...) -> Any: ...

    def answer(self, kind: Any, handler: Callable[[NodeId, Any], Awaitable[Message]]) -> None: ...

    def hear(self, kind: Any, handler: Callable[[NodeId, Any], Awaitable[None]]) -> None: ...

    async def fetch_blob(
        self, ref: ChunkRef, holders: Sequence[NodeId], *, timeout_s: float
    ) -> None: ...

    def members(self) -> Sequence[Any]: ...


def rules_of(config: RunConfig) -> Rules:
    """The clerk's settings.

    Raises:
        UsageError: weights would be published so rarely that no rollout could be fresh.
    """
    staleness, rollout = config.staleness, config.rollout
    if staleness.kappa_steps > staleness.limit_steps + 1:
        raise UsageError(
            f"staleness.publish_every_steps = {staleness.kappa_steps} is more than "
            f"staleness.limit_steps + 1 = {staleness.limit_steps + 1}: every rollout would be "
            "stale before new weights are published.",
            "Publish more often or allow more staleness.",
        )
    return Rules(
        groups_per_step=rollout.groups_per_step,
        group_size=rollout.group_size,
        staleness_limit_steps=staleness.limit_steps,
        policy=staleness.policy,
        lease_ttl_s=rollout.lease_ttl_s,
        refills_per_group_max=rollout.refills_per_group_max,
        zero_variance_groups_max=rollout.zero_variance_groups_max,
    )


class RolloutDesk:
    """See the module. Takes over the ledger's unfinished groups and leases when it starts.

    Args:
        model_folder: names tokenizer and template, whose digests actors must share.
        admission_secret: None where the run is open.
        rng: lease ids and sampling seeds; the default is seeded by the system.
        inline_work: verify, score and record on the event loop: for virtual clocks.

    Errors:
        UsageError: the ledger belongs to another run, or the settings exclude fresh rollouts.
        LocalError: the ledger is damaged.
    """

    def __init__(
        self,
        config: RunConfig,
        mesh: DeskMesh,
        ledger: Ledger,
        *,
        task: Task,
        codec: TokenCodec,
        model_folder: Path,
        admission_secret: bytes | None = None,
        rng: random.Random | None = None,
        inline_work: bool = False,
    ) -> None:
        self._mesh = mesh
        self._ledger = ledger
        self._rules = rules_of(config)
        ledger.begin(
            run_id=mesh.run_id,
            seed=config.run.seed,
            staleness_limit=self._rules.staleness_limit_steps,
            groups_per_step=self._rules.groups_per_step,
            group_size=self._rules.group_size,
        )
        self._terms = Terms(
            run_id=mesh.run_id,
            tokenizer_digest=tokenizer_digest(model_folder),
            template_digest=template_digest(model_folder),
            task_digest=task_digest(task),
            admission_secret=admission_secret,
        )
        self._offers: Offers
        self._keeper = Keeper(
            self._rules,
            ledger,
            run_id=mesh.run_id,
            rng=rng or random.Random(),
            granted=lambda granted: self._offers.deliver(granted),
            inline_work=inline_work,
        )
        self._journal, self._clerk = self._keeper.journal, self._keeper.clerk
        prompts = Prompts(
            task,
            seed=config.run.seed,
            rollout=config.rollout,
            encode_prompt=codec.encode_prompt,
            decode=codec.decode,
        )
        self._offers = Offers(self._terms, prompts, self._keeper)
        self._intake = Intake(
            self._terms,
            prompts,
            self._keeper,
            mesh,
            vocabulary=codec.vocabulary,
            eos_ids=codec.eos_ids,
            inline_work=inline_work,
        )
        self._acks = Acknowledger(
            lambda node, verdicts, timeout_s: mesh.ask(node, verdicts, timeout_s=timeout_s)
        )
        self._announced: trio.MemorySendChannel[tuple[NodeId, RolloutBatch]] | None = None
        self._in_intake: Counter[NodeId] = Counter()
        self._incarnations: dict[NodeId, int] = {}
        """Of actors with leases: the life in which they last asked for some."""

    # --- for the learner's loop -----------------------------------------------------------------

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serve actors until cancelled.

        Errors:
            sqlite3.IntegrityError, AssertionError: our bugs.
        """
        self._keeper.restore()
        self._mesh.answer(LeaseRequest, self._answer_request)
        self._mesh.answer(LeaseReturn, self._answer_return)
        self._mesh.answer(RolloutBatch, self._answer_batch)
        self._mesh.hear(RolloutBatch, self._hear_batch)
        send, receive = trio.open_memory_channel[tuple[NodeId, RolloutBatch]](GOSSIP_BATCHES_MAX)
        self._announced = send
        try:
            async with send, receive, trio.open_nursery() as nursery:
                nursery.start_soon(self._journal.run)
                nursery.start_soon(self._acks.run)
                nursery.start_soon(self._keeper.keep_alarms)
                nursery.start_soon(self._watch_members)
                for _ in range(INTAKE_TASKS):
                    nursery.start_soon(self._take_announcements, receive)
                task_status.started()
        finally:
            # The mesh outlives the desk by a moment; what arrives then is asked for again later.
            self._announced = None

    async def next_batch(self, version: PolicyVersion) -> Batch:
        """Wait for P whole, varied, fresh groups: those with the oldest versions.

        Errors:
            NoSignal: too many groups in a row had equal rewards.
        """
        return await self._keeper.next_batch(version)

    async def trained(
        self, batch: Batch, *, step: int, version_before: PolicyVersion, skipped: bool
    ) -> None:
        """The batch was consumed by `step`: record it, once, durably."""
        self.trained_nowait(batch, step=step, version_before=version_before, skipped=skipped)
        await self.wait_recorded()

    def trained_nowait(
        self, batch: Batch, *, step: int, version_before: PolicyVersion, skipped: bool
    ) -> None:
        """Begin to record it; `next_batch` and `wait_recorded` wait until it is durable."""
        self._keeper.feed(
            events.Trained(
                step=step,
                group_ids=batch.group_ids,
                version_before=version_before,
                skipped=skipped,
            )
        )
        for age in batch.staleness_steps:
            self._keeper.tallies.count_age(age)

    async def wait_recorded(self) -> None:
        """Everything decided so far is in the ledger, durably."""
        await self._journal.wait_written()

    async def published(self, version: PolicyVersion, manifest: Digest) -> None:
        """Actors may have `version` from now on; recorded."""
        self._keeper.feed(events.Published(version=version, manifest=manifest))
        await self._journal.wait_written()

    async def checkpointed(self, step: int) -> None:
        """A checkpoint that stays has step `step`: earlier payloads are no longer needed."""
        await self._journal.wait_written()
        try:
            await self._journal.read(lambda: self._ledger.covered(step))
        except LocalError as error:
            log.warning("payloads not deleted", reason=str(error))

    async def close(self, *, ended: bool) -> None:
        """Write what is still to be written; with `ended`, end all leases first.

        Errors:
            LocalError: the ledger could not be written in time.
        """
        if ended:
            self._keeper.feed(events.Ended())
        with trio.move_on_after(FLUSH_TIMEOUT_S) as scope:
            await self._journal.wait_written()
        if scope.cancelled_caught:
            raise LocalError(
                f"The ledger {self._ledger.path} could not be written before the end: "
                f"{self._journal.last_error or 'its disk is too slow'}.",
                "What was recorded before is unharmed; free space and continue with --resume.",
            )

    @property
    def groups_alive(self) -> int:
        return self._clerk.shelf.alive

    @property
    def groups_alive_max(self) -> int:
        return admission.alive_max(self._rules)

    def take_reward_mean(self) -> float | None:
        """Mean reward of what was admitted since the last call, equal-reward groups included."""
        return self._keeper.tallies.take_reward_mean()

    @property
    def zero_variance_groups(self) -> int:
        """Groups dropped in this run because their rewards were equal."""
        return self._keeper.tallies.zero_variance_groups

    @property
    def accepted(self) -> int:
        return self._keeper.tallies.accepted

    @property
    def refused(self) -> int:
        return self._keeper.tallies.refused

    @property
    def refusals(self) -> dict[str, int]:
        """Trajectories refused, by reason."""
        return dict(self._keeper.tallies.refusals)

    @property
    def commonest_refusal(self) -> Reason | None:
        return self._keeper.tallies.commonest_refusal

    @property
    def verdicts_by_actor(self) -> dict[str, dict[str, int]]:
        """Verdicts given to each actor, by reason; `admitted` is one of them."""
        return self._keeper.tallies.by_actor

    @property
    def staleness_histogram(self) -> dict[str, int]:
        """Consumed trajectories by age in steps."""
        return {str(age): count for age, count in sorted(self._keeper.tallies.ages.items())}

    @property
    def last_error(self) -> str:
        """Why the ledger cannot be written at the moment; empty when it can."""
        return self._journal.last_error

    # --- actors ---------------------------------------------------------------------------------

    async def _answer_request(self, actor: NodeId, request: LeaseRequest) -> LeaseGrant | Refusal:
        if self._clerk.ended:
            return Refusal(code="run-ended", text="The run is over. Thank you for your work.")
        self._check_open()
        self._end_leases_of_the_dead()
        return await self._offers.answer(actor, request)

    def _check_open(self) -> None:
        if self._announced is None:
            raise PeerError("The learner is closing.", "Ask again when it is back.")

    async def _answer_return(self, actor: NodeId, message: LeaseReturn) -> Done:
        self._check_open()
        self._keeper.feed(events.Returned(actor=actor, lease_ids=message.lease_ids))
        with trio.move_on_after(ANSWER_TIMEOUT_S):
            await self._journal.wait_written()
        log.info("leases handed back", peer=actor, count=len(message.lease_ids))
        return Done()

    async def _answer_batch(self, actor: NodeId, message: RolloutBatch) -> Verdicts:
        self._check_open()
        notes: tuple[VerdictNote, ...] = ()
        with trio.move_on_after(ANSWER_TIMEOUT_S):
            notes = await self._intake.judge(actor, message.headers)
        return Verdicts(notes=notes)

    async def _hear_batch(self, actor: NodeId, message: RolloutBatch) -> None:
        if self._announced is None:
            return
        try:
            if self._in_intake[actor] >= INTAKE_PER_ACTOR_MAX:
                raise trio.WouldBlock
            self._announced.send_nowait((actor, message))
            self._in_intake[actor] += 1
        except (trio.WouldBlock, trio.ClosedResourceError, trio.BrokenResourceError):
            self._keeper.tallies.announcements_dropped += 1

    async def _take_announcements(
        self, announcements: trio.MemoryReceiveChannel[tuple[NodeId, RolloutBatch]]
    ) -> None:
        async for actor, message in announcements:
            notes: tuple[VerdictNote, ...] = ()
            with trio.move_on_after(ANSWER_TIMEOUT_S):
                notes = await self._intake.judge(actor, message.headers)
            self._in_intake -= Counter((actor,))
            # Strangers are not looked for to be told: who asks directly is answered directly.
            self._acks.add(actor, [note for note in notes if note.verdict not in _STRAY])

    async def _watch_members(self) -> None:
        """Leases of actors that are gone for good need not run to their end."""
        while True:
            await trio.sleep(GONE_CHECK_INTERVAL_S)
            self._end_leases_of_the_dead()

    def _end_leases_of_the_dead(self) -> None:
        """An actor that is gone, or lives anew since, knows nothing of the leases it had."""
        holders = {held.actor for held in self._clerk.book.live.values()}
        known = self._incarnations
        self._incarnations = {}
        for member in self._mesh.members():
            node, incarnation = member.node, member.heartbeat.incarnation_unix_ms
            if node not in holders:
                continue
            gone = member.standing.value == "gone"
            if gone or incarnation > known.get(node, incarnation):
                log.info("actor gone or restarted, its leases end", peer=node)
                self._keeper.feed(events.Departed(actor=node))
            else:
                self._incarnations[node] = incarnation
