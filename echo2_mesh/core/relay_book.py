"""What a relay has promised: places, circuits and bytes, so that no stranger takes them all.

Decides who may reserve and who may be connected; moves no byte. `net.relays` asks it before it
does anything for a peer, and tells it when a circuit ends.
"""

from __future__ import annotations

from collections import Counter
from enum import Enum

import msgspec

from echo2_mesh import limits
from echo2_mesh.wire.types import NodeId


class RelayLimits(msgspec.Struct, frozen=True, kw_only=True):
    """What one relay gives at most."""

    reservations: int = limits.RELAY_RESERVATIONS_MAX
    reservations_per_ip: int = limits.RELAY_RESERVATIONS_PER_IP_MAX
    reservation_s: float = limits.RELAY_RESERVATION_S
    circuits: int = limits.RELAY_CIRCUITS_MAX
    circuits_per_node: int = limits.RELAY_CIRCUITS_PER_NODE_MAX
    circuit_bytes: int = limits.RELAY_CIRCUIT_BYTES_MAX
    circuit_s: float = limits.RELAY_CIRCUIT_S_MAX
    bytes_per_s: float = limits.RELAY_BYTES_PER_S_MAX


class Denial(Enum):
    """Why a relay refuses."""

    FULL = "full"
    NO_RESERVATION = "no reservation"


class RelayBook:
    """Reservations by node, circuits by their two ends. Expired places are free at once."""

    def __init__(self, given: RelayLimits) -> None:
        self.limits = given
        self._expires_s: dict[NodeId, float] = {}
        self._ips: dict[NodeId, str] = {}
        self._circuits: Counter[NodeId] = Counter()
        self._open = 0
        self._free_s = 0.0

    @property
    def circuits(self) -> int:
        """Circuits open now."""
        return self._open

    def reservations(self, now_s: float) -> int:
        """Places taken now."""
        self._expire(now_s)
        return len(self._expires_s)

    def reserve(self, node: NodeId, ip: str, now_s: float) -> Denial | None:
        """Give `node` a place until `reservation_s` from now, or prolong the one it has."""
        self._expire(now_s)
        if node not in self._expires_s:
            here = sum(other == ip for other in self._ips.values())
            full = len(self._expires_s) >= self.limits.reservations
            if full or here >= self.limits.reservations_per_ip:
                return Denial.FULL
        self._expires_s[node] = now_s + self.limits.reservation_s
        self._ips[node] = ip
        return None

    def leave(self, node: NodeId) -> None:
        """`node` is gone, and its place is free; no error if it had none."""
        self._expires_s.pop(node, None)
        self._ips.pop(node, None)

    def holders(self) -> frozenset[NodeId]:
        """Who has a place."""
        return frozenset(self._expires_s)

    def open(self, source: NodeId, target: NodeId, now_s: float) -> Denial | None:
        """Count a circuit from `source` to `target`, which must have a place here."""
        self._expire(now_s)
        if target not in self._expires_s:
            return Denial.NO_RESERVATION
        most = self.limits.circuits_per_node
        if (
            self._open >= self.limits.circuits
            or self._circuits[source] >= most
            or self._circuits[target] >= most
        ):
            return Denial.FULL
        self._open += 1
        self._circuits[source] += 1
        self._circuits[target] += 1
        return None

    def close(self, source: NodeId, target: NodeId) -> None:
        """A counted circuit has ended."""
        self._open -= 1
        for node in (source, target):
            self._circuits[node] -= 1
            if self._circuits[node] <= 0:
                del self._circuits[node]

    def delay_s(self, size_bytes: int, now_s: float) -> float:
        """Seconds to wait before passing on `size_bytes`, so that the rate is kept."""
        start_s = max(self._free_s, now_s)
        self._free_s = start_s + size_bytes / self.limits.bytes_per_s
        return start_s - now_s

    def _expire(self, now_s: float) -> None:
        for node in [node for node, at_s in self._expires_s.items() if at_s <= now_s]:
            self.leave(node)
