"""Ask and answer: one signed request, one signed reply, over whichever connection exists.

Both envelopes are verified, and each sender must be the peer that the connection authenticated:
nobody asks in another's name. Handlers decide the answers; a `PeerError` of theirs travels back
as a `Refusal` with its code.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import trio

from echo2_mesh import limits
from echo2_mesh.errors import LocalError, PeerError
from echo2_mesh.net.carrier import Carrier
from echo2_mesh.net.driver import Guard
from echo2_mesh.net.envelopes import Envelopes
from echo2_mesh.wire.messages import KIND_OF, Message, Refusal
from echo2_mesh.wire.types import NodeId

ASK_PROTOCOL = "/echo2/ask/1"
Reach = Callable[[NodeId], Awaitable[None]]
"""Have a connection to a node, or raise PeerError."""
Asked = TypeVar("Asked", bound=msgspec.Struct)


class Questions:
    """The ask protocol of one node."""

    def __init__(self, carrier: Carrier, envelopes: Envelopes, guard: Guard, reach: Reach) -> None:
        self._carrier = carrier
        self._envelopes = envelopes
        self._guard = guard
        self._reach = reach
        self._handlers: dict[type, Callable[[NodeId, Any], Awaitable[Message]]] = {}
        carrier.serve(ASK_PROTOCOL, self._serve, request_bytes_max=limits.ASK_SIZE_BYTES_MAX)

    def answer(
        self, kind: type[Asked], handler: Callable[[NodeId, Asked], Awaitable[Message]]
    ) -> None:
        """Answer questions of `kind` with `handler`; one handler a kind."""
        assert kind not in self._handlers, f"{kind.__name__} has a handler already"
        self._handlers[kind] = handler

    async def ask(
        self, node: NodeId, message: Message, *, timeout_s: float = limits.ASK_TIMEOUT_S
    ) -> Message:
        """Put one question and wait for its answer.

        Raises:
            PeerError: unreachable, late, an illegal reply, or a refusal (its `code` says which).
        """
        request = self._envelopes.seal(message)
        if len(request) > limits.ASK_SIZE_BYTES_MAX:
            raise LocalError(
                f"A {KIND_OF[type(message)]} of {len(request)} bytes is above the ask limit of "
                f"{limits.ASK_SIZE_BYTES_MAX}."
            )
        raw: bytes | None = None
        with trio.move_on_after(timeout_s):
            await self._reach(node)
            raw = await self._carrier.exchange(
                node,
                ASK_PROTOCOL,
                request,
                reply_bytes_max=limits.ASK_SIZE_BYTES_MAX,
                timeout_s=timeout_s,
            )
        if raw is None:
            raise PeerError(f"{node[-8:]} did not answer in {timeout_s:g} s.", code="late")
        opened = self._envelopes.unseal(raw, size_bytes_max=limits.ASK_SIZE_BYTES_MAX)
        if opened.sender != node:
            self._guard.counters["foreign_replies"] += 1
            raise PeerError(f"The reply of {node[-8:]} is signed by {opened.sender[-8:]}.")
        if isinstance(opened.message, Refusal):
            refusal = opened.message
            raise PeerError(f"{node[-8:]} refused: {refusal.text}", code=refusal.code)
        return opened.message

    async def _serve(self, peer: NodeId, request: bytes) -> bytes:
        async with self._guard.serving():
            opened = self._envelopes.unseal(request, size_bytes_max=limits.ASK_SIZE_BYTES_MAX)
            if opened.sender != peer:
                self._guard.counters["foreign_asks"] += 1
                raise PeerError(f"{peer[-8:]} asked in the name of {opened.sender[-8:]}.")
            return self._envelopes.seal(await self._reply(peer, opened.message))

    async def _reply(self, peer: NodeId, message: Message) -> Message:
        handler = self._handlers.get(type(message))
        if handler is None:
            kind = KIND_OF[type(message)]
            return Refusal(code="unknown_question", text=f"This node does not answer '{kind}'.")
        try:
            return await handler(peer, message)
        except PeerError as error:
            self._guard.counters["refused_asks"] += 1
            return Refusal(code=error.code or "refused", text=str(error)[:512])
        except LocalError as error:
            self._guard.counters["failed_asks"] += 1
            return Refusal(code="unavailable", text=error.what[:512])
