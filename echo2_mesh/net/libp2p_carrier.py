"""The real carrier: bytes between authenticated peers over py-libp2p (TCP, Noise, yamux).

`open_libp2p_carrier` is the only door; `echo2_mesh.mesh` calls it. It puts the parts of `net`
together and keeps a node joined; each verb is explained in `net.carrier.Carrier`.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Iterable
from typing import Any

import trio

from echo2_mesh import limits
from echo2_mesh.errors import LocalError, PeerError, UsageError
from echo2_mesh.identity import Identity, public_key_of
from echo2_mesh.net.carrier import HearGossip, Outreach, ServeExchange
from echo2_mesh.wire.types import NodeId

try:
    from libp2p.tools.anyio_service import background_trio_service

    from echo2_mesh.net import guards
    from echo2_mesh.net.connections import Connections, peer_of
    from echo2_mesh.net.discovery import Discovery, Found, open_discovery
    from echo2_mesh.net.exchanges import Exchanges
    from echo2_mesh.net.gossip import Gossip, open_gossip
    from echo2_mesh.net.host import advertised, close_host, listen_on, make_host, parse_address
    from echo2_mesh.net.outreach import Libp2pOutreach
except ImportError as error:
    raise LocalError(
        f"py-libp2p cannot be loaded: {error}.",
        "libp2p 0.8.1 works with fastecdsa 3.0.1 or newer; install both the way the README says "
        "(`uv pip install -e .`, which carries the override).",
    ) from error

REJOIN_INTERVAL_MIN_S = 1.0


class Libp2pCarrier:
    """See `net.carrier.Carrier` for what each verb promises."""

    def __init__(
        self,
        host: Any,
        connections: Connections,
        gossip: Gossip,
        discovery: Discovery,
        nursery: trio.Nursery,
        *,
        announce: tuple[str, ...],
        listening: bool,
        relay: bool,
        counters: Counter[str],
    ) -> None:
        self.node = NodeId(str(host.get_id()))
        self.counters = counters
        self._host = host
        self._connections = connections
        self._exchanges = Exchanges(host, connections, counters)
        self._gossip = gossip
        self._discovery = discovery
        self._nursery = nursery
        self._announce = announce
        self._reached = Libp2pOutreach(
            host,
            connections,
            counters,
            listening=listening,
            addresses=self._own_addresses,
            relay=relay,
        )

    @property
    def outreach(self) -> Outreach:
        """What this node can do about how others come to it."""
        return self._reached

    def addresses(self) -> tuple[str, ...]:
        """Where this node can be dialled, without /p2p; circuits through relays included."""
        return self._reached.addresses()

    def _own_addresses(self) -> tuple[str, ...]:
        return advertised(self._host.get_transport_addrs(), self._announce)

    def connected(self) -> frozenset[NodeId]:
        """Peers with a live connection in either direction."""
        return self._connections.connected()

    async def connect(self, node: NodeId, addresses: tuple[str, ...]) -> None:
        """Have a connection that answers; dial if there is none."""
        await self._connections.connect(node, addresses)

    async def disconnect(self, node: NodeId) -> None:
        """Close every connection to `node`."""
        await self._connections.disconnect(node)

    async def exchange(
        self, node: NodeId, protocol: str, request: bytes, *, reply_bytes_max: int, timeout_s: float
    ) -> bytes:
        """One request and its reply over a connection opened by either side."""
        return await self._exchanges.exchange(
            node, protocol, request, reply_bytes_max=reply_bytes_max, timeout_s=timeout_s
        )

    def serve(self, protocol: str, handler: ServeExchange, *, request_bytes_max: int) -> None:
        """Answer `protocol`; a request above `request_bytes_max` is refused unread."""
        self._exchanges.serve(protocol, handler, request_bytes_max=request_bytes_max)

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

    async def keep_joined(self, bootstrap: tuple[tuple[NodeId, tuple[str, ...]], ...]) -> None:
        """Hold a connection to the bootstrap nodes and keep the DHT told; never ends."""
        pause_s = REJOIN_INTERVAL_MIN_S
        while True:
            changed = self._connections.changed
            missing = False
            for node, addresses in bootstrap:
                if node != self.node and not self._connections.live(peer_of(node)):
                    try:
                        await self.connect(node, addresses)
                    except PeerError:
                        missing = True
            await self._discovery.provide_again()
            if missing:
                await trio.sleep(pause_s)
                pause_s = min(2 * pause_s, limits.DISCOVERY_INTERVAL_S)
            else:
                pause_s = REJOIN_INTERVAL_MIN_S
                with trio.move_on_after(limits.DISCOVERY_INTERVAL_S):
                    await changed.wait()


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


@contextlib.asynccontextmanager
async def open_libp2p_carrier(
    identity: Identity,
    *,
    listen: tuple[str, ...] = (),
    announce: tuple[str, ...] = (),
    bootstrap: tuple[str, ...] = (),
    mdns: bool = False,
    topics: tuple[str, ...] = (),
    relay: bool = True,
) -> AsyncIterator[Libp2pCarrier]:
    """A carrier for the length of the block.

    Args:
        listen: multiaddresses to listen on; none makes a node that only dials.
        announce: what to advertise instead of the interfaces' addresses.
        bootstrap: /.../p2p/<id> of nodes to stay connected to.
        mdns: find and be found on the local network, among nodes with the same first topic.
        topics: the gossip topics peers may subscribe to; all others are ignored.
        relay: carry connections for others, once it is known that they can dial this node.

    Resources:
        Sockets, tasks and (with `mdns`) threads, gone `limits.CLOSE_TIMEOUT_S` after the block.

    Errors:
        LocalError, UsageError: an address cannot be had, or cannot be read.
    """
    counters: Counter[str] = Counter()
    homes = split_bootstrap(bootstrap)
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
                    connections = Connections(host, nursery, counters)
                    carrier = Libp2pCarrier(
                        host,
                        connections,
                        gossip,
                        discovery,
                        nursery,
                        announce=announce,
                        listening=bool(listen),
                        relay=relay,
                        counters=counters,
                    )
                    nursery.start_soon(carrier.keep_joined, homes)
                    nursery.start_soon(connections.watch)
                    if mdns:
                        group = min(topics, default="echo2")
                        nursery.start_soon(discovery.stay_local, carrier.addresses(), group)
                    try:
                        yield carrier
                    except Exception as error:
                        failure = error
                    finally:
                        await close_host(host)
                        nursery.cancel_scope.cancel()
            except LocalError as error:
                failure = error
    finally:
        await close_host(host)
    if failure is not None:
        raise failure
