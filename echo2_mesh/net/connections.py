"""The connections of one host: dial them, use the live ones, bury the dead ones.

It decides which connection a peer is reached by and when one is dead; it knows no request and no
topic. The carrier owns one `Connections`. The library keeps a half-open connection listed as long
as the kernel does, and new streams may be sent into it; so a connection is probed with a ping when
it matters: before `connect` trusts it, after a request timed out, when its peer turns up a second
time, and now and then. Addresses through a relay (`net.circuits`) are dialled when direct ones
have had a moment, and a relayed connection is used only while there is no other.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import trio
from libp2p.peer.id import ID

from echo2_mesh import limits
from echo2_mesh.core.reaching import Link, Way
from echo2_mesh.errors import PeerError, UsageError
from echo2_mesh.identity import public_key_of
from echo2_mesh.net import guards, streams
from echo2_mesh.net.host import parse_address
from echo2_mesh.net.thrift import heard_s
from echo2_mesh.wire.types import NodeId

log = logging.getLogger("echo2.net")

PING_PROTOCOL = "/ipfs/ping/1.0.0"
PING_SIZE_BYTES = 32
PROBE_TIMEOUT_S = 2.0
"""A connection that does not answer a ping for this long when we need it is worth a new dial."""
WATCH_INTERVAL_S = 15.0
WATCH_TIMEOUT_S = 10.0
"""One that does not answer for this long is dead; a host whose processors are taken may need
seconds to say that it lives."""
SUSPECT_TIMEOUT_S = 5.0
CLOSE_STEP_TIMEOUT_S = 1.0
DIALS_AT_ONCE_MAX = 4
PEERSTORE_TTL_S = 600
DIRECT_HEAD_START_S = 1.0
"""Before an address through a relay is dialled, if there are direct ones to try."""
PUNCHED_PLACES_MAX = 512
CIRCUIT_MARK = "/p2p-circuit"
CIRCUITS_TRIED = 2 * limits.RELAYS_WANTED
DialCircuit = Callable[[str, NodeId], Awaitable[Any]]


class Connections:
    """Connections by node. `changed` is set, and replaced, whenever one ends.

    Args:
        nursery: lives as long as the host; probes that nobody waits for run there.
    """

    def __init__(self, host: Any, nursery: trio.Nursery, counters: Counter[str]) -> None:
        self.changed = trio.Event()
        self.dial_circuit: DialCircuit | None = None
        """Dials an address through a relay; set by the carrier."""
        self._host = host
        self._network = host.get_network()
        self._node = NodeId(str(host.get_id()))
        self._nursery = nursery
        self._counters = counters
        self._probed: set[Any] = set()
        self._dialling: dict[NodeId, trio.Event] = {}
        self._punched: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._network.register_notifee(_Notifee(self))

    def connected(self) -> frozenset[NodeId]:
        """Peers with a live connection in either direction."""
        return frozenset(
            NodeId(str(peer)) for peer in list(self._network.connections) if self.live(peer)
        )

    def live(self, peer: Any) -> list[Any]:
        """Connections to a peer that are not known to be dead: relayed last, newest first."""
        found = [
            connection
            for connection in reversed(self._network.get_connections(peer))
            if not connection.is_closed and not connection.muxed_conn.event_shutting_down.is_set()
        ]
        return sorted(found, key=lambda connection: self.way(connection) is Way.RELAYED)

    def direct(self, node: NodeId) -> list[Any]:
        """Live connections to a node that no relay carries."""
        return [c for c in self.live(peer_of(node)) if self.way(c) is not Way.RELAYED]

    def way(self, connection: Any) -> Way:
        """How a connection came about."""
        place = connection.muxed_conn.get_remote_address()
        if place is None:
            return Way.RELAYED
        return Way.PUNCHED if tuple(place) in self._punched else Way.DIRECT

    def punched(self, ip: str, port: int) -> None:
        """A connection with this far end is the work of both sides; said before it exists."""
        self._punched[(ip, port)] = None
        if len(self._punched) > PUNCHED_PLACES_MAX:
            self._punched.popitem(last=False)

    def links(self) -> tuple[Link, ...]:
        """Every live connection, as `core.reach` wants to know it."""
        found = []
        for peer in list(self._network.connections):
            for connection in self.live(peer):
                place = connection.muxed_conn.get_remote_address()
                found.append(
                    Link(
                        node=NodeId(str(peer)),
                        way=self.way(connection),
                        dialled=connection.direction.name == "OUTBOUND",
                        ip=place[0] if place else "",
                        port=place[1] if place else 0,
                    )
                )
        return tuple(found)

    async def connect(self, node: NodeId, addresses: tuple[str, ...]) -> None:
        """Have a connection that answers; dial if there is none.

        Raises:
            PeerError: nobody with that identity answered at any address in time.
        """
        if node == self._node:
            raise PeerError("A node does not connect to itself.")
        peer = peer_of(node)
        if (other := self._dialling.get(node)) is not None:
            with trio.move_on_after(limits.CONNECT_TIMEOUT_S):
                await other.wait()
            if self.live(peer):
                return
        done = self._dialling[node] = trio.Event()
        try:
            old = self.live(peer)
            for connection in old:
                if await self._answers(connection, PROBE_TIMEOUT_S):
                    return
            await self._dial(node, addresses)
            # Only now: a silent peer may be busy, and a slow connection is better than none.
            for connection in old:
                self._counters["connections_buried"] += 1
                await self.close(connection)
        finally:
            done.set()
            if self._dialling.get(node) is done:
                del self._dialling[node]

    async def _dial(self, node: NodeId, addresses: tuple[str, ...]) -> None:
        """Try all addresses side by side; the first that proves the identity wins."""
        peer = peer_of(node)
        places = dialable(addresses)
        circuits = circuits_of(addresses) if self.dial_circuit is not None else []
        if not places and not circuits:
            raise PeerError(f"No address is known at which {node[-8:]} could be dialled.")
        limiter = trio.CapacityLimiter(DIALS_AT_ONCE_MAX)
        failures: list[str] = []
        reached: list[Any] = []
        direct_failed = trio.Event()

        async def attempt(place: Any, race: trio.CancelScope) -> None:
            async with limiter:
                try:
                    await self._network.dial_addr(place, peer)
                except Exception as error:
                    failures.append(f"{place}: {reason_of(error)}")
                    if len(failures) >= len(places):
                        direct_failed.set()
                    return
            reached.append(place)
            race.cancel()

        async def go_round(race: trio.CancelScope) -> None:
            if places:
                with trio.move_on_after(DIRECT_HEAD_START_S):
                    await direct_failed.wait()
            assert self.dial_circuit is not None
            for text in circuits:
                try:
                    await self.dial_circuit(text, node)
                except PeerError as error:
                    failures.append(f"{text}: {error.what}")
                else:
                    reached.append(None)
                    race.cancel()
                    return

        with trio.move_on_after(limits.CONNECT_TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                for place in places:
                    nursery.start_soon(attempt, place, nursery.cancel_scope)
                if circuits:
                    nursery.start_soon(go_round, nursery.cancel_scope)
        if not reached:
            self._counters["dials_failed"] += 1
            raise PeerError(
                f"{node[-8:]} does not answer at "
                f"{', '.join([*(str(place) for place in places), *circuits])}: "
                f"{'; '.join(failures) or 'no answer in time'}."
            )
        direct = [place for place in reached if place is not None]
        if direct:
            store = self._host.get_peerstore()
            store.clear_addrs(peer)  # what was known before may be where it used to live
            store.add_addrs(peer, direct, PEERSTORE_TTL_S)

    async def dial_direct(self, node: NodeId, addresses: tuple[str, ...]) -> None:
        """A connection past the relay that carries the present one.

        Raises:
            PeerError: nobody with that identity answered at an address that is no circuit.
        """
        await self._dial(node, tuple(text for text in addresses if CIRCUIT_MARK not in text))

    async def dial_back(self, node: NodeId, address: str) -> bool:
        """True if `node` proves its identity at `address`. Leaves no connection behind."""
        raw = None
        reached = False
        with trio.move_on_after(limits.DIAL_BACK_TIMEOUT_S):
            try:
                raw = await self._network.dialled_sockets.dial(parse_address(address))
                await self._network.upgrader.upgrade_security(raw, True, peer_of(node))
                reached = True
            except Exception as error:
                log.debug("dial back to %s: %r", address, error)
        if raw is not None:
            with trio.move_on_after(CLOSE_STEP_TIMEOUT_S) as scope, contextlib.suppress(Exception):
                scope.shield = True
                await raw.close()
        return reached

    async def retire_relayed(self, node: NodeId) -> None:
        """Close the relayed connections to a node that carry no request, if there is another."""
        if self.direct(node):
            for connection in self.live(peer_of(node)):
                if self.way(connection) is Way.RELAYED and not _asking(connection):
                    await self.close(connection)

    async def disconnect(self, node: NodeId) -> None:
        """Close every connection to `node`."""
        peer = peer_of(node)
        for connection in self._network.get_connections(peer):
            await self.close(connection)
        self._network.connections.pop(peer, None)

    async def close(self, connection: Any) -> None:
        """Close a connection even if its peer takes no bytes any more."""
        with trio.move_on_after(CLOSE_STEP_TIMEOUT_S) as scope:
            await connection.close()
        if scope.cancelled_caught:
            with trio.move_on_after(CLOSE_STEP_TIMEOUT_S), contextlib.suppress(Exception):
                connection.muxed_conn.event_shutting_down.set()
                await connection.muxed_conn.secured_conn.close()
                await connection._cleanup()
            self._network.remove_conn(connection)

    async def bury(self, connections: Iterable[Any], timeout_s: float) -> None:
        """Probe connections side by side and close those that do not answer."""

        async def probe(connection: Any) -> None:
            if connection in self._probed:
                return
            self._probed.add(connection)
            try:
                if not await self._answers(connection, timeout_s):
                    self._counters["connections_buried"] += 1
                    await self.close(connection)
            finally:
                self._probed.discard(connection)

        async with trio.open_nursery() as nursery:
            for connection in connections:
                nursery.start_soon(probe, connection)

    async def _answers(self, connection: Any, timeout_s: float) -> bool:
        """True if the peer at the other end of this very connection echoes a ping in time."""
        token = os.urandom(PING_SIZE_BYTES)
        stream = None
        with trio.move_on_after(timeout_s):
            try:
                stream = await streams.open_stream(connection, PING_PROTOCOL, token)
                await streams.wait_agreed(stream, PING_PROTOCOL)
                echoed = await streams.read_exactly(stream, PING_SIZE_BYTES)
                await stream.close()
                return echoed == token
            except Exception as error:
                log.debug("probe failed: %r", error)
        if stream is not None:
            await guards.reset_quietly(stream)
        return False

    def suspect(self, connections: Iterable[Any]) -> None:
        """Probe these in the background and close those that do not answer."""
        self._nursery.start_soon(self.bury, tuple(connections), SUSPECT_TIMEOUT_S)

    async def watch(self) -> None:
        """Ping every silent connection now and then: a half-open one never fails by itself."""
        while True:
            await trio.sleep(WATCH_INTERVAL_S)
            since_s = trio.current_time() - WATCH_INTERVAL_S
            silent = [c for c in self._network.get_connections() if heard_s(c) < since_s]
            await self.bury(silent, WATCH_TIMEOUT_S)


class _Notifee:
    """What the library tells about connections coming and going."""

    def __init__(self, connections: Connections) -> None:
        self._connections = connections

    async def connected(self, network: Any, connection: Any) -> None:
        """A second connection of a peer may mean that the first is a corpse."""
        await trio.lowlevel.checkpoint()
        known = network.get_connections(connection.muxed_conn.peer_id)
        if older := [other for other in known if other is not connection]:
            self._connections.suspect(older)

    async def disconnected(self, network: Any, connection: Any) -> None:
        """Wake whoever wants to reconnect."""
        await trio.lowlevel.checkpoint()
        self._connections.changed.set()
        self._connections.changed = trio.Event()

    async def _ignore(self, *_: Any) -> None:
        await trio.lowlevel.checkpoint()

    opened_stream = closed_stream = listen = listen_close = _ignore


def peer_of(node: NodeId) -> Any:
    """The library's name for a node.

    Raises:
        PeerError: the string is not a node id.
    """
    public_key_of(node)
    return ID.from_string(node)


def dialable(addresses: Iterable[str]) -> list[Any]:
    """The addresses among a peer's claims that a TCP dial makes sense for, at most so many."""
    places = []
    for text in list(addresses)[: limits.ADDRESSES_MAX]:
        with contextlib.suppress(UsageError):
            bare = text.split("/p2p/")[0]
            if len(text) <= limits.ADDRESS_CHARACTERS_MAX and CIRCUIT_MARK not in text:
                places.append(parse_address(bare))
    return places


def _asking(connection: Any) -> bool:
    """True while a request of ours or of theirs is under way; gossip's streams stay open."""
    spoken = [stream.get_protocol() for stream in connection.get_streams()]
    return any(protocol is None or protocol.startswith("/echo2/") for protocol in spoken)


def circuits_of(addresses: Iterable[str]) -> list[str]:
    """The addresses through relays among a peer's claims, at most a few."""
    found = [text for text in list(addresses)[: limits.ADDRESSES_MAX] if CIRCUIT_MARK in text]
    return [text for text in found if len(text) <= limits.ADDRESS_CHARACTERS_MAX][:CIRCUITS_TRIED]


def reason_of(error: BaseException) -> str:
    """The innermost cause, in one line: the library wraps several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, BaseExceptionGroup) and error.exceptions:
        return reason_of(error.exceptions[0])
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__
