"""Request and reply over any live connection, with every size, wait and number bounded.

It moves one frame there and one back; it never decides what a request means or whether to answer.
The carrier owns one `Exchanges`. On the wire: the protocol proposal, then a frame; back comes a
frame or, in place of its length, a `streams.Refusal`.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import trio
from libp2p.custom_types import TProtocol

from echo2_mesh import limits
from echo2_mesh.errors import Echo2Error, PeerError
from echo2_mesh.net import guards, streams
from echo2_mesh.net.carrier import ServeExchange
from echo2_mesh.net.connections import Connections, peer_of, reason_of
from echo2_mesh.wire.types import NodeId

log = logging.getLogger("echo2.net")

REQUEST_READ_TIMEOUT_S = limits.ASK_TIMEOUT_S
SERVE_TIMEOUT_S = limits.BLOB_TIMEOUT_S
FIRST_WRITE_BYTES_MAX = 32 * limits.KIB
"""Up to this size the request rides with the protocol proposal, in one yamux frame."""


class Exchanges:
    """Asks and answers for one host."""

    def __init__(self, host: Any, connections: Connections, counters: Counter[str]) -> None:
        self._host = host
        self._connections = connections
        self._counters = counters

    async def exchange(
        self, node: NodeId, protocol: str, request: bytes, *, reply_bytes_max: int, timeout_s: float
    ) -> bytes:
        """One request and its reply over a connection opened by either side.

        Raises:
            PeerError: no connection, a refusal, a broken stream, or too slow.
        """
        connections = self._connections.live(peer_of(node))
        if not connections:
            raise PeerError(f"There is no connection to {node[-8:]}.")
        try:
            with trio.fail_after(timeout_s):
                return await self._exchange(connections[0], protocol, request, reply_bytes_max)
        except PeerError as error:
            raise PeerError(f"{protocol} to {node[-8:]}: {error.what}", error.hint) from error
        except trio.TooSlowError as error:
            self._counters["exchanges_late"] += 1
            self._connections.suspect(connections)
            raise PeerError(f"{protocol} to {node[-8:]}: no reply in {timeout_s:g} s.") from error
        except streams.DeadConnection as error:
            await self._connections.close(connections[0])
            raise PeerError(f"{protocol} to {node[-8:]}: it takes no bytes any more.") from error
        except Exception as error:  # the library's many names for a broken stream
            self._counters["exchanges_broken"] += 1
            raise PeerError(f"{protocol} to {node[-8:]}: {reason_of(error)}.") from error

    async def _exchange(
        self, connection: Any, protocol: str, request: bytes, reply_bytes_max: int
    ) -> bytes:
        framed = streams.frame(request)
        stream = None
        finished = False
        try:
            with trio.fail_after(limits.STREAM_OPEN_TIMEOUT_S):
                stream = await streams.open_stream(
                    connection, protocol, framed[:FIRST_WRITE_BYTES_MAX]
                )
                await streams.wait_agreed(stream, protocol)
            if len(framed) > FIRST_WRITE_BYTES_MAX:
                await streams.write(stream, framed[FIRST_WRITE_BYTES_MAX:])
            reply = await streams.receive_frame(stream, reply_bytes_max)
            finished = True
            await stream.close()
            return reply
        finally:
            if stream is not None and not finished:
                await guards.reset_quietly(stream)

    def serve(self, protocol: str, handler: ServeExchange, *, request_bytes_max: int) -> None:
        """Answer `protocol`; too large, too many at once and failures are refused by a code."""
        serving: Counter[NodeId] = Counter()

        async def handle(stream: Any) -> None:
            node = NodeId(str(stream.muxed_conn.peer_id))
            # One at a time is everybody's, however many others ask: connections are bounded.
            if serving[node] >= limits.INBOUND_ASKS_PER_PEER_MAX or (
                serving.total() >= limits.INBOUND_ASKS_MAX and serving[node] > 0
            ):
                self._counters["exchanges_refused_busy"] += 1
                await self._refuse(stream, streams.Refusal.BUSY)
                return
            serving[node] += 1
            try:
                await self._answer(node, stream, handler, request_bytes_max)
            finally:
                serving[node] -= 1
                if not serving[node]:
                    del serving[node]

        self._host.set_stream_handler(TProtocol(protocol), handle)

    async def _answer(
        self, node: NodeId, stream: Any, handler: ServeExchange, request_bytes_max: int
    ) -> None:
        with trio.fail_after(REQUEST_READ_TIMEOUT_S):
            length = await streams.receive_length(stream)
            if length > request_bytes_max:
                self._counters["exchanges_refused_large"] += 1
                await self._refuse(stream, streams.Refusal.TOO_LARGE)
                return
            request = await streams.read_exactly(stream, length)
        try:
            with trio.fail_after(SERVE_TIMEOUT_S):
                reply = await handler(node, request)
        except Exception as error:
            self._counters["exchanges_failed"] += 1
            if not isinstance(error, Echo2Error):
                log.exception("a handler failed")
            await self._refuse(stream, streams.Refusal.FAILED)
            return
        with trio.fail_after(SERVE_TIMEOUT_S):
            await streams.write(stream, streams.frame(reply))
            await stream.close()
        self._counters["exchanges_served"] += 1

    async def _refuse(self, stream: Any, refusal: streams.Refusal) -> None:
        """Say why, then stop listening: the rest of the request is never read."""
        with trio.move_on_after(guards.RESET_TIMEOUT_S):
            await streams.send_refusal(stream, refusal)
            await stream.close()
