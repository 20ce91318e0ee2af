"""Relayed connections, from the ends: keep a place at a relay, open a circuit, accept one.

Circuit relay v2 of libp2p (`/libp2p/circuit/relay/0.2.0/...`): one message each way on a stream,
after which that stream is the raw line of an ordinary connection, with its own handshake: the relay
carries it and reads none of it. The carrier owns one `Circuits`; `net.relays` is the middle.
"""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from typing import Any, TypeVar

import trio
from google.protobuf.message import DecodeError, Message
from libp2p.connection_types import ConnectionType
from libp2p.custom_types import TProtocol
from libp2p.io.exceptions import ConnectionClosedError
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.peer.id import ID
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb
from libp2p.utils.varint import encode_varint_prefixed
from multiaddr import Multiaddr

from echo2_mesh import limits
from echo2_mesh.errors import PeerError
from echo2_mesh.identity import public_key_of
from echo2_mesh.net import guards, streams
from echo2_mesh.net.connections import Connections, peer_of, reason_of
from echo2_mesh.wire.types import NodeId

HOP = "/libp2p/circuit/relay/0.2.0/hop"
STOP = "/libp2p/circuit/relay/0.2.0/stop"
MESSAGE_BYTES_MAX = 4 * limits.KIB
STEP_TIMEOUT_S = 10.0
"""For one message of the relay protocol; the relay asks the other end in between."""
RESERVATION_S_MIN = 60.0
CIRCUIT = "/p2p-circuit"
MessageT = TypeVar("MessageT", bound=Message)


async def send_message(stream: Any, message: Message) -> None:
    """One message with its length before it, as the relay and punching protocols have it."""
    await streams.write(stream, encode_varint_prefixed(message.SerializeToString()))


async def receive_message(stream: Any, kind: type[MessageT]) -> MessageT:
    """One message, and not a byte of what follows it.

    Raises:
        PeerError: it is too long, or none.
    """
    size = 0
    for shift in (0, 7):
        byte = (await streams.read_exactly(stream, 1))[0]
        size |= (byte & 0x7F) << shift
        if byte < 0x80:
            break
    else:
        size = MESSAGE_BYTES_MAX + 1
    if size > MESSAGE_BYTES_MAX:
        raise PeerError(f"A message above {MESSAGE_BYTES_MAX} bytes on a relay stream.")
    message = kind()
    try:
        message.ParseFromString(await streams.read_exactly(stream, size))
    except DecodeError as error:
        raise PeerError("A damaged message on a relay stream.") from error
    return message


def split_circuit(address: str) -> tuple[NodeId, str]:
    """`/.../p2p/<relay>/p2p-circuit[/p2p/<node>]` as (relay, where the relay is).

    Raises:
        PeerError: it is no such address, or has a circuit within a circuit.
    """
    before, separator, _ = address.partition(CIRCUIT)
    place, marked, relay = before.rpartition("/p2p/")
    if not (separator and marked and relay) or CIRCUIT in address[len(before) + len(CIRCUIT) :]:
        raise PeerError(f"'{address[:200]}' is not the address of a circuit.")
    public_key_of(NodeId(relay))
    return NodeId(relay), place


class CircuitStream:
    """A stream through a relay in the place of a socket.

    Writes are shielded: half a frame of the inner connection would ruin it (see `net.streams`).
    """

    def __init__(self, stream: Any) -> None:
        guards.guard_window(stream)
        self._stream = stream

    async def read(self, n: int | None = None) -> bytes:
        """Up to `n` bytes; empty at the end, as a socket says it."""
        try:
            return bytes(await self._stream.read(n))
        except Exception as error:  # the library's many names for a broken stream
            if isinstance(error, OSError) or "EOF" in type(error).__name__:
                return b""
            raise ConnectionClosedError(f"The circuit broke: {error!r}") from error

    async def write(self, data: bytes) -> None:
        """All of `data`, or the circuit is dead."""
        try:
            with trio.CancelScope(shield=True):
                await streams.write_patiently(self._stream, data)
        except Exception as error:
            raise ConnectionClosedError(f"The circuit broke: {error!r}") from error

    async def close(self) -> None:
        """End both directions."""
        with trio.move_on_after(guards.RESET_TIMEOUT_S) as scope, contextlib.suppress(Exception):
            scope.shield = True
            await self._stream.close()
        await guards.reset_quietly(self._stream)

    def get_remote_address(self) -> None:
        """Nobody's: the socket under it leads to the relay. `Connections.way` relies on it."""


