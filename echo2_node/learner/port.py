"""What the learner daemon needs of a trainer: five verbs. Two implementations.

`learner.trainer_process` drives the real one in a child process; tests have a simulated one on
a virtual clock. The trainer sees no network and no key: it reads trajectories, steps, and writes
chunks into the store.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import msgspec

from echo2_mesh.wire.messages import ChunkRef, FileRef, Patch, Probe, TensorSpan, Trajectory
from echo2_mesh.wire.types import Digest, PolicyVersion


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """One trajectory as the learner judged it: `reward` is the learner's own, never the actor's."""

    trajectory: Trajectory
    reward: float
    advantage: float


class StepReport(msgspec.Struct, frozen=True, kw_only=True):
    """One training step. `skipped`: the non-finite guard kept model and optimizer as they were."""

    skipped: bool
    why_skipped: str = ""
    metrics: dict[str, float]
    """loss, grad_norm, kl, ess, clip_fraction, mask_fraction, entropy, tokens, lr, ..."""
    seconds: float


class Exported(msgspec.Struct, frozen=True, kw_only=True):
    """A version written into the chunk store, ready to be put into a manifest and signed."""

    version: PolicyVersion
    chunks: tuple[ChunkRef, ...]
    tensors: tuple[TensorSpan, ...]
    tied: tuple[tuple[str, str], ...]
    files: tuple[FileRef, ...]
    state_digest: Digest
    tokenizer_digest: Digest
    template_digest: Digest
    probe: Probe
    seconds: float
    patches: tuple[Patch, ...] = ()
    """Ways to this version from older ones, the newest first; their blobs are in the store."""


class TrainerInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What was loaded."""

    parameters: int
    device: str
    dtype: str
    step: int
    """0, or the step of the checkpoint that was resumed."""


class Trainer(Protocol):
    """One verb at a time; each raises LocalError if the child died or said what went wrong."""

    info: TrainerInfo

    async def step(self, samples: tuple[Sample, ...]) -> StepReport:
        """One optimizer step over whole groups. Does not change any version number."""
        ...

    async def export(self, version: PolicyVersion) -> Exported:
        """Write the current weights, rounded to the published dtype, into the chunk store."""
        ...

    async def save(self, folder: Path, *, step: int) -> None:
        """Write model, optimizer and step into `folder`, which does not exist yet."""
        ...
