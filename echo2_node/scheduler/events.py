"""What the clerk hears and what it asks for: two closed unions of frozen values.

Events come from the learner's desk; effects are performed by it in the order given. `Write`
effects are durable before any later effect of the same answer is shown to a peer.
"""

from __future__ import annotations

import msgspec

from echo2_mesh.wire.types import Digest, NodeId, PolicyVersion, Reason
from echo2_node.scheduler.records import Member, OpenLease, Record


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all events."""


class Requested(Event, frozen=True, kw_only=True):
    """An actor that proved `version` wants prompts; it waits until `until_s` at most."""

    request: int
    actor: NodeId
    version: PolicyVersion
    groups_max: int
    until_s: float


class Withdrawn(Event, frozen=True, kw_only=True):
    """Whoever asked `request` no longer listens."""

    request: int


class Returned(Event, frozen=True, kw_only=True):
    """An actor hands leases back; foreign or ended ones are ignored."""

    actor: NodeId
    lease_ids: tuple[str, ...]
    delivered: bool = True
    """False: the leases never reached it, so nothing is held against it."""


class Departed(Event, frozen=True, kw_only=True):
    """The mesh says that this actor is gone: its leases end now."""

    actor: NodeId


class Recalled(Event, frozen=True, kw_only=True):
    """The ledger remembers an ended lease that the clerk had forgotten."""

    lease: OpenLease


class Judged(Event, frozen=True, kw_only=True):
    """A trajectory was examined; `verdict` is ADMITTED where nothing is wrong with it by itself."""

    actor: NodeId
    lease_id: str
    index: int
    verdict: Reason
    digest: Digest
    version_oldest: PolicyVersion
    version_newest: PolicyVersion
    tokens: int
    reward: float


class Wanted(Event, frozen=True, kw_only=True):
    """The learner wants a batch to train at `version`."""

    version: PolicyVersion


class Unwanted(Event, frozen=True, kw_only=True):
    """The learner no longer waits for a batch."""


class Trained(Event, frozen=True, kw_only=True):
    """A batch was consumed by a step that began at `version_before`."""

    step: int
    group_ids: tuple[str, ...]
    version_before: PolicyVersion
    skipped: bool


class Published(Event, frozen=True, kw_only=True):
    """Actors may have `version` from now on."""

    version: PolicyVersion
    manifest: Digest


class Ended(Event, frozen=True, kw_only=True):
    """The run is over: nothing is leased or admitted any more."""


class Woke(Event, frozen=True, kw_only=True):
    """The alarm set by `Arm` is due."""

    key: str


ClerkEvent = (
    Requested
    | Withdrawn
    | Returned
    | Departed
    | Recalled
    | Judged
    | Wanted
    | Unwanted
    | Trained
    | Published
    | Ended
    | Woke
)


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all effects."""


class Write(Effect, frozen=True, kw_only=True):
    """Keep these facts, together and before anything that follows."""

    records: tuple[Record, ...]


class Granted(Effect, frozen=True, kw_only=True):
    """The answer to a request; no leases means: ask again after `retry_after_s`."""

    request: int
    leases: tuple[OpenLease, ...]
    retry_after_s: float


class Answered(Effect, frozen=True, kw_only=True):
    """The verdict of a submission; `first` is False where it had one already."""

    lease_id: str
    index: int
    verdict: Reason
    first: bool


class BatchGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A whole group on its way to the trainer, members in order of index."""

    group_id: str
    item_index: int
    members: tuple[Member, ...]


class BatchReady(Effect, frozen=True, kw_only=True):
    """Train these at `version`."""

    version: PolicyVersion
    groups: tuple[BatchGroup, ...]


class Freed(Effect, frozen=True, kw_only=True):
    """Payloads of these groups are no longer needed in memory."""

    group_ids: tuple[str, ...]


class NothingToLearn(Effect, frozen=True, kw_only=True):
    """`groups` groups in a row had equal rewards."""

    groups: int


class Arm(Effect, frozen=True, kw_only=True):
    """Wake the clerk with `key` at `at_s`; replaces an earlier alarm of that key."""

    key: str
    at_s: float


ClerkEffect = Write | Granted | Answered | BatchReady | Freed | NothingToLearn | Arm
