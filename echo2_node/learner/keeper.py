"""The keeper: feeds the clerk, performs what it asks for, and holds the trajectories meanwhile.

The clerk is fed directly from whichever task has an event: `handle` never waits, so on one event
loop each event is one uninterrupted step, and its facts join the journal in that same step.
Whoever must speak only of what is recorded waits for the journal afterwards. The desk owns it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random
from typing import assert_never

import msgspec
import structlog
import trio

from echo2_mesh import identity, limits
from echo2_mesh.errors import LocalError, PeerError
from echo2_mesh.wire.codec import unseal
from echo2_mesh.wire.messages import Trajectory
from echo2_mesh.wire.types import PolicyVersion, Reason
from echo2_node.learner.journal import Journal
from echo2_node.learner.ledger import Ledger
from echo2_node.learner.port import Sample
from echo2_node.learner.tallies import Tallies
from echo2_node.scheduler import admission, events
from echo2_node.scheduler.admission import Rules
from echo2_node.scheduler.clerk import Clerk
from echo2_node.scheduler.events import Answered, ClerkEffect, ClerkEvent
from echo2_node.scheduler.groups import advantages
from echo2_node.scheduler.records import OpenGroup

log = structlog.get_logger()


class NoSignal(LocalError):
    """Groups in a row had equal rewards, too many: there is nothing left to learn."""


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """P whole groups to train at `version`; samples of one group stand together.

    `staleness_steps[i]` is the age of `samples[i]`, counted from its oldest token.
    """

    version: PolicyVersion
    group_ids: tuple[str, ...]
    samples: tuple[Sample, ...]
    staleness_steps: tuple[int, ...]


class Keeper:
    """One run's clerk, journal and trajectories.

    Args:
        granted: takes the clerk's answers to requests.
    """

    def __init__(
        self,
        rules: Rules,
        ledger: Ledger,
        *,
        run_id: str,
        rng: Random,
        granted: Callable[[events.Granted], None],
        inline_work: bool = False,
    ) -> None:
        self.clerk = Clerk(rules, rng, cursor=ledger.item_cursor())
        self.journal = Journal(ledger, inline=inline_work)
        self.tallies = Tallies(ledger.summary())
        self._ledger = ledger
        self._run_id = run_id
        self._granted = granted
        self._trajectories: dict[str, dict[int, Trajectory]] = {}
        self._alarms: dict[str, float] = {}
        self._alarm_moved = trio.Event()
        self._batch: events.BatchReady | None = None
        self._batch_stirred = trio.Event()
        self._equal_groups = 0

    def feed(self, event: ClerkEvent, envelope: bytes | None = None) -> tuple[ClerkEffect, ...]:
        """One event, and everything the clerk wants done about it."""
        effects = self.clerk.handle(event, trio.current_time())
        self._perform(effects, envelope)
        return effects

    def submit(
        self, event: events.Judged, trajectory: Trajectory | None, envelope: bytes
    ) -> Answered:
        """A judged trajectory; what the clerk says to it."""
        effects = self.feed(event, envelope)
        answer = next(effect for effect in effects if isinstance(effect, Answered))
        if answer.first and answer.verdict is Reason.ADMITTED:
            assert trajectory is not None
            if self.clerk.shelf.find(trajectory.group_id) is not None:
                group = self._trajectories.setdefault(trajectory.group_id, {})
                group[trajectory.index] = trajectory
        return answer

    async def next_batch(self, version: PolicyVersion) -> Batch:
        """Wait until the clerk has a batch for `version`; it is recorded then.

        Errors:
            NoSignal: too many groups in a row had equal rewards.
        """
        self._batch = None
        self.feed(events.Wanted(version=version))
        try:
            ready = await self._wait_ready()
        finally:
            if self._batch is None:
                self.feed(events.Unwanted())
        await self.journal.wait_written()
        return self._make_batch(ready)

    async def _wait_ready(self) -> events.BatchReady:
        while self._batch is None:
            if self._equal_groups:
                raise NoSignal(
                    f"{self._equal_groups} groups in a row had equal rewards: there is nothing "
                    "left to learn from this task.",
                    "Choose harder items, or raise rollout.zero_variance_groups_max.",
                )
            self._batch_stirred = trio.Event()
            await self._batch_stirred.wait()
        return self._batch

    async def keep_alarms(self) -> None:
        """Wake the clerk when it wants to be woken, for ever."""
        while True:
            self._alarm_moved = trio.Event()
            with trio.move_on_at(min(self._alarms.values(), default=float("inf"))):
                await self._alarm_moved.wait()
            now_s = trio.current_time()
            for key in [key for key, at_s in self._alarms.items() if at_s <= now_s]:
                del self._alarms[key]
                self.feed(events.Woke(key=key))

    def restore(self) -> None:
        """Take over the unfinished groups and leases of the ledger.

        Errors:
            LocalError: a payload in the ledger is missing or not what was recorded.
        """
        groups: Sequence[OpenGroup] = self._ledger.pending_groups()
        for group in groups:
            for member in group.members:
                trajectory = open_payload(self._ledger.payload(member.digest), run_id=self._run_id)
                self._trajectories.setdefault(group.group_id, {})[member.index] = trajectory
        self._perform(self.clerk.restore(groups, trio.current_time()), None)
        if groups:
            log.info("unfinished groups restored", count=len(groups))

    def _perform(self, effects: Sequence[ClerkEffect], envelope: bytes | None) -> None:
        for effect in effects:
            match effect:
                case events.Write(records=facts):
                    self.tallies.count(facts)
                    self.journal.append(facts, envelope)
                case events.Granted():
                    self._granted(effect)
                case events.Answered():
                    pass  # `submit` hands it to the intake
                case events.BatchReady():
                    self._batch = effect
                    self._batch_stirred.set()
                case events.Freed(group_ids=group_ids):
                    for group_id in group_ids:
                        self._trajectories.pop(group_id, None)
                case events.NothingToLearn(groups=groups):
                    self._equal_groups = groups
                    self._batch_stirred.set()
                case events.Arm(key=key, at_s=at_s):
                    self._alarms[key] = at_s
                    self._alarm_moved.set()
                case _:
                    assert_never(effect)

    def _make_batch(self, ready: events.BatchReady) -> Batch:
        samples: list[Sample] = []
        ages: list[int] = []
        for group in ready.groups:
            held = self._trajectories[group.group_id]
            shares = advantages([member.reward for member in group.members])
            for member, advantage in zip(group.members, shares, strict=True):
                trajectory = held[member.index]
                samples.append(
                    Sample(trajectory=trajectory, reward=member.reward, advantage=advantage)
                )
                ages.append(
                    admission.staleness_steps(trained=ready.version, oldest=member.version_oldest)
                )
        return Batch(
            version=ready.version,
            group_ids=tuple(group.group_id for group in ready.groups),
            samples=tuple(samples),
            staleness_steps=tuple(ages),
        )


def open_payload(raw: bytes, *, run_id: str) -> Trajectory:
    """A trajectory from the ledger; it was verified before it was recorded.

    Raises:
        LocalError: it is not what was recorded.
    """
    try:
        opened = unseal(
            raw, run_id=run_id, verify=identity.verify, size_bytes_max=limits.CHUNK_SIZE_BYTES_MAX
        )
    except PeerError as error:
        raise LocalError(
            f"The ledger holds a damaged payload: {error}.",
            "`echo2-node ledger verify` lists the damage.",
        ) from error
    if not isinstance(opened.message, Trajectory):
        raise LocalError("The ledger holds a payload that is no trajectory.")
    return opened.message
