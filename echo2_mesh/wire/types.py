"""Scalar types of the wire. Pure: every value that exists is legal, because the type checks it."""

from __future__ import annotations

from enum import Enum
from typing import Annotated, NewType

from msgspec import Meta

from echo2_mesh import limits

NodeId = NewType("NodeId", str)
"""libp2p peer id of an Ed25519 key, base58."""
PolicyVersion = NewType("PolicyVersion", int)
"""The learner's training-step counter; 0 is the initial policy. Never a count, never an index."""
Digest = NewType("Digest", bytes)
"""32-byte BLAKE3 of a blob's bytes."""

# `$(?!\n)` is the end of the text in every regular-expression dialect; Python's bare `$` also
# matches before a last line break, which would give one node, run or file two names.
NodeIdField = Annotated[NodeId, Meta(pattern=r"^12D3KooW[1-9A-HJ-NP-Za-km-z]{44}$(?!\n)")]
VersionField = Annotated[PolicyVersion, Meta(ge=0, le=2**53)]
DigestField = Annotated[Digest, Meta(min_length=32, max_length=32)]
RunIdField = Annotated[str, Meta(pattern=r"^[a-z0-9][a-z0-9-]{1,62}$(?!\n)")]
NameField = Annotated[str, Meta(min_length=1, max_length=128)]
TensorNameField = Annotated[str, Meta(min_length=1, max_length=512)]
ShortTextField = Annotated[str, Meta(max_length=512)]
HexIdField = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}$(?!\n)")]
LeaseIdsField = Annotated[tuple[HexIdField, ...], Meta(max_length=limits.LEASES_NAMED_MAX)]
CountField = Annotated[int, Meta(ge=0, le=2**53)]
SizeField = Annotated[int, Meta(ge=0, le=2**53)]
BlobSizeField = Annotated[int, Meta(ge=0, le=limits.CHUNK_SIZE_BYTES_MAX)]
RateField = Annotated[float, Meta(ge=0.0, le=1e18)]
FiniteField = Annotated[float, Meta(ge=-1e18, le=1e18)]
"""Bounds also keep out the values that are no number."""
SecondsField = Annotated[float, Meta(ge=0.0, le=1e9)]
AddressField = Annotated[str, Meta(min_length=1, max_length=limits.ADDRESS_CHARACTERS_MAX)]
SignatureField = Annotated[bytes, Meta(min_length=64, max_length=64)]


class ChunkKind(str, Enum):
    """What a blob is for. Decides where it is kept and how long, never whether it is verified."""

    FULL = "full"
    """A slice of a version's tensor data."""
    PATCH = "patch"
    """An encoded difference against a base version."""
    MANIFEST = "manifest"
    TRAJECTORY = "trajectory"
    FILE = "file"
    """A part of a file that travels with the model: configuration, tokenizer, template."""


GOODBYE_RUN_ENDED = "run ended"
"""A learner's goodbye with these words ends the run for everybody (proto/membership.md)."""


class Role(str, Enum):
    LEARNER = "learner"
    ACTOR = "actor"
    OBSERVER = "observer"


class Reach(str, Enum):
    """How others come to a node. Decides who may be an inner node of a distribution tree."""

    UNKNOWN = "unknown"
    DIRECT = "direct"
    """It was dialled at one of its addresses."""
    PUNCHED = "punched"
    """Behind a NAT; connections are made by opening from both sides at once."""
    RELAYED = "relayed"
    """Behind a NAT that cannot be punched: a relay carries what it did not dial itself."""


class StopReason(str, Enum):
    STOP = "stop"
    """The model ended the sequence itself."""
    LENGTH = "length"
    """The token limit of the lease was reached."""


class Reason(str, Enum):
    """Why a rollout was not used: a closed set, each with a counter.

    `ADMITTED` is the one verdict that is no refusal. A verdict is given once per (lease, index).
    """

    ADMITTED = "admitted"
    UNKNOWN_LEASE = "unknown_lease"
    WRONG_ACTOR = "wrong_actor"
    EXPIRED = "expired"
    MALFORMED = "malformed"
    BAD_SIGNATURE = "bad_signature"
    DUPLICATE = "duplicate"
    LATE = "late"
    STALE = "stale"
    FROM_THE_FUTURE = "from_the_future"
    WRONG_PROMPT = "wrong_prompt"
    WRONG_DIGESTS = "wrong_digests"
    REWARD_MISMATCH = "reward_mismatch"
    LOGPROB_MISMATCH = "logprob_mismatch"
    NON_FINITE = "non_finite"
    OVER_LONG = "over_long"
    ZERO_VARIANCE = "zero_variance"
    GROUP_ABANDONED = "group_abandoned"
    PAYLOAD_UNAVAILABLE = "payload_unavailable"
    RUN_ENDED = "run_ended"
