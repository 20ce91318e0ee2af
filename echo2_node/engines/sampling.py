"""The distribution a token is drawn from, and the draw. Both exact, so log-probs are honest.

Used by `torch_engine`; the order and the borders of the filters are those of vLLM, so that both
engines mean the same by one `Sampling`. Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

_UNIFORM_BLOCK = 64


class Uniforms:
    """A sequence's own random numbers: number i depends on the seed alone, never on the batch."""

    def __init__(self, seed: int) -> None:
        self._generator = np.random.Generator(np.random.Philox(key=seed))
        self._block: list[float] = []

    def next(self) -> float:
        """Uniform in [0, 1)."""
        if not self._block:
            self._block = self._generator.random(_UNIFORM_BLOCK).tolist()[::-1]
        return self._block.pop()


class Filters:
    """Sampling parameters of the rows of a batch, on the model's device."""

    def __init__(
        self,
        temperatures: list[float],
        top_ks: list[int],
        top_ps: list[float],
        device: torch.device,
    ) -> None:
        def column(values: list[float]) -> torch.Tensor:
            return torch.tensor(values, dtype=torch.float32, device=device)[:, None]

        self._temperatures_B1 = None if set(temperatures) == {1.0} else column(temperatures)
        self._top_ks_B: torch.Tensor | None = None
        self._top_ps_B1 = column(top_ps) if any(p < 1.0 for p in top_ps) else None
        if any(top_ks):
            self._top_ks_B = torch.tensor(top_ks, device=device)

    def logprobs(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """float32 log-probs of the distribution that is drawn from; -inf where filtered out."""
        logits_BV = logits_BV.float()
        if self._temperatures_B1 is not None:
            logits_BV = logits_BV / self._temperatures_B1
        if self._top_ks_B is not None or self._top_ps_B1 is not None:
            logits_BV = self._filtered(logits_BV)
        return torch.log_softmax(logits_BV, dim=-1)

    def _filtered(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Top-k keeps ties with the k-th logit; top-p keeps the token that crosses p."""
        sorted_BV, order_BV = logits_BV.sort(dim=-1, descending=False)
        vocabulary = logits_BV.shape[-1]
        if self._top_ks_B is not None:
            kept_B = torch.where(self._top_ks_B == 0, vocabulary, self._top_ks_B)
            places_B1 = (vocabulary - kept_B.clamp(max=vocabulary))[:, None]
            sorted_BV = sorted_BV.masked_fill(
                sorted_BV < sorted_BV.gather(1, places_B1), -torch.inf
            )
        if self._top_ps_B1 is not None:
            below_BV = sorted_BV.softmax(dim=-1).cumsum(dim=-1) <= 1 - self._top_ps_B1
            below_BV[:, -1] = False
            below_BV &= self._top_ps_B1 < 1.0
            sorted_BV = sorted_BV.masked_fill(below_BV, -torch.inf)
        return torch.empty_like(logits_BV).scatter_(1, order_BV, sorted_BV)


def draw(logprobs_BV: torch.Tensor, uniforms: list[float]) -> tuple[torch.Tensor, torch.Tensor]:
    """One token per row by inverting the distribution function, with its log-prob.

    Returns: int64[B], float32[B].
    """
    sums_BV = logprobs_BV.exp().double().cumsum(dim=-1)
    goals_B1 = torch.tensor(uniforms, dtype=torch.float64, device=logprobs_BV.device)[:, None]
    tokens_B1 = torch.searchsorted(sums_BV, goals_B1 * sums_BV[:, -1:], right=True)
    tokens_B1 = tokens_B1.clamp_(max=logprobs_BV.shape[-1] - 1)
    chosen_B = logprobs_BV.gather(1, tokens_B1)[:, 0]
    return tokens_B1[:, 0], chosen_B
