"""A transformers causal LM as the torch engine uses it: built empty, filled, and run by slots.

Owns the module, its device and its masks. It never samples and keeps no sequence; positions,
masks and cache rows are always given explicitly, so nothing is left to a model's defaults. Code
that travels with a model is never run (`trust_remote_code=False`): the folder came from a peer.

Shapes: R prompts, B running rows, C columns of a prefill, L tokens visible, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.utils import logging as transformers_logging

from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.wire.messages import Cohort, Manifest, TensorSpan
from echo2_node.engines.matching import as_tensor, match
from echo2_node.engines.registry import EngineSettings
from echo2_node.engines.slots import SlotCache
from echo2_node.engines.weights import Staged
from echo2_node.tokens import TokenCodec

PREFILL_TOKENS_MAX = 4096
"""Tokens of one prefill pass, padding included: bounds its activations and logits."""
PROBE_SLICE_TOKENS = 8
LENGTH_TOKENS_DEFAULT = 2048
"""The context of a model whose configuration names none."""
_ATTENTION_KINDS = ("full_attention", "sliding_attention")
Pairs = list[tuple[torch.Tensor, TensorSpan]]


class TorchModel:
    """The module and what is known of it."""

    def __init__(
        self, module: torch.nn.Module, *, eos_ids: frozenset[int], device: torch.device
    ) -> None:
        self._module = module
        self.device = device
        self.eos_ids = eos_ids
        config = module.config.get_text_config()  # type: ignore[operator,union-attr]
        self.vocabulary = int(config.vocab_size)
        self.length_tokens_max = int(
            getattr(config, "max_position_embeddings", None) or LENGTH_TOKENS_DEFAULT
        )
        self.parameters = sum(p.numel() for p in module.parameters())
        self._dtype = next(module.parameters()).dtype
        self.cohort = Cohort(
            engine="torch",
            dtype=str(self._dtype).removeprefix("torch."),
            device="cpu" if device.type == "cpu" else torch.cuda.get_device_name(device)[:128],
        )
        self._mask_kinds, self._window = _attention(config)
        accepted = inspect.signature(module.forward).parameters
        self._cache_argument = "cache" if "cache" in accepted else "past_key_values"
        if self._cache_argument not in accepted or "logits_to_keep" not in accepted:
            raise UsageError(
                f"The torch engine cannot run {type(module).__name__}: it has no key-value cache "
                "in the usual form.",
                "Try `--engine vllm`.",
            )

    @classmethod
    def build(cls, settings: EngineSettings) -> TorchModel:
        """The model of a folder, parameters undefined.

        Raises:
            UsageError: no usable config.json or tokenizer, or an architecture that is unknown.
            LocalError: a GPU was asked for and there is none.
        """
        transformers_logging.set_verbosity_error()
        transformers_logging.disable_progress_bar()
        if settings.threads:
            torch.set_num_threads(settings.threads)
        device = _device(settings.device)
        folder = Path(settings.model_folder)
        name = settings.dtype
        if name == "auto":
            name = "float32" if device.type == "cpu" else "bfloat16"
        try:
            config = AutoConfig.from_pretrained(
                folder, trust_remote_code=False, local_files_only=True
            )
            with no_init_weights(), device:
                module = AutoModelForCausalLM.from_config(
                    config, dtype=getattr(torch, name), trust_remote_code=False
                )
        except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
            raise UsageError(
                f"The model in {folder} cannot be built: {str(error)[:300]}.",
                "It must be a causal language model that this version of transformers knows.",
            ) from error
        module.tie_weights()  # left out with the initialisation
        module.eval().requires_grad_(False)
        return cls(module, eos_ids=TokenCodec.load(folder).eos_ids, device=device)

    def make_cache(self, slots: int) -> SlotCache:
        """An empty cache for `slots` sequences; memory is taken as they grow."""
        return SlotCache(slots)

    # --- weights -------------------------------------------------------------------------------

    def pairs(self, manifest: Manifest) -> Pairs:
        """Which published tensor fills which parameter, or a refusal (see `matching.match`)."""
        return match(self._module, manifest)

    def copy(self, staged: Staged, pairs: Pairs) -> None:
        """Write a whole version into the parameters."""
        published = {span.name: as_tensor(span, data) for span, data in staged.tensors()}
        for target, span in pairs:
            target.copy_(published[span.name])

    def probe(self, token_ids: list[int], between: Callable[[], None] | None = None) -> bytes:
        """float32[T-1] log-probs of a fixed sequence, by the path that generates.

        All but the last two tokens by prefill, the rest by decoding through the cache: an
        architecture whose cache this engine misunderstands cannot match the learner's forward.
        Where there is something to do meanwhile, in slices little dearer than a decoding step,
        with a call of `between` after each.
        """
        cache = self.make_cache(1)
        prefilled = max(1, len(token_ids) - 2)
        logits = []
        step = PROBE_SLICE_TOKENS if between is not None else prefilled
        for offset in range(0, prefilled, step):
            columns = min(step, prefilled - offset)
            slice_ids = [token_ids[: offset + columns]]
            logits.append(self._prefill_columns(cache, 0, slice_ids, offset, columns, None)[0])
            if between is not None:
                between()
        for position in range(prefilled, len(token_ids) - 1):
            logits.append(self.decode(cache, [token_ids[position]], [position]))
            if between is not None:
                between()
        logprobs_TV = torch.cat(logits).float().log_softmax(dim=-1)[: len(token_ids) - 1]
        targets_T1 = torch.tensor(token_ids[1:], device=self.device)[:, None]
        chosen_T: np.ndarray = logprobs_TV.gather(1, targets_T1)[:, 0].cpu().numpy()
        return chosen_T.astype("<f4").tobytes()

    # --- forward -------------------------------------------------------------------------------

    def prefill(
        self, cache: SlotCache, first_row: int, prompts: list[list[int]], *, logits: bool
    ) -> torch.Tensor | None:
        """Fill the cache rows from `first_row` on; logits [R, V] after each prompt if wanted.

        Shorter prompts are padded on the right: no real token sees the padding, and decoding
        overwrites it.
        """
        parts = []
        for first, last in _passes(prompts):
            part = prompts[first:last]
            length = max(map(len, part))
            ends: list[torch.Tensor | None] = [None] * len(part)
            for offset in range(0, length, PREFILL_TOKENS_MAX):
                columns = min(PREFILL_TOKENS_MAX, length - offset)
                lasts = [len(prompt) - 1 - offset for prompt in part]
                here = sorted({last for last in lasts if 0 <= last < columns})
                kept = torch.tensor(here or [columns - 1], device=self.device)
                logits_RKV = self._prefill_columns(
                    cache, first_row + first, part, offset, columns, kept
                )
                for row, last_column in enumerate(lasts):
                    if logits and last_column in here:
                        ends[row] = logits_RKV[row, here.index(last_column)]
            parts += ends
        if not logits:
            return None
        return torch.stack([end for end in parts if end is not None])

    def _prefill_columns(
        self,
        cache: SlotCache,
        first_row: int,
        prompts: list[list[int]],
        offset: int,
        columns: int,
        kept: torch.Tensor | None,
    ) -> torch.Tensor:
        """One pass over columns [offset, offset + columns): logits [R, kept or C, V]."""
        ids_RC = torch.zeros(len(prompts), columns, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            piece = prompt[offset : offset + columns]
            ids_RC[row, : len(piece)] = torch.tensor(piece, dtype=torch.long)
        positions_1C = torch.arange(offset, offset + columns, device=self.device)[None]
        cache.aim_prefill(first_row, len(prompts), offset, columns)
        keep: torch.Tensor | int = 0 if kept is None else kept
        positions_RC = positions_1C.expand(len(prompts), columns)
        return self._forward(cache, ids_RC, positions_RC, positions_1C, offset + columns, keep)

    def decode(self, cache: SlotCache, tokens: list[int], positions: list[int]) -> torch.Tensor:
        """Put one token into each of the first B rows; logits [B, V] for what follows it."""
        positions_B = torch.tensor(positions, device=self.device)
        length = max(positions) + 1
        cache.aim_decode(torch.arange(len(tokens), device=self.device), positions_B, length)
        positions_B1 = positions_B[:, None]
        ids_B1 = torch.tensor(tokens)[:, None]
        return self._forward(cache, ids_B1, positions_B1, positions_B1, length, 1)[:, -1]

    def _forward(
        self,
        cache: SlotCache,
        ids: torch.Tensor,
        position_ids: torch.Tensor,
        mask_positions: torch.Tensor,
        length: int,
        keep: torch.Tensor | int,
    ) -> torch.Tensor:
        masks = {
            kind: self._mask(mask_positions, length, kind == "sliding_attention")
            for kind in self._mask_kinds
        }
        output: Any = self._module(
            input_ids=ids.to(self.device),
            position_ids=position_ids,
            attention_mask=masks if len(masks) > 1 else next(iter(masks.values())),
            use_cache=True,
            logits_to_keep=keep,
            return_dict=True,
            **{self._cache_argument: cache},
        )
        logits: torch.Tensor = output.logits
        return logits

    def _mask(self, positions: torch.Tensor, length: int, sliding: bool) -> torch.Tensor:
        """Additive [R or 1, 1, C, L]: token at position p sees [0, p], or its window of it."""
        seen = torch.arange(length, device=self.device)
        hidden = seen > positions[:, None, :, None]
        if sliding:
            hidden |= seen <= positions[:, None, :, None] - self._window
        zeros = torch.zeros(hidden.shape, dtype=self._dtype, device=self.device)
        return zeros.masked_fill_(hidden, torch.finfo(self._dtype).min)


def _passes(prompts: list[list[int]]) -> list[tuple[int, int]]:
    """Cut prompts, in order, into passes of at most `PREFILL_TOKENS_MAX` padded tokens."""
    passes = []
    first = 0
    longest = 0
    for row, prompt in enumerate(prompts):
        longer = max(longest, len(prompt))
        if row > first and longer * (row - first + 1) > PREFILL_TOKENS_MAX:
            passes.append((first, row))
            first, longer = row, len(prompt)
        longest = longer
    return [*passes, (first, len(prompts))] if prompts else []


def _attention(config: Any) -> tuple[tuple[str, ...], int]:
    """The kinds of attention in a model, and the window of the sliding ones.

    Raises:
        UsageError: a kind whose state is more than keys and values.
    """
    window = getattr(config, "sliding_window", None) or 0
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = ["sliding_attention" if window else "full_attention"]
    unknown = sorted(set(kinds) - set(_ATTENTION_KINDS))
    if unknown:
        raise UsageError(
            f"The torch engine cannot run a model with {', '.join(unknown)} layers.",
            "Try `--engine vllm`.",
        )
    return tuple(kind for kind in _ATTENTION_KINDS if kind in kinds), int(window)


def _device(name: str) -> torch.device:
    if name == "cuda" and not torch.cuda.is_available():
        raise LocalError("There is no CUDA device on this host.", "Use --device cpu.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
