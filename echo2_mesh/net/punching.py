"""From a relayed connection to a direct one: both sides dial at the same moment (DCUtR of libp2p).

Each binds a fresh port, tells the other over the relayed connection where its NAT will show it
(the address that neighbours see, the same port: right for NATs that keep ports), and dials when the
round trip says that the other does. A fresh port a try, so that no NAT remembers the last. The one
that was reached through the relay leads and answers the handshake, as the specification wants. The
carrier owns one `Punching`; `core.reach` decides when.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import trio
from libp2p.custom_types import TProtocol
from libp2p.io.trio import TrioTCPStream
from libp2p.network.connection.raw_connection import RawConnection
from libp2p.relay.circuit_v2.pb.dcutr_pb2 import HolePunch
from multiaddr import Multiaddr

from echo2_mesh import limits
from echo2_mesh.errors import PeerError
from echo2_mesh.net import guards, streams
from echo2_mesh.net.circuits import receive_message, send_message
from echo2_mesh.net.connections import Connections, peer_of, reason_of
from echo2_mesh.net.interfaces import own_ips
from echo2_mesh.wire.types import NodeId

log = logging.getLogger("echo2.net")

DCUTR = "/libp2p/dcutr"
STEP_TIMEOUT_S = 5.0
RETRY_S = 0.1
"""A refusal comes from a NAT that has not seen its own side dial yet."""
LEAD_S_MAX = 2.0
ANSWERS_MAX = 4
Place = tuple[str, int]


class Punching:
    """Hole punches of one node, in either role.

    `observed` gives this node's address as neighbours see it, None while nobody has said.
    """

    def __init__(self, host: Any, connections: Connections, counters: Counter[str]) -> None:
        self.observed: Callable[[], str | None] = lambda: None
        self._network = host.get_network()
        self._connections = connections
        self._counters = counters
        self._answering = 0
        host.set_stream_handler(TProtocol(DCUTR), self._answer)

    async def punch(self, node: NodeId) -> None:
        """Lead: have a connection to `node` past the relay.

        Raises:
            PeerError: there is none in the end; says why.
        """
        live = self._connections.live(peer_of(node))
        if not live:
            raise PeerError(f"There is no connection to {node[-8:]} to punch from.")
        with _fresh_port() as (port, held):
            stream = None
            try:
                with trio.fail_after(2 * STEP_TIMEOUT_S):
                    stream = await streams.open_stream(live[0], DCUTR)
                    await streams.wait_agreed(stream, DCUTR)
                    begun_s = trio.current_time()
                    await send_message(stream, self._connect(port))
                    heard = await receive_message(stream, HolePunch)
                    round_s = trio.current_time() - begun_s
                    places = _places(heard)
                    await send_message(stream, HolePunch(type=HolePunch.SYNC))
                    await trio.sleep(min(round_s / 2, LEAD_S_MAX))
            except PeerError:
                raise
            except Exception as error:
                raise PeerError(f"{node[-8:]} does not punch: {reason_of(error)}.") from error
            finally:
                if stream is not None:
                    await guards.reset_quietly(stream)
            held.listen(ANSWERS_MAX)
            await self._dial(node, places, port, leads=held)

    def _connect(self, port: int) -> HolePunch:
        ips = [ip for ip in (self.observed(), *sorted(own_ips())) if ip and _version4(ip)]
        places = [Multiaddr(_text(ip, port)) for ip in dict.fromkeys(ips)]
        return HolePunch(
            type=HolePunch.CONNECT,
            ObsAddrs=[place.to_bytes() for place in places[: limits.PUNCH_ADDRESSES_MAX]],
        )

    async def _answer(self, stream: Any) -> None:
        """Follow: the peer leads. Only over a relay, and only a few at once."""
        node = NodeId(str(stream.muxed_conn.peer_id))
        relayed = stream.muxed_conn.get_remote_address() is None
        if not relayed or self._connections.direct(node) or self._answering >= ANSWERS_MAX:
            self._counters["punches_refused"] += 1
            await guards.reset_quietly(stream)
            return
        self._answering += 1
        try:
            with _fresh_port() as (port, _):
                with trio.fail_after(3 * STEP_TIMEOUT_S):
                    places = _places(await receive_message(stream, HolePunch))
                    await send_message(stream, self._connect(port))
                    if (await receive_message(stream, HolePunch)).type != HolePunch.SYNC:
                        raise PeerError(f"{node[-8:]} does not punch as agreed.")
                with contextlib.suppress(PeerError):
                    await self._dial(node, places, port, leads=None)
        finally:
            self._answering -= 1
            await guards.reset_quietly(stream)

    async def _dial(
        self, node: NodeId, places: list[Place], port: int, *, leads: socket.socket | None
    ) -> None:
        """Dial every place until one is the peer or the window closes.

        Args:
            leads: the leader's socket, which listens: what arrives before its own dial is under
                way finds somebody, in the role that it expects.
        """
        failures: list[str] = []
        with trio.move_on_after(limits.PUNCH_WINDOW_S):
            async with trio.open_nursery() as nursery:
                if leads is not None:
                    nursery.start_soon(self._admit, node, leads, failures, nursery)
                for place in places:
                    nursery.start_soon(
                        self._attempt, node, place, port, leads is not None, failures, nursery
                    )
        if self._connections.direct(node):
            self._counters["punches"] += 1
            return
        self._counters["punches_failed"] += 1
        met = ", ".join(f"{ip}:{port}" for ip, port in places)
        raise PeerError(
            f"{failures[-1] if failures else 'no answer'} at {met} "
            f"in {limits.PUNCH_WINDOW_S:g} s from both sides"
        )

    async def _attempt(
        self,
        node: NodeId,
        place: Place,
        port: int,
        leads: bool,
        failures: list[str],
        race: trio.Nursery,
    ) -> None:
        while True:
            try:
                line = await _connect_from(place, port)
            except OSError as error:
                log.debug("punch to %s: %r", place, error)
                await trio.sleep(RETRY_S)
                continue
            try:
                await self._upgrade(node, place, line, leads)
            except Exception as error:
                failures.append(f"{place[0]}: {reason_of(error)}")
                log.debug("punched to %s, but: %r", place, error)
                await line.aclose()
                await trio.sleep(RETRY_S)
                continue
            race.cancel_scope.cancel()
            return

    async def _admit(
        self, node: NodeId, leads: socket.socket, failures: list[str], race: trio.Nursery
    ) -> None:
        # A duplicate: the file descriptor of the caller's socket stays the caller's.
        with trio.socket.from_stdlib_socket(leads.dup()) as listener:
            while True:
                sock, place = await listener.accept()
                line = trio.SocketStream(sock)
                try:
                    await self._upgrade(node, (place[0], place[1]), line, True)
                except Exception as error:
                    failures.append(f"{place[0]}: {reason_of(error)}")
                    await line.aclose()
                    continue
                race.cancel_scope.cancel()
                return

    async def _upgrade(
        self, node: NodeId, place: Place, line: trio.SocketStream, leads: bool
    ) -> None:
        """Make a connection of a socket that both sides opened."""
        self._connections.punched(*place)
        self._network.dialled_sockets.remember(line)
        stream = TrioTCPStream(line)
        stream.get_remote_address()  # remembered from now on, also when the socket is gone
        raw = RawConnection(stream, not leads)
        # The window may close meanwhile; a handshake under way is worth its few more seconds.
        with trio.fail_after(guards.HANDSHAKE_TIMEOUT_S) as scope:
            scope.shield = True
            if not leads:
                await self._network.upgrade_outbound_raw_conn(raw, peer_of(node))
                return
            muxed = await self._network.upgrade_inbound_raw_conn(raw, Multiaddr(_text(*place)))
            if muxed.peer_id != peer_of(node):
                await muxed.close()
                raise PeerError("somebody else is there")


@contextlib.contextmanager
def _fresh_port() -> Iterator[tuple[int, socket.socket]]:
    """A local port that nobody else has, and the socket that holds it for the block."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        _share(held)
        held.bind(("0.0.0.0", 0))
        yield held.getsockname()[1], held


