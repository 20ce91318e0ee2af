"""What waits on a lane: blobs that we asked for, that the peer asked for, and the one under way.

Values of `bulk.lane` and `bulk.hub`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from echo2_mesh.bulk.loop import Timer
from echo2_mesh.wire.messages import ChunkRef
from echo2_mesh.wire.types import Digest

if TYPE_CHECKING:
    from echo2_mesh.bulk.lane import Lane


class Wanted:
    """A blob that this node has asked for."""

    def __init__(self, request: int, ref: ChunkRef, wait_s: float) -> None:
        self.request = request
        self.ref = ref
        self.wait_s = wait_s
        self.buffer: memoryview | None = None
        self.got_bytes = 0
        self.whole = False
        """Every byte has come; a worker has the buffer."""
        self.lane: Lane | None = None
        self.number = 0
        self.timer: Timer | None = None


class Owed(NamedTuple):
    """A blob that the peer has asked for."""

    digest: Digest
    size_bytes: int
    blob_kind: int


class Sending:
    """The answer that is under way."""

    def __init__(self, number: int, view: memoryview, blob_kind: int) -> None:
        self.number = number
        self.view = view
        self.blob_kind = blob_kind
        self.sent_bytes = 0
