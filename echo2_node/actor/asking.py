"""Asks the learner for leases, always in the name of the newest proved version.

The learner holds a question until it has a slot, so asking is cheap and never polls. What a
refusal means is decided here; what is done with leases is not. Called by `actor.rollouts`.
"""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
import trio

from echo2_mesh import limits
from echo2_mesh.errors import PeerError, UsageError
from echo2_mesh.mesh import Mesh, ReadyVersion
from echo2_mesh.wire.messages import Cohort, LeaseGrant, LeaseRequest
from echo2_node.actor.weights import Weights

log = structlog.get_logger()

Result = TypeVar("Result")

LEASE_ASK_TIMEOUT_S = 10.0
LAST_ASK_S = 3.0
"""On leaving: how long a question that is on its way may still take."""


class RunEnded(Exception):
    """The learner says that the run is over."""


class Asker:
    """One actor's questions for leases."""

    def __init__(self, mesh: Mesh, weights: Weights, *, admission: bytes) -> None:
        self._mesh = mesh
        self._weights = weights
        self._admission = admission

    async def ask(
        self, cohort: Cohort, room: int, stopping: trio.Event, *, held: tuple[str, ...]
    ) -> list[LeaseGrant]:
        """Ask for at most `room` groups: what the learner grants.

        `held` names the leases whose verdicts are still to come, so that the learner ends those
        whose grant was lost.

        Empty where it does not answer, or where `stopping` was set first.

        Errors:
            RunEnded: nothing more is to be done.
            UsageError: this actor will never get a lease.
        """
        grants: list[LeaseGrant] = []
        installed = await unless(stopping, self._weights.wait_installed)
        if installed is not None:
            ask = functools.partial(self._ask_for_newest, cohort, room, installed, grants, held)
            await unless(stopping, ask, grace_s=LAST_ASK_S)
        return grants

    async def _ask_for_newest(
        self,
        cohort: Cohort,
        room: int,
        installed: ReadyVersion,
        grants: list[LeaseGrant],
        held: tuple[str, ...],
    ) -> None:
        """Ask, and ask again whenever a newer version is installed before the answer.

        The learner holds a question until there is a slot for its version, and the slots of an
        old version get fewer with every step. It answers the older question of an actor as soon
        as a newer one arrives, so no grant is ever dropped here.
        """
        open_asks = 0

        async def ask(version: ReadyVersion, named: tuple[str, ...] | None) -> None:
            nonlocal open_asks
            open_asks += 1
            reply = await self._ask_learner(cohort, room, version, named)
            if reply is not None:
                grants.append(reply)
            open_asks -= 1
            if not open_asks:
                nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, installed, held)
            while True:
                installed = await self._weights.wait_newer(installed.version)
                # A grant may be on its way to the question before: no list would be complete.
                nursery.start_soon(ask, installed, None)

    async def _ask_learner(
        self, cohort: Cohort, room: int, installed: ReadyVersion, held: tuple[str, ...] | None
    ) -> LeaseGrant | None:
        request = LeaseRequest(
            version=installed.version,
            groups_max=min(room, limits.LEASES_PER_GRANT_MAX),
            cohort=cohort,
            tokenizer_digest=installed.manifest.tokenizer_digest,
            template_digest=installed.manifest.template_digest,
            task_digest=installed.manifest.task.digest,
            admission=self._admission,
            held=held if held is not None and len(held) <= limits.LEASES_NAMED_MAX else None,
        )
        try:
            reply = await self._mesh.ask(self._mesh.learner, request, timeout_s=LEASE_ASK_TIMEOUT_S)
        except PeerError as error:
            self._judge_refusal(error)
            return None
        if not isinstance(reply, LeaseGrant):
            log.warning("odd reply", peer=self._mesh.learner, reason=type(reply).__name__)
            return None
        return reply

    def _judge_refusal(self, error: PeerError) -> None:
        """A refusal that no waiting will change ends the actor; anything else is tried again."""
        code = getattr(error, "code", "")
        if code == "run-ended":
            raise RunEnded
        if code in ("not-admitted", "wrong-digests"):
            raise UsageError(error.what, error.hint or "Ask whoever runs the learner.")
        log.debug("no leases", reason=str(error))


async def unless(
    event: trio.Event, wait: Callable[[], Awaitable[Result]], *, grace_s: float = 0.0
) -> Result | None:
    """What `wait` returns; None if `event` is set and `grace_s` later there is nothing yet."""
    result: Result | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(cancel_on, event, nursery.cancel_scope, grace_s)
        result = await wait()
        nursery.cancel_scope.cancel()
    return result


async def cancel_on(event: trio.Event, scope: trio.CancelScope, grace_s: float = 0.0) -> None:
    """Cancel `scope` when `event` is set, `grace_s` later."""
    await event.wait()
    await trio.sleep(grace_s)
    scope.cancel()
