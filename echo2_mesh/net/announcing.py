"""What the learner says exists: said again and again, heard once, and never an older word again.

On the learner it repeats the newest announcement; on every other node it refuses forged and
replayed ones and passes news on. Used by `net.following`, which owns what happens then.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from echo2_mesh import limits
from echo2_mesh.errors import PeerError
from echo2_mesh.net.driver import Guard
from echo2_mesh.net.envelopes import Envelopes
from echo2_mesh.net.topics import Topics
from echo2_mesh.wire.codec import Opened
from echo2_mesh.wire.messages import Announce
from echo2_mesh.wire.types import NodeId, PolicyVersion

ANNOUNCE_INTERVAL_S = 5.0


class Announcing:
    """The newest announcement of one node.

    Args:
        learner: whose announcements count.
        heard: told of every newer announcement, on nodes that are not the learner.
    """

    def __init__(
        self,
        *,
        learner: NodeId,
        envelopes: Envelopes,
        topics: Topics,
        guard: Guard,
        heard: Callable[[Announce], Awaitable[None]],
    ) -> None:
        self._learner = learner
        self._envelopes = envelopes
        self._topics = topics
        self._guard = guard
        self._heard = heard
        self._newest: Opened | None = None
        self._heard_s: dict[PolicyVersion, float] = {}
        topics.hear_opened(Announce, self._hear)

    @property
    def raw(self) -> bytes | None:
        """The newest announcement's envelope, to pass on."""
        return self._newest.raw if self._newest else None

    def heard_s(self, version: PolicyVersion) -> float:
        """When `version` was first heard of; now, for one that was forgotten."""
        return self._heard_s.get(version, trio.current_time())

    async def say(self, message: Announce) -> None:
        """Learner: announce now, and again until the next."""
        envelope = await self._topics.gossip(message)
        self._newest = Opened(sender=self._envelopes.node, message=message, raw=envelope)

    async def repeat(self) -> None:
        """Learner: gossip promises nothing, so say it again, until cancelled."""
        while True:
            await trio.sleep(ANNOUNCE_INTERVAL_S)
            if self._newest is not None:
                await self._topics.publish(Announce, self._newest.raw)

    async def _hear(self, opened: Opened) -> None:
        message = opened.message
        assert isinstance(message, Announce)
        if opened.sender != self._learner:
            self._guard.counters["forged_announces"] += 1
            raise PeerError(f"{opened.sender[-8:]} announces a version and is not the learner.")
        if self._learner == self._envelopes.node:
            return
        if self._newest is not None:
            known = self._newest.message
            assert isinstance(known, Announce)
            if _order(message) < _order(known):
                self._guard.counters["replayed_announces"] += 1
                return
            if _order(message) == _order(known):
                return
        self._newest = opened
        self._heard_s[message.version] = trio.current_time()
        while len(self._heard_s) > limits.SHELF_VERSIONS_MAX:
            del self._heard_s[next(iter(self._heard_s))]
        await self._heard(message)


def _order(message: Announce) -> tuple[int, int]:
    return message.incarnation_unix_ms, int(message.version)
