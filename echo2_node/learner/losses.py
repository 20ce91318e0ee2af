"""Policy losses by name, over flat tokens; the ratio's denominator is the engine's own log-prob.

Carries the formulas and their monitors. It never runs a model, never sees text and never decides
which samples are trained. `learner.stepper` calls one loss per micro-batch and adds the results:
every loss divides by a `Scale` of the *whole* batch, so micro-batches sum to the exact loss.

Shapes: N loss tokens of a micro-batch (prompt, padding and environment tokens are not among
them), S sequences of it. A ratio is exp(trainer log-prob - behaviour log-prob), so it holds the
engine mismatch and the version lag together ("bypass" in peers' words).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Protocol

import msgspec
import torch
from msgspec import Meta
from torch import Tensor

from echo2_mesh.errors import UsageError
from echo2_node.learner.lossnames import check_loss


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Counts of the whole batch; both at least 1."""

    tokens: int
    sequences: int


@dataclass(frozen=True, kw_only=True)
class TokenBatch:
    """The loss tokens of one micro-batch, on one device.

    `logprobs_N` float32 carries the gradient; `behaviour_N` float32; `sequence_N` int64 in
    [0, S) says whose token it is; `advantage_S` float32.
    """

    logprobs_N: Tensor
    behaviour_N: Tensor
    sequence_N: Tensor
    advantage_S: Tensor


Sums = dict[str, Tensor]
"""Detached scalars to be added over micro-batches; `Loss.metrics` names what comes of them."""


class Loss(Protocol):
    """Built by `make_loss`; stateless."""

    @property
    def std_normalised(self) -> bool:
        """Advantages are divided by their group's reward deviation before the loss sees them."""
        ...

    def __call__(self, batch: TokenBatch, scale: Scale) -> tuple[Tensor, Sums]:
        """This micro-batch's share of the batch loss, and the sums behind the metrics."""
        ...


def make_loss(name: str, args: Mapping[str, float]) -> Loss:
    """The loss of that name; arguments not given take their defaults.

    Raises:
        UsageError: unknown loss, unknown argument or a value out of bounds, each with what is
            known.
    """
    check_loss(name, args)
    try:
        loss: Loss = msgspec.convert(dict(args), LOSSES[name])
    except msgspec.ValidationError as error:
        problem, _, at = str(error).partition(" - at ")
        raise UsageError(
            f"The loss '{name}' refuses {at.strip('`').removeprefix('$.')}: {problem}.",
            "Change it in [learner.loss_args] of the run file.",
        ) from error
    return loss


Positive = Annotated[float, Meta(gt=0.0)]
Fraction = Annotated[float, Meta(gt=0.0, lt=1.0)]
Switch = Annotated[float, Meta(ge=0.0, le=1.0)]
"""0 is off, 1 is on: loss arguments are numbers."""


