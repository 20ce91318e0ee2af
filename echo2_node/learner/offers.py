"""Offers: who may have leases, and leases on their way out.

Checks what an asking actor says about itself against the run, with the difference in the refusal;
then the clerk decides and the request waits for a slot for a while, so that actors need not poll.
Nothing leaves before it is in the ledger. Called by the desk for each LeaseRequest.
"""

from __future__ import annotations

import hmac

import msgspec
import trio

from echo2_mesh import limits
from echo2_mesh.wire.messages import LeaseGrant, LeaseRequest, Refusal
from echo2_mesh.wire.ticket import admission_proof
from echo2_mesh.wire.types import Digest, NodeId
from echo2_node.learner.keeper import Keeper
from echo2_node.learner.prompts import Prompts
from echo2_node.scheduler import events
from echo2_node.scheduler.clerk import RETRY_AFTER_S

HOLD_S = 2.0
"""How long a request waits for a slot before it is answered empty."""
RECORD_TIMEOUT_S = 2.0
GRANT_BYTES_MAX = limits.ASK_SIZE_BYTES_MAX // 2
LEASE_OVERHEAD_BYTES = 1024


class Terms(msgspec.Struct, frozen=True, kw_only=True):
    """What an actor must have in common with the run."""

    run_id: str
    tokenizer_digest: Digest
    template_digest: Digest
    task_digest: Digest
    admission_secret: bytes | None
    """None: the run is open."""


class Offers:
    """Open requests and their answers."""

    def __init__(self, terms: Terms, prompts: Prompts, keeper: Keeper) -> None:
        self._terms = terms
        self._prompts = prompts
        self._keeper = keeper
        self._journal = keeper.journal
        self._feed = keeper.feed
        self._requests = 0
        self._answers: dict[int, events.Granted | None] = {}
        self._answered: dict[int, trio.Event] = {}
        self.refused = 0

    async def answer(self, actor: NodeId, request: LeaseRequest) -> LeaseGrant | Refusal:
        """Leases for `actor` as soon as there are some, none after `HOLD_S`, or why not."""
        refusal = self._refusal(actor, request)
        if refusal is not None:
            self.refused += 1
            return refusal
        self._end_lost(actor, request)
        if self._journal.paused:
            return LeaseGrant(leases=(), retry_after_s=1.0, run_seed=self._prompts.seed)
        granted = await self._ask_clerk(actor, request)
        if granted.leases and not await self._recorded():
            self._hand_back(actor, granted)
            return LeaseGrant(leases=(), retry_after_s=1.0, run_seed=self._prompts.seed)
        return LeaseGrant(
            leases=tuple(self._prompts.lease(lease) for lease in granted.leases),
            retry_after_s=granted.retry_after_s,
            run_seed=self._prompts.seed,
        )

    def _end_lost(self, actor: NodeId, request: LeaseRequest) -> None:
        """End leases that the actor does not know of: a crash swallowed the grant."""
        if request.held is None:
            return
        live = {held.lease_id for held in self._keeper.clerk.book.of_actor(actor)}
        lost = tuple(sorted(live - set(request.held)))
        if lost:
            self._feed(events.Returned(actor=actor, lease_ids=lost))

    async def _ask_clerk(self, actor: NodeId, request: LeaseRequest) -> events.Granted:
        self._requests += 1
        number = self._requests
        self._answered[number] = trio.Event()
        try:
            self._feed(
                events.Requested(
                    request=number,
                    actor=actor,
                    version=request.version,
                    groups_max=min(request.groups_max, self._groups_that_fit()),
                    until_s=trio.current_time() + HOLD_S,
                )
            )
            with trio.move_on_after(2 * HOLD_S):
                await self._answered[number].wait()
            granted = self._answers.pop(number, None)
        finally:
            del self._answered[number]
            self._give_back(actor, number)
        return granted or events.Granted(request=number, leases=(), retry_after_s=RETRY_AFTER_S)

    def _give_back(self, actor: NodeId, number: int) -> None:
        """The request is over; what was granted and not collected goes to somebody else."""
        self._feed(events.Withdrawn(request=number))
        left = self._answers.pop(number, None)
        if left is not None and left.leases:
            self._hand_back(actor, left)

    def _hand_back(self, actor: NodeId, granted: events.Granted) -> None:
        lease_ids = tuple(lease.lease_id for lease in granted.leases)
        self._feed(events.Returned(actor=actor, lease_ids=lease_ids, delivered=False))

    async def _recorded(self) -> bool:
        """False where the ledger cannot be written in time: then nothing may leave."""
        with trio.move_on_after(RECORD_TIMEOUT_S):
            await self._journal.wait_written()
            return True
        return False

    def deliver(self, granted: events.Granted) -> None:
        """The clerk's answer to a request."""
        waiting = self._answered.get(granted.request)
        if waiting is not None:
            self._answers[granted.request] = granted
            waiting.set()

    def _groups_that_fit(self) -> int:
        """Leases carry their prompts, and a reply has a bound."""
        return max(1, GRANT_BYTES_MAX // (LEASE_OVERHEAD_BYTES + self._prompts.size_bytes_max))

    def _refusal(self, actor: NodeId, request: LeaseRequest) -> Refusal | None:
        terms = self._terms
        if terms.admission_secret is not None:
            proof = admission_proof(terms.admission_secret, run_id=terms.run_id, node=actor)
            if not hmac.compare_digest(proof, request.admission):
                return Refusal(
                    code="not-admitted",
                    text="This run is closed and your ticket does not hold its secret. Ask "
                    "whoever runs the learner for a ticket and join with that.",
                )
        for name, mine, yours in (
            ("tokenizer", terms.tokenizer_digest, request.tokenizer_digest),
            ("chat template", terms.template_digest, request.template_digest),
            ("task", terms.task_digest, request.task_digest),
        ):
            if mine != yours:
                return Refusal(
                    code="wrong-digests",
                    text=f"Your {name} is {yours.hex()[:8]}, this run's is {mine.hex()[:8]}. "
                    "Join again with the run's current ticket and the same version of echo2.",
                )
        return None
