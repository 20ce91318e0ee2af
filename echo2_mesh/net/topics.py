"""Gossip: two topics a run, signed messages, each kind on its own topic.

`control` carries what everybody hears (announcements, heartbeats, goodbyes); `rollouts` is joined
by the learner alone. Delivery, order and uniqueness are promised by nobody, so every handler must
bear repeats. A message from a liar is counted and dropped here.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import msgspec

from echo2_mesh import limits
from echo2_mesh.errors import LocalError, PeerError
from echo2_mesh.net.carrier import Carrier
from echo2_mesh.net.driver import Guard
from echo2_mesh.net.envelopes import Envelopes
from echo2_mesh.wire.codec import Opened
from echo2_mesh.wire.messages import Announce, Goodbye, Heartbeat, Message, RolloutBatch
from echo2_mesh.wire.types import NodeId

_TOPIC_OF: dict[type, str] = {
    Announce: "control",
    Heartbeat: "control",
    Goodbye: "control",
    RolloutBatch: "rollouts",
}
Heard = TypeVar("Heard", bound=msgspec.Struct)


def topic_name(run_id: str, topic: str) -> str:
    """The name on the wire of `control` or `rollouts`."""
    return f"echo2/{run_id}/{topic}"


def topics_of(run_id: str, *, learner: bool) -> tuple[str, ...]:
    """The topics a node of that role joins."""
    names = ("control", "rollouts") if learner else ("control",)
    return tuple(topic_name(run_id, name) for name in names)


class Topics:
    """The gossip of one node."""

    def __init__(self, carrier: Carrier, envelopes: Envelopes, guard: Guard) -> None:
        self._carrier = carrier
        self._envelopes = envelopes
        self._guard = guard
        self._handlers: dict[type, list[Callable[[Opened], Awaitable[None]]]] = {}

    async def join(self, *, learner: bool) -> None:
        """Subscribe to what this role hears."""
        for name in topics_of(self._envelopes.run_id, learner=learner):
            await self._carrier.subscribe(name, partial(self._hear, name))

    def hear_opened(self, kind: type, handler: Callable[[Opened], Awaitable[None]]) -> None:
        """Call `handler` with each verified envelope of `kind`, its raw bytes included."""
        self._handlers.setdefault(kind, []).append(handler)

    def hear(self, kind: type[Heard], handler: Callable[[NodeId, Heard], Awaitable[None]]) -> None:
        """Call `handler(sender, message)` for each verified message of `kind`."""

        async def unwrap(opened: Opened) -> None:
            message: Any = opened.message
            await handler(opened.sender, message)

        self.hear_opened(kind, unwrap)

    async def gossip(self, message: Message) -> bytes:
        """Sign and publish; returns the envelope. Returning promises no delivery."""
        raw = self._envelopes.seal(message)
        if len(raw) > limits.GOSSIP_SIZE_BYTES_MAX:
            raise LocalError(
                f"A gossip message of {len(raw)} bytes is above the limit of "
                f"{limits.GOSSIP_SIZE_BYTES_MAX}."
            )
        await self.publish(type(message), raw)
        return raw

    async def publish(self, kind: type, raw: bytes) -> None:
        """Publish an envelope of `kind` that was sealed before."""
        topic = topic_name(self._envelopes.run_id, _TOPIC_OF[kind])
        await self._carrier.publish(topic, raw)

    async def _hear(self, topic: str, raw: bytes) -> None:
        async with self._guard.serving():
            await self._guard.forgive("refused_gossip", self.deliver(raw, topic=topic))

    async def deliver(self, raw: bytes, *, topic: str | None = None) -> None:
        """Verify an envelope, however it came, and hand it to its handlers.

        Args:
            topic: where it was heard; None for one that a member passed on.

        Raises:
            PeerError: it is illegal, on another kind's topic, or a handler refused it.
        """
        opened = self._envelopes.unseal(raw, size_bytes_max=limits.GOSSIP_SIZE_BYTES_MAX)
        if type(opened.message) not in _TOPIC_OF:
            raise PeerError("This kind of message does not travel by gossip.")
        own = topic_name(self._envelopes.run_id, _TOPIC_OF[type(opened.message)])
        if topic is not None and topic != own:
            raise PeerError(f"A {type(opened.message).__name__} does not belong on {topic}.")
        await self.dispatch(opened)

    async def dispatch(self, opened: Opened) -> None:
        """Hand a verified message to its handlers, as if it had been gossiped."""
        for handler in self._handlers.get(type(opened.message), ()):
            await handler(opened)
