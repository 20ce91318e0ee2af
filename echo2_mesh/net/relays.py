"""The relay: carries connections between nodes that cannot dial each other, within limits.

Any node that others can dial is one, unless its owner says no. It knows who has a place and passes
bytes between two streams; what they say is encrypted end to end and none of its business. The
carrier owns one `Relays`; `core.relay_book` decides, `net.circuits` is the other side.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb
from multiaddr import Multiaddr

from echo2_mesh.core.relay_book import Denial, RelayBook, RelayLimits
from echo2_mesh.errors import PeerError
from echo2_mesh.net import guards, streams
from echo2_mesh.net.circuits import HOP, STEP_TIMEOUT_S, STOP, receive_message, send_message
from echo2_mesh.net.connections import Connections
from echo2_mesh.wire.types import NodeId

PIECE_SIZE_BYTES = streams.PIECE_SIZE_BYTES
_STATUS = {
    Denial.FULL: pb.Status.RESOURCE_LIMIT_EXCEEDED,
    Denial.NO_RESERVATION: pb.Status.NO_RESERVATION,
}


class Relays:
    """The relay service of one node.

    `serving` is off until somebody could dial this node; `welcome` says who may use it.

    Args:
        addresses: where this node can be dialled, without /p2p.
    """

    def __init__(
        self,
        host: Any,
        connections: Connections,
        counters: Counter[str],
        *,
        addresses: Callable[[], tuple[str, ...]],
        given: RelayLimits | None = None,
    ) -> None:
        self.serving = False
        self.welcome: Callable[[NodeId], bool] = lambda node: True
        self.book = RelayBook(given or RelayLimits())
        self._node = NodeId(str(host.get_id()))
        self._connections = connections
        self._counters = counters
        self._addresses = addresses
        host.set_stream_handler(TProtocol(HOP), self._handle)

    async def _handle(self, stream: Any) -> None:
        """One request; a circuit lasts as long as this call."""
        node = NodeId(str(stream.muxed_conn.peer_id))
        place = stream.muxed_conn.get_remote_address()
        with trio.fail_after(STEP_TIMEOUT_S):
            asked = await receive_message(stream, pb.HopMessage)
        if place is None:  # through another relay: not twice
            await self._refuse(stream, pb.Status.PERMISSION_DENIED)
        elif not self.serving or not self.welcome(node):
            await self._refuse(stream, pb.Status.RESERVATION_REFUSED)
        elif asked.type == pb.HopMessage.RESERVE:
            await self._reserve(stream, node, place[0])
        elif asked.type == pb.HopMessage.CONNECT and 0 < len(asked.peer.id) <= 64:
            await self._connect(stream, node, NodeId(str(ID(asked.peer.id))))
        else:
            await self._refuse(stream, pb.Status.MALFORMED_MESSAGE)

    async def _refuse(self, stream: Any, status: Any) -> None:
        self._counters["relay_refusals"] += 1
        with trio.move_on_after(STEP_TIMEOUT_S):
            await send_message(stream, pb.HopMessage(type=pb.HopMessage.STATUS, status=status))
            await stream.close()

    async def _reserve(self, stream: Any, node: NodeId, ip: str) -> None:
        for gone in self.book.holders() - self._connections.connected():
            self.book.leave(gone)
        denial = self.book.reserve(node, ip, trio.current_time())
        if denial is not None:
            await self._refuse(stream, _STATUS[denial])
            return
        given = self.book.limits
        places = [Multiaddr(f"{text}/p2p/{self._node}") for text in self._addresses()]
        answer = pb.HopMessage(
            type=pb.HopMessage.STATUS,
            status=pb.Status.OK,
            reservation=pb.Reservation(
                expire=int(time.time() + given.reservation_s),
                addrs=[place.to_bytes() for place in places],
            ),
            limit=self._limit(),
        )
        with trio.fail_after(STEP_TIMEOUT_S):
            await send_message(stream, answer)
            await stream.close()
        self._counters["relay_reservations"] += 1

    def _limit(self) -> pb.Limit:
        given = self.book.limits
        return pb.Limit(duration=int(given.circuit_s), data=min(given.circuit_bytes, 2**63))

    async def _connect(self, stream: Any, source: NodeId, target: NodeId) -> None:
        denial = self.book.open(source, target, trio.current_time())
        if denial is not None:
            await self._refuse(stream, _STATUS[denial])
            return
        onward = None
        try:
            onward = await self._knock(source, target)
            if onward is None:
                await self._refuse(stream, pb.Status.CONNECTION_FAILED)
                return
            with trio.fail_after(STEP_TIMEOUT_S):
                await send_message(
                    stream,
                    pb.HopMessage(
                        type=pb.HopMessage.STATUS, status=pb.Status.OK, limit=self._limit()
                    ),
                )
            self._counters["relay_circuits"] += 1
            await self._carry(stream, onward)
        finally:
            self.book.close(source, target)
            await guards.reset_quietly(stream)
            if onward is not None:
                await guards.reset_quietly(onward)

    async def _knock(self, source: NodeId, target: NodeId) -> Any | None:
        """A stream to `target` that it has agreed to be reached by; None if it has not."""
        live = self._connections.direct(target)
        if not live:
            return None
        stream = None
        try:
            with trio.fail_after(STEP_TIMEOUT_S):
                stream = await streams.open_stream(live[0], STOP)
                await streams.wait_agreed(stream, STOP)
                peer = pb.PeerId(id=ID.from_string(source).to_bytes())
                await send_message(
                    stream,
                    pb.StopMessage(type=pb.StopMessage.CONNECT, peer=peer, limit=self._limit()),
                )
                answer = await receive_message(stream, pb.StopMessage)
            if answer.status == pb.Status.OK:
                return stream
        except (PeerError, trio.TooSlowError):
            pass
        except Exception:  # a broken connection has many names in the library
            self._counters["relay_knocks_failed"] += 1
        if stream is not None:
            await guards.reset_quietly(stream)
        return None

    async def _carry(self, one: Any, other: Any) -> None:
        """Pass bytes both ways until an end closes, or the circuit has had its share."""
        left = [self.book.limits.circuit_bytes]
        for stream in (one, other):
            guards.guard_window(stream)
        with trio.move_on_after(self.book.limits.circuit_s) as clock:
            async with trio.open_nursery() as nursery:
                for source, target in ((one, other), (other, one)):
                    nursery.start_soon(self._pump, source, target, left, nursery.cancel_scope)
        if clock.cancelled_caught or left[0] <= 0:
            self._counters["relay_circuits_used_up"] += 1

    async def _pump(
        self, source: Any, target: Any, left: list[int], both: trio.CancelScope
    ) -> None:
        # An end that breaks, in whichever way the library puts it, ends this circuit alone.
        with contextlib.suppress(Exception):
            while left[0] > 0:
                data = await source.read(PIECE_SIZE_BYTES)
                if not data:
                    break
                left[0] -= len(data)
                if left[0] < 0:
                    break
                await trio.sleep(self.book.delay_s(len(data), trio.current_time()))
                await streams.write_patiently(target, data)
                self._counters["relay_bytes"] += len(data)
        both.cancel()
