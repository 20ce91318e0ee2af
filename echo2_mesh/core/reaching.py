"""The words of the reach machine: what it is told, and what it wants done.

Kept apart from `core.reach` so that the machine is read on its own. Values only.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from echo2_mesh.core.machine import Effect, Event, Woke
from echo2_mesh.wire.types import NodeId


class Way(Enum):
    """How a connection came about."""

    DIRECT = "direct"
    PUNCHED = "punched"
    RELAYED = "relayed"


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """One live connection. `ip` and `port` of the far end are empty where a relay is between."""

    node: NodeId
    way: Way
    dialled: bool
    """By this node."""
    ip: str = ""
    port: int = 0


class Looked(Event, frozen=True, kw_only=True):
    """All connections there are now.

    `public`: members that say of themselves that they are; `own_ips`: where this node listens, or
    is announced.
    """

    links: tuple[Link, ...]
    public: frozenset[NodeId] = frozenset()
    own_ips: tuple[str, ...] = ()


class Answered(Event, frozen=True, kw_only=True):
    """`node` sees this one at `observed` (a multiaddress, empty through a relay) and reached it.

    `kept`: whether the port it sees is the socket's own; None where that is not known.
    `foreign`: the address it sees is none of this host's: a NAT is between.
    `tried`: it did dial.
    """

    node: NodeId
    observed: str
    reached: tuple[str, ...] = ()
    kept: bool | None = None
    foreign: bool = False
    tried: bool = True


class Unanswered(Event, frozen=True, kw_only=True):
    node: NodeId


class Reserved(Event, frozen=True, kw_only=True):
    relay: NodeId
    lasts_s: float


class NotReserved(Event, frozen=True, kw_only=True):
    relay: NodeId
    why: str


class PunchEnded(Event, frozen=True, kw_only=True):
    """`why` it failed; empty where it did not."""

    node: NodeId
    why: str = ""


ReachEvent = Looked | Answered | Unanswered | Reserved | NotReserved | PunchEnded | Woke


class AskBack(Effect, frozen=True, kw_only=True):
    """Ask `node` to dial back; answer with `Answered` or `Unanswered`."""

    node: NodeId


class Reserve(Effect, frozen=True, kw_only=True):
    """Have a place at `relay`; answer with `Reserved` or `NotReserved`."""

    relay: NodeId


class Punch(Effect, frozen=True, kw_only=True):
    """Get past the relay to `node`; answer with `PunchEnded`."""

    node: NodeId


class Retire(Effect, frozen=True, kw_only=True):
    """Close the relayed connections to `node`: there are better ones."""

    node: NodeId


ReachEffect = AskBack | Reserve | Punch | Retire
