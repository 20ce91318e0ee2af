"""Requests that wait for a slot: bounded, in order of arrival, one for each actor.

An actor that asks again replaces its earlier request: the first answer would reach nobody. The
clerk owns it.
"""

from __future__ import annotations

from echo2_node.scheduler.events import Requested

WAITERS_MAX = 256
"""Requests held at once; the longest waiting gives way with an empty answer."""


class Waiters:
    """Open requests by id, oldest first."""

    def __init__(self) -> None:
        self._requests: dict[int, Requested] = {}

    def add(self, request: Requested) -> list[Requested]:
        """Hold `request`; the requests that must be answered empty because of it."""
        assert request.request not in self._requests
        displaced = [held for held in self._requests.values() if held.actor == request.actor]
        if not displaced and len(self._requests) >= WAITERS_MAX:
            displaced = [next(iter(self._requests.values()))]
        for held in displaced:
            del self._requests[held.request]
        self._requests[request.request] = request
        return displaced

    def remove(self, request: int) -> None:
        """Forget a request; no error if it is gone."""
        self._requests.pop(request, None)

    def overdue(self, now_s: float) -> list[Requested]:
        """Take out the requests that have waited long enough."""
        due = [held for held in self._requests.values() if held.until_s <= now_s]
        for held in due:
            del self._requests[held.request]
        return due

    def clear(self) -> list[Requested]:
        """Take out all requests."""
        held = list(self._requests.values())
        self._requests.clear()
        return held

    def in_order(self) -> list[Requested]:
        """Everybody who waits, first come first."""
        return list(self._requests.values())

    def next_deadline_s(self) -> float | None:
        """When the next request has waited long enough."""
        return min((held.until_s for held in self._requests.values()), default=None)
