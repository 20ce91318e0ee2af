"""What peers say to one another: frozen structs, decoded only after size and signature.

Documented in `proto/`; `proto/schema.json` is generated from here. Structs evolve by adding
optional fields; unknown fields are ignored, unknown kinds refused.
Token ids travel as little-endian int32 bytes, log-probs as little-endian float32 bytes: one
memcpy to decode, where a MessagePack list costs a hundred times as much.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from echo2_mesh import limits
from echo2_mesh.wire.blocks import ChunkRef as ChunkRef
from echo2_mesh.wire.blocks import Cohort as Cohort
from echo2_mesh.wire.blocks import Sampling as Sampling
from echo2_mesh.wire.blocks import Value as Value
from echo2_mesh.wire.blocks import VersionSpan as VersionSpan
from echo2_mesh.wire.lanes import LaneAsk as LaneAsk
from echo2_mesh.wire.lanes import LaneOffer as LaneOffer
from echo2_mesh.wire.lanes import LaneWay as LaneWay
from echo2_mesh.wire.reach import ReachAnswer as ReachAnswer
from echo2_mesh.wire.reach import ReachAsk as ReachAsk
from echo2_mesh.wire.types import (
    AddressField,
    BlobSizeField,
    CountField,
    DigestField,
    FiniteField,
    HexIdField,
    LeaseIdsField,
    NameField,
    RateField,
    Reach,
    Reason,
    Role,
    RunIdField,
    SecondsField,
    ShortTextField,
    SizeField,
    StopReason,
    VersionField,
)
from echo2_mesh.wire.weights import Announce as Announce
from echo2_mesh.wire.weights import FileRef as FileRef
from echo2_mesh.wire.weights import Manifest as Manifest
from echo2_mesh.wire.weights import Patch as Patch
from echo2_mesh.wire.weights import PatchChunk as PatchChunk
from echo2_mesh.wire.weights import Probe as Probe
from echo2_mesh.wire.weights import TaskSpec as TaskSpec
from echo2_mesh.wire.weights import TensorSpan as TensorSpan

# --- membership --------------------------------------------------------------------------------


class Heartbeat(Value, frozen=True, kw_only=True):
    """Gossip: I live, this is what I am doing. Ordered by (incarnation, sequence)."""

    role: Role
    state: NameField
    incarnation_unix_ms: CountField
    sequence: CountField
    name: Annotated[str, Meta(max_length=64)] = ""
    addresses: Annotated[tuple[AddressField, ...], Meta(max_length=limits.ADDRESSES_MAX)] = ()
    """Where it can be dialled; empty for a node that can only dial out."""
    version: VersionField | None = None
    """Installed (actor) or current (learner) policy version."""
    tokens_per_s: RateField = 0.0
    uplink_bytes_per_s: RateField = 0.0
    """What its bulk sockets can send, measured or configured; 0 where nobody knows yet."""
    downlink_bytes_per_s: RateField = 0.0
    reach: Reach = Reach.UNKNOWN
    cohort: Cohort | None = None
    accepted: CountField = 0
    refused: CountField = 0
    commonest_refusal: Reason | None = None
    fetched_bytes: SizeField = 0
    """Progress of the version being fetched; equal to `fetch_bytes` when nothing is missing."""
    fetch_bytes: SizeField = 0
    last_error: ShortTextField = ""


class Goodbye(Value, frozen=True, kw_only=True):
    """Gossip: I am leaving on purpose; my leases are handed back."""

    incarnation_unix_ms: CountField
    why: ShortTextField = ""


# --- rollouts ----------------------------------------------------------------------------------


class Lease(Value, frozen=True, kw_only=True):
    """Permission to generate members `indices` of one prompt group until `ttl_s` has passed.

    The deadline runs on the learner's clock from the moment of granting; `ttl_s` tells the actor
    how long that is. Nobody else holds these members meanwhile.
    """

    lease_id: HexIdField
    group_id: HexIdField
    item_index: CountField
    """Names the prompt: the task makes item `item_index` of the run's seed."""
    prompt_ids: Annotated[bytes, Meta(min_length=4, max_length=4 * limits.PROMPT_TOKENS_MAX)]
    indices: Annotated[tuple[CountField, ...], Meta(min_length=1, max_length=limits.GROUP_SIZE_MAX)]
    group_size: Annotated[int, Meta(ge=1, le=limits.GROUP_SIZE_MAX)]
    sampling: Sampling
    version_min: VersionField
    ttl_s: SecondsField


