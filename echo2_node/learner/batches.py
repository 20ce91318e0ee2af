"""Samples into padded micro-batches of bounded size, longest last; and what is wrong with them.

Pure numpy. It decides which samples are computed together, never which are trained: all are.
Called by `learner.stepper`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from echo2_node.learner.port import Sample

DEVIATION_EPSILON = 1e-6
"""Added to a group's reward deviation (paper App. D.4)."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One sample as arrays over its T tokens."""

    token_ids: NDArray[np.int32]
    loss_mask: NDArray[np.bool_]
    logprobs: NDArray[np.float32]
    temperature: float
    advantage: float


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """B rows padded on the right to T, and their N loss tokens as (row, position) pairs."""

    ids_BT: NDArray[np.int64]
    rows_N: NDArray[np.int64]
    positions_N: NDArray[np.int64]
    behaviour_N: NDArray[np.float32]
    temperature_N: NDArray[np.float32]
    advantage_B: NDArray[np.float32]


def flaw_of(samples: Sequence[Sample], vocabulary: int) -> str:
    """Why these samples must not be trained, in a sentence; empty if they may.

    Intake has judged them before; this is the last look before a gradient.
    """
    for sample in samples:
        trajectory = sample.trajectory
        who = f"member {trajectory.index} of group {trajectory.group_id[:8]}"
        tokens = len(trajectory.loss_mask)
        if len(trajectory.token_ids) != 4 * tokens or len(trajectory.logprobs) != 4 * tokens:
            return f"{who} has arrays of different lengths"
        if trajectory.loss_mask[0] != 0:
            return f"{who} has a loss on its first token, which nothing predicts"
        ids = np.frombuffer(trajectory.token_ids, dtype="<i4")
        if ids.min() < 0 or ids.max() >= vocabulary:
            return f"{who} has a token id outside the vocabulary of {vocabulary}"
        chosen = np.frombuffer(trajectory.loss_mask, dtype=np.uint8) != 0
        behaviour = np.frombuffer(trajectory.logprobs, dtype="<f4")[chosen]
        numbers = (sample.advantage, sample.reward, *behaviour)
        if not np.isfinite(numbers).all():
            return f"{who} has a reward, advantage or log-prob that is not finite"
    return ""


def rows_of(samples: Sequence[Sample], *, std_normalised: bool) -> tuple[Row, ...]:
    """Samples as arrays. Those without a loss token are left out: they have no gradient."""
    deviations = _deviations(samples) if std_normalised else {}
    rows = []
    for sample in samples:
        trajectory = sample.trajectory
        mask = np.frombuffer(trajectory.loss_mask, dtype=np.uint8) != 0
        if not mask.any():
            continue
        spread = deviations[trajectory.group_id] + DEVIATION_EPSILON if std_normalised else 1.0
        rows.append(
            Row(
                token_ids=np.frombuffer(trajectory.token_ids, dtype="<i4"),
                loss_mask=mask,
                logprobs=np.frombuffer(trajectory.logprobs, dtype="<f4"),
                temperature=trajectory.sampling.temperature,
                advantage=sample.advantage / spread,
            )
        )
    return tuple(rows)


def _deviations(samples: Sequence[Sample]) -> dict[str, float]:
    """Each group's reward deviation (population)."""
    rewards: dict[str, list[float]] = {}
    for sample in samples:
        rewards.setdefault(sample.trajectory.group_id, []).append(sample.reward)
    return {group: float(np.std(values)) for group, values in rewards.items()}


def plan(lengths: Sequence[int], tokens_max: int) -> tuple[tuple[int, ...], ...]:
    """Indices by micro-batch: neighbours in length together, padded size at most `tokens_max`.

    A single sequence above the bound is a micro-batch of its own.
    """
    parts: list[tuple[int, ...]] = []
    current: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda index: (lengths[index], index)):
        if current and lengths[index] * (len(current) + 1) > tokens_max:
            parts.append(tuple(current))
            current = []
        current.append(index)
    if current:
        parts.append(tuple(current))
    return tuple(parts)


def pack(rows: Sequence[Row]) -> MicroBatch:
    """Pad rows on the right (with token 0, which no real token ever sees)."""
    width = max(len(row.token_ids) for row in rows)
    ids_BT = np.zeros((len(rows), width), dtype=np.int64)
    for index, row in enumerate(rows):
        ids_BT[index, : len(row.token_ids)] = row.token_ids
    positions = [np.flatnonzero(row.loss_mask) for row in rows]
    counts = [len(part) for part in positions]
    return MicroBatch(
        ids_BT=ids_BT,
        rows_N=np.repeat(np.arange(len(rows)), counts),
        positions_N=np.concatenate(positions),
        behaviour_N=np.concatenate([row.logprobs[row.loss_mask] for row in rows]),
        temperature_N=np.repeat(
            np.array([row.temperature for row in rows], dtype=np.float32), counts
        ),
        advantage_B=np.array([row.advantage for row in rows], dtype=np.float32),
    )
