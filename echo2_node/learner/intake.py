"""Intake: from an announced header to a verdict that is recorded, then acknowledged.

In order, cheapest first: is the lease known and the sender its holder; was it judged already; are
the payload's bytes what the header names; is it signed by the holder; does it fit the lease
(`scheduler.examination`); does the reward stand. The actor's reward is compared and never used.
The clerk gives the verdict; this room carries bytes and numbers to it. Called by the desk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import msgspec
import structlog
import trio

from echo2_mesh import identity, limits
from echo2_mesh.chunks import ChunkStore, digest_of
from echo2_mesh.errors import LocalError, PeerError
from echo2_mesh.wire.codec import unseal
from echo2_mesh.wire.messages import ChunkRef, Trajectory, TrajectoryHeader, VerdictNote
from echo2_mesh.wire.types import Digest, NodeId, PolicyVersion, Reason
from echo2_node.learner.keeper import Keeper
from echo2_node.learner.offers import Terms
from echo2_node.learner.prompts import Prompt, Prompts
from echo2_node.learner.threads import Threads
from echo2_node.scheduler import events
from echo2_node.scheduler.examination import Expected, examine
from echo2_node.scheduler.leases import HeldLease
from echo2_node.scheduler.records import OpenLease

log = structlog.get_logger()

REWARD_TOLERANCE = 1e-6
PULLS_MAX = 32
"""Payloads fetched at once."""
PULLS_PER_ACTOR_MAX = 4
"""Of one actor: who announces and does not deliver keeps nobody else waiting."""
PULL_TIMEOUT_S = 10.0
THREADS = 2
"""Examinations at once."""
BUSY_MAX = 8192
"""Trajectories in examination at once; more are left unanswered and come again."""
STRAYS_PER_MESSAGE_MAX = 16
"""Refusals recorded for one message about leases that are not its sender's; the rest is ignored."""
PAYLOAD_OVERHEAD_BYTES = 64 * limits.KIB
"""What an envelope may hold beside 9 bytes a token: segments, metrics, digests."""


