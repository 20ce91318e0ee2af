"""Facts worth keeping: what the scheduler writes down, in the order in which it happened.

Values only. The clerk makes them, the learner's ledger stores each tuple of them in one
transaction, and a restart rebuilds the clerk from them (`OpenGroup`, `OpenLease`). Nothing here
knows a database.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from echo2_mesh.wire.types import Digest, NodeId, PolicyVersion, Reason


class LeaseEnd(str, Enum):
    """How a lease ended. Every lease ends at most once."""

    COMPLETED = "completed"
    """Every member has a verdict."""
    EXPIRED = "expired"
    RETURNED = "returned"
    ACTOR_GONE = "actor_gone"
    """The mesh declared its actor gone before the deadline."""
    GROUP_DROPPED = "group_dropped"
    RUN_ENDED = "run_ended"


class Fact(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all records."""


class GroupOpened(Fact, frozen=True, kw_only=True):
    group_id: str
    item_index: int
    size: int


class LeaseGranted(Fact, frozen=True, kw_only=True):
    lease_id: str
    group_id: str
    actor: NodeId
    indices: tuple[int, ...]
    version_min: PolicyVersion
    seed: int


class LeaseEnded(Fact, frozen=True, kw_only=True):
    lease_id: str
    how: LeaseEnd
    lost: int
    """Members of the lease that the group still misses."""


class Submission(Fact, frozen=True, kw_only=True):
    """The one verdict of (lease, index). Rewards are the learner's own."""

    lease_id: str
    index: int
    group_id: str
    actor: NodeId
    verdict: Reason
    digest: Digest
    version_oldest: PolicyVersion
    version_newest: PolicyVersion
    tokens: int
    reward: float


class DuplicateSeen(Fact, frozen=True, kw_only=True):
    """A result that already has a verdict came again."""

    lease_id: str
    index: int


class StrayRefused(Fact, frozen=True, kw_only=True):
    """A refusal that belongs to no lease of its sender: counted, not itemised."""

    actor: NodeId
    reason: Reason


class GroupDropped(Fact, frozen=True, kw_only=True):
    """A group that will never be trained, and why."""

    group_id: str
    reason: Reason


class StepTaken(Fact, frozen=True, kw_only=True):
    """One training step consumed these groups, once and for all (until a roll-back undoes it)."""

    step: int
    version_before: PolicyVersion
    skipped: bool
    group_ids: tuple[str, ...]


class VersionPublished(Fact, frozen=True, kw_only=True):
    version: PolicyVersion
    manifest: Digest


Record = (
    GroupOpened
    | LeaseGranted
    | LeaseEnded
    | Submission
    | DuplicateSeen
    | StrayRefused
    | GroupDropped
    | StepTaken
    | VersionPublished
)


# --- what a restart needs ----------------------------------------------------------------------


class OpenLease(Fact, frozen=True, kw_only=True):
    """A lease as recorded; `verdicts` holds the members that were judged before."""

    lease_id: str
    group_id: str
    actor: NodeId
    indices: tuple[int, ...]
    item_index: int
    version_min: PolicyVersion
    seed: int
    verdicts: dict[int, Reason] = {}
    ended: bool = False


class Member(Fact, frozen=True, kw_only=True):
    """An admitted trajectory of a group, without its payload."""

    index: int
    lease_id: str
    actor: NodeId
    digest: Digest
    version_oldest: PolicyVersion
    reward: float


class OpenGroup(Fact, frozen=True, kw_only=True):
    """A group that was neither trained nor dropped."""

    group_id: str
    item_index: int
    size: int
    losses: int
    members: tuple[Member, ...]
    leases: tuple[OpenLease, ...]
