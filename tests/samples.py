"""Samples as the learner's desk hands them to a trainer, and a model folder to train."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from echo2_mesh.wire.messages import Cohort, Sampling, Trajectory, VersionSpan
from echo2_mesh.wire.types import Digest, PolicyVersion, StopReason
from echo2_node.config import LearnerSection, ModelSection, RunConfig, TaskSection
from echo2_node.learner.port import Sample
from tests.tiny_model import make_module, write_model_folder

ZEROS = Digest(bytes(32))


def write_trainable_folder(folder: Path, seed: int = 0, **changes: Any) -> Path:
    """A complete random model: configuration, tokenizer and bfloat16 weights."""
    write_model_folder(folder, **changes)
    make_module(folder, seed).to(torch.bfloat16).save_pretrained(folder)
    return folder


def run_config(folder: Path, **learner: Any) -> RunConfig:
    """A run on `folder`, on one CPU thread."""
    settings: dict[str, Any] = {"lr": 1e-3, "device": "cpu", "threads": 1, **learner}
    return RunConfig(
        model=ModelSection(path=str(folder)),
        task=TaskSection(id="sort_digits"),
        learner=LearnerSection(**settings),
    )


def make_sample(
    prompt: list[int],
    completion: list[int],
    logprobs: list[float],
    *,
    advantage: float,
    reward: float = 0.0,
    group: int = 0,
    index: int = 0,
    masked: tuple[int, ...] = (),
    temperature: float = 1.0,
) -> Sample:
    """One judged trajectory; `masked` are completion positions the policy did not choose."""
    tokens = len(prompt) + len(completion)
    mask = [0] * len(prompt) + [int(i not in masked) for i in range(len(completion))]
    trajectory = Trajectory(
        run_id="run-test",
        lease_id=f"{group:032x}",
        group_id=f"{group:032x}",
        index=index,
        item_index=group,
        token_ids=np.array(prompt + completion, dtype="<i4").tobytes(),
        prompt_length=len(prompt),
        loss_mask=bytes(mask),
        logprobs=np.array([0.0] * len(prompt) + logprobs, dtype="<f4").tobytes(),
        segments=(VersionSpan(version=PolicyVersion(0), start=len(prompt), end=tokens),),
        reward=0.0,
        stop_reason=StopReason.STOP,
        sampling=Sampling(temperature=temperature),
        cohort=Cohort(engine="test", dtype="float32", device="cpu"),
        tokenizer_digest=ZEROS,
        template_digest=ZEROS,
        task_digest=ZEROS,
    )
    return Sample(trajectory=trajectory, reward=reward, advantage=advantage)


@torch.no_grad()
def behaviour(module: Any, prompt: list[int], completion: list[int], temperature: float) -> Any:
    """float[C]: each completion token's log-prob, every prefix in a forward pass of its own."""
    values = []
    for end in range(len(prompt), len(prompt) + len(completion)):
        ids = torch.tensor([[*prompt, *completion][:end]])
        logits = module(input_ids=ids, use_cache=False).logits[0, -1].double() / temperature
        values.append(float(logits.log_softmax(-1)[completion[end - len(prompt)]]))
    return values


def sampled_batch(
    module: Any,
    *,
    groups: int = 3,
    size: int = 4,
    seed: int = 0,
    noise: float = 0.0,
    temperature: float = 1.0,
) -> tuple[Sample, ...]:
    """Random completions of many lengths with their true log-probs (plus noise) under `module`."""
    rng = np.random.default_rng(seed)
    samples = []
    for group in range(groups):
        prompt = rng.integers(2, 40, size=int(rng.integers(2, 7))).tolist()
        rewards = rng.random(size)
        for index in range(size):
            completion = rng.integers(2, 40, size=int(rng.integers(1, 9))).tolist()
            true = np.array(behaviour(module, prompt, completion, temperature))
            samples.append(
                make_sample(
                    prompt,
                    completion,
                    (true + noise * rng.standard_normal(len(true))).tolist(),
                    advantage=float(rewards[index] - rewards.mean()),
                    reward=float(rewards[index]),
                    group=group,
                    index=index,
                    temperature=temperature,
                )
            )
    return tuple(samples)