class Circuits:
    """The relayed connections of one node."""

    def __init__(self, host: Any, connections: Connections, counters: Counter[str]) -> None:
        self._host = host
        self._network = host.get_network()
        self._connections = connections
        self._counters = counters
        self._own_id = host.get_id().to_bytes()
        self._reserved_s: dict[NodeId, float] = {}
        self._inbound = 0
        host.set_stream_handler(TProtocol(STOP), self._accept)

    async def reserve(self, relay: NodeId) -> float:
        """Have a place at `relay`, to which there is a direct connection; seconds it lasts.

        Raises:
            PeerError: it refuses, or does not answer.
        """
        stream = await self._hop(relay)
        try:
            with trio.fail_after(STEP_TIMEOUT_S):
                await send_message(stream, pb.HopMessage(type=pb.HopMessage.RESERVE))
                answer = await receive_message(stream, pb.HopMessage)
            self._expect_ok(relay, answer.status)
        except PeerError:
            raise
        except Exception as error:
            raise PeerError(f"{relay[-8:]} does not reserve: {reason_of(error)}.") from error
        finally:
            await guards.reset_quietly(stream)
        # The relay's clock is not ours: what it says may be off, so it is kept within reason.
        left_s = float(answer.reservation.expire) - time.time()
        lasts_s = min(max(left_s, RESERVATION_S_MIN), limits.RELAY_RESERVATION_S)
        self._reserved_s[relay] = trio.current_time() + lasts_s
        return lasts_s

    async def dial(self, address: str, node: NodeId) -> Any:
        """A new connection to `node` through the relay that `address` names.

        Raises:
            PeerError: the relay is not there or refuses, or the other end is not `node`.
        """
        relay, place = split_circuit(address)
        if relay in (node, NodeId(str(self._host.get_id()))):
            raise PeerError("A circuit needs a third node between its ends.")
        if not self._connections.direct(relay):
            await self._connections.connect(relay, (place,))
        stream = await self._hop(relay)
        try:
            with trio.fail_after(STEP_TIMEOUT_S + limits.RELAY_HANDSHAKE_TIMEOUT_S):
                target = pb.PeerId(id=peer_of(node).to_bytes())
                await send_message(stream, pb.HopMessage(type=pb.HopMessage.CONNECT, peer=target))
                answer = await receive_message(stream, pb.HopMessage)
                self._expect_ok(relay, answer.status)
                connection = await self._network.upgrade_outbound_raw_conn(
                    _raw(stream, relay, node, initiator=True), peer_of(node)
                )
        except BaseException as error:
            await guards.reset_quietly(stream)
            if isinstance(error, PeerError) or not isinstance(error, Exception):
                raise
            raise PeerError(
                f"{node[-8:]} does not answer through {relay[-8:]}: {reason_of(error)}."
            ) from error
        self._counters["circuits_opened"] += 1
        return connection

    async def _hop(self, relay: NodeId) -> Any:
        """A stream to the relay, agreed upon."""
        live = self._connections.direct(relay)
        if not live:
            raise PeerError(f"There is no direct connection to the relay {relay[-8:]}.")
        stream = None
        try:
            with trio.fail_after(limits.STREAM_OPEN_TIMEOUT_S):
                stream = await streams.open_stream(live[0], HOP)
                await streams.wait_agreed(stream, HOP)
                return stream
        except BaseException as error:
            if stream is not None:
                await guards.reset_quietly(stream)
            if isinstance(error, PeerError) or not isinstance(error, Exception):
                raise
            raise PeerError(f"{relay[-8:]} is no relay: {reason_of(error)}.") from error

    def _expect_ok(self, relay: NodeId, status: Any) -> None:
        if status != pb.Status.OK:
            known = status in pb.Status.values()
            word = pb.Status.Name(status) if known else str(status)
            raise PeerError(f"The relay {relay[-8:]} refuses: {word.lower().replace('_', ' ')}.")

    async def _accept(self, stream: Any) -> None:
        """Somebody comes through a relay; returns when that connection has ended."""
        relay = NodeId(str(stream.muxed_conn.peer_id))
        with trio.fail_after(STEP_TIMEOUT_S):
            asked = await receive_message(stream, pb.StopMessage)
            status = self._judge(relay, asked)
            await send_message(stream, pb.StopMessage(type=pb.StopMessage.STATUS, status=status))
        if status != pb.Status.OK:
            self._counters["circuits_refused"] += 1
            await stream.close()
            return
        self._inbound += 1
        try:
            await self._serve(stream, relay, asked.peer.id)
        finally:
            self._inbound -= 1
            await guards.reset_quietly(stream)

    def _judge(self, relay: NodeId, asked: pb.StopMessage) -> Any:
        if asked.type != pb.StopMessage.CONNECT or not 0 < len(asked.peer.id) <= 64:
            return pb.Status.MALFORMED_MESSAGE
        if self._reserved_s.get(relay, 0.0) < trio.current_time():
            return pb.Status.PERMISSION_DENIED
        if self._inbound >= limits.CIRCUITS_INBOUND_MAX:
            return pb.Status.RESOURCE_LIMIT_EXCEEDED
        return pb.Status.OK

    async def _serve(self, stream: Any, relay: NodeId, claimed: bytes) -> None:
        node = NodeId(str(ID(claimed)))
        raw = _raw(stream, relay, node, initiator=False)
        with trio.fail_after(limits.RELAY_HANDSHAKE_TIMEOUT_S):
            (address,) = raw.get_transport_addresses()
            muxed = await self._network.upgrade_inbound_raw_conn(raw, address)
        if muxed.peer_id.to_bytes() != claimed:
            await muxed.close()
            raise PeerError(f"{relay[-8:]} announced another node than came through it.")
        self._counters["circuits_accepted"] += 1
        for connection in self._network.get_connections(muxed.peer_id):
            if connection.muxed_conn is muxed:
                await connection.event_closed.wait()


def _raw(stream: Any, relay: NodeId, node: NodeId, *, initiator: bool) -> RawConnection:
    address = Multiaddr(f"/p2p/{relay}{CIRCUIT}/p2p/{node}")
    line: Any = CircuitStream(stream)
    return RawConnection(
        line, initiator, connection_type=ConnectionType.RELAYED, addresses=[address]
    )