class LeaseRequest(Value, frozen=True, kw_only=True):
    """Ask: give me up to `groups_max` prompt groups; I have `version` installed and proved."""

    version: VersionField
    groups_max: Annotated[int, Meta(ge=1, le=limits.LEASES_PER_GRANT_MAX)]
    cohort: Cohort
    tokenizer_digest: DigestField
    template_digest: DigestField
    task_digest: DigestField
    admission: Annotated[bytes, Meta(max_length=32)] = b""
    """Proof of the ticket's secret: see `wire.ticket.admission_proof`."""
    held: LeaseIdsField | None = None
    """Every lease that waits for verdicts: a live one not named was lost on the way and ends."""


class LeaseGrant(Value, frozen=True, kw_only=True):
    """Reply: the leases (may be none), and when to ask again if none."""

    leases: Annotated[tuple[Lease, ...], Meta(max_length=limits.LEASES_PER_GRANT_MAX)]
    retry_after_s: SecondsField = 0.0
    run_seed: CountField = 0


class LeaseReturn(Value, frozen=True, kw_only=True):
    """Ask: I cannot finish these; offer them to somebody else."""

    lease_ids: Annotated[
        tuple[HexIdField, ...], Meta(min_length=1, max_length=limits.LEASES_PER_GRANT_MAX)
    ]
    why: ShortTextField = ""


class TrajectoryHeader(Value, frozen=True, kw_only=True):
    """What is announced of a trajectory. `payload` names a signed envelope of kind `trajectory`."""

    lease_id: HexIdField
    group_id: HexIdField
    index: CountField
    version_min: VersionField
    version_max: VersionField
    tokens: CountField
    reward: FiniteField
    payload: ChunkRef
    inline: Annotated[bytes, Meta(max_length=limits.INLINE_PAYLOAD_SIZE_BYTES_MAX)] | None = None
    """The payload's bytes where they are small."""


class RolloutBatch(Value, frozen=True, kw_only=True):
    """Gossip or ask: trajectories that exist. Sent again until each has a verdict."""

    headers: Annotated[
        tuple[TrajectoryHeader, ...],
        Meta(min_length=1, max_length=limits.ROLLOUT_BATCH_HEADERS_MAX),
    ]


class Trajectory(Value, frozen=True, kw_only=True):
    """One sampled sequence, whole: nothing in it is ever tokenised again.

    All arrays run over the T tokens of prompt and completion together.
    """

    run_id: RunIdField
    lease_id: HexIdField
    group_id: HexIdField
    index: CountField
    item_index: CountField
    token_ids: Annotated[bytes, Meta(min_length=4, max_length=4 * limits.PAYLOAD_TOKENS_MAX)]
    """int32[T]."""
    prompt_length: CountField
    loss_mask: Annotated[bytes, Meta(min_length=1, max_length=limits.PAYLOAD_TOKENS_MAX)]
    """uint8[T]: 1 where the policy chose the token, 0 for prompt and environment tokens."""
    logprobs: Annotated[bytes, Meta(min_length=4, max_length=4 * limits.PAYLOAD_TOKENS_MAX)]
    """float32[T]: behaviour log-prob of token t (temperature applied); 0 where masked."""
    segments: Annotated[tuple[VersionSpan, ...], Meta(min_length=1, max_length=1024)]
    """Cover exactly the completion [prompt_length, T), in order."""
    reward: FiniteField
    metrics: Annotated[dict[NameField, FiniteField], Meta(max_length=64)] = msgspec.field(
        default_factory=dict
    )
    stop_reason: StopReason
    sampling: Sampling
    cohort: Cohort
    tokenizer_digest: DigestField
    template_digest: DigestField
    task_digest: DigestField


