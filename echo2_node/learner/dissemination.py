"""How long versions take to every actor, as their heartbeats tell: what a capacity model reads.

Pure: the loop says what was published and, twice a second, which version each actor runs. A time
here is from the end of the export to the learner's hearing of it, on the learner's clock alone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec

from echo2_node.status import Spread

OPEN_MAX = 16
"""Versions still on their way; the oldest is given up where more are."""
SHOWN_MAX = 8


class _Open(msgspec.Struct):
    announced_s: float
    full_bytes: int
    patch_bytes: int
    waiting: set[str]
    actors: int = 0
    first_s: float | None = None
    last_s: float = 0.0


class Dissemination:
    """The versions on their way, and the last that arrived everywhere."""

    def __init__(self) -> None:
        self._open: dict[int, _Open] = {}
        self.recent: deque[Spread] = deque(maxlen=SHOWN_MAX)

    def announced(
        self,
        version: int,
        now_s: float,
        *,
        actors: Mapping[str, int | None],
        full_bytes: int,
        patch_bytes: int,
    ) -> None:
        """`version` was exported while `actors` (node -> its version) were there."""
        self._open[version] = _Open(now_s, full_bytes, patch_bytes, set(actors))
        while len(self._open) > OPEN_MAX:
            del self._open[next(iter(self._open))]

    def seen(self, actors: Mapping[str, int | None], now_s: float) -> list[Spread]:
        """What each actor that is there runs now; the versions that everybody has since."""
        done = []
        for version, way in tuple(self._open.items()):
            arrived = {node for node in way.waiting if _runs(actors.get(node), version)}
            if arrived:
                way.actors += len(arrived)
                way.last_s = now_s - way.announced_s
                way.first_s = way.last_s if way.first_s is None else way.first_s
            # Who has left is not waited for.
            way.waiting = {n for n in way.waiting - arrived if n in actors}
            if way.waiting:
                continue
            del self._open[version]
            if way.actors and way.first_s is not None:
                spread = Spread(
                    version=version,
                    actors=way.actors,
                    first_s=round(way.first_s, 3),
                    all_s=round(way.last_s, 3),
                    full_bytes=way.full_bytes,
                    patch_bytes=way.patch_bytes,
                )
                self.recent.append(spread)
                done.append(spread)
        return done


def _runs(version: int | None, wanted: int) -> bool:
    return version is not None and version >= wanted
