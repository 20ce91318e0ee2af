"""Pulls leases, generates, scores, and announces until acknowledged.

One task asks for leases while there is room; each lease has a task of its own, so slow prompts
hold up nobody. What is generated leaves through the outbox. Once `stopping` is set no new lease
is taken, running ones get `drain_s`, and the rest is handed back. `actor.daemon` runs it beside
`actor.weights`.
"""

from __future__ import annotations

import structlog
import trio

from echo2_mesh import limits
from echo2_mesh.chunks import digest_of
from echo2_mesh.errors import LocalError, PeerError, UsageError
from echo2_mesh.mesh import Mesh
from echo2_mesh.wire.messages import (
    ChunkRef,
    Done,
    Lease,
    LeaseReturn,
    RolloutBatch,
    TrajectoryHeader,
    Verdicts,
)
from echo2_mesh.wire.types import ChunkKind, NodeId, StopReason
from echo2_node.actor.asking import Asker, unless
from echo2_node.actor.outbox import Outbox, Send, Tally
from echo2_node.actor.trajectories import make_trajectory
from echo2_node.actor.weights import Weights
from echo2_node.config import ActorConfig
from echo2_node.engines.port import EnginePort
from echo2_node.engines.protocol import Generation, GenerationRequest
from echo2_node.tasks.protocol import Task
from echo2_node.tokens import TokenCodec

log = structlog.get_logger()

ROOM_SHARE = 4
LEARNER_AWAY_RETRY_S = 1.0
STORE_RETRY_S = 10.0
"""After a trajectory could not be stored: how long no lease is taken."""
HAND_BACK_TIMEOUT_S = 2.0
ACKNOWLEDGE_TIMEOUT_S = 5.0
"""On leaving: how long announced trajectories may wait for their verdicts."""
KEEP_AFTER_LEASE_S = 60.0
"""A trajectory is announced this long after its lease ended; then it counts for nothing."""


