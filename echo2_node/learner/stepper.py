"""The learner's arithmetic: samples in, one optimizer step, tensors out. Runs in the trainer child.

One step is one batch, one AdamW update of the float32 masters, one rounding into the published
weights. It decides nothing about which samples are trained or when a version is published, and
opens no socket. `learner.trainer` drives it from frames.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.delta.codec import CLASSES_FAST, CLASSES_SMALL
from echo2_mesh.errors import LocalError
from echo2_mesh.wire.messages import Probe
from echo2_mesh.wire.types import PolicyVersion
from echo2_node.config import LearnerSection, RunConfig
from echo2_node.learner import batches, checkpoints, export, tensorfile
from echo2_node.learner.losses import Scale, TokenBatch, make_loss, metrics_of
from echo2_node.learner.models import Policy, entry_of
from echo2_node.learner.patching import Patcher
from echo2_node.learner.port import Exported, Sample, StepReport, TrainerInfo
from echo2_node.tokens import template_digest, tokenizer_digest

_MOMENTS = ("exp_avg", "exp_avg_sq")


class NotFinite(Exception):
    """A number of this step is not finite; the step is skipped."""


class Stepper:
    """A policy with its optimizer.

    Args:
        config: the run.
        store: where exported chunks go, opened without a quota: the daemon evicts.
        resume_from: a checkpoint folder, or None to start from the run's model.

    Errors:
        UsageError: the model or the loss does not fit.
        LocalError: the checkpoint is damaged.
    """

    def __init__(self, config: RunConfig, store: ChunkStore, resume_from: Path | None) -> None:
        settings = config.learner
        self._settings = settings
        self._chunk_size_bytes = config.mesh.chunk_size_bytes
        self._store = store
        self._patcher = Patcher(
            store,
            steps_max=config.weights.patch_steps_max,
            threads=settings.threads or os.cpu_count() or 1,
            classes=CLASSES_SMALL if config.weights.patch_size == "small" else CLASSES_FAST,
        )
        self._loss = make_loss(settings.loss, settings.loss_args)
        record = checkpoints.read_record(resume_from) if resume_from else None
        torch.manual_seed(config.run.seed)
        self.policy = Policy(
            resume_from or Path(config.model.path),
            device=settings.device,
            chunk_tokens=settings.logprob_chunk_tokens,
        )
        self.updates = 0
        self._version: int | None = None
        self._optimizer = _optimizer(self.policy, settings)
        self._files = export.travelling_files(self.policy.folder)
        self._digests = tokenizer_digest(self.policy.folder), template_digest(self.policy.folder)
        if resume_from and record:
            self._restore(resume_from, record)
        self.info = TrainerInfo(
            parameters=self.policy.size,
            device=str(self.policy.device),
            dtype="bfloat16" if self.policy.device.type == "cuda" else "float32",
            step=record.step if record else 0,
        )

    def step(self, samples: Sequence[Sample]) -> StepReport:
        """One optimizer step over whole groups.

        Where anything is not finite (a sample, the loss, the gradient) the step is skipped and
        model, optimizer and learning-rate state keep every bit.
        """
        started_s = time.perf_counter()
        flaw = batches.flaw_of(samples, self.policy.vocabulary)
        metrics: dict[str, float] = {}
        if not flaw:
            try:
                metrics = self._update(samples)
            except NotFinite as reason:
                flaw = str(reason)
        self.policy.drop_gradients()
        return StepReport(
            skipped=bool(flaw),
            why_skipped=flaw,
            metrics=metrics,
            seconds=time.perf_counter() - started_s,
        )

    def _update(self, samples: Sequence[Sample]) -> dict[str, float]:
        rows = batches.rows_of(samples, std_normalised=self._loss.std_normalised)
        if not rows:
            raise NotFinite("no sample has a loss token")
        metrics = self.accumulate(rows)
        if not math.isfinite(metrics["loss"]):
            raise NotFinite(f"the loss is {metrics['loss']}")
        self.policy.take_gradients()
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.masters, self._settings.grad_clip))
        if not math.isfinite(norm):
            raise NotFinite(f"the gradient norm is {norm}")
        warmup = self._settings.lr_warmup_steps
        lr = self._settings.lr * min(1.0, (self.updates + 1) / (warmup + 1))
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self.policy.publish()
        self.updates += 1
        rewards = [sample.reward for sample in samples]
        return metrics | {
            "grad_norm": norm,
            "lr": lr,
            "reward_mean": float(np.mean(rewards)),
            "reward_deviation": float(np.std(rewards)),
            "samples": float(len(samples)),
        }

    def accumulate(self, rows: Sequence[batches.Row]) -> dict[str, float]:
        """Forward and backward over all rows in micro-batches; the gradients add up exactly."""
        device = self.policy.device
        scale = Scale(tokens=sum(int(r.loss_mask.sum()) for r in rows), sequences=len(rows))
        lengths = [len(row.token_ids) for row in rows]
        parts = batches.plan(lengths, self._settings.tokens_per_micro_batch)
        totals: dict[str, float] = {}
        padded = 0
        for part in parts:
            packed = batches.pack([rows[index] for index in part])
            padded += packed.ids_BT.size
            logprobs_N, entropy_N = self.policy.logprobs(
                torch.from_numpy(packed.ids_BT).to(device),
                torch.from_numpy(packed.rows_N).to(device),
                torch.from_numpy(packed.positions_N).to(device),
                torch.from_numpy(packed.temperature_N).to(device),
            )
            batch = TokenBatch(
                logprobs_N=logprobs_N,
                behaviour_N=torch.from_numpy(packed.behaviour_N).to(device),
                sequence_N=torch.from_numpy(packed.rows_N).to(device),
                advantage_S=torch.from_numpy(packed.advantage_B).to(device),
            )
            loss, sums = self._loss(batch, scale)
            loss.backward()  # type: ignore[no-untyped-call]
            sums |= {"loss": loss.detach(), "entropy": entropy_N.sum()}
            values = torch.stack([value.float() for value in sums.values()]).tolist()
            for name, value in zip(sums, values, strict=True):
                totals[name] = totals.get(name, 0.0) + value
        return metrics_of(totals, scale) | {
            "loss": totals["loss"],
            "entropy": totals["entropy"] / scale.tokens,
            "tokens": float(scale.tokens),
            "tokens_computed": float(sum(lengths)),
            "padding_fraction": 1.0 - sum(lengths) / padded,
            "micro_batches": float(len(parts)),
        }

    def export(self, version: PolicyVersion) -> Exported:
        """Write the published weights into the chunk store.

        Errors:
            LocalError: the disk is full or the store cannot be written.
        """
        started_s = time.perf_counter()
        # Before the patcher takes the version for published: an export that fails is made again.
        files = export.write_files(self._files, self._store, self._chunk_size_bytes)
        self._patcher.begin()
        try:
            section = export.write_chunks(
                self.policy.tensors(), self._store, self._chunk_size_bytes, self._patcher.take
            )
            patches = self._patcher.finish(version, section.chunks, section.state_digest)
        finally:
            self._patcher.drop()
        positions = getattr(self.policy.model.config, "max_position_embeddings", None)
        ids = export.probe_tokens(self.policy.vocabulary, positions or export.PROBE_TOKENS)
        probe = Probe(
            token_ids=np.array(ids, dtype="<i4").tobytes(),
            logprobs=np.array(self.policy.probe(ids), dtype="<f4").tobytes(),
        )
        self._version = version
        return Exported(
            version=version,
            chunks=section.chunks,
            patches=patches,
            tensors=section.tensors,
            tied=self.policy.tied,
            files=files,
            state_digest=section.state_digest,
            tokenizer_digest=self._digests[0],
            template_digest=self._digests[1],
            probe=probe,
            seconds=time.perf_counter() - started_s,
        )

    def save(self, folder: Path, *, step: int) -> None:
        """Write a checkpoint.

        Errors:
            LocalError: it exists already, or cannot be written; nothing new is left.
        """
        moments = [
            entry_of(f"{moment}/{name}", state[moment])
            for name, master in zip(self.policy.names, self.policy.masters, strict=True)
            if (state := self._optimizer.state.get(master))
            for moment in _MOMENTS
        ]
        contents = {name: partial(_write, data=data) for name, data in self._files.items()} | {
            checkpoints.MODEL: partial(_write_entries, entries=[*self.policy.tensors()]),
            checkpoints.MASTERS: partial(_write_entries, entries=[*self.policy.master_tensors()]),
            checkpoints.OPTIMIZER: partial(_write_entries, entries=moments),
        }
        record = checkpoints.Record(
            step=step,
            updates=self.updates,
            version=self._version,
            rng=torch.get_rng_state().numpy().tobytes(),
        )
        checkpoints.write_checkpoint(folder, record, contents)

    def _restore(self, folder: Path, record: checkpoints.Record) -> None:
        masters = checkpoints.read_tensors(folder / checkpoints.MASTERS)
        moments = checkpoints.read_tensors(folder / checkpoints.OPTIMIZER)
        try:
            with torch.no_grad():
                for name, master in zip(self.policy.names, self.policy.masters, strict=True):
                    master.copy_(_tensor(masters[name][1], master))
                    if record.updates == 0:
                        continue
                    self._optimizer.state[master] = {
                        "step": torch.tensor(float(record.updates), device=master.device),
                        **{m: _tensor(moments[f"{m}/{name}"][1], master) for m in _MOMENTS},
                    }
        except (KeyError, RuntimeError, ValueError) as error:
            raise LocalError(
                f"The checkpoint {folder} does not fit its own model: {error}.",
                "Resume from the checkpoint before it: move this folder away and try again.",
            ) from error
        self.policy.publish()
        self.updates = record.updates
        self._version = record.version
        torch.set_rng_state(torch.frombuffer(bytearray(record.rng), dtype=torch.uint8))


def _optimizer(policy: Policy, settings: LearnerSection) -> torch.optim.AdamW:
    return torch.optim.AdamW(
        policy.masters,
        lr=settings.lr,
        betas=(settings.adam_beta1, settings.adam_beta2),
        eps=settings.adam_eps,
        weight_decay=settings.weight_decay,
        fused=True,
    )


def _tensor(data: bytearray, like: torch.Tensor) -> torch.Tensor:
    return torch.frombuffer(data, dtype=torch.float32).reshape(like.shape).to(like.device)


def _write(file: BinaryIO, *, data: bytes) -> None:
    file.write(data)


def _write_entries(file: BinaryIO, *, entries: list[tensorfile.Entry]) -> None:
    tensorfile.write_tensors(file, entries)
