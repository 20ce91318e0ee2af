"""The words of the fetch machine: what it is told and what it wants done.

Kept apart from `core.fetch` so that the machine is read on its own. Values only.
"""

from __future__ import annotations

from enum import Enum

from echo2_mesh.core.forest import Seat
from echo2_mesh.core.machine import Arm, Effect, Event, Woke
from echo2_mesh.wire.messages import ChunkRef
from echo2_mesh.wire.types import Digest, NodeId, PolicyVersion


class Fault(str, Enum):
    """Why a peer did not deliver a chunk."""

    MISSING = "missing"
    """It does not hold the chunk (any more): no blame, ask another."""
    BUSY = "busy"
    BROKEN = "broken"
    """The connection or the protocol failed."""
    LATE = "late"
    LIED = "lied"
    """The bytes do not hash to the chunk's name."""


# --- events ------------------------------------------------------------------------------------


class Announced(Event, frozen=True, kw_only=True):
    """The learner signed that this version exists."""

    incarnation_unix_ms: int
    version: PolicyVersion
    manifest: ChunkRef


class ManifestHere(Event, frozen=True, kw_only=True):
    """The manifest is in the store and in order: these are its blobs, `held` are here already.

    `wanted` are those that make the version complete here: the full chunks, or the patches that
    lead to it from a version that is here; None is every data chunk and file.
    """

    manifest: Digest
    refs: tuple[ChunkRef, ...]
    held: frozenset[int]
    wanted: frozenset[int] | None = None
    needed: int | None = None
    """The first `needed` of `refs` (data and files, not patches) are the version: `Ready` comes
    when all of them are held, by being fetched or `Made`, and not before, because until then
    `WantMore` may come. `PeerHas` of None means exactly these. None: those before
    the first patch."""


class WantMore(Event, frozen=True, kw_only=True):
    """A patch did not give what it promised: these blobs are wanted as well."""

    manifest: Digest
    indices: frozenset[int]


class Made(Event, frozen=True, kw_only=True):
    """Blobs that came into the store by another way than being fetched: rebuilt from a patch."""

    manifest: Digest
    indices: frozenset[int]


class Seated(Event, frozen=True, kw_only=True):
    """Who takes part now, this node included: what the forest is planned from."""

    seats: tuple[Seat, ...]


class ManifestAbsent(Event, frozen=True, kw_only=True):
    """The manifest is not in the store: it must be asked for."""

    manifest: Digest


class ManifestUnfit(Event, frozen=True, kw_only=True):
    """The manifest has the announced digest and is no legal manifest: nobody can mend it."""

    manifest: Digest


class PeerUp(Event, frozen=True, kw_only=True):
    peer: NodeId


class PeerGone(Event, frozen=True, kw_only=True):
    peer: NodeId


class PeerHas(Event, frozen=True, kw_only=True):
    """`peer` says it holds these blobs of the manifest; None is all of them."""

    peer: NodeId
    manifest: Digest
    indices: frozenset[int] | None


class ChunkArrived(Event, frozen=True, kw_only=True):
    """The chunk's bytes were verified and are in the store."""

    peer: NodeId
    digest: Digest


class ChunkRefused(Event, frozen=True, kw_only=True):
    peer: NodeId
    digest: Digest
    fault: Fault


class StoreFailed(Event, frozen=True, kw_only=True):
    """A chunk came and could not be written here: this host's fault, not the peer's."""

    peer: NodeId
    digest: Digest


FetchEvent = (
    Announced
    | ManifestHere
    | ManifestAbsent
    | ManifestUnfit
    | WantMore
    | Made
    | Seated
    | PeerUp
    | PeerGone
    | PeerHas
    | ChunkArrived
    | ChunkRefused
    | StoreFailed
    | Woke
)


# --- effects -----------------------------------------------------------------------------------


class Look(Effect, frozen=True, kw_only=True):
    """Is this manifest here and in order? Answer with `ManifestHere`, `-Absent` or `-Unfit`."""

    version: PolicyVersion
    manifest: ChunkRef


class Ask(Effect, frozen=True, kw_only=True):
    """Get one chunk from one peer; answer with `ChunkArrived`, `ChunkRefused`, `StoreFailed`.

    A holder that does not have the chunk yet and expects it may answer up to `wait_s` later.
    """

    peer: NodeId
    ref: ChunkRef
    timeout_s: float
    wait_s: float = 0.0


class Cancel(Effect, frozen=True, kw_only=True):
    """Stop waiting for this chunk from this peer."""

    peer: NodeId
    digest: Digest


class AskHoldings(Effect, frozen=True, kw_only=True):
    peer: NodeId
    manifest: Digest


class Blame(Effect, frozen=True, kw_only=True):
    peer: NodeId
    fault: Fault
    banned: bool


class Ready(Effect, frozen=True, kw_only=True):
    """Every data chunk and file of this version is in the store, verified."""

    version: PolicyVersion
    manifest: ChunkRef


FetchEffect = Look | Ask | Cancel | AskHoldings | Blame | Ready | Arm
