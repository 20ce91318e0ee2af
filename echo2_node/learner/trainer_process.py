"""The trainer as the learner daemon sees it: a child process behind five verbs (`learner.port`).

Carries frames and deadlines. It never imports torch, never retries and never hides a death: a
child that ends raises a LocalError with its exit code and last log lines. Called by
`learner.daemon`.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import trio

from echo2_mesh.child import Child, open_child
from echo2_mesh.errors import LocalError
from echo2_mesh.wire.types import PolicyVersion
from echo2_node.config import RunConfig
from echo2_node.learner import frames
from echo2_node.learner.port import Exported, Sample, StepReport, TrainerInfo
from echo2_node.learner.trainer import threads_for

START_TIMEOUT_S = 1800.0
"""Loading a large model from a slow disk."""
STEP_TIMEOUT_S = 7200.0
EXPORT_TIMEOUT_S = 1800.0
SAVE_TIMEOUT_S = 3600.0
_LOG_NAME = "trainer.log"

R = TypeVar("R", bound=frames.Frame)


class TrainerProcess:
    """Implements `learner.port.Trainer`. One verb at a time, in the order they are called.

    A verb that is cancelled or late kills the child: its next answer would belong to no question.
    """

    def __init__(self, child: Child, info: TrainerInfo) -> None:
        self._child = child
        self._turn = trio.Lock()
        self.info = info

    @property
    def pid(self) -> int:
        return self._child.pid

    async def step(self, samples: tuple[Sample, ...]) -> StepReport:
        """One optimizer step. Errors: LocalError if the child died or is late."""
        question = frames.Step(samples=samples)
        return (await self._ask(question, frames.Stepped, STEP_TIMEOUT_S)).report

    async def export(self, version: PolicyVersion) -> Exported:
        """Write the current weights into the chunk store. Errors: LocalError."""
        question = frames.Export(version=version)
        return (await self._ask(question, frames.ExportDone, EXPORT_TIMEOUT_S)).exported

    async def save(self, folder: Path, *, step: int) -> None:
        """Write a checkpoint into `folder`. Errors: LocalError."""
        question = frames.Save(folder=str(folder), step=step)
        await self._ask(question, frames.SaveDone, SAVE_TIMEOUT_S)

    async def _ask(self, question: frames.Question, kind: type[R], timeout_s: float) -> R:
        async with self._turn:
            return await _ask(self._child, question, kind, timeout_s)


@asynccontextmanager
async def open_trainer(
    config: RunConfig, *, state_dir: Path, store_dir: Path, resume_from: Path | None
) -> AsyncIterator[TrainerProcess]:
    """Start a trainer and wait until its model is loaded.

    Args:
        config: the run, with an absolute model path.
        state_dir: the learner's folder; the log is `logs/trainer.log` in it.
        store_dir: the chunk store's folder, shared with the daemon.
        resume_from: a complete checkpoint, or None.

    Resources: one child process, gone when the context ends.

    Errors:
        UsageError: the model or the loss does not fit.
        LocalError: a damaged checkpoint, or the child died or is late.
    """
    threads = str(threads_for(config.learner.threads))
    environment = {
        "OMP_NUM_THREADS": threads,
        "MKL_NUM_THREADS": threads,
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    }
    argv = (sys.executable, "-m", "echo2_node.learner.trainer")
    async with open_child(argv, log_path=state_dir / "logs" / _LOG_NAME, env=environment) as child:
        question = frames.Start(
            config=config,
            store_dir=str(store_dir),
            resume_from=str(resume_from) if resume_from else None,
        )
        ready = await _ask(child, question, frames.Ready, START_TIMEOUT_S)
        yield TrainerProcess(child, ready.info)


async def _ask(child: Child, question: frames.Question, kind: type[R], timeout_s: float) -> R:
    """One question and its reply; the reply `Failed` is raised as the error it carries."""
    verb = type(question).__name__.lower()
    answered = False
    try:
        with trio.fail_after(timeout_s):
            await child.send(frames.encode(question))
            reply = frames.decode_reply(await child.receive())
        answered = True
    except trio.TooSlowError:
        raise LocalError(
            f"The trainer did not finish '{verb}' within {timeout_s:.0f} s; it was ended.",
            "Look at logs/trainer.log in the state folder; a smaller batch may be needed.",
        ) from None
    finally:
        if not answered:
            child.kill()
    if isinstance(reply, frames.Failed):
        raise reply.error()
    assert isinstance(reply, kind), f"'{verb}' was answered by {type(reply).__name__}"
    return reply