class Clipped(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Clipped surrogate against the behaviour policy: min(rho A, clip(rho) A), rho capped.

    rho = min(r, C): where r is above the cap C the gradient stays but its weight is C, the
    truncated importance sampling of the paper's App. D.4 folded into the one ratio we have.
    Without it a negative advantage would have no bound.
    """

    per_sequence: ClassVar[bool]
    clip_low: Fraction = 0.2
    clip_high: Positive = 0.2
    ratio_cap: Positive = 5.0
    advantage_std: Switch = 0.0

    @property
    def std_normalised(self) -> bool:
        return self.advantage_std > 0.0

    def __call__(self, batch: TokenBatch, scale: Scale) -> tuple[Tensor, Sums]:
        ratio_N = (batch.logprobs_N - batch.behaviour_N).exp()
        capped_N = ratio_N * (self.ratio_cap / ratio_N.detach()).clamp(max=1.0)
        advantage_N = batch.advantage_S[batch.sequence_N]
        clipped_N = ratio_N.clamp(1.0 - self.clip_low, 1.0 + self.clip_high)
        surrogate_N = torch.minimum(capped_N * advantage_N, clipped_N * advantage_N)
        if self.per_sequence:
            weight_N = 1.0 / _lengths(batch)[batch.sequence_N] / scale.sequences
            loss = -(surrogate_N * weight_N).sum()
        else:
            loss = -surrogate_N.sum() / scale.tokens
        with torch.no_grad():
            active_N = (clipped_N * advantage_N < capped_N * advantage_N) & (clipped_N != ratio_N)
            sums = monitor(batch) | {"clipped": active_N.sum()}
        return loss, sums


class Grpo(Clipped, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """As in the paper (App. D.4): group deviation, token mean per sequence, then batch mean."""

    per_sequence: ClassVar[bool] = True
    ratio_cap: Positive = 2.0
    advantage_std: Switch = 1.0


class Dapo(Clipped, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """DAPO (arXiv 2503.14476): higher upper clip, token mean over the batch; no deviation."""

    per_sequence: ClassVar[bool] = False
    clip_high: Positive = 0.28


class Dppo(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The default: a trust region on probabilities, not on ratios (DPPO, arXiv 2602.04879).

    With n, b the trainer's and the behaviour log-probs, r = exp(n - b) and A the advantage:

        keep = not (A > 0 and exp(n) - exp(b) > tau or A < 0 and exp(n) - exp(b) < -tau)
        loss = sum(-keep * stop_gradient(min(r, cap)) * A * n + pull * (n - b)^2) / tokens

    A sequence leaves both terms when its geometric-mean ratio is outside
    [sequence_ratio_min, sequence_ratio_max], when any of its numbers is not finite, or when
    A < 0 and the mean of b - n is above negative_drift_max: the policy has already moved away
    from it (DeepSeek-V3.2's off-policy mask). The pull is Kimi K2.5's squared log-ratio.
    """

    tau: Fraction = 0.2
    ratio_cap: Positive = 5.0
    pull: Annotated[float, Meta(ge=0.0)] = 1e-3
    sequence_ratio_min: Fraction = 0.5
    sequence_ratio_max: Annotated[float, Meta(gt=1.0)] = 2.0
    negative_drift_max: Positive = 0.35
    advantage_std: Switch = 0.0

    @property
    def std_normalised(self) -> bool:
        return self.advantage_std > 0.0

    def __call__(self, batch: TokenBatch, scale: Scale) -> tuple[Tensor, Sums]:
        new_N, old_N = batch.logprobs_N, batch.behaviour_N
        advantage_N = batch.advantage_S[batch.sequence_N]
        with torch.no_grad():
            drift_N = new_N.exp() - old_N.exp()
            leaving_N = ((advantage_N > 0) & (drift_N > self.tau)) | (
                (advantage_N < 0) & (drift_N < -self.tau)
            )
            trusted_S = self._trusted(batch)
            trusted_N = trusted_S[batch.sequence_N]
            ratio_N = (new_N - old_N).exp().clamp(max=self.ratio_cap)
            weight_N = torch.where(trusted_N & ~leaving_N, ratio_N * advantage_N, 0.0)
        gain_N = torch.where(trusted_N, weight_N * new_N, 0.0)
        pull_N = torch.where(trusted_N, (new_N - old_N).square(), 0.0)
        loss = (self.pull * pull_N - gain_N).sum() / scale.tokens
        sums = monitor(batch) | {
            "clipped": (leaving_N & trusted_N).sum(),
            "masked": (~trusted_N).sum(),
        }
        return loss, sums

    def _trusted(self, batch: TokenBatch) -> Tensor:
        """bool[S]: sequences near enough to the policy that made them."""
        log_ratio_N = batch.logprobs_N.detach() - batch.behaviour_N
        mean_S = torch.zeros_like(batch.advantage_S)
        mean_S = mean_S.index_add(0, batch.sequence_N, log_ratio_N) / _lengths(batch)
        low = torch.tensor(self.sequence_ratio_min, device=mean_S.device).log()
        high = torch.tensor(self.sequence_ratio_max, device=mean_S.device).log()
        drifted_S = (batch.advantage_S < 0) & (-mean_S > self.negative_drift_max)
        return (mean_S >= low) & (mean_S <= high) & mean_S.isfinite() & ~drifted_S


LOSSES: dict[str, type[Grpo] | type[Dapo] | type[Dppo]] = {
    "dppo": Dppo,
    "dapo": Dapo,
    "grpo": Grpo,
}


def _lengths(batch: TokenBatch) -> Tensor:
    """float32[S]: loss tokens per sequence, at least 1."""
    ones_N = torch.ones_like(batch.behaviour_N)
    zeros_S = torch.zeros_like(batch.advantage_S)
    return zeros_S.index_add(0, batch.sequence_N, ones_N).clamp(min=1.0)


def monitor(batch: TokenBatch) -> Sums:
    """The sums that every loss reports, whatever it does with the ratio."""
    with torch.no_grad():
        log_ratio_N = batch.logprobs_N.detach() - batch.behaviour_N
        ratio_N = log_ratio_N.exp()
        return {
            "ratio": ratio_N.sum(),
            "ratio_squared": ratio_N.square().sum(),
            "log_ratio": log_ratio_N.sum(),
            "log_ratio_abs": log_ratio_N.abs().sum(),
            "logprob": batch.logprobs_N.detach().sum(),
        }


def metrics_of(sums: Mapping[str, float], scale: Scale) -> dict[str, float]:
    """What people read, from the sums of a whole batch.

    `kl` is the low-variance estimate mean(r - 1 - log r) of KL(behaviour, trainer); `ess` the
    effective share of samples (sum r)^2 / (N sum r^2), 1 on policy. `clip_fraction` counts tokens
    without a policy gradient because of the trust region, `mask_fraction` those of sequences
    left out.
    """
    tokens = float(scale.tokens)
    squared = sums["ratio_squared"] * tokens
    return {
        "kl": (sums["ratio"] - sums["log_ratio"]) / tokens - 1.0,
        "ess": sums["ratio"] ** 2 / squared if squared > 0.0 else 0.0,
        "clip_fraction": sums.get("clipped", 0.0) / tokens,
        "mask_fraction": sums.get("masked", 0.0) / tokens,
        "ratio_mean": sums["ratio"] / tokens,
        "log_ratio_mean": sums["log_ratio"] / tokens,
        "log_ratio_abs_mean": sums["log_ratio_abs"] / tokens,
        "logprob_mean": sums["logprob"] / tokens,
    }
