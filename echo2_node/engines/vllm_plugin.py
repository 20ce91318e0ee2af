"""What runs inside vLLM's worker: take a version from the chunk store into the live model.

Named by `worker_extension_cls`, so its methods become the worker's and are called with
`collective_rpc`; with tensor parallelism every worker reads the store itself. Where engine and
worker share a process, the version read by `prepare` is handed over in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from echo2_mesh.wire.types import Digest
from echo2_node.engines.matching import as_tensor
from echo2_node.engines.weights import Staged, stage

HANDED_OVER: dict[Digest, Staged] = {}
"""Versions staged in this process; the engine puts one in and takes it out again."""


class WeightsExtension:
    """Mixed into `vllm.v1.worker.Worker`; `model_runner` is the worker's."""

    model_runner: Any

    def echo2_install(self, store_dir: str, digest_hex: str) -> None:
        """Replace all weights, in checkpoint coordinates, then repair what vLLM forgets."""
        digest = Digest(bytes.fromhex(digest_hex))
        staged = HANDED_OVER.get(digest) or stage(Path(store_dir), digest)
        self.model_runner.reload_weights(weights_iterator=_named(staged), is_checkpoint_format=True)
        _repack_heads(self.model_runner.model)


def _named(staged: Staged) -> Iterator[tuple[str, torch.Tensor]]:
    """Published tensors under their own names; ties are the model's business."""
    for span, data in staged.tensors():
        yield span.name, as_tensor(span, data)


def _repack_heads(model: torch.nn.Module) -> None:
    """Pack every output head again that keeps a packed copy of its weight.

    On a CPU, vLLM 0.32 packs each linear for oneDNN; a reload packs linears again but not a head
    that is tied to the embedding, whose copy then stays that of the old weights while every
    parameter looks right. The engine's probe would catch it; this mends it.
    """
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if "cpu_linear" in module.__dict__ and weight is not None and weight.numel():
            method: Any = module.quant_method
            method.process_weights_after_loading(module)
