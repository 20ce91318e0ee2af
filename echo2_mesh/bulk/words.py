"""What the daemon and its bulk process say to one another, in MessagePack, a frame a word.

`net.lanes` speaks on the one end, `bulk.worker` on the other; neither trusts the network, both
trust this pipe. Addresses are (ip, port) pairs here: multiaddresses are the daemon's business.
"""

from __future__ import annotations

import msgspec

from echo2_mesh.core.fetching import Fault
from echo2_mesh.wire.types import ChunkKind, Digest, NodeId

Place = tuple[str, int]


class Word(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all words."""


# --- from the daemon ---------------------------------------------------------------------------


class Listen(Word, frozen=True, kw_only=True):
    """First of all, once: where to listen, and how fast to be. Answered with `Listening`."""

    places: tuple[Place, ...]
    """Empty: do not listen, hold a port to dial from."""
    uplink_bytes_per_s: float = 0.0
    """0: no cap."""
    downlink_bytes_per_s: float = 0.0


class Admit(Word, frozen=True, kw_only=True):
    """Let `peer` in, once, with this token."""

    token: bytes
    peer: NodeId
    lifetime_s: float
    way: str


class Dial(Word, frozen=True, kw_only=True):
    """Open a lane to `peer` at the first of these places that has the certificate."""

    attempt: int
    peer: NodeId
    places: tuple[Place, ...]
    certificate: bytes
    token: bytes
    way: str


class Punch(Word, frozen=True, kw_only=True):
    """Open a lane by connecting from the bulk port while the peer does the same.

    The server's token was admitted before; the client checks the certificate and shows the token.
    """

    attempt: int
    peer: NodeId
    places: tuple[Place, ...]
    server: bool
    certificate: bytes = b""
    token: bytes = b""
    timeout_s: float


class Get(Word, frozen=True, kw_only=True):
    """Fetch one blob over a lane to `peer`. Answered with `Got` or `Failed`."""

    request: int
    peer: NodeId
    kind: ChunkKind
    digest: Digest
    size_bytes: int
    wait_s: float
    timeout_s: float


class Cancel(Word, frozen=True, kw_only=True):
    request: int


class Expect(Word, frozen=True, kw_only=True):
    """These blobs, and no others, are on their way here: asks for them may wait."""

    digests: tuple[Digest, ...]


class Landed(Word, frozen=True, kw_only=True):
    """Another process of this node has put these blobs into the store."""

    digests: tuple[Digest, ...]


class HangUp(Word, frozen=True, kw_only=True):
    peer: NodeId


Command = Listen | Admit | Dial | Punch | Get | Cancel | Expect | Landed | HangUp

# --- to the daemon -----------------------------------------------------------------------------


class Listening(Word, frozen=True, kw_only=True):
    """`places` as bound; `certificate` is the SHA-256 of this process's certificate."""

    places: tuple[Place, ...]
    port: int
    """The port that lanes are punched from."""
    certificate: bytes


class Unable(Word, frozen=True, kw_only=True):
    """A place in `Listen` cannot be had; the process ends."""

    place: Place
    why: str


class Reached(Word, frozen=True, kw_only=True):
    """How a `Dial` or `Punch` ended; `why` is empty where a lane is up."""

    attempt: int
    why: str


class LaneUp(Word, frozen=True, kw_only=True):
    peer: NodeId
    way: str
    address: str
    rtt_s: float
    """Of the handshake; 0 where the system does not tell."""


class LaneDown(Word, frozen=True, kw_only=True):
    peer: NodeId
    way: str
    """As its `LaneUp` said."""
    why: str


class Got(Word, frozen=True, kw_only=True):
    """The blob is in the store, verified."""

    request: int


class Failed(Word, frozen=True, kw_only=True):
    """`fault` is None where this host failed: no room in the store, or no lane to the peer."""

    request: int
    fault: Fault | None
    text: str
    no_lane: bool = False


class Measures(Word, frozen=True, kw_only=True):
    """What has happened since the last such word; rates are the best of the last busy spells."""

    uplink_bytes_per_s: float
    downlink_bytes_per_s: float
    kinds: dict[ChunkKind, tuple[int, int]]
    """(in, out) bytes of blobs by kind; what was asked of us goes by the asker's word."""
    peers: dict[NodeId, tuple[int, int]]
    counters: dict[str, int]


Report = Listening | Unable | Reached | LaneUp | LaneDown | Got | Failed | Measures

_commands = msgspec.msgpack.Decoder(Command)
_reports = msgspec.msgpack.Decoder(Report)
_encoder = msgspec.msgpack.Encoder()


def encode(word: Command | Report) -> bytes:
    return _encoder.encode(word)


def decode_command(frame: bytes) -> Command:
    return _commands.decode(frame)


def decode_report(frame: bytes) -> Report:
    return _reports.decode(frame)
