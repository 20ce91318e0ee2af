"""Finds out how others come to this node, and gets it places at relays where they cannot.

The hands of `core.reach`: looks at the connections, asks neighbours to dial back, reserves,
punches, and answers the same question of others, within limits. The mesh owns one where its carrier
has an `outreach`; heartbeats and the status document say what it found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from random import Random

import trio

from echo2_mesh import limits
from echo2_mesh.core.members import Member
from echo2_mesh.core.reach import ReachMachine
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
from echo2_mesh.errors import PeerError
from echo2_mesh.net.carrier import Carrier, Outreach
from echo2_mesh.net.driver import Driver, Guard
from echo2_mesh.net.interfaces import own_ips
from echo2_mesh.net.joining import Joining
from echo2_mesh.net.questions import Questions
from echo2_mesh.wire.messages import ReachAnswer, ReachAsk
from echo2_mesh.wire.types import NodeId, Reach

LOOK_INTERVAL_S = 0.5
ASK_TIMEOUT_S = 2 * limits.DIAL_BACK_TIMEOUT_S
ASKERS_KEPT = 1024
_BEHIND = (Reach.PUNCHED, Reach.RELAYED)


class Reaching:
    """The reach of one node, as others have proved it.

    Args:
        members: everybody heard of.
        heard: True for a node that has spoken in this run; others are carried for by nobody.
    """

    def __init__(
        self,
        carrier: Carrier,
        outreach: Outreach,
        learner: NodeId,
        *,
        questions: Questions,
        guard: Guard,
        nursery: trio.Nursery,
        rng: Random,
        members: Callable[[], tuple[Member, ...]],
        heard: Callable[[NodeId], bool],
    ) -> None:
        self._carrier = carrier
        self._outreach = outreach
        self._questions = questions
        self._guard = guard
        self._nursery = nursery
        self._members = members
        self._machine = ReachMachine(learner, rng, listening=outreach.listening)
        self._driver: Driver[ReachEvent] = Driver(self._machine, self._perform)
        self._links: tuple[Link, ...] = ()
        self._asked_s: OrderedDict[NodeId, float] = OrderedDict()
        self._dialling_back = 0
        outreach.attend(self.observed_ip, lambda node: node == learner or heard(node))
        questions.answer(ReachAsk, self._answer)

    @property
    def reach(self) -> Reach:
        """The class that heartbeats carry."""
        return self._machine.reach

    @property
    def reason(self) -> str:
        """Why it is that class, in one line for people."""
        return self._machine.reason

    def observed_ip(self) -> str | None:
        """This node's address as neighbours see it: its NAT's, where there is one."""
        return self._machine.observed_ip

    def hidden(self, node: NodeId) -> bool:
        """True when neither this node nor that one can be dialled, as far as anybody knows."""
        heard = (m.heartbeat.reach for m in self._members() if m.node == node)
        theirs = next(heard, Reach.UNKNOWN)
        if Reach.DIRECT in (self._machine.reach, theirs):
            return False
        indirect = self.ways().get(node, Way.DIRECT) is not Way.DIRECT
        return indirect or (self._machine.reach in _BEHIND and theirs in _BEHIND)

    def ways(self) -> dict[NodeId, Way]:
        """How each neighbour is connected, by its best connection."""
        order = (Way.RELAYED, Way.PUNCHED, Way.DIRECT)
        found: dict[NodeId, Way] = {}
        for link in sorted(self._links, key=lambda link: order.index(link.way)):
            found[link.node] = link.way
        return found

    async def run(self) -> None:
        """Look, and do what follows from it, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._driver.run)
            while True:
                self._links = self._outreach.links()
                self._driver.post_nowait(
                    Looked(
                        links=self._links,
                        public=frozenset(
                            member.node
                            for member in self._members()
                            if member.heartbeat.reach is Reach.DIRECT
                        ),
                        own_ips=tuple(filter(None, map(_ip, self._carrier.addresses()))),
                    )
                )
                self._outreach.serve(self._machine.reach is Reach.DIRECT)
                self._outreach.announce(
                    self._machine.reached,
                    {relay: self._places_of(relay) for relay in self._machine.relays()},
                )
                await trio.sleep(LOOK_INTERVAL_S)

    def _places_of(self, node: NodeId) -> tuple[str, ...]:
        """Where a neighbour is: the place it was dialled at, then what it says itself."""
        proved = [
            _place(link.ip, link.port)
            for link in self._links
            if link.node == node and link.dialled and link.way is Way.DIRECT
        ]
        return tuple(dict.fromkeys([*proved, *self._direct_addresses(node)]))

    def _direct_addresses(self, node: NodeId) -> tuple[str, ...]:
        found = (m.heartbeat.addresses for m in self._members() if m.node == node)
        return tuple(text for text in next(found, ()) if "/p2p-circuit" not in text)

    def _perform(self, effect: ReachEffect) -> None:
        match effect:
            case AskBack(node=node):
                self._nursery.start_soon(self._ask, node)
            case Reserve(relay=relay):
                self._nursery.start_soon(self._reserve, relay)
            case Punch(node=node):
                self._nursery.start_soon(self._punch, node)
            case Retire(node=node):
                self._nursery.start_soon(self._outreach.retire, node)

    # --- asking --------------------------------------------------------------------------------

    async def _ask(self, node: NodeId) -> None:
        own = [text for text in self._carrier.addresses() if "/p2p-circuit" not in text]
        question = ReachAsk(addresses=tuple(own) if self._outreach.listening else ())
        try:
            answer = await self._questions.ask(node, question, timeout_s=ASK_TIMEOUT_S)
        except PeerError:
            self._guard.counters["reach_unanswered"] += 1
            await self._driver.post(Unanswered(node=node))
            return
        if not isinstance(answer, ReachAnswer):
            self._guard.counters["reach_unanswered"] += 1
            await self._driver.post(Unanswered(node=node))
            return
        # Where it says that it came through must be where it sees us, at a port that we listen on.
        seen, ports = _ip(answer.observed), {_port(text) for text in own}
        reached = [p for p in answer.reached if seen and _ip(p) == seen and _port(p) in ports]
        await self._driver.post(
            Answered(
                node=node,
                observed=answer.observed,
                reached=tuple(reached[: limits.DIAL_BACK_ADDRESSES_MAX]),
                kept=self._kept(node, answer.observed),
                tried=answer.tried,
                foreign=_ip(answer.observed) not in own_ips(),
            )
        )

    def _kept(self, node: NodeId, observed: str) -> bool | None:
        """True if `node` sees the port that this host gave the socket: the NAT keeps ports."""
        for link in self._links:
            if link.node == node and link.dialled and link.way is Way.DIRECT and observed:
                port = self._outreach.port_towards(link.ip, link.port)
                if port is not None:
                    return observed.endswith(f"/tcp/{port}")
        return None

    async def _reserve(self, relay: NodeId) -> None:
        event: ReachEvent
        try:
            event = Reserved(relay=relay, lasts_s=await self._outreach.reserve(relay))
        except PeerError as error:
            self._guard.counters["reservations_failed"] += 1
            event = NotReserved(relay=relay, why=error.what[:200])
        await self._driver.post(event)

    async def _punch(self, node: NodeId) -> None:
        """Past the relay: by dialling, where the other one is public, else from both sides."""
        why = ""
        public = [
            m.heartbeat.addresses
            for m in self._members()
            if m.node == node and m.heartbeat.reach is Reach.DIRECT
        ]
        try:
            if public:
                await self._outreach.dial_direct(node, public[0])
            else:
                await self._outreach.punch(node)
        except PeerError as error:
            why = error.what[:200] or "no answer"
        await self._driver.post(PunchEnded(node=node, why=why))

    # --- answering -----------------------------------------------------------------------------

    async def _answer(self, peer: NodeId, question: ReachAsk) -> ReachAnswer:
        """Dial the asker where it is seen, and nowhere else, and not often."""
        links = [link for link in self._outreach.links() if link.node == peer and link.ip]
        if not links:
            return ReachAnswer(tried=False)
        seen, now_s = links[0], trio.current_time()
        last_s = self._asked_s.get(peer, float("-inf"))
        if (
            now_s - last_s < limits.DIAL_BACK_INTERVAL_S
            or self._dialling_back >= limits.DIAL_BACKS_MAX
        ):
            return ReachAnswer(observed=_place(seen.ip, seen.port), tried=False)
        self._asked_s[peer] = now_s
        self._asked_s.move_to_end(peer)
        if len(self._asked_s) > ASKERS_KEPT:
            self._asked_s.popitem(last=False)
        ports = dict.fromkeys(filter(None, (_port(text) for text in question.addresses)))
        places = [_place(seen.ip, port) for port in ports][: limits.DIAL_BACK_ADDRESSES_MAX]
        reached: list[str] = []

        async def dial(place: str) -> None:
            if await self._outreach.dial_back(peer, place):
                reached.append(place)

        self._dialling_back += 1
        try:
            async with trio.open_nursery() as nursery:
                for place in places:
                    nursery.start_soon(dial, place)
        finally:
            self._dialling_back -= 1
        return ReachAnswer(observed=_place(seen.ip, seen.port), reached=tuple(reached))


def reaching_of(
    carrier: Carrier,
    learner: NodeId,
    questions: Questions,
    guard: Guard,
    nursery: trio.Nursery,
    rng: Random,
    joining: Joining,
) -> Reaching | None:
    """The reach of a node on `carrier`; None where nobody needs to ask about it."""
    if carrier.outreach is None:
        return None
    return Reaching(
        carrier,
        carrier.outreach,
        learner,
        questions=questions,
        guard=guard,
        nursery=nursery,
        rng=rng,
        members=joining.members,
        heard=joining.table.heard,
    )


def _place(ip: str, port: int) -> str:
    return f"/ip{6 if ':' in ip else 4}/{ip}/tcp/{port}"


def _ip(place: str) -> str:
    """The address in a place; empty where there is none."""
    parts = place.split("/")
    return parts[2] if len(parts) == 5 else ""


def _port(address: str) -> int | None:
    """The TCP port of an address that names no relay; None if there is none to dial."""
    parts = address.split("/")
    if len(parts) < 5 or parts[3] != "tcp" or "p2p-circuit" in parts or not parts[4].isdecimal():
        return None
    port = int(parts[4])
    return port if 0 < port < 65536 else None
