"""The real carrier: bytes between authenticated peers over py-libp2p (TCP, Noise, yamux).

`open_libp2p_carrier` is the only door; `echo2_mesh.mesh` calls it. It decides which connection a
request takes and when one is dead; it knows no message and no run. Frames and refusals are in
`net.streams`, the guards in `net.guards`, the options in `net.host`.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any

import trio

from echo2_mesh import limits
from echo2_mesh.errors import Echo2Error, LocalError, PeerError, UsageError
from echo2_mesh.identity import Identity, public_key_of
from echo2_mesh.net.carrier import HearGossip, ServeExchange
from echo2_mesh.net.host import advertised, listen_on, make_host, parse_address
from echo2_mesh.wire.types import NodeId

from libp2p.custom_types import TProtocol  # noqa: I001  after net.host, which explains a failure
from libp2p.peer.id import ID
from libp2p.tools.anyio_service import background_trio_service

from echo2_mesh.net import guards, streams
from echo2_mesh.net.discovery import Discovery, Found, open_discovery
from echo2_mesh.net.gossip import Gossip, open_gossip

log = logging.getLogger("echo2.net")

PING_PROTOCOL = "/ipfs/ping/1.0.0"
PING_SIZE_BYTES = 32
PROBE_TIMEOUT_S = 2.0
"""A connection that does not answer a ping for this long when we need it is dead."""
WATCH_INTERVAL_S = 15.0
WATCH_TIMEOUT_S = 5.0
REQUEST_READ_TIMEOUT_S = limits.ASK_TIMEOUT_S
SERVE_TIMEOUT_S = limits.BLOB_TIMEOUT_S
FIRST_WRITE_BYTES_MAX = 32 * limits.KIB
"""Up to this size the request rides with the protocol proposal, in one yamux frame."""
DIALS_AT_ONCE_MAX = 4
PEERSTORE_TTL_S = 600
REJOIN_INTERVAL_MIN_S = 1.0


class Libp2pCarrier:
    """See `net.carrier.Carrier` for what each verb promises."""

    def __init__(
        self,
        host: Any,
        gossip: Gossip,
        discovery: Discovery,
        nursery: trio.Nursery,
        *,
        announce: tuple[str, ...],
        counters: Counter[str],
    ) -> None:
        self.node = NodeId(str(host.get_id()))
        self.counters = counters
        self._host = host
        self._network = host.get_network()
        self._gossip = gossip
        self._discovery = discovery
        self._nursery = nursery
        self._announce = announce
        self._dialling: dict[NodeId, trio.Event] = {}

    # --- who and where -------------------------------------------------------------------------

    def addresses(self) -> tuple[str, ...]:
        """Where this node can be dialled, without /p2p."""
        return advertised(self._host.get_transport_addrs(), self._announce)

    def connected(self) -> frozenset[NodeId]:
        """Peers with a live connection in either direction."""
        return frozenset(
            NodeId(str(peer)) for peer in list(self._network.connections) if self._live(peer)
        )

    def _live(self, peer: Any) -> list[Any]:
        """Connections to a peer that are not known to be dead, newest first."""
        return [
            connection
            for connection in reversed(self._network.get_connections(peer))
            if not connection.is_closed and not connection.muxed_conn.event_shutting_down.is_set()
        ]

    # --- connections ---------------------------------------------------------------------------

    async def connect(self, node: NodeId, addresses: tuple[str, ...]) -> None:
        """Have a connection that answers; dial if there is none.

        Raises:
            PeerError: nobody with that identity answered at any address in time.
        """
        if node == self.node:
            raise PeerError("A node does not connect to itself.")
        peer = peer_of(node)
        if (other := self._dialling.get(node)) is not None:
            with trio.move_on_after(limits.CONNECT_TIMEOUT_S):
                await other.wait()
            if self._live(peer):
                return
        done = self._dialling[node] = trio.Event()
        try:
            await self._bury(self._live(peer), PROBE_TIMEOUT_S)
            if not self._live(peer):
                await self._dial(node, addresses)
        finally:
            done.set()
            if self._dialling.get(node) is done:
                del self._dialling[node]

    async def _dial(self, node: NodeId, addresses: tuple[str, ...]) -> None:
        """Try all addresses side by side; the first that proves the identity wins."""
        peer = peer_of(node)
        places = dialable(addresses)
        if not places:
            raise PeerError(f"No address is known at which {node[-8:]} could be dialled.")
        limiter = trio.CapacityLimiter(DIALS_AT_ONCE_MAX)
        failures: list[str] = []
        reached: list[Any] = []

        async def attempt(place: Any, race: trio.CancelScope) -> None:
            async with limiter:
                try:
                    reached.append((place, await self._network.dial_addr(place, peer)))
                except Exception as error:
                    failures.append(f"{place}: {_reason(error)}")
                    return
            race.cancel()

        with trio.move_on_after(limits.CONNECT_TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                for place in places:
                    nursery.start_soon(attempt, place, nursery.cancel_scope)
        if not reached:
            self.counters["dials_failed"] += 1
            raise PeerError(
                f"{node[-8:]} does not answer at {', '.join(str(place) for place in places)}: "
                f"{'; '.join(failures) or 'no answer in time'}."
            )
        store = self._host.get_peerstore()
        store.clear_addrs(peer)  # what was known before may be where it used to live
        store.add_addrs(peer, [place for place, _ in reached], PEERSTORE_TTL_S)

    async def disconnect(self, node: NodeId) -> None:
        """Close every connection to `node`."""
        peer = peer_of(node)
        for connection in self._network.get_connections(peer):
            await self._close(connection)
        self._network.connections.pop(peer, None)

    async def _close(self, connection: Any) -> None:
        """Close a connection even if its peer takes no bytes any more."""
        with trio.move_on_after(1.0) as scope:
            await connection.close()
        if scope.cancelled_caught:
            with trio.move_on_after(1.0), contextlib.suppress(Exception):
                connection.muxed_conn.event_shutting_down.set()
                await connection.muxed_conn.secured_conn.close()
                await connection._cleanup()
            self._network.remove_conn(connection)

    async def _bury(self, connections: Iterable[Any], timeout_s: float) -> None:
        """Probe connections side by side and close those that do not answer."""

        async def probe(connection: Any) -> None:
            if not await self._answers(connection, timeout_s):
                self.counters["connections_buried"] += 1
                await self._close(connection)

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

    # --- exchanges -----------------------------------------------------------------------------

    async def exchange(
        self, node: NodeId, protocol: str, request: bytes, *, reply_bytes_max: int, timeout_s: float
    ) -> bytes:
        """One request and its reply over a connection opened by either side.

        Raises:
            PeerError: no connection, a refusal, a broken stream, or too slow.
        """
        connections = self._live(peer_of(node))
        if not connections:
            raise PeerError(f"There is no connection to {node[-8:]}.")
        try:
            with trio.fail_after(timeout_s):
                return await self._exchange(connections[0], protocol, request, reply_bytes_max)
        except PeerError as error:
            raise PeerError(f"{protocol} to {node[-8:]}: {error.what}", error.hint) from error
        except trio.TooSlowError as error:
            self.counters["exchanges_late"] += 1
            self._nursery.start_soon(self._bury, connections, PROBE_TIMEOUT_S)
            raise PeerError(f"{protocol} to {node[-8:]}: no reply in {timeout_s:g} s.") from error
        except streams.DeadConnection as error:
            await self._close(connections[0])
            raise PeerError(f"{protocol} to {node[-8:]}: it takes no bytes any more.") from error
        except Exception as error:  # the library's many names for a broken stream
            self.counters["exchanges_broken"] += 1
            raise PeerError(f"{protocol} to {node[-8:]}: {_reason(error)}.") from error

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
            if (
                serving.total() >= limits.INBOUND_ASKS_MAX
                or serving[node] >= limits.INBOUND_ASKS_PER_PEER_MAX
            ):
                self.counters["exchanges_refused_busy"] += 1
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
                self.counters["exchanges_refused_large"] += 1
                await self._refuse(stream, streams.Refusal.TOO_LARGE)
                return
            request = await streams.read_exactly(stream, length)
        try:
            with trio.fail_after(SERVE_TIMEOUT_S):
                reply = await handler(node, request)
        except Exception as error:
            self.counters["exchanges_failed"] += 1
            if not isinstance(error, Echo2Error):
                log.exception("a handler failed")
            await self._refuse(stream, streams.Refusal.FAILED)
            return
        with trio.fail_after(SERVE_TIMEOUT_S):
            await streams.write(stream, streams.frame(reply))
            await stream.close()
        self.counters["exchanges_served"] += 1

    async def _refuse(self, stream: Any, refusal: streams.Refusal) -> None:
        """Say why, then stop listening: the rest of the request is never read."""
        with trio.move_on_after(guards.RESET_TIMEOUT_S):
            await streams.send_refusal(stream, refusal)
            await stream.close()

    # --- gossip and discovery ------------------------------------------------------------------

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossip `data`; returning promises nothing."""
        await self._gossip.publish(topic, data)

    async def subscribe(self, topic: str, hear: HearGossip) -> None:
        """Call `hear` for each message on `topic` from now on, own messages excluded."""
        await self._gossip.subscribe(topic, hear, self._nursery)

    async def provide(self, key: str) -> None:
        """Say in the DHT that this node can be found under `key`."""
        await self._discovery.provide(key)

    async def find(self, key: str) -> Found:
        """Nodes found under `key` (DHT, and the local network), with their addresses."""
        return await self._discovery.find(key)

    # --- loops ---------------------------------------------------------------------------------

    async def keep_joined(self, bootstrap: tuple[tuple[NodeId, tuple[str, ...]], ...]) -> None:
        """Hold a connection to the bootstrap nodes and keep the DHT told; never ends."""
        pause_s = REJOIN_INTERVAL_MIN_S
        while True:
            for node, addresses in bootstrap:
                if node != self.node and not self._live(peer_of(node)):
                    with contextlib.suppress(PeerError):
                        await self.connect(node, addresses)
            await self._discovery.provide_again()
            alone = not self.connected()
            pause_s = min(2 * pause_s, limits.DISCOVERY_INTERVAL_S)
            await trio.sleep(pause_s if alone else limits.DISCOVERY_INTERVAL_S)
            if not alone:
                pause_s = REJOIN_INTERVAL_MIN_S

    async def watch_connections(self) -> None:
        """Ping every connection now and then: a half-open one never fails by itself."""
        while True:
            await trio.sleep(WATCH_INTERVAL_S)
            await self._bury(self._network.get_connections(), WATCH_TIMEOUT_S)


