"""How much is asked of one source at once, and how long it may take: learnt from what came before.

Used by `core.queues` and `core.fetch` for one version, with the paces of all versions.
"""

from __future__ import annotations

import math

from echo2_mesh import limits
from echo2_mesh.core.forest import Forest
from echo2_mesh.core.swarm import RATE_BYTES_PER_S_MIN, Flight, Holder, Pace
from echo2_mesh.wire.messages import ChunkRef

HOP_S_UNKNOWN = 1.0
HOP_S_GUESSED_MAX = 2.0
HOPS_WAITED = 3.0
"""A parent may wait for a chunk as long as it takes over so many levels."""
FILLS_WAITED = 4.0
"""It may say that it waits for so many times as long as a chunk takes from top to bottom."""
WINDOW_S = 1.5
"""So long a parent is kept busy at its own pace: what is asked of it sooner than needed cannot be
had of others when it turns out to be slow."""
SLACK_PACES = 4.0
UNKNOWN_PACES = 2.0
"""A peer that has delivered nothing yet may be slower than the others by this factor."""


class Waits:
    """The waits of one version.

    Args:
        pace: of all peers together.
    """

    def __init__(self, forest: Forest, pace: Pace) -> None:
        self._forest = forest
        self._pace = pace
        self._windows: dict[tuple[int, int], int] = {}

    def window(self, ref: ChunkRef, holder: Holder, sources: int) -> int:
        """Chunks like `ref` awaited at once of `holder`, one of `sources`."""
        size_bytes = max(1, ref.size_bytes)
        most = self._windows.get((size_bytes, sources))
        if most is None:
            count = -(-limits.FETCH_WINDOW_BYTES // size_bytes)
            share = limits.FETCH_IN_FLIGHT_MAX // sources
            most = min(count, share, limits.FETCH_IN_FLIGHT_PER_PEER_MAX)
            self._windows[size_bytes, sources] = most
        if s_per_byte := holder.pace.s_per_byte:
            most = min(most, math.ceil(WINDOW_S / (s_per_byte * size_bytes)))
        return max(limits.FETCH_IN_FLIGHT_PER_PEER_MIN, most)

    def wait_s(self, ref: ChunkRef) -> float:
        """How long a source that does not have it yet may wait for it."""
        wait_s = HOPS_WAITED * self._hop_s(ref)
        return min(max(wait_s, limits.CHUNK_WAIT_S_MIN), limits.CHUNK_WAIT_S_MAX)

    def missing_s(self, ref: ChunkRef) -> float:
        """How long a source may go on saying that it waits for it."""
        fill_s = FILLS_WAITED * self._forest.depth * self._hop_s(ref)
        return max(limits.MISSING_PATIENCE_S, fill_s)

    def silence_s(self, holder: Holder, flight: Flight, ref: ChunkRef) -> float:
        """How long `holder` may say nothing at all before it is late."""
        s_per_byte = holder.pace.s_per_byte
        if s_per_byte is None and self._pace.s_per_byte is not None:
            s_per_byte = UNKNOWN_PACES * self._pace.s_per_byte
        if s_per_byte is None or holder.peer == self._forest.learner:
            # Nobody is above the learner: there is nothing to be gained by haste.
            slack_s = limits.CHUNK_DEADLINE_S + ref.size_bytes / RATE_BYTES_PER_S_MIN
        else:
            slack_s = min(
                max(SLACK_PACES * s_per_byte * ref.size_bytes, limits.CHUNK_SLACK_S_MIN),
                limits.CHUNK_DEADLINE_S,
            )
        return flight.wait_s + slack_s * holder.patience

    def _hop_s(self, ref: ChunkRef) -> float:
        """Seconds from one level to the next, as planned or else as met."""
        hop_s = self._forest.hop_s(ref.size_bytes)
        if hop_s is not None:
            return hop_s
        if self._pace.s_per_byte is not None:
            return min(self._pace.s_per_byte * ref.size_bytes, HOP_S_GUESSED_MAX)
        return HOP_S_UNKNOWN