class Rollouts:
    """From a lease to an acknowledged trajectory."""

    def __init__(
        self,
        mesh: Mesh,
        weights: Weights,
        *,
        config: ActorConfig,
        task: Task,
        codec: TokenCodec,
        admission: bytes,
    ) -> None:
        self._mesh = mesh
        self._weights = weights
        self._config = config
        self._task = task
        self._codec = codec
        self._asker = Asker(mesh, weights, admission=admission)
        self._held: dict[str, Lease] = {}
        self._moved = trio.Event()
        """A lease ended, or the outbox got shorter."""
        self._stirred = trio.Event()
        """The outbox has something new to send."""
        self._pause_until_s = float("-inf")
        self.outbox = Outbox()
        self.tally = Tally()
        self.completion_tokens = 0
        self.learner_away = False
        """The last question for leases had no answer."""
        self.last_error = ""
        self.stopping = trio.Event()
        self.run_ended = False
        """Nothing that is held or announced counts any more."""
        mesh.answer(Verdicts, self._hear_verdicts)

    @property
    def leases_held(self) -> int:
        return len(self._held)

    async def announce_for_ever(self) -> None:
        """Send what the outbox has due, until cancelled. Outlives engine restarts."""
        while True:
            waiting = len(self.outbox)
            sends = self.outbox.due(trio.current_time())
            if len(self.outbox) < waiting:
                self._move()
            for send in sends:
                await self._send(send)
            due_s = self.outbox.next_due_s()
            with trio.move_on_at(float("inf") if due_s is None else due_s):
                await self._stirred.wait()
            self._stirred = trio.Event()

    async def generate_for_ever(self, engine: EnginePort) -> None:
        """Take leases and work on them with `engine` until stopped.

        Errors:
            LocalError: the engine died; leases it held are handed back.
            RunEnded: nothing more is to be done.
        """
        try:
            async with trio.open_nursery() as nursery:
                await self._take_leases(engine, nursery)
                with trio.move_on_after(self._config.drain_s):
                    while self._held:
                        await self._moved.wait()
                nursery.cancel_scope.cancel()
        finally:
            left, self._held = tuple(self._held.values()), {}
            with trio.CancelScope(shield=True), trio.move_on_after(limits.CLOSE_TIMEOUT_S):
                await self._hand_back(left, "leaving")

    async def announce_the_rest(self) -> None:
        """Announce, for a bounded time, until the learner has recorded all of it."""
        if not len(self.outbox):
            return
        self.outbox.retry_now(trio.current_time())
        with trio.move_on_after(ACKNOWLEDGE_TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self.announce_for_ever)
                while len(self.outbox):
                    await self._moved.wait()
                nursery.cancel_scope.cancel()

    def _move(self) -> None:
        self._moved.set()
        self._moved = trio.Event()

    async def _take_leases(self, engine: EnginePort, nursery: trio.Nursery) -> None:
        while not self.stopping.is_set():
            room = self._config.groups_in_flight_max - len(self._held)
            if not self._worth_asking(room) or self.outbox.full():
                await unless(self.stopping, self._moved.wait)
                continue
            pause_s = self._pause_until_s - trio.current_time()
            if pause_s > 0:
                await self._pause(pause_s)
                continue
            held = tuple(sorted({*self._held, *self.outbox.lease_ids()}))
            grants = await self._asker.ask(engine.info.cohort, room, self.stopping, held=held)
            self.learner_away = not grants and not self.stopping.is_set()
            leases = tuple(lease for grant in grants for lease in grant.leases)
            if self.stopping.is_set():
                await self._hand_back(leases, "leaving")
            elif not grants:
                await self._pause(LEARNER_AWAY_RETRY_S)
            elif not leases:
                await self._pause(min(grant.retry_after_s for grant in grants))
            else:
                for lease in leases:
                    self._held[lease.lease_id] = lease
                    nursery.start_soon(self._work, engine, lease, grants[0].run_seed)

    def _worth_asking(self, room: int) -> bool:
        """A question for one group costs as much as one for many: wait for a quarter's room."""
        return room > 0 and ROOM_SHARE * room >= self._config.groups_in_flight_max

    async def _pause(self, seconds: float) -> None:
        with trio.move_on_after(seconds):
            await self.stopping.wait()

    async def _work(self, engine: EnginePort, lease: Lease, run_seed: int) -> None:
        """One lease, from prompt to outbox. A prompt the engine cannot take is handed back.

        Cancelled or with a dead engine it leaves the lease held, to be handed back with the rest.
        """
        expires_s = trio.current_time() + lease.ttl_s + KEEP_AFTER_LEASE_S
        generations: tuple[Generation, ...] = ()
        try:
            with trio.move_on_after(lease.ttl_s) as deadline:
                generations = await engine.generate(
                    GenerationRequest(
                        request_id=lease.lease_id,
                        prompt_ids=lease.prompt_ids,
                        indices=lease.indices,
                        sampling=lease.sampling,
                    )
                )
        except UsageError as error:
            log.warning("prompt refused", claim=lease.lease_id[:8], reason=str(error))
            await self._hand_back((lease,), str(error)[:200])
            return
        if not all(self._weights.trusts(one.segments) for one in generations):
            await self._hand_back((lease,), "weights refused")
            return
        if deadline.cancelled_caught:
            engine.cancel_nowait(lease.lease_id)
            log.info("lease ran out", claim=lease.lease_id[:8], seconds=lease.ttl_s)
        try:
            headers = [await self._finish(engine, lease, one, run_seed) for one in generations]
        except LocalError as error:  # the store's: a full disk
            self.last_error = error.what
            self._pause_until_s = trio.current_time() + STORE_RETRY_S
            log.warning("trajectory not stored", reason=str(error))
            await self._hand_back((lease,), error.what[:200])
            return
        for header in headers:
            self.outbox.add(header, trio.current_time(), expires_s=expires_s)
        if headers:
            self.last_error = ""
        self._stirred.set()
        self._held.pop(lease.lease_id, None)
        self._move()

    async def _finish(
        self, engine: EnginePort, lease: Lease, generation: Generation, run_seed: int
    ) -> TrajectoryHeader:
        """Score a generation and seal it. Payloads too large for gossip wait in the store."""
        installed = await self._weights.wait_first()
        item = self._task.item(run_seed, lease.item_index)
        score = self._task.score(
            item,
            self._codec.decode(generation.token_ids),
            finished=generation.stop_reason is StopReason.STOP,
        )
        trajectory = make_trajectory(
            lease,
            generation,
            run_id=self._mesh.run_id,
            reward=score.reward,
            metrics=score.metrics,
            cohort=engine.info.cohort,
            manifest=installed.manifest,
        )
        self.completion_tokens += len(generation.token_ids) // 4
        payload = self._mesh.seal(trajectory)
        inline = payload if len(payload) <= limits.INLINE_PAYLOAD_SIZE_BYTES_MAX else None
        if inline is None:
            ref = await trio.to_thread.run_sync(self._mesh.store.add, ChunkKind.TRAJECTORY, payload)
            self._mesh.store.pin(f"outbox {ref.digest.hex()}", (ref.digest,))
        else:
            ref = ChunkRef(
                kind=ChunkKind.TRAJECTORY, digest=digest_of(payload), size_bytes=len(payload)
            )
        versions = [span.version for span in generation.segments]
        return TrajectoryHeader(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            index=generation.index,
            version_min=min(versions),
            version_max=max(versions),
            tokens=len(trajectory.loss_mask),
            reward=score.reward,
            payload=ref,
            inline=inline,
        )

    async def _send(self, send: Send) -> None:
        batch = RolloutBatch(headers=send.headers)
        if not send.directly:
            await self._mesh.gossip(batch)
            return
        try:
            reply = await self._mesh.ask(self._mesh.learner, batch)
        except PeerError as error:
            log.debug("learner away", reason=str(error))
            return
        if isinstance(reply, Verdicts):
            self._take_verdicts(reply)

    async def _hear_verdicts(self, sender: NodeId, verdicts: Verdicts) -> Done:
        if sender != self._mesh.learner:
            raise PeerError("Only the learner gives verdicts.")
        self._take_verdicts(verdicts)
        return Done()

    def _take_verdicts(self, verdicts: Verdicts) -> None:
        done = {(header.lease_id, header.index) for header in self._release(verdicts)}
        self.tally.count(
            tuple(note for note in verdicts.notes if (note.lease_id, note.index) in done)
        )
        self._move()

    def _release(self, verdicts: Verdicts) -> tuple[TrajectoryHeader, ...]:
        headers = self.outbox.acknowledge(verdicts.notes)
        for header in headers:
            if header.inline is None:
                self._mesh.store.unpin(f"outbox {header.payload.digest.hex()}")
                self._mesh.store.remove(header.payload.digest)
        return headers

    async def _hand_back(self, leases: tuple[Lease, ...], why: str) -> None:
        for lease in leases:
            self._held.pop(lease.lease_id, None)
        self._move()
        if self.run_ended:
            return
        ids = [lease.lease_id for lease in leases]
        for start in range(0, len(ids), limits.LEASES_PER_GRANT_MAX):
            part = tuple(ids[start : start + limits.LEASES_PER_GRANT_MAX])
            message = LeaseReturn(lease_ids=part, why=why)
            try:
                await self._mesh.ask(self._mesh.learner, message, timeout_s=HAND_BACK_TIMEOUT_S)
            except (PeerError, LocalError) as error:
                log.debug("leases not handed back", reason=str(error))