class _Arrivals:
    """Network notifee: when a peer comes back, probe the connections it left behind."""

    def __init__(self, carrier: Libp2pCarrier) -> None:
        self._carrier = carrier

    async def connected(self, network: Any, connection: Any) -> None:
        """A second connection may mean that the first is a corpse."""
        await trio.lowlevel.checkpoint()
        older = [c for c in network.get_connections(connection.muxed_conn.peer_id) if c is not connection]
        if older:
            self._carrier._nursery.start_soon(self._carrier._bury, older, PROBE_TIMEOUT_S)

    async def _ignore(self, *_: Any) -> None:
        await trio.lowlevel.checkpoint()

    disconnected = opened_stream = closed_stream = listen = listen_close = _ignore


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
            if len(bare) <= limits.ADDRESS_CHARACTERS_MAX and "p2p-circuit" not in bare:
                places.append(parse_address(bare))
    return places


def split_bootstrap(
    bootstrap: Iterable[str],
) -> tuple[tuple[NodeId, tuple[str, ...]], ...]:
    """Group /.../p2p/<id> multiaddresses by node.

    Raises:
        UsageError: one of them names no node or no TCP address.
    """
    grouped: dict[NodeId, tuple[str, ...]] = {}
    for text in bootstrap:
        address, separator, node = text.rpartition("/p2p/")
        if not separator:
            raise UsageError(
                f"The bootstrap address '{text[:200]}' names no node.",
                "Write it like /ip4/192.0.2.1/tcp/4001/p2p/<node id>.",
            )
        parse_address(address)
        try:
            public_key_of(NodeId(node))
        except PeerError as error:
            raise UsageError(f"The bootstrap address '{text[:200]}' is wrong: {error}") from error
        grouped[NodeId(node)] = (*grouped.get(NodeId(node), ()), address)
    return tuple(grouped.items())


