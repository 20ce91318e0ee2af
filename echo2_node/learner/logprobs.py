"""Log-probs of chosen tokens straight from hidden states, without logits for the whole batch.

One autograd function: the forward pass keeps a log-sum-exp per token, the backward pass makes
each chunk's logits again. It knows no model and no loss; `learner.models` calls it.
Shapes: N chosen tokens, C of them in a chunk, H hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def chunked_logprobs(
    hidden_NH: Tensor,
    weight_VH: Tensor,
    bias_V: Tensor | None,
    target_N: Tensor,
    inverse_temperature_N: Tensor,
    chunk_tokens: int,
) -> tuple[Tensor, Tensor]:
    """Log-probs (with gradient) and entropies, float32[N]; memory for `chunk_tokens` x V logits.

    Logits are made in the weights' dtype, as engines make them; the softmax is in float32. The
    backward pass makes each chunk's logits again.
    """
    logprobs_N, entropy_N = _ChunkedLogprobs.apply(  # type: ignore[no-untyped-call]
        hidden_NH, weight_VH, bias_V, target_N, inverse_temperature_N, chunk_tokens
    )
    return logprobs_N, entropy_N


class _ChunkedLogprobs(torch.autograd.Function):
    """log softmax(hidden W^T / temperature)[target] without ever holding [N, V]."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden_NH: Tensor,
        weight_VH: Tensor,
        bias_V: Tensor | None,
        target_N: Tensor,
        inverse_N: Tensor,
        chunk_tokens: int,
    ) -> tuple[Tensor, Tensor]:
        logprobs, entropies, totals = [], [], []
        for part in _parts(len(target_N), chunk_tokens):
            logits_CV = _logits(hidden_NH[part], weight_VH, bias_V, inverse_N[part])
            total_C = logits_CV.logsumexp(-1)
            logprobs.append(logits_CV.gather(1, target_N[part, None])[:, 0] - total_C)
            share_CV = (logits_CV - total_C[:, None]).exp_()
            entropies.append(total_C - (share_CV.mul_(logits_CV)).sum(-1))
            totals.append(total_C)
        ctx.save_for_backward(hidden_NH, weight_VH, bias_V, target_N, inverse_N, torch.cat(totals))
        ctx.chunk_tokens = chunk_tokens
        entropy_N = torch.cat(entropies)
        ctx.mark_non_differentiable(entropy_N)
        return torch.cat(logprobs), entropy_N

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        hidden_NH, weight_VH, bias_V, target_N, inverse_N, total_N = ctx.saved_tensors
        gradient_N = gradients[0] * inverse_N
        hidden_gradient_NH = torch.empty_like(hidden_NH)
        weight_gradient_VH = torch.zeros_like(weight_VH, dtype=torch.float32)
        bias_gradient_V = None if bias_V is None else torch.zeros_like(bias_V, dtype=torch.float32)
        for part in _parts(len(target_N), ctx.chunk_tokens):
            logits_CV = _logits(hidden_NH[part], weight_VH, bias_V, inverse_N[part])
            slope_CV = logits_CV.sub_(total_N[part, None]).exp_().mul_(-gradient_N[part, None])
            slope_CV.scatter_add_(1, target_N[part, None], gradient_N[part, None])
            if bias_gradient_V is not None:
                bias_gradient_V += slope_CV.sum(0)
            slope_CV = slope_CV.to(weight_VH.dtype)
            hidden_gradient_NH[part] = slope_CV @ weight_VH
            weight_gradient_VH += slope_CV.T @ hidden_NH[part]
        bias_gradient = None if bias_gradient_V is None else bias_gradient_V.to(bias_V.dtype)
        return (
            hidden_gradient_NH, weight_gradient_VH.to(weight_VH.dtype), bias_gradient,
            None, None, None,
        )  # fmt: skip


def _parts(count: int, size: int) -> Iterator[slice]:
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def _logits(
    hidden_CH: Tensor, weight_VH: Tensor, bias_V: Tensor | None, inverse_C: Tensor
) -> Tensor:
    logits_CV = torch.nn.functional.linear(hidden_CH, weight_VH, bias_V).float()
    return logits_CV.mul_(inverse_C[:, None])
