"""Runs one pure machine on trio: events in, alarms kept, effects performed, in order.

One task owns one machine; everybody else posts events into a bounded queue. This is also where
the line between peers' faults and ours is drawn: `Guard` turns what a peer did wrong into a
counter, and lets everything else end the process, because a bug of ours must be seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Generic, Protocol, TypeVar

import trio

from echo2_mesh import limits
from echo2_mesh.core.machine import Arm, Woke
from echo2_mesh.errors import Echo2Error, LocalError, PeerError

Event_contra = TypeVar("Event_contra", contravariant=True)
EventT = TypeVar("EventT")
Result = TypeVar("Result")


class Machine(Protocol[Event_contra]):
    """What a driver can run."""

    def handle(self, event: Event_contra, now_s: float, /) -> tuple[Any, ...]: ...


class Driver(Generic[EventT]):
    """The only caller of one machine's `handle`.

    Args:
        machine: owned from now on; others may read it between events.
        perform: does one effect without waiting; it starts tasks for what takes time. `Arm` never
            reaches it.
    """

    def __init__(self, machine: Machine[EventT | Woke], perform: Callable[[Any], None]) -> None:
        self._machine = machine
        self._perform = perform
        self._alarms: dict[str, float] = {}
        self._send, self._receive = trio.open_memory_channel[EventT | Woke](limits.EVENT_QUEUE_MAX)

    async def post(self, event: EventT | Woke) -> None:
        """Queue an event; waits while the queue is full."""
        await self._send.send(event)

    def post_nowait(self, event: EventT | Woke) -> bool:
        """Queue an event that may be lost; False if the queue was full."""
        try:
            self._send.send_nowait(event)
        except trio.WouldBlock:
            return False
        return True

    async def run(self) -> None:
        """Feed the machine until cancelled."""
        while True:
            wake_at_s = min(self._alarms.values(), default=float("inf"))
            event: EventT | Woke | None = None
            with trio.move_on_at(wake_at_s):
                event = await self._receive.receive()
            if event is not None:
                self._feed(event)
            now_s = trio.current_time()
            for key in [key for key, at_s in self._alarms.items() if at_s <= now_s]:
                del self._alarms[key]
                self._feed(Woke(key=key))

    def _feed(self, event: EventT | Woke) -> None:
        for effect in self._machine.handle(event, trio.current_time()):
            if isinstance(effect, Arm):
                self._alarms[effect.key] = effect.at_s
            else:
                self._perform(effect)


class Guard:
    """Where peers' faults are counted and our own are not caught.

    Args:
        nursery: the mesh's; a bug raised under somebody else's task (a carrier's stream handler)
            is raised again in it and ends the daemon.
    """

    def __init__(self, nursery: trio.Nursery, counters: Counter[str]) -> None:
        self._nursery = nursery
        self.counters = counters

    async def forgive(self, name: str, wait: Awaitable[Result]) -> Result | None:
        """Await `wait`; a peer's or this host's fault is counted under `name`: None is returned."""
        try:
            return await wait
        except (PeerError, LocalError):
            self.counters[name] += 1
            return None

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[None]:
        """Around our code that a carrier's task runs: deliberate errors pass, bugs end the mesh."""
        try:
            yield
        except Echo2Error:
            raise
        except Exception as error:
            self._nursery.start_soon(_raise, error)
            raise


async def _raise(error: Exception) -> None:
    raise error