class BlobMesh(Protocol):
    """What the intake needs of a mesh."""

    store: ChunkStore

    async def fetch_blob(
        self, ref: ChunkRef, holders: Sequence[NodeId], *, timeout_s: float
    ) -> None: ...


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What examination says of one payload. Only a sound one has a trajectory."""

    verdict: Reason
    why: str = ""
    trajectory: Trajectory | None = None
    reward: float = 0.0


class Intake:
    """Examines headers and hands the findings to the clerk.

    Args:
        vocabulary: token ids run from 0 to below this.
        eos_ids: tokens that end a completion.
    """

    def __init__(
        self,
        terms: Terms,
        prompts: Prompts,
        keeper: Keeper,
        mesh: BlobMesh,
        *,
        vocabulary: int,
        eos_ids: frozenset[int],
        inline_work: bool = False,
    ) -> None:
        self._terms = terms
        self._prompts = prompts
        self._keeper = keeper
        self._journal = keeper.journal
        self._clerk = keeper.clerk
        self._mesh = mesh
        self._vocabulary = vocabulary
        self._eos_ids = eos_ids
        self._threads = Threads(THREADS, inline=inline_work)
        self._pulls = trio.CapacityLimiter(PULLS_MAX)
        self._pulls_of: dict[NodeId, trio.CapacityLimiter] = {}
        self._busy: set[tuple[str, int]] = set()

    async def judge(
        self, sender: NodeId, headers: Sequence[TrajectoryHeader]
    ) -> tuple[VerdictNote, ...]:
        """Verdicts on `headers`, recorded. Headers that could not be judged now have none."""
        await self._journal.wait_room()
        notes: list[VerdictNote] = []
        mine = await self._sift(sender, headers)
        async with trio.open_nursery() as nursery:
            small = [header for header in mine if header.inline is not None]
            nursery.start_soon(self._judge_inline, sender, small, notes)
            for header in mine:
                if header.inline is None:
                    nursery.start_soon(self._judge_pulled, sender, header, notes)
        await self._journal.wait_written()
        return tuple(notes)

    async def _sift(
        self, sender: NodeId, headers: Sequence[TrajectoryHeader]
    ) -> list[TrajectoryHeader]:
        """The headers of the sender's own leases, and a few of the others: each costs a record."""
        mine: list[TrajectoryHeader] = []
        strays = 0
        for header in headers:
            held = self._clerk.book.find(header.lease_id)
            if held is None and strays < STRAYS_PER_MESSAGE_MAX:
                held = await self._lease(header.lease_id)
            if held is None or held.actor != sender:
                strays += 1
                if strays > STRAYS_PER_MESSAGE_MAX:
                    continue
            mine.append(header)
        return mine

    def _claim(self, header: TrajectoryHeader) -> bool:
        """False while the same trajectory is examined on behalf of another message.

        Asked once the sender is known to hold the lease: nobody else can claim what is its own.
        """
        key = (header.lease_id, header.index)
        if key in self._busy or len(self._busy) >= BUSY_MAX:
            return False
        self._busy.add(key)
        return True

    async def _judge_inline(
        self, sender: NodeId, headers: Sequence[TrajectoryHeader], notes: list[VerdictNote]
    ) -> None:
        """All small ones in one visit to a worker thread."""
        open_: list[tuple[TrajectoryHeader, bytes, Expected, Prompt]] = []

        def work() -> list[Finding]:
            return [
                self._examine(sender, header, raw, expected, prompt)
                for header, raw, expected, prompt in open_
            ]

        try:
            for header in headers:
                found = await self._expected(sender, header, notes)
                if found is not None:
                    open_.append((header, header.inline or b"", *found))
            findings = await self._threads.run(work) if open_ else []
            for (header, raw, _, _), finding in zip(open_, findings, strict=True):
                notes.append(self._hand_in(sender, header, finding, raw))
        finally:
            self._busy.difference_update((one[0].lease_id, one[0].index) for one in open_)

    async def _judge_pulled(
        self, sender: NodeId, header: TrajectoryHeader, notes: list[VerdictNote]
    ) -> None:
        """One large one: fetch it from its announcer first."""
        found = await self._expected(sender, header, notes)
        if found is None:
            return
        expected, prompt = found
        try:
            tokens_max = len(prompt.token_ids) // 4 + expected.sampling.tokens_max
            if header.payload.size_bytes > 9 * tokens_max + PAYLOAD_OVERHEAD_BYTES:
                why = f"{header.payload.size_bytes} bytes"
                finding = Finding(verdict=Reason.OVER_LONG, why=why)
                notes.append(self._hand_in(sender, header, finding, b""))
                return
            raw = await self._pull(sender, header.payload)
            if raw is None:
                return
            finding = await self._threads.run(self._examine, sender, header, raw, expected, prompt)
            notes.append(self._hand_in(sender, header, finding, raw))
        finally:
            self._busy.discard((header.lease_id, header.index))

    async def _pull(self, sender: NodeId, ref: ChunkRef) -> bytes | None:
        """A payload from its announcer, a few of one actor at once; None where it cannot be had."""
        own = self._pulls_of.setdefault(sender, trio.CapacityLimiter(PULLS_PER_ACTOR_MAX))
        try:
            async with own, self._pulls:
                # What lies here already is not the actor's to have deleted: a chunk of weights.
                known = await self._threads.run(self._mesh.store.has, ref.digest)
                await self._mesh.fetch_blob(ref, (sender,), timeout_s=PULL_TIMEOUT_S)
                return await self._threads.run(self._take_blob, ref.digest, known)
        except (PeerError, LocalError, KeyError) as error:
            # No verdict: the actor announces again, until its lease ends.
            log.debug("payload unavailable", peer=sender, reason=str(error))
            return None
        finally:
            if not own.borrowed_tokens and not own.statistics().tasks_waiting:
                self._pulls_of.pop(sender, None)

    async def _expected(
        self, sender: NodeId, header: TrajectoryHeader, notes: list[VerdictNote]
    ) -> tuple[Expected, Prompt] | None:
        """What the lease promises; None where the header alone settles the matter."""
        held = await self._lease(header.lease_id)
        if (
            held is None
            or held.actor != sender
            or header.index not in held.indices
            or header.index in held.verdicts
            or held.ended
            or self._clerk.ended
        ):
            # The clerk knows the reason; nothing of the payload is needed for it.
            notes.append(self._hand_in(sender, header, Finding(verdict=Reason.LATE), b""))
            return None
        if not self._claim(header):
            return None
        prompt = self._prompts.get(held.item_index)
        lease = OpenLease(
            lease_id=held.lease_id,
            group_id=held.group_id,
            actor=held.actor,
            indices=held.indices,
            item_index=held.item_index,
            version_min=held.version_min,
            seed=held.seed,
        )
        expected = Expected(
            run_id=self._terms.run_id,
            lease=lease,
            prompt_ids=prompt.token_ids,
            sampling=self._prompts.sampling(lease),
            version_newest=self._clerk.newest_legal_version(),
            tokenizer_digest=self._terms.tokenizer_digest,
            template_digest=self._terms.template_digest,
            task_digest=self._terms.task_digest,
            vocabulary=self._vocabulary,
            eos_ids=self._eos_ids,
        )
        return expected, prompt

    async def _lease(self, lease_id: str) -> HeldLease | None:
        """The clerk's memory, then the ledger's."""
        held = self._clerk.book.find(lease_id)
        if held is None:
            known = await self._journal.recall_lease(lease_id)
            if known is not None:
                self._keeper.feed(events.Recalled(lease=known))
                held = self._clerk.book.find(lease_id)
        return held

    def _examine(
        self,
        sender: NodeId,
        header: TrajectoryHeader,
        raw: bytes,
        expected: Expected,
        prompt: Prompt,
    ) -> Finding:
        """Signature, meaning, reward: everything about one payload. Runs in a worker thread."""
        if len(raw) != header.payload.size_bytes or digest_of(raw) != header.payload.digest:
            return Finding(verdict=Reason.MALFORMED, why="payload is not what its header names")
        signed: list[bool] = []

        def verify(node: NodeId, message: bytes, signature: bytes) -> bool:
            signed.append(identity.verify(node, message, signature))
            return signed[-1]

        try:
            opened = unseal(
                raw,
                run_id=self._terms.run_id,
                verify=verify,
                size_bytes_max=limits.CHUNK_SIZE_BYTES_MAX,
            )
        except PeerError as error:
            reason = Reason.BAD_SIGNATURE if signed == [False] else Reason.MALFORMED
            return Finding(verdict=reason, why=str(error))
        if opened.sender != sender:
            return Finding(verdict=Reason.WRONG_ACTOR, why=f"signed by {opened.sender}")
        if not isinstance(opened.message, Trajectory):
            return Finding(verdict=Reason.MALFORMED, why="payload is not a trajectory")
        fault = examine(opened.message, header.index, expected)
        if fault is not None:
            return Finding(verdict=fault.reason, why=fault.why)
        return self._score(opened.message, prompt)

    def _score(self, trajectory: Trajectory, prompt: Prompt) -> Finding:
        try:
            reward = self._prompts.score(prompt.item, trajectory).reward
        except PeerError as error:
            return Finding(verdict=Reason.MALFORMED, why=str(error))
        assert math.isfinite(reward), "a task's score is finite"
        if not math.isclose(
            reward, trajectory.reward, rel_tol=REWARD_TOLERANCE, abs_tol=REWARD_TOLERANCE
        ):
            return Finding(
                verdict=Reason.REWARD_MISMATCH, why=f"claims {trajectory.reward}, is {reward}"
            )
        return Finding(verdict=Reason.ADMITTED, trajectory=trajectory, reward=reward)

    def _take_blob(self, digest: Digest, keep: bool) -> bytes:
        """A pulled payload; the ledger will keep it, the store need not."""
        raw = self._mesh.store.read(digest)
        if not keep:
            self._mesh.store.remove(digest)
        return raw

    def _hand_in(
        self, sender: NodeId, header: TrajectoryHeader, finding: Finding, raw: bytes
    ) -> VerdictNote:
        """Let the clerk decide; the note to send once that is recorded."""
        trajectory = finding.trajectory
        oldest, newest, tokens = header.version_min, header.version_max, header.tokens
        if trajectory is not None:
            oldest = PolicyVersion(min(span.version for span in trajectory.segments))
            newest = PolicyVersion(max(span.version for span in trajectory.segments))
            tokens = len(trajectory.loss_mask)
        answer = self._keeper.submit(
            events.Judged(
                actor=sender,
                lease_id=header.lease_id,
                index=header.index,
                verdict=finding.verdict,
                digest=header.payload.digest,
                version_oldest=oldest,
                version_newest=newest,
                tokens=tokens,
                reward=finding.reward,
            ),
            trajectory,
            raw,
        )
        if answer.first and answer.verdict is not Reason.ADMITTED:
            log.debug(
                "rollout refused",
                peer=sender,
                claim=header.lease_id[:8],
                reason=answer.verdict.value,
                why=finding.why,
            )
        return VerdictNote(lease_id=header.lease_id, index=header.index, verdict=answer.verdict)
