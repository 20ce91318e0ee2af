"""Attention of one new token per row on a CPU: plain matrix products beat the fused kernel.

PyTorch's fused CPU kernel is made for long queries; with one query token, grouped heads and a
mask it takes twice as long as two batched products (measured: batch 64, 88 tokens). Everything
else goes to the kernel that transformers would have chosen. Used by `torch_model` alone.

Shapes: B rows, H query heads, K key-value heads, G = H / K, L visible tokens, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

NAME = "echo2_rows"


def use_row_attention(module: torch.nn.Module) -> None:
    """Have a model on a CPU decode with `attend`, where it would use the fused kernel."""
    config: Any = module.config
    if config._attn_implementation != "sdpa":
        return
    AttentionInterface.register(NAME, attend)
    module.set_attn_implementation(NAME)  # type: ignore[operator]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """query [B, H, 1, D], key and value [B, K, L, D], additive mask [B, 1, 1, L] -> [B, 1, H, D]."""
    plain = options.get("softcap") is None and options.get("position_bias") is None
    if query.shape[2] != 1 or attention_mask is None or not plain:
        output: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **options
        )
        return output
    rows, heads, _, size = query.shape
    grouped = query.reshape(rows, key.shape[1], heads // key.shape[1], size)
    scale = size**-0.5 if scaling is None else scaling
    scores = torch.matmul(grouped * scale, key.transpose(2, 3)).add_(attention_mask)
    attended = torch.matmul(scores.softmax(dim=-1), value)
    return attended.reshape(rows, 1, heads, value.shape[-1]), None
