"""Caps and estimates of speed, one of each per direction, shared by all lanes.

`Bucket` says how many bytes may move now; `Meter` says how fast the line is, from spells in which
there was always something to move. Time is an argument.
"""

from __future__ import annotations

from collections import deque

BURST_S = 0.1
GRAIN_BYTES = 16 * 1024
"""Nothing smaller is granted: a TLS record."""
SPELL_S = 0.5
SPELLS_KEPT = 32


class Bucket:
    """A token bucket.

    Args:
        bytes_per_s: 0 for no cap.
    """

    def __init__(self, bytes_per_s: float, now_s: float) -> None:
        self.bytes_per_s = bytes_per_s
        self._burst = max(2.0 * GRAIN_BYTES, bytes_per_s * BURST_S)
        self._tokens = 0.0
        self._at_s = now_s

    def take(self, want: int, now_s: float) -> int:
        """How many of `want` bytes may move now; 0: see `wait_s`."""
        if not self.bytes_per_s:
            return want
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self.bytes_per_s)
        self._at_s = now_s
        granted = min(want, int(self._tokens))
        if granted < min(want, GRAIN_BYTES):
            return 0
        self._tokens -= granted
        return granted

    def give_back(self, unused: int) -> None:
        """Granted and not moved."""
        if self.bytes_per_s:
            self._tokens += unused

    def wait_s(self) -> float:
        """From the last refusal until a grain is there."""
        if not self.bytes_per_s:
            return 0.0
        return max(0.001, (GRAIN_BYTES - self._tokens) / self.bytes_per_s)


class Meter:
    """The best rate of the last busy spells: what the line gave when it was asked for all.

    A spell of at least `SPELL_S` counts when the mover was waiting for the line most of the time.
    """

    def __init__(self, now_s: float) -> None:
        self._start_s = now_s
        self._bytes = 0
        self._busy_s = 0.0
        self._busy_since_s: float | None = None
        self._spells: deque[float] = deque(maxlen=SPELLS_KEPT)

    def moved(self, count: int) -> None:
        self._bytes += count

    def busy(self, is_busy: bool, now_s: float) -> None:
        """There is something to move that the line does not take yet (or no more)."""
        if self._busy_since_s is not None:
            self._busy_s += now_s - self._busy_since_s
        self._busy_since_s = now_s if is_busy else None

    def bytes_per_s(self, now_s: float) -> float:
        """The estimate; 0 before the first busy spell."""
        self.busy(self._busy_since_s is not None, now_s)
        length_s = now_s - self._start_s
        if length_s >= SPELL_S:
            if self._busy_s >= 0.8 * length_s:
                self._spells.append(self._bytes / length_s)
            self._start_s, self._bytes, self._busy_s = now_s, 0, 0.0
        return max(self._spells, default=0.0)
