"""Which version to fetch: the newest, but never so that none is ever finished.

Kept by `core.fetch`. Orders announcements by the learner's incarnation, then by version.
"""

from __future__ import annotations

from echo2_mesh.core.fetching import Announced

SUPERSEDES_IN_A_ROW_MAX = 1
"""Unfinished versions dropped for newer ones before one must be finished: progress is certain."""
Order = tuple[int, int]


def order_of(event: Announced) -> Order:
    """Later is greater."""
    return event.incarnation_unix_ms, int(event.version)


class Versions:
    """What was announced, and what is done."""

    def __init__(self) -> None:
        self._newest: Announced | None = None
        self._done: Order = (-1, -1)
        self._dropped = 0

    def hear(self, event: Announced) -> bool:
        """Whether this is news."""
        order = order_of(event)
        if order <= self._done or (self._newest is not None and order <= order_of(self._newest)):
            return False
        self._newest = event
        return True

    def next(self) -> Announced | None:
        """What to begin when nothing is being fetched."""
        newest = self._newest
        return newest if newest is not None and order_of(newest) > self._done else None

    def newer_than(self, order: Order) -> bool:
        """Something newer was announced."""
        return self._newest is not None and order_of(self._newest) > order

    def may_drop(self, here_bytes: int, wanted_bytes: int) -> bool:
        """Whether an unfinished version gives way to a newer one; more than half done it stays."""
        return self._dropped < SUPERSEDES_IN_A_ROW_MAX and 2 * here_bytes <= wanted_bytes

    def drop(self) -> None:
        """An unfinished version gave way."""
        self._dropped += 1

    def unfit(self, order: Order) -> None:
        """It cannot be had from anybody."""
        self._done = order

    def finish(self, order: Order) -> None:
        """It is complete."""
        self._done = order
        self._dropped = 0
