"""How others come to this node, and what to do about it where they cannot.

Told twice a second which connections exist, it asks neighbours to dial back, keeps places at relays
while nobody can, and has relayed connections replaced by punched ones, a bounded number of times.
Decides only: `net.reach` asks, reserves and punches. What a node says of itself is what somebody
else has proved, not what its owner configured.
"""

from __future__ import annotations

import ipaddress
from random import Random
from typing import assert_never

import msgspec

from echo2_mesh import limits
from echo2_mesh.core.machine import Woke, backoff_s
from echo2_mesh.core.reaching import (
    Answered,
    AskBack,
    Link,
    Looked,
    NotReserved,
    Punch,
    PunchEnded,
    ReachEffect,
    ReachEvent,
    Reserve,
    Reserved,
    Retire,
    Unanswered,
    Way,
)
from echo2_mesh.wire.types import NodeId, Reach

PROOF_S = 1800.0
"""How long a successful dial, or a punched connection, is believed in."""
RECHECK_S = 300.0
DENIALS_WANTED = 2
LONE_DENIAL_S = 5.0
"""Where only one neighbour could be asked, its denial counts after so long."""
RESERVE_FIRST_S, RESERVE_LONGEST_S = 1.0, 120.0
PUNCH_FIRST_S, PUNCH_LONGEST_S = 2.0, 30.0
PUNCHES_AT_ONCE_MAX = 2
PUNCH_FORGET_S = 1800.0
GRACE_S = 10.0
"""A relayed connection stays so long beside a better one: what runs on it may end."""


class _Relay(msgspec.Struct, kw_only=True):
    """A relay that has been asked. Owned by the machine."""

    asking: bool = False
    failures: int = 0
    after_s: float = 0.0
    expires_s: float = 0.0
    why: str = ""


class _Target(msgspec.Struct, kw_only=True):
    """A node behind a relay. Owned by the machine."""

    tries: int = 0
    running: bool = False
    after_s: float = 0.0
    seen_s: float = 0.0
    why: str = ""


def scope_of(ip: str) -> int:
    """0 this host, 1 a private network, 2 the public one; -1 where there is no address."""
    try:
        address = ipaddress.ip_address(ip.split("%")[0])
    except ValueError:
        return -1
    if address.is_loopback:
        return 0
    private = [ipaddress.ip_network(text) for text in _PRIVATE]
    inside = any(address.version == net.version and address in net for net in private)
    return 1 if inside or address.is_link_local else 2


_PRIVATE = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "100.64.0.0/10", "fc00::/7")


