"""Caps and estimates of speed, one of each per direction, shared by all lanes.

`Bucket` says how many bytes may move now, `Turnstile` whose turn it is; `Meter` says how fast the
line is, from spells in which there was always something to move. Time is an argument.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable

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
        self._fill(now_s)
        granted = min(want, int(self._tokens))
        if granted < min(want, GRAIN_BYTES):
            return 0
        self._tokens -= granted
        return granted

    def give_back(self, unused: int) -> None:
        """Granted and not moved."""
        if self.bytes_per_s:
            self._tokens += unused

    def _fill(self, now_s: float) -> None:
        self._tokens = min(self._burst, self._tokens + (now_s - self._at_s) * self.bytes_per_s)
        self._at_s = now_s

    def ready(self, now_s: float) -> bool:
        """A grain would be granted."""
        self._fill(now_s)
        return not self.bytes_per_s or self._tokens >= GRAIN_BYTES

    def wait_s(self) -> float:
        """From the last refusal, or the last `ready`, until a grain is there."""
        if not self.bytes_per_s:
            return 0.0
        return max(0.001, (GRAIN_BYTES - self._tokens) / self.bytes_per_s)


class Turnstile:
    """Those whom a bucket refused, served in the order in which they came.

    Were each to try again by itself, all would wake for every grain and one would get it.

    Args:
        now_s, after: the loop's clock and its timer.
    """

    def __init__(
        self,
        bucket: Bucket,
        now_s: Callable[[], float],
        after: Callable[[float, Callable[[], None]], object],
    ) -> None:
        self._bucket = bucket
        self._now_s = now_s
        self._after = after
        self._waiting: deque[Callable[[], None]] = deque()
        self._armed = False

    def wait(self, turn: Callable[[], None]) -> None:
        """Call `turn` when it is its turn and a grain is there."""
        self._waiting.append(turn)
        self._arm()

    def leave(self, turn: Callable[[], None]) -> None:
        """It waits no more: under a low cap a grain is long in coming, and lanes come and go."""
        with contextlib.suppress(ValueError):
            self._waiting.remove(turn)

    def _arm(self) -> None:
        if self._waiting and not self._armed:
            self._armed = True
            self._after(self._bucket.wait_s(), self._open)

    def _open(self) -> None:
        self._armed = False
        for _ in range(len(self._waiting)):
            # Whose turn it is may make others leave.
            if not self._waiting or not self._bucket.ready(self._now_s()):
                break
            self._waiting.popleft()()
        self._arm()


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
