"""How often a node asks and searches: rarely while all is well. Wires and questions are fakes."""

from collections import Counter
from contextlib import asynccontextmanager
from itertools import pairwise
from random import Random
from types import SimpleNamespace

import pytest
import trio

from echo2_mesh import limits
from echo2_mesh.net import joining
from echo2_mesh.net.driver import Guard
from echo2_mesh.net.joining import Joining
from echo2_mesh.testing import identity_of, open_network
from echo2_mesh.wire.codec import Opened
from echo2_mesh.wire.messages import CaughtUp, Heartbeat
from echo2_mesh.wire.types import NodeId, Role

LEARNER, OTHER = identity_of("learner").node, identity_of("other").node
SETTLED_S = 10.0
"""Greetings are over."""


async def nothing(*_):
    await trio.lowlevel.checkpoint()


@asynccontextmanager
async def joined(*, seed=1):
    """A node connected to the learner and one other; `asked_s` and `found_s` are when it spoke."""
    async with open_network(Random(seed)) as network, trio.open_nursery() as nursery:
        me, *_ = (network.carrier(identity_of(name)) for name in ("me", "learner", "other"))
        kit = SimpleNamespace(
            network=network, me=me, asked=[], found_s=[], beating={LEARNER, OTHER}
        )

        async def ask(node, message, *, timeout_s):
            kit.asked.append((trio.current_time(), node))
            await trio.sleep(0.05)
            return CaughtUp()

        async def find(key):
            kit.found_s.append(trio.current_time())
            await trio.sleep(0.05)
            return ()

        def hear(kind, handler):
            kit.hear = handler

        async def beat():
            for sequence in range(10**6):
                for node in sorted(kit.beating):
                    message = Heartbeat(
                        role=Role.ACTOR, state="x", incarnation_unix_ms=1, sequence=sequence
                    )
                    await kit.hear(Opened(sender=node, message=message, raw=b""))
                await trio.sleep(limits.HEARTBEAT_INTERVAL_S)

        me.find = find
        node = Joining(
            carrier=me, learner=LEARNER, run_id="run", bootstrap=(), members_path=None,
            questions=SimpleNamespace(ask=ask, answer=lambda kind, handler: None),
            topics=SimpleNamespace(hear=lambda *_: None, hear_opened=hear, gossip=nothing),
            workers=None, guard=Guard(nursery, Counter()), nursery=nursery, rng=Random(seed),
            beat=lambda: None, seal=lambda _: b"", peer_up=nothing, peer_gone=nothing,
            announce_raw=lambda: None,
        )  # fmt: skip
        for peer in (LEARNER, OTHER):
            network.link(me.node, peer)
        nursery.start_soon(node.run)
        nursery.start_soon(beat)
        yield kit
        nursery.cancel_scope.cancel()


def since(kit, at_s):
    """When questions were put after `at_s`, and to whom."""
    return [(s, node) for s, node in kit.asked if s > at_s]


def gaps_of(times_s):
    return [after - before for before, after in pairwise(times_s)]


async def test_while_everybody_is_heard_a_neighbour_is_asked_only_now_and_then(autojump_clock):
    async with joined() as kit:
        await trio.sleep(SETTLED_S)
        began_s = trio.current_time()
        await trio.sleep(300.0)
        times_s = [s for s, _ in since(kit, began_s)]
        gaps_s = gaps_of(times_s)
        assert len(gaps_s) >= 10
        assert min(gaps_s) >= joining.CATCH_UP_CALM_S
        assert max(gaps_s) <= joining.CATCH_UP_CALM_S + 1.3 * joining.CATCH_UP_INTERVAL_S


@pytest.mark.parametrize("near", [True, False])
async def test_while_somebody_is_silent_neighbours_are_asked_often(autojump_clock, near):
    async with joined() as kit:
        far = NodeId("far")
        silent = OTHER if near else far
        kit.beating.add(far)
        await trio.sleep(SETTLED_S)
        kit.beating.discard(silent)
        await trio.sleep(limits.SUSPECT_AFTER_S + limits.HEARTBEAT_INTERVAL_S)
        began_s = trio.current_time()
        await trio.sleep(limits.GONE_AFTER_S - limits.SUSPECT_AFTER_S - limits.HEARTBEAT_INTERVAL_S)
        asked = since(kit, began_s)
        gaps_s = gaps_of([s for s, _ in asked])
        assert len(gaps_s) >= 1
        assert min(gaps_s) >= 0.7 * joining.CATCH_UP_INTERVAL_S
        assert max(gaps_s) <= 1.3 * joining.CATCH_UP_INTERVAL_S
        nodes = {node for _, node in asked}
        assert nodes <= ({silent} if near else {LEARNER, OTHER}), "a silent neighbour goes first"
        # One that is gone for good does not keep the others asking.
        await trio.sleep(SETTLED_S)
        began_s = trio.current_time()
        await trio.sleep(100.0)
        assert min(gaps_of([s for s, _ in since(kit, began_s)])) >= joining.CATCH_UP_CALM_S


async def test_searches_become_rare_at_home_and_frequent_when_the_learner_is_lost(autojump_clock):
    async with joined() as kit:
        await trio.sleep(900.0)
        pauses = gaps_of(kit.found_s)
        steady = [pause for pause in pauses if pause > 1.3 * joining.DISCOVERY_FIRST_S]
        doubling, planned_s = [], limits.DISCOVERY_INTERVAL_S
        while len(doubling) < len(steady):
            doubling.append(planned_s)
            planned_s = min(2 * planned_s, joining.DISCOVERY_SETTLED_S)
        assert doubling[:4] == [15.0, 30.0, 60.0, 120.0]
        assert len(steady) >= 6
        assert len(pauses) - len(steady) <= 1, "the first neighbour is worth one more look"
        assert all(0.75 * p <= s <= 1.25 * p for s, p in zip(steady, doubling, strict=True))

        lost_s = trio.current_time()
        kit.network.unlink(kit.me.node, LEARNER)
        await trio.sleep(300.0)
        times_s = [s for s in kit.found_s if s > lost_s]
        pauses = gaps_of(times_s)
        assert times_s[0] - lost_s <= 2 * joining.WATCH_INTERVAL_S
        assert 0.7 * joining.DISCOVERY_FIRST_S <= pauses[0] <= 2 * joining.DISCOVERY_FIRST_S
        assert all(after <= 2.5 * before for before, after in pairwise(pauses))
        assert max(pauses) <= 1.25 * limits.DISCOVERY_INTERVAL_S
        assert pauses[-1] >= 0.75 * limits.DISCOVERY_INTERVAL_S

        kit.network.link(kit.me.node, LEARNER)
        await trio.sleep(600.0)
        assert gaps_of(kit.found_s)[-1] >= 0.75 * joining.DISCOVERY_SETTLED_S
