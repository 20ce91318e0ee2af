"""What a libp2p host can do about reach, put together: links, dial-backs, relays and punches.

`net.reach` uses it through `net.carrier.Outreach`; the carrier owns one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from echo2_mesh import limits
from echo2_mesh.core.reaching import Link
from echo2_mesh.core.relay_book import RelayLimits
from echo2_mesh.net.circuits import CIRCUIT, Circuits
from echo2_mesh.net.connections import Connections
from echo2_mesh.net.punching import Punching
from echo2_mesh.net.relays import Relays
from echo2_mesh.wire.types import NodeId

PLACES_OF_A_RELAY = 2


class Libp2pOutreach:
    """See `net.carrier.Outreach` for what each verb promises.

    Args:
        addresses: where this node listens or is announced, without /p2p.
        relay: False where its owner does not want it to carry for others.
    """

    def __init__(
        self,
        host: Any,
        connections: Connections,
        counters: Counter[str],
        *,
        listening: bool,
        addresses: Callable[[], tuple[str, ...]],
        relay: bool,
        given: RelayLimits | None = None,
    ) -> None:
        self.listening = listening
        self._network = host.get_network()
        self._connections = connections
        self._addresses = addresses
        self._relay = relay
        self._reached: tuple[str, ...] = ()
        self._places: dict[NodeId, tuple[str, ...]] = {}
        self._circuits = Circuits(host, connections, counters)
        self._punching = Punching(host, connections, counters)
        self.relays = Relays(host, connections, counters, addresses=self.addresses, given=given)
        connections.dial_circuit = self._circuits.dial

    def addresses(self) -> tuple[str, ...]:
        """Where this node is reached: its own addresses, those proved by others, circuits."""
        circuits = [
            f"{place}/p2p/{relay}{CIRCUIT}"
            for relay, places in self._places.items()
            for place in places[:PLACES_OF_A_RELAY]
        ]
        fit = [text for text in circuits if len(text) <= limits.ADDRESS_CHARACTERS_MAX]
        room = limits.ADDRESSES_MAX - len(fit)
        own = dict.fromkeys((*self._reached, *self._addresses()))
        return (*tuple(own)[:room], *fit)

    def announce(self, reached: tuple[str, ...], relays: dict[NodeId, tuple[str, ...]]) -> None:
        """Have `addresses` say that others reached `reached`, and are let through at `relays`."""
        self._reached = reached
        self._places = relays

    def links(self) -> tuple[Link, ...]:
        """Every live connection."""
        return self._connections.links()

    def port_towards(self, ip: str, port: int) -> int | None:
        """The local port of the socket dialled to that place."""
        port_here: int | None = self._network.dialled_sockets.port_towards(ip, port)
        return port_here

    async def dial_back(self, node: NodeId, address: str) -> bool:
        """True if `node` answers at `address`."""
        return await self._connections.dial_back(node, address)

    async def dial_direct(self, node: NodeId, addresses: tuple[str, ...]) -> None:
        """A connection past the relay that carries the present one."""
        await self._connections.dial_direct(node, addresses)

    async def reserve(self, relay: NodeId) -> float:
        """Have a place at `relay`; the seconds it lasts."""
        return await self._circuits.reserve(relay)

    async def punch(self, node: NodeId) -> None:
        """A connection past the relay, opened from both sides at once."""
        await self._punching.punch(node)

    async def retire(self, node: NodeId) -> None:
        """Close the relayed connections to `node`."""
        await self._connections.retire_relayed(node)

    def serve(self, on: bool) -> None:
        """Carry for others, or stop making new promises."""
        self.relays.serving = on and self._relay

    def attend(self, observed: Callable[[], str | None], welcome: Callable[[NodeId], bool]) -> None:
        """Where neighbours see this node, and whom it carries for."""
        self._punching.observed = observed
        self.relays.welcome = welcome
