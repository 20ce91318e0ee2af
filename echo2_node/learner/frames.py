"""What the learner daemon and its trainer child say on the pipe: one question, one reply.

Frozen, tagged unions; both ends import this file and nothing heavier. A reply of another kind
than the question's, except `Failed`, is our own bug.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from echo2_mesh.errors import DiskFull, Echo2Error, LocalError, UsageError
from echo2_node.config import RunConfig
from echo2_node.learner.port import Exported, Sample, StepReport, TrainerInfo


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of everything on the pipe."""


class Start(Frame, frozen=True, kw_only=True):
    """First: load the model, or resume from a checkpoint folder."""

    config: RunConfig
    store_dir: str
    resume_from: str | None


class Step(Frame, frozen=True, kw_only=True):
    samples: tuple[Sample, ...]


class Export(Frame, frozen=True, kw_only=True):
    version: int


class Save(Frame, frozen=True, kw_only=True):
    folder: str
    step: int


class Ready(Frame, frozen=True, kw_only=True):
    """Reply to `Start`."""

    info: TrainerInfo


class Stepped(Frame, frozen=True, kw_only=True):
    report: StepReport


class ExportDone(Frame, frozen=True, kw_only=True):
    exported: Exported


class SaveDone(Frame, frozen=True, kw_only=True):
    pass


class Failed(Frame, frozen=True, kw_only=True):
    """Reply: not done, and the child goes on living."""

    kind: Literal["usage", "local", "full"]
    what: str
    hint: str

    @classmethod
    def of(cls, error: Echo2Error) -> Failed:
        """An error as a frame."""
        kind: Literal["usage", "local", "full"] = "local"
        if isinstance(error, UsageError):
            kind = "usage"
        elif isinstance(error, DiskFull):
            kind = "full"
        return cls(kind=kind, what=error.what, hint=error.hint)

    def error(self) -> Echo2Error:
        """And back."""
        kinds = {"usage": UsageError, "local": LocalError, "full": DiskFull}
        return kinds[self.kind](self.what, self.hint)


Question = Start | Step | Export | Save
Reply = Ready | Stepped | ExportDone | SaveDone | Failed

_encoder = msgspec.msgpack.Encoder()
_questions: msgspec.msgpack.Decoder[Question] = msgspec.msgpack.Decoder(Question)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def encode(frame: Question | Reply) -> bytes:
    return _encoder.encode(frame)


def decode_question(raw: bytes) -> Question:
    return _questions.decode(raw)


def decode_reply(raw: bytes) -> Reply:
    return _replies.decode(raw)
