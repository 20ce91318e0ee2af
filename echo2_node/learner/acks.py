"""Acknowledgements for trajectories that came by gossip: gathered for a moment, sent directly.

An acknowledgement that gets lost costs little: the actor announces again and gets the same
verdict. So each is tried a few times and then forgotten. The desk owns it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

import structlog
import trio

from echo2_mesh import limits
from echo2_mesh.errors import PeerError
from echo2_mesh.wire.messages import VerdictNote, Verdicts
from echo2_mesh.wire.types import NodeId

log = structlog.get_logger()

GATHER_S = 0.2
ATTEMPTS_MAX = 2
SEND_TIMEOUT_S = 5.0
SENDS_MAX = 16
ACTORS_MAX = 4096

Tell = Callable[[NodeId, Verdicts, float], Awaitable[object]]


class Acknowledger:
    """Notes by actor until they are sent."""

    def __init__(self, tell: Tell) -> None:
        self._tell = tell
        self._notes: dict[NodeId, list[VerdictNote]] = {}
        self._stirred = trio.Event()
        self._sends = trio.CapacityLimiter(SENDS_MAX)

    def add(self, actor: NodeId, notes: Sequence[VerdictNote]) -> None:
        """Send these soon. Beyond the bounds they are dropped: the actor will ask again."""
        if not notes or (actor not in self._notes and len(self._notes) >= ACTORS_MAX):
            return
        waiting = self._notes.setdefault(actor, [])
        waiting += notes[: limits.VERDICTS_PER_MESSAGE_MAX - len(waiting)]
        self._stirred.set()

    async def run(self) -> None:
        """Send for ever."""
        async with trio.open_nursery() as nursery:
            while True:
                await self._stirred.wait()
                await trio.sleep(GATHER_S)
                self._stirred = trio.Event()
                gathered, self._notes = self._notes, {}
                for actor, notes in gathered.items():
                    nursery.start_soon(self._send, actor, tuple(notes))

    async def _send(self, actor: NodeId, notes: tuple[VerdictNote, ...]) -> None:
        async with self._sends:
            for _ in range(ATTEMPTS_MAX):
                try:
                    await self._tell(actor, Verdicts(notes=notes), SEND_TIMEOUT_S)
                except PeerError as error:
                    log.debug("verdicts not delivered", peer=actor, reason=str(error))
                    continue
                return
