"""Waits where this host's disk is full, so that a full disk pauses a run and does not end it.

The learner's exports, manifests and checkpoints go through `Patience.run`; whatever is waited for
is told in `last_error`, which the status document shows. Called by `learner.publisher` and
`learner.loop`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

import structlog
import trio

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import DiskFull

log = structlog.get_logger()

RETRY_S = 5.0
Result = TypeVar("Result")


class Patience:
    """Tries again while the disk is full.

    Args:
        store: trimmed before every new try: only this process knows what may go.
        wait_s: how long in all one call may be held up.
    """

    def __init__(self, store: ChunkStore, wait_s: float) -> None:
        self._store = store
        self._wait_s = wait_s
        self._stopped = False
        self._held: dict[object, str] = {}
        """What each call that waits now was told."""

    @property
    def last_error(self) -> str:
        """Why something is waiting; empty while nothing is."""
        return next(iter(self._held.values()), "")

    def stop(self) -> None:
        """The run is being stopped: whoever waits gives up at the next try."""
        self._stopped = True

    async def run(self, call: Callable[[], Awaitable[Result]]) -> Result:
        """What `call()` returns, however often the disk was full before.

        Errors:
            DiskFull: still full after `wait_s`, or after `stop`.
        """
        began_s = trio.current_time()
        place = object()
        try:
            while True:
                try:
                    return await call()
                except DiskFull as error:
                    if self._stopped or trio.current_time() - began_s >= self._wait_s:
                        raise
                    if not self._held:
                        log.warning("disk full, waiting", reason=error.what)
                    self._held[place] = str(error)
                await trio.to_thread.run_sync(self._store.trim)
                await trio.sleep(RETRY_S)
        finally:
            self._held.pop(place, None)
