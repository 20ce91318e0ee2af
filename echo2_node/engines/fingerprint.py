"""Did an engine really take the weights? Its log-probs of the manifest's probe say so.

Checksums of parameters are no evidence: kernels keep repacked copies that go stale while every
parameter looks right. A distribution that is neither old nor new is off by nats, rounding by far
less, so the bounds below have a wide gap on both sides. Pure; called by the actor daemon after
each install, before it asks for leases.
"""

from __future__ import annotations

import msgspec
import numpy as np


class Tolerance(msgspec.Struct, frozen=True, kw_only=True):
    """Largest and mean absolute difference of log-probs, in nats."""

    maximum: float
    mean: float


TOLERANCES = {
    "float32": Tolerance(maximum=2e-3, mean=5e-4),
    "float16": Tolerance(maximum=0.5, mean=0.06),
    "bfloat16": Tolerance(maximum=1.0, mean=0.15),
}
"""Per engine dtype. Measured between engines on one 135M model: float32 4e-5 / 6e-6; bfloat16
0.42 / 0.042, on badly conditioned random weights 0.8 / 0.04; a stale output head 3.0 mean."""


class Fingerprint(msgspec.Struct, frozen=True, kw_only=True):
    """`why` says what is wrong where `matches` is False. Differences are in nats."""

    matches: bool
    why: str = ""
    maximum: float = 0.0
    mean: float = 0.0


def compare(published: bytes, measured: bytes, *, dtype: str) -> Fingerprint:
    """Judge an engine's probe.

    Args:
        published: float32[T-1] of the manifest.
        measured: float32[T-1] of the engine.
        dtype: the engine's, as in its cohort; an unknown one is judged like bfloat16.
    """
    if len(published) != len(measured) or len(published) % 4:
        return Fingerprint(
            matches=False,
            why=f"{len(measured) // 4} log-probs measured, {len(published) // 4} published",
        )
    truth, found = np.frombuffer(published, dtype="<f4"), np.frombuffer(measured, dtype="<f4")
    if not (np.isfinite(truth).all() and np.isfinite(found).all()):
        return Fingerprint(matches=False, why="a log-prob is not finite")
    difference = np.abs(truth.astype(np.float64) - found.astype(np.float64))
    maximum, mean = float(difference.max(initial=0.0)), float(difference.mean())
    allowed = TOLERANCES.get(dtype, TOLERANCES["bfloat16"])
    matches = maximum <= allowed.maximum and mean <= allowed.mean
    return Fingerprint(
        matches=matches,
        why=""
        if matches
        else f"log-probs differ by {maximum:.4f} at most and {mean:.4f} on average; {dtype} "
        f"allows {allowed.maximum} and {allowed.mean}",
        maximum=maximum,
        mean=mean,
    )
