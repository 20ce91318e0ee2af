"""The answering side of reach: whom it dials back, where, and how often; and what it announces."""

from __future__ import annotations

from collections import Counter
from random import Random

import trio

from echo2_mesh import limits
from echo2_mesh.core.reaching import Link, Way
from echo2_mesh.errors import PeerError
from echo2_mesh.net.driver import Guard
from echo2_mesh.net.reach import Reaching
from echo2_mesh.wire.messages import ReachAnswer, ReachAsk
from echo2_mesh.wire.types import NodeId, Reach

LEARNER, A, B, STRANGER = (NodeId(name) for name in ("learner", "a", "b", "stranger"))


def link(node, way=Way.DIRECT, *, dialled=False, ip="203.0.113.21", port=40001):
    return Link(node=node, way=way, dialled=dialled, ip=ip, port=port)


class FakeOutreach:
    """Remembers what it was told; answers dial-backs from a list."""

    listening = True

    def __init__(self, links=(), answering=()):
        self.now = tuple(links)
        self.answering = answering
        self.dialled: list[tuple[str, str]] = []
        self.announced: list = []
        self.serving = False
        self.reserved: list[str] = []
        self.welcome = None

    def links(self):
        return self.now

    def announce(self, reached, relays):
        self.announced.append((reached, relays))

    def port_towards(self, ip, port):
        return 40001

    async def dial_back(self, node, address):
        self.dialled.append((node, address))
        await trio.lowlevel.checkpoint()
        return address in self.answering

    async def reserve(self, relay):
        await trio.lowlevel.checkpoint()
        self.reserved.append(relay)
        return 600.0

    def serve(self, on):
        self.serving = on

    def attend(self, observed, welcome):
        self.welcome = welcome


class FakeQuestions:
    def __init__(self, reply=None):
        self.reply = reply
        self.asked: list = []

    def answer(self, kind, handler):
        self.handler = handler

    async def ask(self, node, message, *, timeout_s):
        await trio.lowlevel.checkpoint()
        self.asked.append((node, message))
        if isinstance(self.reply, Exception) or self.reply is None:
            raise self.reply or PeerError("nobody there")
        return self.reply


class FakeCarrier:
    def addresses(self):
        return ("/ip4/192.168.1.5/tcp/4201", "/ip4/203.0.113.9/tcp/1/p2p/x/p2p-circuit")


def make(nursery, outreach, questions, *, heard=()):
    return Reaching(
        FakeCarrier(),
        outreach,
        LEARNER,
        questions=questions,
        guard=Guard(nursery, Counter()),
        nursery=nursery,
        rng=Random(1),
        members=tuple,
        heard=lambda node: node in heard,
    )


async def test_the_asker_is_dialled_where_it_is_seen_and_nowhere_else(autojump_clock):
    outreach = FakeOutreach([link(A)], answering=("/ip4/203.0.113.21/tcp/4201",))
    questions = FakeQuestions()
    async with trio.open_nursery() as nursery:
        make(nursery, outreach, questions)
        asked = ReachAsk(
            addresses=(
                "/ip4/192.168.1.5/tcp/4201",
                "/ip4/198.51.100.7/tcp/22",
                "/ip4/198.51.100.8/tcp/22",
                "/dns4/example.org/tcp/443",
                "/ip4/1.2.3.4/tcp/70000",
                "/ip4/1.2.3.4/udp/53",
                "nonsense",
                "/ip4/9.9.9.9/tcp/1/p2p/x/p2p-circuit",
                *(f"/ip4/1.2.3.4/tcp/{port}" for port in range(5000, 5008)),
            )
        )
        answer = await questions.handler(A, asked)
        nursery.cancel_scope.cancel()
    assert answer == ReachAnswer(
        observed="/ip4/203.0.113.21/tcp/40001", reached=("/ip4/203.0.113.21/tcp/4201",)
    )
    assert len(outreach.dialled) == limits.DIAL_BACK_ADDRESSES_MAX
    assert {address.rpartition("/tcp/")[0] for _, address in outreach.dialled} == {
        "/ip4/203.0.113.21"
    }


async def test_the_same_asker_waits_a_minute_and_a_relayed_one_learns_nothing(autojump_clock):
    outreach = FakeOutreach([link(A), link(B, Way.RELAYED, ip="", port=0)])
    questions = FakeQuestions()
    async with trio.open_nursery() as nursery:
        make(nursery, outreach, questions)
        await questions.handler(A, ReachAsk())
        own = ReachAsk(addresses=FakeCarrier().addresses())
        assert await questions.handler(A, own) == ReachAnswer(
            observed="/ip4/203.0.113.21/tcp/40001", tried=False
        )
        assert await questions.handler(B, own) == ReachAnswer(tried=False)
        assert outreach.dialled == []
        await trio.sleep(limits.DIAL_BACK_INTERVAL_S)
        assert (await questions.handler(A, own)).tried
        nursery.cancel_scope.cancel()
    assert outreach.dialled == [(A, "/ip4/203.0.113.21/tcp/4201")]


async def test_a_node_behind_a_nat_learns_it_reserves_and_announces_the_relay(autojump_clock):
    learner = link(LEARNER, dialled=True, ip="203.0.113.10", port=4001)
    outreach = FakeOutreach([learner])
    seen = ReachAnswer(observed="/ip4/203.0.113.21/tcp/40001")
    questions = FakeQuestions(seen)
    async with trio.open_nursery() as nursery:
        reaching = make(nursery, outreach, questions)
        nursery.start_soon(reaching.run)
        await trio.sleep(3)
        assert reaching.reach is Reach.RELAYED
        assert reaching.observed_ip() == "203.0.113.21"
        assert reaching.ways() == {LEARNER: Way.DIRECT}
        nursery.cancel_scope.cancel()
    assert questions.asked == [(LEARNER, ReachAsk(addresses=("/ip4/192.168.1.5/tcp/4201",)))]
    assert outreach.reserved == [LEARNER]
    assert outreach.announced[-1] == ((), {LEARNER: ("/ip4/203.0.113.10/tcp/4001",)})
    assert not outreach.serving


async def test_a_direct_node_carries_for_those_that_have_spoken_in_the_run(autojump_clock):
    outreach = FakeOutreach([link(A)])
    async with trio.open_nursery() as nursery:
        reaching = make(nursery, outreach, FakeQuestions(), heard=(A,))
        nursery.start_soon(reaching.run)
        await trio.sleep(1)
        nursery.cancel_scope.cancel()
    assert reaching.reach is Reach.DIRECT
    assert outreach.serving
    assert outreach.welcome(A)
    assert outreach.welcome(LEARNER)
    assert not outreach.welcome(STRANGER)
