"""The trainer child: `python -m echo2_node.learner.trainer`. Frames in, frames out, one at a time.

Carries questions from the learner daemon to `learner.stepper` and its answers back. It imports
torch only after the pipes are safe, so nothing a library prints can break a frame. A deliberate
error is answered; anything else ends the process with its traceback in the log, and the daemon
sees an exit code.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, assert_never

from echo2_mesh.child import ChildPipe, take_pipes
from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import Echo2Error, LocalError
from echo2_mesh.wire.types import PolicyVersion
from echo2_node.learner import frames
from echo2_node.learner.checkpoints import read_record
from echo2_node.learner.modelfolder import check_model_folder

if TYPE_CHECKING:
    from echo2_node.learner.stepper import Stepper

THREADS_MAX = 16


def main() -> None:
    """Serve one daemon until it hangs up."""
    pipe = take_pipes()
    first = pipe.read()
    if first is None:
        return
    question = frames.decode_question(first)
    if not isinstance(question, frames.Start):
        raise AssertionError(f"The first frame is a {type(question).__name__}, not a Start.")
    try:
        stepper = _start(question)
    except Echo2Error as error:
        pipe.write(frames.encode(frames.Failed.of(error)))
        return
    pipe.write(frames.encode(frames.Ready(info=stepper.info)))
    _serve(pipe, stepper)


def threads_for(wanted: int) -> int:
    """Torch threads: as asked, or all cores but one for the daemon."""
    return wanted or max(1, min(THREADS_MAX, (os.cpu_count() or 1) - 1))


def _start(question: frames.Start) -> Stepper:
    config = question.config
    resume_from = Path(question.resume_from) if question.resume_from else None
    if resume_from is None:
        check_model_folder(Path(config.model.path))
    else:
        read_record(resume_from)
    os.environ["OMP_NUM_THREADS"] = str(threads_for(config.learner.threads))
    import torch

    from echo2_node.learner.stepper import Stepper

    torch.set_num_threads(threads_for(config.learner.threads))
    # Only the daemon knows what is pinned, so it alone evicts.
    store = ChunkStore(Path(question.store_dir), quota_bytes=None)
    return Stepper(config, store, resume_from)


def _serve(pipe: ChildPipe, stepper: Stepper) -> None:
    while (raw := pipe.read()) is not None:
        try:
            reply = _answer(stepper, frames.decode_question(raw))
        except Echo2Error as error:
            reply = frames.Failed.of(error)
        except MemoryError:
            reply = frames.Failed.of(LocalError("The trainer is out of memory."))
        pipe.write(frames.encode(reply))


def _answer(stepper: Stepper, question: frames.Question) -> frames.Reply:
    match question:
        case frames.Step(samples=samples):
            return frames.Stepped(report=stepper.step(samples))
        case frames.Export(version=version):
            return frames.ExportDone(exported=stepper.export(PolicyVersion(version)))
        case frames.Save(folder=folder, step=step):
            stepper.save(Path(folder), step=step)
            return frames.SaveDone()
        case frames.Start():
            raise AssertionError("A trainer is started once.")
        case _:
            assert_never(question)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
