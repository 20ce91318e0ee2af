"""What is wrong with one trajectory by itself: shapes, lease, prompt, versions, numbers.

A list of rules over a decoded trajectory and what its lease promised, each with its reason. It
never looks at rewards (the learner recomputes those), at time, or at other trajectories. Called
by the learner's intake, in a worker thread.
"""

from __future__ import annotations

import math

import msgspec
import numpy as np

from echo2_mesh.wire.messages import Sampling, Trajectory
from echo2_mesh.wire.types import Digest, PolicyVersion, Reason, StopReason
from echo2_node.scheduler.records import OpenLease

LOGPROB_MAX = 1e-3
"""A log-prob may exceed 0 by rounding, no more."""
LOGPROB_MARGIN = 30.0
"""A token that was sampled has a log-prob above -ln(vocabulary) - margin, but for one time in
exp(margin): there are only so many tokens that could be so improbable."""


class Expected(msgspec.Struct, frozen=True, kw_only=True):
    """What a lease and the run promise about a trajectory."""

    run_id: str
    lease: OpenLease
    prompt_ids: bytes
    """int32[P] little-endian."""
    sampling: Sampling
    version_newest: PolicyVersion
    """Nobody can have a newer policy."""
    tokenizer_digest: Digest
    template_digest: Digest
    task_digest: Digest
    vocabulary: int
    eos_ids: frozenset[int]
    """Empty: any token may end a sequence."""


class Fault(msgspec.Struct, frozen=True, kw_only=True):
    """Why a trajectory is refused; `why` is for the log."""

    reason: Reason
    why: str


def examine(trajectory: Trajectory, index: int, expected: Expected) -> Fault | None:
    """The first fault of a trajectory that was announced as member `index`; None if sound."""
    return (
        _binding(trajectory, index, expected)
        or _shapes(trajectory, expected)
        or _versions(trajectory, expected)
        or _numbers(trajectory, expected)
        or _ending(trajectory, expected)
    )


def completion_ids(trajectory: Trajectory) -> bytes:
    """int32[C] of the completion, the end token included."""
    return trajectory.token_ids[4 * trajectory.prompt_length :]


def _binding(trajectory: Trajectory, index: int, expected: Expected) -> Fault | None:
    """It is what the lease asked for."""
    lease = expected.lease
    if (trajectory.run_id, trajectory.lease_id, trajectory.group_id, trajectory.index) != (
        expected.run_id,
        lease.lease_id,
        lease.group_id,
        index,
    ):
        return Fault(reason=Reason.MALFORMED, why="not the trajectory that its header names")
    if trajectory.item_index != lease.item_index:
        return Fault(reason=Reason.WRONG_PROMPT, why=f"item {trajectory.item_index}")
    for name in ("tokenizer_digest", "template_digest", "task_digest"):
        if getattr(trajectory, name) != getattr(expected, name):
            return Fault(reason=Reason.WRONG_DIGESTS, why=name)
    if trajectory.sampling != expected.sampling:
        return Fault(reason=Reason.MALFORMED, why="sampled with other parameters than leased")
    return None


def _shapes(trajectory: Trajectory, expected: Expected) -> Fault | None:
    """Arrays of one length over the leased prompt and a completion of legal length and ids."""
    tokens = len(trajectory.loss_mask)
    if len(trajectory.token_ids) != 4 * tokens or len(trajectory.logprobs) != 4 * tokens:
        return Fault(reason=Reason.MALFORMED, why="arrays of different lengths")
    prompt = trajectory.prompt_length
    if (
        4 * prompt != len(expected.prompt_ids)
        or trajectory.token_ids[: 4 * prompt] != expected.prompt_ids
    ):
        return Fault(reason=Reason.WRONG_PROMPT, why="prompt tokens differ from the lease's")
    completion = tokens - prompt
    if completion < 1:
        return Fault(reason=Reason.MALFORMED, why="no completion")
    if completion > expected.sampling.tokens_max:
        return Fault(reason=Reason.OVER_LONG, why=f"{completion} completion tokens")
    # Tasks are single-turn: the policy chose every token of the completion and none before it.
    if trajectory.loss_mask != bytes(prompt) + b"\x01" * completion:
        return Fault(reason=Reason.MALFORMED, why="loss mask is not exactly the completion")
    ids = np.frombuffer(trajectory.token_ids, dtype="<i4")
    if int(ids.min()) < 0 or int(ids.max()) >= expected.vocabulary:
        return Fault(reason=Reason.MALFORMED, why="token id outside the vocabulary")
    return None


def _versions(trajectory: Trajectory, expected: Expected) -> Fault | None:
    """Segments cover the completion without a gap, versions only rise, within the lease's."""
    at = trajectory.prompt_length
    version = 0
    for span in trajectory.segments:
        if span.start != at or span.end <= span.start or span.version < version:
            return Fault(reason=Reason.MALFORMED, why="segments do not cover the completion")
        at, version = span.end, span.version
    if at != len(trajectory.loss_mask):
        return Fault(reason=Reason.MALFORMED, why="segments do not cover the completion")
    if version > expected.version_newest:
        return Fault(reason=Reason.FROM_THE_FUTURE, why=f"version {version}")
    oldest = trajectory.segments[0].version
    if oldest < expected.lease.version_min:
        return Fault(reason=Reason.STALE, why=f"version {oldest} below the lease's floor")
    return None


def _numbers(trajectory: Trajectory, expected: Expected) -> Fault | None:
    """Log-probs are finite, of sampled tokens, and 0 where nothing was sampled."""
    logprobs = np.frombuffer(trajectory.logprobs, dtype="<f4")
    finite = bool(np.isfinite(logprobs).all()) and math.isfinite(trajectory.reward)
    if not finite or not all(math.isfinite(value) for value in trajectory.metrics.values()):
        return Fault(reason=Reason.NON_FINITE, why="a log-prob, reward or metric is not finite")
    if logprobs[: trajectory.prompt_length].any():
        return Fault(reason=Reason.LOGPROB_MISMATCH, why="log-probs on prompt tokens")
    least = -math.log(expected.vocabulary) - LOGPROB_MARGIN
    if float(logprobs.max()) > LOGPROB_MAX or float(logprobs.min()) < least:
        return Fault(reason=Reason.LOGPROB_MISMATCH, why="log-probs of tokens nobody samples")
    return None


def _ending(trajectory: Trajectory, expected: Expected) -> Fault | None:
    """It ended as it says: by an end token, or by the lease's limit; never earlier or later."""
    ids = np.frombuffer(completion_ids(trajectory), dtype="<i4")
    ends = [place for place, token in enumerate(ids.tolist()) if token in expected.eos_ids]
    if ends and ends[0] != len(ids) - 1:
        return Fault(reason=Reason.MALFORMED, why="tokens after the end token")
    match trajectory.stop_reason:
        case StopReason.STOP if expected.eos_ids and not ends:
            return Fault(reason=Reason.MALFORMED, why="stopped without an end token")
        case StopReason.LENGTH if len(ids) != expected.sampling.tokens_max:
            return Fault(reason=Reason.MALFORMED, why="cut before the token limit")
        case _:
            return None
