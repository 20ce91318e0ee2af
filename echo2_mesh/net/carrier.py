"""What the mesh needs of a network: a few verbs, two implementations.

`net.libp2p_carrier` is the real one (py-libp2p on trio); `net.simulated` is that of tests, on
trio's virtual clock. Everything above this protocol, the daemons included, runs unchanged on
either. A carrier moves bytes between authenticated peers; it knows no message and no run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

from echo2_mesh.wire.types import NodeId

ServeExchange = Callable[[NodeId, bytes], Awaitable[bytes]]
"""(authenticated peer, request) -> reply. Whatever it raises ends that stream, never the host."""
HearGossip = Callable[[bytes], Awaitable[None]]
"""One gossiped message, from anybody, in any order, perhaps more than once."""


class Carrier(Protocol):
    """Bytes between authenticated peers. Every method is bounded in time."""

    node: NodeId
    counters: Counter[str]
    """What it refused and what broke, by name; the mesh counts in it too."""

    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses (without /p2p) where this node can be dialled; empty if it cannot."""
        ...

    def connected(self) -> frozenset[NodeId]:
        """Peers with a live connection in either direction."""
        ...

    async def connect(self, node: NodeId, addresses: tuple[str, ...]) -> None:
        """Have a connection to `node`, dialling if there is none.

        Raises:
            PeerError: nobody with that identity answered at any address in time.
        """
        ...

    async def disconnect(self, node: NodeId) -> None:
        """Close every connection to `node`; no error if there is none."""
        ...

    async def exchange(
        self, node: NodeId, protocol: str, request: bytes, *, reply_bytes_max: int, timeout_s: float
    ) -> bytes:
        """Send one request over a connection opened by either side and wait for the reply.

        Raises:
            PeerError: no connection, the peer does not speak `protocol`, the reply is larger than
                `reply_bytes_max`, the stream broke, or `timeout_s` passed.
        """
        ...

    def serve(self, protocol: str, handler: ServeExchange, *, request_bytes_max: int) -> None:
        """Answer `protocol`; a request above `request_bytes_max` is refused unread."""
        ...

    async def publish(self, topic: str, data: bytes) -> None:
        """Gossip `data`; returning promises nothing."""
        ...

    async def subscribe(self, topic: str, hear: HearGossip) -> None:
        """Call `hear` for each message on `topic` from now on, own messages excluded."""
        ...

    async def provide(self, key: str) -> None:
        """Say in the DHT that this node can be found under `key`. Errors are swallowed."""
        ...

    async def find(self, key: str) -> tuple[tuple[NodeId, tuple[str, ...]], ...]:
        """Nodes found under `key` (DHT, and the local network), with their addresses."""
        ...
