"""What messages are built of: references, sampling, cohorts. Imported through `wire.messages`."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from echo2_mesh import limits
from echo2_mesh.wire.types import (
    BlobSizeField,
    ChunkKind,
    CountField,
    DigestField,
    NameField,
    VersionField,
)


class Value(msgspec.Struct, frozen=True, kw_only=True):
    """Base of everything on the wire: immutable. Subclasses repeat both flags."""


class ChunkRef(Value, frozen=True, kw_only=True):
    """A blob by digest. Whoever holds it may serve it; the bytes must hash to `digest`."""

    kind: ChunkKind
    digest: DigestField
    size_bytes: BlobSizeField


class Sampling(Value, frozen=True, kw_only=True):
    """How to sample. `seed` makes member i of a group use seed + i where the engine can."""

    temperature: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31)] = 0
    """0 is off."""
    tokens_max: Annotated[int, Meta(ge=1, le=limits.PAYLOAD_TOKENS_MAX)] = 256
    seed: Annotated[int, Meta(ge=0, le=2**53)] = 0


class Cohort(Value, frozen=True, kw_only=True):
    """Machines whose numerics may be compared: engine, dtype and device."""

    engine: NameField
    dtype: NameField
    device: NameField


class VersionSpan(Value, frozen=True, kw_only=True):
    """Policy `version` generated the tokens [start, end) of a trajectory."""

    version: VersionField
    start: CountField
    end: CountField
