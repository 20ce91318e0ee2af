"""Which published tensor fills which parameter: all of them, each once, of the right shape.

Looks at names, shapes and ties of a transformers module, which may live on the meta device; it
copies nothing. Every engine calls it before it changes its first weight, so that a version that
does not fit leaves the old one whole.
"""

from __future__ import annotations

import numpy as np
import torch

from echo2_mesh.errors import UsageError
from echo2_mesh.wire.messages import Manifest, TensorSpan

_TORCH_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def match(module: torch.nn.Module, manifest: Manifest) -> list[tuple[torch.Tensor, TensorSpan]]:
    """(parameter or buffer, published tensor) for the whole state of `module`, each target once.

    Raises:
        UsageError: tensors missing, unknown, of another shape, or tied otherwise.
    """
    state = module.state_dict(keep_vars=True)
    aliases: dict[str, list[str]] = {}
    for alias, stored in manifest.tied:
        aliases.setdefault(stored, []).append(alias)
    pairs = []
    filled: dict[int, str] = {}
    for span in manifest.tensors:
        for name in (span.name, *aliases.get(span.name, ())):
            target = state.get(name)
            if target is None or target.shape != torch.Size(span.shape):
                have = "no such tensor" if target is None else f"{list(target.shape)} there"
                raise _misfit(module, manifest, f"{name} {list(span.shape)}: {have}")
            if id(target) not in filled:
                filled[id(target)] = span.name
                pairs.append((target.data, span))
            elif (owner := filled[id(target)]) != span.name:
                raise _misfit(module, manifest, f"{name} and {owner} are one tensor in the model")
    missing = [name for name, tensor in state.items() if id(tensor) not in filled]
    if missing:
        raise _misfit(module, manifest, f"{len(missing)} tensors are missing, e.g. {missing[0]}")
    return pairs


def probe_ids(manifest: Manifest, vocabulary: int) -> list[int]:
    """The probe's token ids.

    Raises:
        UsageError: an id is outside the engine's vocabulary.
    """
    raw = manifest.probe.token_ids
    ids: list[int] = np.frombuffer(raw[: len(raw) // 4 * 4], dtype="<i4").tolist()
    if min(ids) < 0 or max(ids) >= vocabulary:
        raise UsageError(
            f"The probe of version {manifest.version} holds a token outside the "
            f"vocabulary of {vocabulary}.",
            "The model folder and the weights must come from the same run.",
        )
    return ids


def as_tensor(span: TensorSpan, data: np.ndarray) -> torch.Tensor:
    """A whole tensor's published bytes, uint8, as a tensor on the CPU, not copied."""
    return as_elements(span, data).reshape(span.shape)


def as_elements(span: TensorSpan, data: np.ndarray) -> torch.Tensor:
    """Some elements' published bit patterns as a flat tensor on the CPU, not copied."""
    return torch.from_numpy(data.view(np.uint8)).view(_TORCH_DTYPES[span.dtype])


def _misfit(module: torch.nn.Module, manifest: Manifest, what: str) -> UsageError:
    return UsageError(
        f"Version {manifest.version} does not fit {type(module).__name__}: {what[:300]}.",
        "The model folder and the weights must come from the same run.",
    )
