"""What the mesh needs of a network: a few verbs, two implementations.

`net.libp2p_carrier` is the real one (py-libp2p on trio); `net.simulated` is that of tests, on
trio's virtual clock. Everything above this protocol, the daemons included, runs unchanged on
either. A carrier moves bytes between authenticated peers; it knows no message and no run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Protocol

from echo2_mesh.core.reaching import Link
from echo2_mesh.wire.types import NodeId

ServeExchange = Callable[[NodeId, bytes], Awaitable[bytes]]
"""(authenticated peer, request) -> reply. Whatever it raises ends that stream, never the host."""
HearGossip = Callable[[bytes], Awaitable[None]]
"""One gossiped message, from anybody, in any order, perhaps more than once."""


class Outreach(Protocol):
    """What a real network can do about how others come to this node. Every method is bounded."""

    listening: bool

    def links(self) -> tuple[Link, ...]:
        """Every live connection."""
        ...

    def announce(self, reached: tuple[str, ...], relays: dict[NodeId, tuple[str, ...]]) -> None:
        """What `Carrier.addresses` shall say besides the listening addresses.

        Args:
            reached: where others could dial this node.
            relays: those that hold a place for it, and where they are.
        """
        ...

    def port_towards(self, ip: str, port: int) -> int | None:
        """The local port of the socket that was dialled to that place, if it is remembered."""
        ...

    async def dial_back(self, node: NodeId, address: str) -> bool:
        """True if `node` proves its identity at `address`; leaves no connection behind."""
        ...

    async def dial_direct(self, node: NodeId, addresses: tuple[str, ...]) -> None:
        """Have a connection to `node` past the relay that carries the present one.

        Raises:
            PeerError: it does not answer at any of the addresses that are no circuits.
        """
        ...

    async def reserve(self, relay: NodeId) -> float:
        """Have a place at `relay`, to which there is a direct connection; seconds it lasts.

        Raises:
            PeerError: it refuses or does not answer.
        """
        ...

    async def punch(self, node: NodeId) -> None:
        """Have a connection past the relay by dialling from both sides at once.

        Raises:
            PeerError: there is none in the end; says why.
        """
        ...

    async def retire(self, node: NodeId) -> None:
        """Close the idle relayed connections to `node`, if there is another one."""
        ...

    def serve(self, on: bool) -> None:
        """Carry connections for others from now on, or make no new promises."""
        ...

    def attend(self, observed: Callable[[], str | None], welcome: Callable[[NodeId], bool]) -> None:
        """Where neighbours see this node, and for whom it carries connections."""
        ...


class Carrier(Protocol):
    """Bytes between authenticated peers. Every method is bounded in time."""

    node: NodeId
    counters: Counter[str]
    """What it refused and what broke, by name; the mesh counts in it too."""

    @property
    def outreach(self) -> Outreach | None:
        """What it can do about reach; None in a network where nobody needs to."""
        ...

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
