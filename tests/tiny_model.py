"""A tiny causal LM, and versions of it published into a chunk store the way a learner does."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import blake3
import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore
from echo2_mesh.identity import Identity
from echo2_mesh.wire.codec import seal
from echo2_mesh.wire.messages import FileRef, Manifest, Probe, TaskSpec, TensorSpan
from echo2_mesh.wire.types import ChunkKind, Digest, PolicyVersion
from echo2_node.tokens import build_character_tokenizer

ALPHABET = "0123456789=abcdefghijklmnopqrstuvwxyz +-*/()"
PROBE_IDS = [5, 9, 3, 17, 22, 4, 8, 30, 2, 11, 40, 7]
EOS_ID = 1


def write_model_folder(folder: Path, **changes: Any) -> Path:
    """config.json and a character tokenizer; no weights."""
    settings: dict[str, Any] = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": True,
        "eos_token_id": EOS_ID,
        "pad_token_id": 0,
        "bos_token_id": None,
        "initializer_range": 0.15,
    }
    config = changes.pop("config", None) or Qwen3Config(**{**settings, **changes})
    config.architectures = [config.model_type.title() + "ForCausalLM"]
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    for name, data in build_character_tokenizer(ALPHABET).items():
        (folder / name).write_bytes(data)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": EOS_ID}))
    return folder


def make_module(folder: Path, seed: int) -> torch.nn.Module:
    """A randomly initialised fp32 model of the folder's configuration."""
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()


@torch.no_grad()
def logprobs_of(module: torch.nn.Module, ids: list[int], temperature: float = 1.0) -> np.ndarray:
    """float32[T-1]: entry i is token i + 1's log-prob by one plain forward, without any cache."""
    logits = module(torch.tensor([ids]), use_cache=False).logits[0].float() / temperature
    logprobs = logits.log_softmax(-1)[:-1]
    return logprobs.gather(-1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def publish(
    module: torch.nn.Module,
    store: ChunkStore,
    version: int,
    *,
    chunk_size_bytes: int = 50_000,
    drop: str | None = None,
    reshape: str | None = None,
    probe_ids: list[int] | None = None,
    claim_probe_ids: list[int] | None = None,
) -> Digest:
    """Write a module's state as version `version`; returns the manifest blob's digest."""
    stored: dict[int, str] = {}
    tied, tensors, data = [], [], b""
    for name, tensor in module.state_dict(keep_vars=True).items():
        if tensor.data_ptr() in stored:
            tied.append((name, stored[tensor.data_ptr()]))
            continue
        stored[tensor.data_ptr()] = name
        raw = tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()
        shape = tuple(tensor.shape)
        if name == reshape:
            shape = (*shape[:-1], shape[-1] // 2, 2)
        if name != drop:
            tensors.append(
                TensorSpan(
                    name=name,
                    dtype={torch.float32: "F32", torch.bfloat16: "BF16"}[tensor.dtype],
                    shape=shape,
                    offset_bytes=len(data),
                    size_bytes=len(raw),
                )
            )
        data += raw
    chunks = tuple(
        store.add(ChunkKind.FULL, data[start : start + chunk_size_bytes])
        for start in range(0, len(data), chunk_size_bytes)
    )
    ids = probe_ids or PROBE_IDS
    digest = Digest(bytes(32))
    manifest = Manifest(
        run_id="run-test",
        version=PolicyVersion(version),
        chunks=chunks,
        tensors=tuple(tensors),
        tied=tuple(tied),
        files=(FileRef(name="config.json", chunks=()),),
        state_digest=Digest(blake3.blake3(data).digest()),
        tokenizer_digest=digest,
        template_digest=digest,
        task=TaskSpec(task_id="sort_digits", args_json="{}", digest=digest),
        probe=Probe(
            token_ids=np.array(claim_probe_ids or ids, dtype="<i4").tobytes(),
            logprobs=logprobs_of(module.float(), ids).astype("<f4").tobytes(),
        ),
    )
    identity = Identity(bytes(32))
    raw = seal(manifest, run_id="run-test", sender=identity.node, sign=identity.sign)
    assert len(raw) < limits.CHUNK_SIZE_BYTES_MAX
    return store.add(ChunkKind.MANIFEST, raw).digest
