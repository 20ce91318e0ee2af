"""A Hugging Face causal LM as the trained policy: published weights compute, masters are stepped.

The weights that compute *are* the published ones: values rounded to bfloat16, held in float32 on
a CPU and in bfloat16 on a GPU. Float32 masters lie beside them, take the optimizer's step and
are rounded back. So the trainer's forward pass is exactly the policy the actors sample from: at
staleness 0 an exact engine gives the ratio 1, and no second log-prob pass is ever needed.

Carries no optimizer and no loss; `learner.stepper` and `learner.starter` call it.
Shapes: B sequences, T positions, H hidden, V vocabulary, N chosen tokens.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from echo2_mesh.errors import LocalError, UsageError
from echo2_node.learner.logprobs import chunked_logprobs
from echo2_node.learner.modelfolder import check_model_folder
from echo2_node.learner.tensorfile import Entry

ACTIVATION_CHECKPOINT_PARAMETERS_MIN = 1_000_000_000
"""From this size on activations are recomputed in the backward pass."""
FLOAT_COPY_HEADROOM = 3.0
"""Free GPU memory, in float32 copies of the weights, for a probe in float32."""
_HEAD_TOLERANCE = 1e-3
_PUBLISHED = torch.bfloat16
_DTYPE_NAMES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16",
    torch.int32: "I32", torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float32: "F32", torch.float64: "F64",
}  # fmt: skip


class Policy:
    """One model on one device.

    Args:
        folder: a Hugging Face causal-LM folder.
        device: where to compute; `auto` takes a GPU where there is one.
        chunk_tokens: positions whose logits exist at once.

    Errors:
        UsageError: the folder is missing, incomplete, damaged or not a causal LM.
    """

    def __init__(
        self, folder: Path, *, device: Literal["auto", "cpu", "cuda"], chunk_tokens: int
    ) -> None:
        self.folder = folder
        self.device = choose_device(device)
        self.model = load_model(folder)
        self.chunk_tokens = chunk_tokens
        self.vocabulary = int(self.model.get_input_embeddings().weight.shape[0])
        self.masters: list[Tensor] = []
        self.model.to(self.device)
        self._stored, self.tied = _stored_tensors(self.model)
        for _, parameter in self.model.named_parameters():
            self.masters.append(parameter.data.clone().requires_grad_())
            if self.device.type == "cuda":
                parameter.data = parameter.data.to(_PUBLISHED)
        self.parameters = list(self.model.parameters())
        self.names = [name for name, _ in self.model.named_parameters()]
        self.size = sum(parameter.numel() for parameter in self.parameters)
        _silence_dropout(self.model)
        self.model.eval()
        if self.size >= ACTIVATION_CHECKPOINT_PARAMETERS_MIN and self.device.type == "cuda":
            self.model.gradient_checkpointing_enable(
                gradient_checkpointing_kwargs={"use_reentrant": False}
            )
            self.model.train()
        self.publish()
        self._hook_gradients()
        self._plain_head = self._head_is_plain()

    def publish(self) -> None:
        """Round the masters into the weights that compute."""
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.copy_(master.to(_PUBLISHED))

    def logprobs(
        self, ids_BT: Tensor, rows_N: Tensor, positions_N: Tensor, temperature_N: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-prob of the chosen tokens, float32[N] with gradient, and entropy, float32[N].

        Token (row, position) is predicted from position - 1, so positions start at 1. Padding is
        on the right, where causal attention never looks at it from a real token, so there is no
        attention mask. The temperature is applied as the engine applied it.
        """
        inputs_BT = ids_BT[:, :-1]
        targets_N = ids_BT[rows_N, positions_N]
        inverse_N = temperature_N.reciprocal()
        if self._plain_head:
            hidden_BTH = self.model.base_model(input_ids=inputs_BT, use_cache=False)[0]
            hidden_NH = hidden_BTH[rows_N, positions_N - 1]
            head = self.model.get_output_embeddings()
            return chunked_logprobs(
                hidden_NH, head.weight, head.bias, targets_N, inverse_N, self.chunk_tokens
            )
        logits_BTV = self.model(input_ids=inputs_BT, use_cache=False).logits
        logits_NV = logits_BTV[rows_N, positions_N - 1].float() * inverse_N[:, None]
        all_NV = logits_NV.log_softmax(-1)
        entropy_N = -(all_NV.exp() * all_NV).sum(-1).detach()
        return all_NV.gather(1, targets_N[:, None])[:, 0], entropy_N

    def tensors(self) -> Iterator[Entry]:
        """The published version, each tensor once: parameters as BF16, buffers as they are.

        Wider dtypes first, as safetensors orders them, so every tensor is aligned.
        """
        shadow = {id(parameter) for parameter in self.parameters}
        widths = {
            name: 2 if id(tensor) in shadow else tensor.element_size()
            for name, tensor in self._stored.items()
        }
        for name in sorted(self._stored, key=lambda name: -widths[name]):
            tensor = self._stored[name]
            yield entry_of(name, tensor, _PUBLISHED if id(tensor) in shadow else None)

    def master_tensors(self) -> Iterator[Entry]:
        """The float32 masters by parameter name."""
        for name, master in zip(self.names, self.masters, strict=True):
            yield entry_of(name, master)

    def probe(self, token_ids: list[int]) -> list[float]:
        """Log-probs of tokens 1.. under the published weights, in float32 where that fits."""
        ids_BT = torch.tensor([token_ids], device=self.device)
        positions_N = torch.arange(1, len(token_ids), device=self.device)
        rows_N, ones_N = torch.zeros_like(positions_N), torch.ones(len(positions_N)).to(self.device)
        widened = self._widen()
        try:
            with torch.no_grad():
                logprobs_N, _ = self.logprobs(ids_BT, rows_N, positions_N, ones_N)
        finally:
            if widened:
                for parameter in self.parameters:
                    parameter.data = parameter.data.to(_PUBLISHED)
        return [float(value) for value in logprobs_N.cpu()]

    def _widen(self) -> bool:
        """GPU only: parameters to float32 for a moment (exact both ways), if memory allows."""
        if self.device.type != "cuda":
            return False
        free_bytes, _ = torch.cuda.mem_get_info(self.device)
        if free_bytes < FLOAT_COPY_HEADROOM * 4 * self.size:
            return False
        for parameter in self.parameters:
            parameter.data = parameter.data.float()
        return True

    def take_gradients(self) -> None:
        """After the last backward pass: every master has its float32 gradient."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if self.device.type == "cpu":
                master.grad, parameter.grad = parameter.grad, None
            if master.grad is None:
                master.grad = torch.zeros_like(master)

    def drop_gradients(self) -> None:
        """Forget all gradients."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.grad = master.grad = None

    def _hook_gradients(self) -> None:
        """GPU: move each bfloat16 gradient into its float32 master as soon as it is there."""
        if self.device.type == "cpu":
            return
        for parameter, master in zip(self.parameters, self.masters, strict=True):

            def move(parameter: Tensor, master: Tensor = master) -> None:
                gradient = parameter.grad
                assert gradient is not None
                if master.grad is None:
                    master.grad = gradient.float()
                else:
                    master.grad.add_(gradient)
                parameter.grad = None

            parameter.register_post_accumulate_grad_hook(move)

    def _head_is_plain(self) -> bool:
        """True if logits are the hidden state times the output embedding and nothing more.

        Some architectures scale or cap their logits; they take the slower path.
        """
        ids_BT = torch.arange(8, device=self.device)[None] % self.vocabulary
        head = self.model.get_output_embeddings()
        with torch.no_grad():
            wanted = self.model(input_ids=ids_BT, use_cache=False).logits.float()
            hidden = self.model.base_model(input_ids=ids_BT, use_cache=False)[0]
            if head is None or hidden.shape[-1] != head.weight.shape[-1]:
                return False
            logits = torch.nn.functional.linear(hidden, head.weight, head.bias).float()
        return bool(torch.allclose(wanted, logits, atol=_HEAD_TOLERANCE, rtol=_HEAD_TOLERANCE))