def _reason(error: BaseException) -> str:
    """The innermost cause, in one line: the library wraps several times."""
    while error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, BaseExceptionGroup) and error.exceptions:
        return _reason(error.exceptions[0])
    return (str(error).splitlines() or [""])[0][:200] or type(error).__name__


@contextlib.asynccontextmanager
async def open_libp2p_carrier(
    identity: Identity,
    *,
    listen: tuple[str, ...] = (),
    announce: tuple[str, ...] = (),
    bootstrap: tuple[str, ...] = (),
    mdns: bool = False,
    topics: tuple[str, ...] = (),
) -> AsyncIterator[Libp2pCarrier]:
    """A carrier for the length of the block.

    Args:
        listen: multiaddresses to listen on; none makes a node that only dials.
        announce: what to advertise instead of the interfaces' addresses.
        bootstrap: /.../p2p/<id> of nodes to stay connected to.
        mdns: find and be found on the local network, among nodes with the same first topic.
        topics: the gossip topics peers may subscribe to; all others are ignored.

    Resources:
        Sockets, tasks and (with `mdns`) threads, all gone when the block ends, in at most
        `limits.CLOSE_TIMEOUT_S`; the port is free then.

    Errors:
        LocalError: an address cannot be listened on, or py-libp2p is not the one we know.
        UsageError: an address cannot be read.
    """
    counters: Counter[str] = Counter()
    homes = split_bootstrap(bootstrap)
    for text in announce:
        parse_address(text)
    host = make_host(identity, listen=listen, announce=announce, counters=counters)
    failure: Exception | None = None
    try:
        async with background_trio_service(host.get_network()):
            try:
                guards.guard_tasks(host.get_network(), counters)
                await listen_on(host, listen)
                async with (
                    open_gossip(host, topics, counters) as gossip,
                    open_discovery(host, dialable=bool(listen), counters=counters) as discovery,
                    trio.open_nursery() as nursery,
                ):
                    carrier = Libp2pCarrier(
                        host, gossip, discovery, nursery, announce=announce, counters=counters
                    )
                    host.get_network().register_notifee(_Arrivals(carrier))
                    nursery.start_soon(carrier.keep_joined, homes)
                    nursery.start_soon(carrier.watch_connections)
                    try:
                        if mdns:
                            group = min(topics, default="echo2")
                            async with discovery.local_network(carrier.addresses(), group):
                                yield carrier
                        else:
                            yield carrier
                    except Exception as error:
                        failure = error
                    finally:
                        await _close_host(host)
                        nursery.cancel_scope.cancel()
            except LocalError as error:
                failure = error
    finally:
        await _close_host(host)
    if failure is not None:
        raise failure


async def _close_host(host: Any) -> None:
    """Leaving the services is not enough: listeners are system tasks and keep the port."""
    with trio.move_on_after(limits.CLOSE_TIMEOUT_S, shield=True):
        await host.close()
