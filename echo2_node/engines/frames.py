"""What the daemon and its engine child say to each other: MessagePack of two closed unions.

Both ends are this program on one host, so frames are typed but not signed. `engines.process`
writes `Command`s and reads `Event`s; `engines.worker` the other way round.
"""

from __future__ import annotations

import msgspec

from echo2_mesh.wire.types import Digest
from echo2_node.engines.protocol import EngineInfo, Generation, GenerationRequest, InstallReport
from echo2_node.engines.registry import EngineSettings


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of both unions; the class name is the tag."""


class Load(Frame, frozen=True, kw_only=True):
    """First command, once."""

    engine: str
    settings: EngineSettings


class Submit(Frame, frozen=True, kw_only=True):
    request: GenerationRequest


class Cancel(Frame, frozen=True, kw_only=True):
    request_id: str


class Install(Frame, frozen=True, kw_only=True):
    """One at a time; `manifest` names it in the reply."""

    manifest: Digest


class Loaded(Frame, frozen=True, kw_only=True):
    info: EngineInfo


class Finished(Frame, frozen=True, kw_only=True):
    """Sequences that ended in one step."""

    generations: tuple[Generation, ...]


class Installed(Frame, frozen=True, kw_only=True):
    manifest: Digest
    report: InstallReport


class Failed(Frame, frozen=True, kw_only=True):
    """A command that was refused; the engine goes on as if it had not come.

    Exactly one of the two ids says which; neither: loading failed and the child ends.
    """

    usage: bool
    """True: UsageError, False: LocalError."""
    what: str
    hint: str
    request_id: str | None = None
    manifest: Digest | None = None


class Pulse(Frame, frozen=True, kw_only=True):
    """Every second: alive, and how much was generated so far."""

    tokens_total: int


Command = Load | Submit | Cancel | Install
Event = Loaded | Finished | Installed | Failed | Pulse
encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_event = msgspec.msgpack.Decoder(Event).decode
