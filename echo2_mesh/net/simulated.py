"""A network that exists only in memory: the carrier of tests and simulations.

Latency, bandwidth, gossip that loses, repeats and reorders, partitions, crashes, peers that lie
or stall: all from one seeded generator and trio's clock, so that with `autojump_clock` an hour
passes in a second and a seed repeats. Everything above `net.carrier` runs on it unchanged.
Used through `echo2_mesh.testing`, by tests alone.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import trio

from echo2_mesh import limits
from echo2_mesh.errors import PeerError
from echo2_mesh.identity import Identity
from echo2_mesh.net.carrier import HearGossip, Outreach, ServeExchange
from echo2_mesh.wire.types import NodeId

GOSSIP_REPEAT_SHARE = 0.05
SHORT_MESSAGE_BYTES_MAX = 4 * limits.KIB
"""Up to this size a message slips between the pieces of a long one, as streams share a line."""
Spoil = Callable[[NodeId, str, bytes], bytes]
"""(asker, protocol, honest reply) -> what is sent instead."""


class SimNetwork:
    """All the wires between the carriers of one simulation.

    Args:
        rng: the only source of chance.
        nursery: where gossip in flight lives.
        latency_s: one way, between any two nodes; each message varies by half of it.
        bandwidth_bytes_per_s: up and down, of every node; None is infinite.
        loss: share of gossip deliveries lost, and of exchanges that break off.
    """

    def __init__(
        self,
        rng: Random,
        nursery: trio.Nursery,
        *,
        latency_s: float = 0.02,
        bandwidth_bytes_per_s: float | None = None,
        loss: float = 0.0,
    ) -> None:
        self.rng = rng
        self.latency_s = latency_s
        self.bandwidth_bytes_per_s = bandwidth_bytes_per_s
        self.loss = loss
        self.counters: Counter[str] = Counter()
        self.nodes: dict[NodeId, SimCarrier] = {}
        self.nursery = nursery
        self._islands: dict[NodeId, int] = {}
        self._ports = 0

    def carrier(self, identity: Identity, *, dialable: bool = True) -> SimCarrier:
        """A fresh place on the network; one with the same identity replaces its crashed self."""
        old = self.nodes.get(identity.node)
        assert old is None or not old.alive, "this identity is on the network already"
        self._ports += 1
        carrier = SimCarrier(self, identity.node, self._ports if dialable else None)
        self.nodes[identity.node] = carrier
        return carrier

    def crash(self, node: NodeId) -> None:
        """`node` is gone in mid-word; its peers see their connections close."""
        carrier = self.nodes[node]
        carrier.alive = False
        for scope in tuple(carrier.scopes):
            scope.cancel()
        for peer in sorted(carrier.links):
            self.unlink(node, peer)

    def partition(self, *islands: frozenset[NodeId]) -> None:
        """Only nodes of one island reach each other; nodes in none form another. () heals."""
        self._islands = {node: i for i, island in enumerate(islands) for node in island}
        for carrier in self.nodes.values():
            for peer in sorted(carrier.links):
                if not self.reachable(carrier.node, peer):
                    self.unlink(carrier.node, peer)

    def reachable(self, source: NodeId, target: NodeId) -> bool:
        """Both alive, and on one island."""
        ends = (self.nodes.get(source), self.nodes.get(target))
        return all(end is not None and end.alive for end in ends) and (
            self._islands.get(source, -1) == self._islands.get(target, -1)
        )

    def link(self, source: NodeId, target: NodeId) -> None:
        """Connect two nodes."""
        self.nodes[source].links.add(target)
        self.nodes[target].links.add(source)

    def unlink(self, source: NodeId, target: NodeId) -> None:
        """Close the connection of two nodes; exchanges over it break off."""
        for node, peer in ((source, target), (target, source)):
            carrier = self.nodes[node]
            carrier.links.discard(peer)
            for scope in tuple(carrier.exchanges.get(peer, ())):
                scope.cancel()

    def delay_s(self) -> float:
        """One way, this time."""
        return self.latency_s * self.rng.uniform(0.5, 1.5)

    async def carry(self, source: NodeId, target: NodeId, size_bytes: int) -> None:
        """Wait as long as `size_bytes` take from `source` to `target`, behind what went before."""
        uplink, downlink = self.nodes[source], self.nodes[target]
        uplink.sent_bytes += size_bytes
        done_s = trio.current_time()
        if self.bandwidth_bytes_per_s is not None and size_bytes > SHORT_MESSAGE_BYTES_MAX:
            wire_s = size_bytes / self.bandwidth_bytes_per_s
            sent_s = uplink.uplink_free_s = max(done_s, uplink.uplink_free_s) + wire_s
            # The downlink is taken when the bytes come, not when they are queued; the first of
            # them came in while the last still waited to leave.
            await trio.sleep_until(sent_s)
            first_s = max(sent_s - wire_s, downlink.downlink_free_s)
            done_s = downlink.downlink_free_s = max(sent_s, first_s + wire_s)
        await trio.sleep_until(done_s + self.delay_s())


class SimCarrier:
    """One node's end of a `SimNetwork`; a `net.carrier.Carrier`."""

    def __init__(self, network: SimNetwork, node: NodeId, port: int | None) -> None:
        self.node = node
        self.counters: Counter[str] = Counter()
        self.outreach: Outreach | None = None
        self.alive = True
        self.links: set[NodeId] = set()
        self.exchanges: dict[NodeId, dict[trio.CancelScope, None]] = {}
        self.scopes: dict[trio.CancelScope, None] = {}
        self.uplink_free_s = 0.0
        self.downlink_free_s = 0.0
        self.sent_bytes = 0
        self.port = port
        self.stalls: frozenset[str] = frozenset()
        """Protocols on which this node takes questions and never answers."""
        self.mute = False
        """Its gossip reaches nobody."""
        self.spoil: Spoil | None = None
        """Makes this node lie."""
        self.provided: set[str] = set()
        self._network = network
        self._handlers: dict[str, tuple[ServeExchange, int]] = {}
        self._topics: dict[str, HearGossip] = {}

    def addresses(self) -> tuple[str, ...]:
        return () if self.port is None else (f"/ip4/10.0.0.1/tcp/{self.port}",)

    def connected(self) -> frozenset[NodeId]:
        return frozenset(self.links)

    async def connect(self, node: NodeId, addresses: tuple[str, ...]) -> None:
        await trio.sleep(2 * self._network.delay_s())
        if node in self.links:
            return
        target = self._network.nodes.get(node)
        if (
            target is None
            or not set(target.addresses()) & set(addresses)
            or not self._network.reachable(self.node, node)
        ):
            raise PeerError(f"{node[-8:]} did not answer at {addresses}.")
        self._network.link(self.node, node)

    async def disconnect(self, node: NodeId) -> None:
        await trio.lowlevel.checkpoint()
        if node in self.links:
            self._network.unlink(self.node, node)

    async def exchange(
        self, node: NodeId, protocol: str, request: bytes, *, reply_bytes_max: int, timeout_s: float
    ) -> bytes:
        if node not in self.links:
            raise PeerError(f"{node[-8:]} is not connected.")
        target = self._network.nodes[node]
        reply: bytes | None = None
        late = False
        with trio.CancelScope() as scope:
            mine = self.exchanges.setdefault(node, {})
            mine[scope] = None
            try:
                with trio.move_on_after(timeout_s) as clock:
                    await self._network.carry(self.node, node, len(request))
                    reply = await target.take(self.node, protocol, request)
                    if reply is not None:
                        await self._network.carry(node, self.node, len(reply))
                late = clock.cancelled_caught
            finally:
                mine.pop(scope, None)
        if late:
            raise PeerError(f"{node[-8:]} did not answer on {protocol} in {timeout_s:g} s.")
        if scope.cancelled_caught or reply is None:
            raise PeerError(f"The connection to {node[-8:]} broke.")
        if len(reply) > reply_bytes_max:
            raise PeerError(f"A reply of {len(reply)} bytes; {reply_bytes_max} allowed.")
        return reply

    async def take(self, peer: NodeId, protocol: str, request: bytes) -> bytes | None:
        """Serve a request that arrived; None if the stream ends without a reply."""
        handler, request_bytes_max = self._handlers.get(protocol, (None, 0))
        broken = self._network.rng.random() < self._network.loss
        if handler is None or len(request) > request_bytes_max or broken or not self.alive:
            return None
        if protocol in self.stalls:
            await trio.sleep_forever()
        reply: bytes | None = None
        with trio.CancelScope() as scope:
            self.scopes[scope] = None
            try:
                reply = await handler(peer, request)
            except Exception:  # as a stream handler of a real carrier: the stream ends, no more
                self._network.counters["handler_failures"] += 1
            finally:
                self.scopes.pop(scope, None)
        if reply is not None and self.spoil is not None:
            reply = self.spoil(peer, protocol, reply)
        return reply

    def serve(self, protocol: str, handler: ServeExchange, *, request_bytes_max: int) -> None:
        self._handlers[protocol] = (handler, request_bytes_max)

    async def publish(self, topic: str, data: bytes) -> None:
        """Flood along connections between subscribers, as a gossip mesh ends up doing."""
        await trio.lowlevel.checkpoint()
        network = self._network
        seen = {self.node}
        edge = deque((peer, 1) for peer in sorted(self.links) if not self.mute)
        while edge:
            node, hops = edge.popleft()
            carrier = network.nodes[node]
            hear = carrier._topics.get(topic)
            if node in seen or hear is None or not carrier.alive:
                continue
            seen.add(node)
            copies = 2 if network.rng.random() < GOSSIP_REPEAT_SHARE else 1
            for _ in range(copies):
                if network.rng.random() >= network.loss:
                    network.nursery.start_soon(self._deliver, carrier, hear, data, hops)
            edge.extend((peer, hops + 1) for peer in sorted(carrier.links))

    async def _deliver(self, carrier: SimCarrier, hear: HearGossip, data: bytes, hops: int) -> None:
        with trio.CancelScope() as scope:
            carrier.scopes[scope] = None
            try:
                await trio.sleep(sum(self._network.delay_s() for _ in range(hops)))
                if carrier.alive:
                    await hear(data)
            finally:
                carrier.scopes.pop(scope, None)

    async def subscribe(self, topic: str, hear: HearGossip) -> None:
        await trio.lowlevel.checkpoint()
        self._topics[topic] = hear

    async def provide(self, key: str) -> None:
        await trio.sleep(self._network.delay_s())
        if self.links:
            self.provided.add(key)

    async def find(self, key: str) -> tuple[tuple[NodeId, tuple[str, ...]], ...]:
        """As a DHT: one live connection is enough to find everybody who provides `key`."""
        await trio.sleep(2 * self._network.delay_s())
        if not self.links:
            return ()
        return tuple(
            (carrier.node, carrier.addresses())
            for carrier in self._network.nodes.values()
            if key in carrier.provided
            and carrier.node != self.node
            and self._network.reachable(self.node, carrier.node)
        )


@asynccontextmanager
async def open_network(
    rng: Random,
    *,
    latency_s: float = 0.02,
    bandwidth_bytes_per_s: float | None = None,
    loss: float = 0.0,
) -> AsyncIterator[SimNetwork]:
    """A network for the length of the block."""
    _schedule_repeatably(rng)
    async with trio.open_nursery() as nursery:
        yield SimNetwork(
            rng,
            nursery,
            latency_s=latency_s,
            bandwidth_bytes_per_s=bandwidth_bytes_per_s,
            loss=loss,
        )
        nursery.cancel_scope.cancel()


def _schedule_repeatably(rng: Random) -> None:
    """Make trio choose the order of runnable tasks by `rng` alone, as its own test tools do."""
    scheduler: Any = trio._core._run
    scheduler._ALLOW_DETERMINISTIC_SCHEDULING = True
    scheduler._r.seed(rng.random())
