"""One thread that waits for sockets, timers and finished jobs; `bulk.hub` and its lanes live in it.

A loop and not a thread a lane: everything about lanes happens in one thread, without locks, and
encryption at a core's speed outruns a 10 Gbit/s line. What blocks (the disk, hashing a blob) is a
job in one of a few worker threads. It knows no lane and no frame.
"""

from __future__ import annotations

import contextlib
import heapq
import itertools
import queue
import selectors
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

READ, WRITE = selectors.EVENT_READ, selectors.EVENT_WRITE
WORKERS = 2
_WAKE_BYTES = 4096
Result = TypeVar("Result")


class Timer:
    """A call that is due; `cancel` forgets it."""

    __slots__ = ("call",)

    def __init__(self, call: Callable[[], None]) -> None:
        self.call: Callable[[], None] | None = call

    def cancel(self) -> None:
        self.call = None


class Loop:
    """Everything but `post` is called in the loop's own thread."""

    def __init__(self) -> None:
        self.now_s = time.monotonic()
        self._selector = selectors.DefaultSelector()
        self._masks: dict[socket.socket, int] = {}
        self._timers: list[tuple[float, int, Timer]] = []
        self._order = itertools.count()
        self._posted: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._wake_source, self._wake_target = socket.socketpair()
        self._wake_source.setblocking(False)
        self._wake_target.setblocking(False)
        self._selector.register(self._wake_source, READ, None)
        self._workers = ThreadPoolExecutor(WORKERS, thread_name_prefix="bulk")
        self._ended = False

    def watch(self, sock: socket.socket, mask: int, call: Callable[[int], None]) -> None:
        """Call `call(what)` when the socket is ready for any of `mask`; 0 stops that."""
        known = self._masks.get(sock, 0)
        if mask == known:
            return
        if not mask:
            self.forget(sock)
            return
        (self._selector.modify if known else self._selector.register)(sock, mask, call)
        self._masks[sock] = mask

    def forget(self, sock: socket.socket) -> None:
        """Before a socket is closed."""
        if self._masks.pop(sock, 0):
            self._selector.unregister(sock)

    def after(self, delay_s: float, call: Callable[[], None]) -> Timer:
        timer = Timer(call)
        heapq.heappush(self._timers, (self.now_s + delay_s, next(self._order), timer))
        return timer

    def post(self, call: Callable[[], None]) -> None:
        """Have the loop do it; from any thread."""
        self._posted.put(call)
        with contextlib.suppress(BlockingIOError):  # full: it is awake already
            self._wake_target.send(b"x")

    def job(self, work: Callable[[], Result], done: Callable[[Result | Exception], None]) -> None:
        """Run `work` in a worker thread, then `done` with what it gave or raised in the loop."""

        def run() -> None:
            result: Result | Exception
            try:
                result = work()
            except Exception as error:
                result = error
            self.post(lambda: done(result))

        self._workers.submit(run)

    def end(self) -> None:
        """`run` returns after this turn."""
        self._ended = True

    def run(self) -> None:
        """Turn until `end`."""
        while not self._ended:
            self.now_s = time.monotonic()
            while self._timers and self._timers[0][0] <= self.now_s:
                timer = heapq.heappop(self._timers)[2]
                if (call := timer.call) is not None:
                    timer.call = None
                    call()
            while self._timers and self._timers[0][2].call is None:
                heapq.heappop(self._timers)
            wait_s = max(0.0, self._timers[0][0] - time.monotonic()) if self._timers else None
            ready = self._selector.select(wait_s)
            self.now_s = time.monotonic()
            for key, mask in ready:
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._wake_source.recv(_WAKE_BYTES)
                elif key.fileobj in self._masks:  # not closed by an earlier call of this turn
                    key.data(mask)
            with contextlib.suppress(queue.Empty):
                while True:
                    self._posted.get_nowait()()

    def close(self) -> None:
        self._workers.shutdown(wait=False, cancel_futures=True)
        self._selector.close()
        self._wake_source.close()
        self._wake_target.close()