def entry_of(name: str, tensor: Tensor, dtype: torch.dtype | None = None) -> Entry:
    """A tensor in safetensors' terms, converted to `dtype` and copied to the host when read."""
    kind = dtype or tensor.dtype

    def read() -> memoryview:
        flat = tensor.detach().to(device="cpu", dtype=kind).contiguous().reshape(-1)
        array: Any = flat.view(torch.uint8).numpy()
        return memoryview(array) if len(array) else memoryview(b"")

    return Entry(name=name, dtype=_DTYPE_NAMES[kind], shape=tuple(tensor.shape), read=read)


def choose_device(wanted: Literal["auto", "cpu", "cuda"]) -> torch.device:
    """Errors: UsageError where a GPU is asked for and there is none."""
    if wanted == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            "The run asks for a GPU (learner.device = 'cuda') and torch finds none here.",
            "Set learner.device to 'auto' or 'cpu', or install a CUDA build of torch.",
        )
    on_gpu = wanted == "cuda" or (wanted == "auto" and torch.cuda.is_available())
    return torch.device("cuda" if on_gpu else "cpu")


def load_model(folder: Path) -> Any:
    """The model in float32 on the CPU, from files alone.

    Errors:
        UsageError: see `check_model_folder`; also an architecture this transformers does not know.
    """
    check_model_folder(folder)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AutoModelForCausalLM

    try:
        return AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, trust_remote_code=False
        )
    except MemoryError as error:
        raise LocalError(f"The model in {folder} does not fit into memory.") from error
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        reason = " ".join(str(error).split())[:300]
        raise UsageError(
            f"The model in {folder} cannot be loaded: {reason}",
            "Check that its architecture is known to the installed version of transformers.",
        ) from error


def _stored_tensors(model: Any) -> tuple[dict[str, Tensor], tuple[tuple[str, str], ...]]:
    """Tensors by name, each object once, and (alias, stored name) of the rest."""
    stored: dict[str, Tensor] = {}
    names: dict[int, str] = {}
    tied: list[tuple[str, str]] = []
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) in names:
            tied.append((name, names[id(tensor)]))
        else:
            names[id(tensor)] = name
            stored[name] = tensor
    return stored, tuple(tied)


def _silence_dropout(model: Any) -> None:
    """Dropout would make the trainer's policy another one than the published."""
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
        for name in ("attention_dropout", "dropout", "activation_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
