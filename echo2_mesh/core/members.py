"""The words of the membership machine: what it is told, what it wants done, what it knows.

Kept apart from `core.membership` so that the machine is read on its own. Values only.
"""

from __future__ import annotations

from enum import Enum

import msgspec

from echo2_mesh.core.machine import Arm, Effect, Event, Woke
from echo2_mesh.wire.messages import Heartbeat
from echo2_mesh.wire.types import NodeId


class Standing(str, Enum):
    UP = "up"
    SUSPECT = "suspect"
    GONE = "gone"


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One member as seen from here."""

    node: NodeId
    heartbeat: Heartbeat
    standing: Standing
    connected: bool
    seen_s_ago: float


class HeartbeatHeard(Event, frozen=True, kw_only=True):
    """A verified heartbeat of `node`; `raw` is its envelope, kept to pass on."""

    node: NodeId
    heartbeat: Heartbeat
    raw: bytes = b""


class GoodbyeHeard(Event, frozen=True, kw_only=True):
    node: NodeId
    incarnation_unix_ms: int


class AddressesKnown(Event, frozen=True, kw_only=True):
    """Somebody (a ticket, the DHT, our own memory) says where `node` may be dialled."""

    node: NodeId
    addresses: tuple[str, ...]


class Connected(Event, frozen=True, kw_only=True):
    node: NodeId


class Disconnected(Event, frozen=True, kw_only=True):
    node: NodeId


class DialFailed(Event, frozen=True, kw_only=True):
    node: NodeId


MembershipEvent = (
    HeartbeatHeard | GoodbyeHeard | AddressesKnown | Connected | Disconnected | DialFailed | Woke
)


class Dial(Effect, frozen=True, kw_only=True):
    """Connect to `node`; answer with `Connected` or `DialFailed`."""

    node: NodeId
    addresses: tuple[str, ...]


class Greet(Effect, frozen=True, kw_only=True):
    """A new connection: ask `node` what we have missed."""

    node: NodeId


class Changed(Effect, frozen=True, kw_only=True):
    """`node` has a new standing."""

    node: NodeId
    standing: Standing


class Forget(Effect, frozen=True, kw_only=True):
    node: NodeId


MembershipEffect = Dial | Greet | Changed | Forget | Arm
