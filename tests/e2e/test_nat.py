"""Nodes behind NATs find each other, get past the relay where they can, and say so where not."""

import contextlib

import pytest

from tests.e2e.hosts import namespaces_left
from tests.e2e.nat_hosts import open_nats, why_not
from tests.e2e.nat_kit import carrying, open_node

pytestmark = [pytest.mark.e2e, pytest.mark.root, pytest.mark.timeout(240)]
SIZE_BYTES = 2_000_000
PATIENCE_S = 60.0
"""Seconds on an idle machine; this one may be shared."""


@contextlib.contextmanager
def world(folder, *, keeps_ports):
    """(learner, relays, a, b): two more public nodes, and one behind each of two routers.

    The learner carries for nobody, so that a relay can be killed and the run lives on.
    """
    if reason := why_not():
        pytest.skip(f"NAT namespaces: {reason}")
    with (
        open_nats(public=3, houses=2, keeps_ports=keeps_ports) as nats,
        open_node("learner", nats.public[0], folder, relay=False) as learner,
        open_node("third", nats.public[1], folder, know=learner.addresses) as third,
        open_node("fourth", nats.public[2], folder, know=learner.addresses) as fourth,
        open_node("a", nats.houses[0], folder, know=learner.addresses) as a,
        open_node("b", nats.houses[1], folder, know=learner.addresses, listen=False) as b,
    ):
        yield learner, (third, fourth), a, b
    assert namespaces_left() == ()


def test_behind_routers_that_keep_ports_control_and_bulk_leave_the_relay(tmp_path):
    with world(tmp_path, keeps_ports=True) as (learner, relays, a, b):
        a.until(lambda s: s["ways"].get("b") == "punched", "punched connection", PATIENCE_S)
        made = b.ask("make", size_bytes=SIZE_BYTES, count=2)
        assert "seconds" in a.ask("fetch", node=b.node, **made)
        state = a.state()
        assert state["lanes"]["b"] == "punched", state
        assert state["observed_ip"].startswith("203.0.113.")
        a.until(lambda s: s["reach"] == "punched", "class punched", PATIENCE_S)
        seen = learner.state()
        assert (seen["reach"], seen["ways"]["a"]) == ("direct", "direct")
        # What a router lets nobody into is not announced as a place to dial.
        assert sum("/p2p-circuit/" in text for text in a.state()["addresses"]) >= 1
        learner.until(lambda s: s["reaches"].get("b") == "punched", "b's own word", PATIENCE_S)
        relayed = sum(n.state()["counters"].get("relay_bytes", 0) for n in relays)
        assert relayed < SIZE_BYTES, "the relays carried the signals, not the weights"


def test_behind_routers_that_change_ports_the_relay_carries_and_another_takes_over(tmp_path):
    with world(tmp_path, keeps_ports=False) as (_, relays, a, b):
        a.until(lambda s: s["ways"].get("b") == "relayed", "relayed connection", PATIENCE_S)
        made = b.ask("make", size_bytes=SIZE_BYTES // 2)
        assert "seconds" in a.ask("fetch", node=b.node, **made)
        state = a.until(lambda s: "changes ports" in s["reason"], "reason of the NAT", PATIENCE_S)
        assert state["reach"] == "relayed"
        assert state["lanes"].get("b") is None
        (carrier, *_) = carrying(relays)
        others = [node for node in relays if node is not carrier]
        carrier.kill()
        a.until(
            lambda s: (
                carrier.name not in s["ways"]
                and s["ways"].get("b") == "relayed"
                and bool(carrying(others))
            ),
            "another relay",
            PATIENCE_S,
        )
        assert "seconds" in a.ask("ask", node=b.node, timeout_s=20.0)