class VerdictNote(Value, frozen=True, kw_only=True):
    """What became of member `index` of a lease; recorded before it is sent."""

    lease_id: HexIdField
    index: CountField
    verdict: Reason


class Verdicts(Value, frozen=True, kw_only=True):
    """Ask (learner to actor) or reply to a RolloutBatch: recorded, you may forget these."""

    notes: Annotated[tuple[VerdictNote, ...], Meta(max_length=limits.VERDICTS_PER_MESSAGE_MAX)]


# --- questions ---------------------------------------------------------------------------------


class CatchUp(Value, frozen=True, kw_only=True):
    """Ask: what have I missed? (gossip promises neither delivery nor order)."""


class CaughtUp(Value, frozen=True, kw_only=True):
    """Reply: signed envelopes as they were gossiped, to be verified like any other."""

    announce: bytes | None = None
    heartbeats: Annotated[tuple[bytes, ...], Meta(max_length=limits.CATCH_UP_HEARTBEATS_MAX)] = ()


class HoldingsAsk(Value, frozen=True, kw_only=True):
    """Ask: which chunks of this manifest do you hold?"""

    manifest: DigestField


class Holdings(Value, frozen=True, kw_only=True):
    """Reply: bit i (byte i // 8, least significant first) is set when chunk i is held, verified.

    Blobs are numbered data chunks first, then the files' chunks, then the patches', in order.
    Empty: nothing held.
    """

    manifest: DigestField
    bitmap: Annotated[bytes, Meta(max_length=limits.MANIFEST_CHUNKS_MAX // 8 + 1024)]


class Done(Value, frozen=True, kw_only=True):
    """Reply: done, nothing to say."""


class Refusal(Value, frozen=True, kw_only=True):
    """Reply: not done. `code` is for programs, `text` (what and what to do) for people."""

    code: NameField
    text: ShortTextField


class BlobAsk(Value, frozen=True, kw_only=True):
    """Request on the blob protocol."""

    digest: DigestField
    size_bytes: BlobSizeField
    wait_s: Annotated[float, Meta(ge=0.0, le=limits.BLOB_TIMEOUT_S)] = 0.0
    """How long the answer may wait for a blob that the holder is itself about to have."""


Message = (
    Manifest
    | Announce
    | Heartbeat
    | Goodbye
    | LeaseRequest
    | LeaseGrant
    | LeaseReturn
    | RolloutBatch
    | Trajectory
    | Verdicts
    | CatchUp
    | CaughtUp
    | HoldingsAsk
    | Holdings
    | Done
    | Refusal
    | BlobAsk
    | LaneAsk
    | LaneOffer
    | ReachAsk
    | ReachAnswer
)

KINDS: dict[str, type[Message]] = {
    "manifest": Manifest,
    "announce": Announce,
    "heartbeat": Heartbeat,
    "goodbye": Goodbye,
    "lease-request": LeaseRequest,
    "lease-grant": LeaseGrant,
    "lease-return": LeaseReturn,
    "rollout-batch": RolloutBatch,
    "trajectory": Trajectory,
    "verdicts": Verdicts,
    "catch-up": CatchUp,
    "caught-up": CaughtUp,
    "holdings-ask": HoldingsAsk,
    "holdings": Holdings,
    "done": Done,
    "refusal": Refusal,
    "blob-ask": BlobAsk,
    "lane-ask": LaneAsk,
    "lane-offer": LaneOffer,
    "reach-ask": ReachAsk,
    "reach-answer": ReachAnswer,
}
KIND_OF: dict[type, str] = {kind: name for name, kind in KINDS.items()}
