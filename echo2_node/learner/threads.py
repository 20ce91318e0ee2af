"""Blocking work of the learner's daemon, off its event loop or, in simulations, on it.

A virtual clock jumps ahead while a thread works, so a simulated learner works in place. Decides
nothing. Used by journal and intake.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import trio

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")


class Threads:
    """Runs calls in at most `count` worker threads at once.

    Args:
        inline: run them in place instead.
    """

    def __init__(self, count: int, *, inline: bool = False) -> None:
        self._limiter = trio.CapacityLimiter(count)
        self._inline = inline

    async def run(self, call: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """The result of `call(*arguments)`, or what it raised. Not interrupted by cancellation."""
        if self._inline:
            await trio.lowlevel.checkpoint()
            return call(*arguments)
        return await trio.to_thread.run_sync(call, *arguments, limiter=self._limiter)