class ReachMachine:
    """The reach of one node.

    Args:
        learner: asked for a relay's place last: everybody knows it, and it has most to do.
        listening: False for a node that only dials out.
        rng: spreads nodes over relays.
    """

    def __init__(self, learner: NodeId, rng: Random, *, listening: bool) -> None:
        self.observed_ip: str | None = None
        """This node's address as neighbours see it."""
        self.reached: tuple[str, ...] = ()
        """Addresses at which a neighbour dialled this node; without /p2p."""
        self._learner = learner
        self._rng = rng
        self._listening = listening
        self._links: tuple[Link, ...] = ()
        self._proof: tuple[float, str] | None = None
        self._denials: dict[NodeId, float] = {}
        self._asked_s: dict[NodeId, float] = {}
        self._asking: NodeId | None = None
        self._observed_s = float("-inf")
        self._kept: bool | None = None
        self._foreign = False
        self._relays: dict[NodeId, _Relay] = {}
        self._targets: dict[NodeId, _Target] = {}
        self._punched: tuple[float, NodeId] | None = None
        self._double_s: dict[NodeId, float] = {}
        self._now_s = 0.0

    # --- questions -----------------------------------------------------------------------------

    @property
    def reach(self) -> Reach:
        """The class that heartbeats carry."""
        if self._proof is not None:
            return Reach.DIRECT
        if self._listening and not self._denied():
            return Reach.UNKNOWN
        return Reach.RELAYED if self._punched is None else Reach.PUNCHED

    @property
    def reason(self) -> str:
        """One line for people: why `reach` is what it is."""
        match self.reach:
            case Reach.DIRECT:
                assert self._proof is not None
                return self._proof[1]
            case Reach.UNKNOWN:
                return "no neighbour has tried to dial this node yet"
            case Reach.PUNCHED:
                assert self._punched is not None
                return f"{self._cause()}; opening from both sides works ({self._punched[1][-8:]})"
            case Reach.RELAYED:
                return "; ".join([self._cause(), *self._troubles()])

    def relays(self) -> tuple[NodeId, ...]:
        """Where this node has a place now, in a stable order; the learner last."""
        near = {link.node for link in self._links if link.way is not Way.RELAYED}
        held = [r for r, s in self._relays.items() if r in near and s.expires_s > self._now_s]
        return tuple(sorted(held, key=lambda relay: (relay == self._learner, relay)))

    def _denied(self) -> bool:
        first_s = min(self._denials.values(), default=self._now_s)
        wanted = 1 if self._foreign else DENIALS_WANTED
        return len(self._denials) >= wanted or self._now_s - first_s >= LONE_DENIAL_S

    def _cause(self) -> str:
        if not self._listening:
            return "this node only dials out"
        seen = f" at {self.observed_ip}" if self.observed_ip else ""
        ports = ", and the NAT changes ports" if self._kept is False else ""
        return f"{len(self._denials)} neighbour(s) could not dial back{seen}{ports}"

    def _troubles(self) -> list[str]:
        troubles = []
        failed = [t for t in self._targets.values() if t.tries >= limits.PUNCH_TRIES_MAX and t.why]
        if failed:
            troubles.append(
                f"punching failed {failed[-1].tries} times towards {len(failed)} node(s) "
                f"({failed[-1].why})"
            )
        if not self.relays():
            whys = [relay.why for relay in self._relays.values() if relay.why]
            troubles.append(f"no relay ({whys[-1] if whys else 'no public neighbour'})")
        return troubles

    # --- the machine ---------------------------------------------------------------------------

    def handle(self, event: ReachEvent, now_s: float) -> tuple[ReachEffect, ...]:
        """Take one event; return what to do, in order."""
        self._now_s = now_s
        effects: list[ReachEffect] = []
        match event:
            case Looked():
                self._looked(event, now_s, effects)
            case Answered():
                self._answered(event, now_s)
            case Unanswered():
                self._asking = None
            case Reserved(relay=relay, lasts_s=lasts_s):
                self._relays[relay] = _Relay(expires_s=now_s + lasts_s, after_s=now_s + lasts_s / 2)
            case NotReserved(relay=relay, why=why):
                state = self._relays.setdefault(relay, _Relay())
                state.asking, state.why, state.expires_s = False, why, 0.0
                state.after_s = now_s + self._spread(
                    backoff_s(state.failures, first_s=RESERVE_FIRST_S, longest_s=RESERVE_LONGEST_S)
                )
                state.failures += 1
            case PunchEnded():
                self._punch_ended(event, now_s)
            case Woke():
                raise AssertionError("this machine arms nothing: it is told often enough")
            case _:
                assert_never(event)
        return tuple(effects)

    def _spread(self, pause_s: float) -> float:
        return pause_s * self._rng.uniform(0.75, 1.25)

    def _looked(self, event: Looked, now_s: float, effects: list[ReachEffect]) -> None:
        self._links = event.links
        dialled = [link for link in event.links if link.dialled and link.way is Way.DIRECT]
        # A neighbour of the same household proves nothing to a fleet on the Internet.
        wanted = max((scope_of(link.ip) for link in dialled), default=0)
        for link in event.links:
            inbound = link.way is Way.DIRECT and not link.dialled
            if self._listening and inbound and scope_of(link.ip) >= wanted:
                self._proof = (now_s, f"dialled by {link.node[-8:]}")
                break
        if self._proof is not None and now_s - self._proof[0] > PROOF_S:
            self._proof = None
        for link in event.links:
            if link.way is Way.PUNCHED:
                self._punched = (now_s, link.node)
        if self._punched is not None and now_s - self._punched[0] > PROOF_S:
            self._punched = None
        self._ask(now_s, effects)
        # Only private addresses of its own, and a public neighbour dialled: that is a NAT, most
        # likely. A place at a relay is had while the dial back is still out.
        inside = max((scope_of(ip) for ip in event.own_ips), default=wanted) < wanted
        if self.reach in (Reach.PUNCHED, Reach.RELAYED) or (inside and self._proof is None):
            self._reserve(event.public, now_s, effects)
        self._punch(now_s, effects)
        self._retire(now_s, effects)

    # --- dialling back -------------------------------------------------------------------------

    def _ask(self, now_s: float, effects: list[ReachEffect]) -> None:
        if self._asking is not None:
            return
        settled = self.reach is not Reach.UNKNOWN
        if self._proof is not None or (
            settled and self.observed_ip is not None and now_s - self._observed_s < RECHECK_S
        ):
            return
        pause_s = RECHECK_S if settled and self.observed_ip else limits.DIAL_BACK_INTERVAL_S + 1
        ready = [
            link
            for link in self._links
            if link.way is Way.DIRECT
            and now_s - self._asked_s.get(link.node, float("-inf")) >= pause_s
        ]
        if ready:
            # Who was dialled is outside; a neighbour that dialled us may share our household.
            best = max(ready, key=lambda link: (link.dialled, scope_of(link.ip), link.node))
            self._asking = best.node
            self._asked_s[best.node] = now_s
            effects.append(AskBack(node=best.node))
        near = {link.node for link in self._links}
        for node in [node for node in self._asked_s if node not in near]:
            if now_s - self._asked_s[node] > RECHECK_S:
                del self._asked_s[node]

    def _answered(self, event: Answered, now_s: float) -> None:
        self._asking = None
        parts = event.observed.split("/")
        if len(parts) == 5 and scope_of(parts[2]) >= 0:
            self.observed_ip, self._observed_s = parts[2], now_s
            self._kept, self._foreign = event.kept, event.foreign
        if event.reached:
            self._denials.clear()
            self.reached = event.reached
            self._proof = (now_s, f"{event.node[-8:]} dialled {event.reached[0]}")
        elif event.observed and (event.tried or event.foreign):
            self.reached = ()
            self._denials[event.node] = now_s
            if len(self._denials) > DENIALS_WANTED:
                del self._denials[min(self._denials, key=self._denials.__getitem__)]

    # --- relays --------------------------------------------------------------------------------

    def _reserve(self, public: frozenset[NodeId], now_s: float, effects: list[ReachEffect]) -> None:
        near = [
            link.node
            for link in self._links
            if link.way is Way.DIRECT and (link.dialled or link.node in public)
        ]
        for node in [node for node, state in self._relays.items() if node not in near]:
            if not self._relays[node].asking:
                del self._relays[node]
        held = [n for n, s in self._relays.items() if s.expires_s > now_s]
        for node in held[: limits.RELAYS_WANTED]:
            state = self._relays[node]
            if now_s >= state.after_s and not state.asking:
                state.asking = True
                effects.append(Reserve(relay=node))
        asking = [n for n, s in self._relays.items() if s.asking and n not in held]
        missing = limits.RELAYS_WANTED - len(held) - len(asking)
        fresh = [
            node
            for node in dict.fromkeys(near)
            if node not in held
            and node not in asking
            and now_s >= self._relays.get(node, _Relay()).after_s
        ]
        self._rng.shuffle(fresh)
        fresh.sort(key=lambda n: (self._relays.get(n, _Relay()).failures, n == self._learner))
        for node in fresh[: max(0, missing)]:
            self._relays.setdefault(node, _Relay()).asking = True
            effects.append(Reserve(relay=node))

    # --- past the relay ------------------------------------------------------------------------

    def _punch(self, now_s: float, effects: list[ReachEffect]) -> None:
        """Whoever was reached through a relay begins; the other side answers."""
        better = {link.node for link in self._links if link.way is not Way.RELAYED}
        behind = {
            link.node: link
            for link in self._links
            if link.way is Way.RELAYED and not link.dialled and link.node not in better
        }
        for node, target in list(self._targets.items()):
            if node in behind:
                target.seen_s = now_s
            elif now_s - target.seen_s > PUNCH_FORGET_S and not target.running:
                del self._targets[node]
        running = sum(target.running for target in self._targets.values())
        for node in behind:
            target = self._targets.setdefault(node, _Target(seen_s=now_s))
            due = (
                self.observed_ip is not None  # else there is no place to name
                and target.tries < limits.PUNCH_TRIES_MAX
                and now_s >= target.after_s
            )
            if due and not target.running and running < PUNCHES_AT_ONCE_MAX:
                running += 1
                target.running = True
                target.tries += 1
                effects.append(Punch(node=node))

    def _punch_ended(self, event: PunchEnded, now_s: float) -> None:
        target = self._targets.setdefault(event.node, _Target(seen_s=now_s))
        target.running = False
        target.why = event.why
        if event.why:
            pause_s = backoff_s(target.tries - 1, first_s=PUNCH_FIRST_S, longest_s=PUNCH_LONGEST_S)
            target.after_s = now_s + self._spread(pause_s)
        else:
            target.tries = 0
            target.after_s = now_s + GRACE_S

    def _retire(self, now_s: float, effects: list[ReachEffect]) -> None:
        relayed = {link.node for link in self._links if link.way is Way.RELAYED}
        doubled = {link.node for link in self._links if link.way is not Way.RELAYED} & relayed
        for node in [node for node in self._double_s if node not in doubled]:
            del self._double_s[node]
        for node in sorted(doubled):
            if now_s - self._double_s.setdefault(node, now_s) >= GRACE_S:
                self._double_s[node] = now_s
                effects.append(Retire(node=node))