def _share(sock: Any) -> None:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


async def _connect_from(place: Place, port: int) -> trio.SocketStream:
    sock = trio.socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        _share(sock)
        await sock.bind(("0.0.0.0", port))
        await sock.connect(place)
    except BaseException:
        sock.close()
        raise
    return trio.SocketStream(sock)


def _places(heard: HolePunch) -> list[Place]:
    """The IPv4 places of a CONNECT, at most a few; names and circuits are not followed."""
    if heard.type != HolePunch.CONNECT:
        raise PeerError("A hole punch that does not begin as agreed.")
    found: list[Place] = []
    for raw in list(heard.ObsAddrs)[: 4 * limits.PUNCH_ADDRESSES_MAX]:
        try:
            parts = str(Multiaddr(raw)).split("/")
            ip = ipaddress.IPv4Address(parts[2])
            port = int(parts[4])
        except Exception as error:  # the library has a dozen ways to dislike an address
            log.debug("not a place to punch: %r", error)
            continue
        if parts[1] == "ip4" and parts[3] == "tcp" and not (ip.is_multicast or ip.is_unspecified):
            found.append((str(ip), port))
    if not found:
        raise PeerError("The peer named no place to dial.")
    return list(dict.fromkeys(found))[: limits.PUNCH_ADDRESSES_MAX]


def _version4(ip: str) -> bool:
    """Addresses worth telling: a NAT of version 6 is rare, and loopback is nobody else's."""
    return ":" not in ip and not ip.startswith("127.")


def _text(ip: str, port: int) -> str:
    return f"/ip{6 if ':' in ip else 4}/{ip}/tcp/{port}"
