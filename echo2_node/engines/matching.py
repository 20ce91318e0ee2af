"""Which published tensor fills which parameter: all of them, each once, of the right shape.

Looks at names, shapes and ties of a transformers module, which may live on the meta device; it
copies nothing. Every engine calls it before it changes its first weight, so that a version that
does not fit leaves the old one whole.
"""

from __future__ import annotations

import numpy as np
import torch

from echo2_mesh.errors import UsageError
from echo2_mesh.wire.messages import TensorSpan
from echo2_node.engines.weights import Staged

_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def match(module: torch.nn.Module, staged: Staged) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(parameter or buffer, published tensor) for the whole state of `module`.

    Raises:
        UsageError: tensors missing, unknown, of another shape, or tied otherwise.
    """
    state = module.state_dict(keep_vars=True)
    aliases: dict[str, list[str]] = {}
    for alias, stored in staged.manifest.tied:
        aliases.setdefault(stored, []).append(alias)
    pairs = []
    filled: dict[int, str] = {}
    for span, data in staged.tensors():
        published = as_tensor(span, data)
        for name in (span.name, *aliases.get(span.name, ())):
            target = state.get(name)
            if target is None or target.shape != published.shape:
                have = "no such tensor" if target is None else f"{list(target.shape)} there"
                raise _misfit(module, staged, f"{name} {list(span.shape)}: {have}")
            owner = filled.setdefault(id(target), span.name)
            if owner != span.name:
                raise _misfit(module, staged, f"{name} and {owner} are one tensor in the model")
            pairs.append((target.data, published))
    missing = [name for name, tensor in state.items() if id(tensor) not in filled]
    if missing:
        raise _misfit(module, staged, f"{len(missing)} tensors are missing, e.g. {missing[0]}")
    return pairs


def probe_ids(staged: Staged, vocabulary: int) -> list[int]:
    """The probe's token ids.

    Raises:
        UsageError: an id is outside the engine's vocabulary.
    """
    raw = staged.manifest.probe.token_ids
    ids: list[int] = np.frombuffer(raw[: len(raw) // 4 * 4], dtype="<i4").tolist()
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise UsageError(
            f"The probe of version {staged.manifest.version} holds a token outside the "
            f"vocabulary of {vocabulary}.",
            "The model folder and the weights must come from the same run.",
        )
    return ids


def as_tensor(span: TensorSpan, data: np.ndarray) -> torch.Tensor:
    """Published bytes as a tensor on the CPU, not copied."""
    return torch.from_numpy(data).view(_TORCH_DTYPES[span.dtype]).reshape(span.shape)


def _misfit(module: torch.nn.Module, staged: Staged, what: str) -> UsageError:
    return UsageError(
        f"Version {staged.manifest.version} does not fit {type(module).__name__}: {what[:300]}.",
        "The model folder and the weights must come from the same run.",
    )
