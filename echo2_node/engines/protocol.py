"""What an engine is. Synchronous and single-threaded: it lives in a child process of its own.

`engines.worker` runs one engine behind frames on a pipe; `engines.process` is the trio side.
An engine never talks to the network and never sees a key. It generates with exact log-probs,
labels every token with the policy version that chose it, and takes new weights between two
decoding steps.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from echo2_mesh.wire.messages import Cohort, Sampling, VersionSpan
from echo2_mesh.wire.types import Digest, PolicyVersion, StopReason


class GenerationRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Sample members `indices` of one prompt. Each ends as one `Generation`."""

    request_id: str
    prompt_ids: bytes
    """int32[P] little-endian."""
    indices: tuple[int, ...]
    sampling: Sampling


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One finished sequence. Arrays run over the C completion tokens, the end token included."""

    request_id: str
    index: int
    token_ids: bytes
    """int32[C]."""
    logprobs: bytes
    """float32[C], of the sampled token under the distribution it was drawn from."""
    segments: tuple[VersionSpan, ...]
    """Cover [0, C) in completion coordinates."""
    stop_reason: StopReason


class EngineInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was loaded."""

    cohort: Cohort
    vocabulary: int
    length_tokens_max: int
    parameters: int
    sequences_max: int
    """Sequences decoded at once."""


class InstallReport(msgspec.Struct, frozen=True, kw_only=True):
    """A version change: `pause_s` is the time in which no token could be generated.

    The pause holds what lies between two tokens: writing the parameters and computing running
    sequences' keys and values again. `probe_s` comes after it, with tokens in between. `total_s`
    counts all, reading and comparing included. `changed`: elements written where only what differs
    was; None for a full install.

    `probe_logprobs` float32[T-1]: the manifest's probe sequence under the weights now installed,
    computed by the generating model itself, so that stale copies cannot hide.
    """

    version: PolicyVersion
    pause_s: float
    total_s: float
    probe_logprobs: bytes
    probe_s: float = 0.0
    changed: int | None = None


class Engine(Protocol):
    """One model on one device."""

    info: EngineInfo

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request; it starts at the next step with room.

        Raises:
            UsageError: prompt and limit exceed the context, or a token id is outside the
                vocabulary.
        """
        ...

    def step(self) -> list[Generation]:
        """One decoding step for every running sequence; the sequences that ended in it."""
        ...

    def busy(self) -> bool:
        """True while any request is unfinished."""
        ...

    def cancel(self, request_id: str) -> None:
        """Forget a request; no error if it is unknown."""
        ...

    def prepare(self, manifest: Digest) -> None:
        """Read what `install` of the same digest will need; may run in another thread meanwhile.

        Changes nothing that generation sees. What it read is kept until the next install.

        Raises:
            LocalError: a blob is missing or cannot be read.
            UsageError: the manifest is not one, or cannot be installed by any engine.
        """
        ...

    def install(self, manifest: Digest) -> InstallReport:
        """Load the version named by a manifest blob in the chunk store, between two steps.

        Running sequences continue under the new weights; their later tokens carry the new
        version. On any failure the old weights stay and generation goes on. An engine that
        cannot take weights back returns a report whose probe does not match; whoever called
        installs the version before again.

        Raises:
            UsageError: tensors missing, of another shape, or of an unsupported dtype.
        """
        ...

    def close(self) -> None:
        """Free the device."""
        ...
