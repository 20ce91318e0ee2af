"""Who is offered which recent messages (IHAVE), heartbeat by heartbeat, of a router by hand."""

from collections import Counter
from types import SimpleNamespace

import pytest

from echo2_mesh.net import guards
from echo2_mesh.net.gossip import GOSSIP_WINDOW_HEARTBEATS

TOPIC, PROTOCOL = "control", "/meshsub/1.1.0"


def router_of(count, *, mesh=()):
    """`count` peers of one topic; its `recent` messages are what the cache has."""
    peers = [f"peer-{i}" for i in range(count)]
    router = SimpleNamespace(
        protocols=[PROTOCOL],
        mesh={TOPIC: set(mesh)},
        fanout={},
        recent={TOPIC: []},
        pubsub=SimpleNamespace(peer_topics={TOPIC: set(peers)}),
        peer_protocol=dict.fromkeys(peers, PROTOCOL),
    )
    router.mcache = SimpleNamespace(window=lambda topic: list(router.recent.get(topic, ())))
    guards.guard_gossip(router)
    return router, peers


def offers_of(router, topic=TOPIC):
    """Whom one heartbeat offers what."""
    return {peer: set(of[topic]) for peer, of in router.gossip_heartbeat().items() if topic in of}


@pytest.mark.parametrize("count", [1, 2, 3, 7, 8, 9, 40, 63])
def test_all_outside_the_mesh_are_offered_everything_in_a_few_heartbeats_and_nothing_twice(count):
    router, peers = router_of(count)
    router.recent[TOPIC] = ["a", "b"]
    offered, sizes = Counter(), []
    for _ in range(guards.GOSSIP_TURNS):
        offers = offers_of(router)
        sizes.append(len(offers))
        for peer, messages in offers.items():
            offered.update((peer, message) for message in messages)
    assert offered == Counter((peer, message) for peer in peers for message in "ab")
    assert max(sizes) <= max(guards.GOSSIP_PEERS_MIN, -(-count // guards.GOSSIP_TURNS))
    for _ in range(3 * guards.GOSSIP_TURNS):
        assert offers_of(router) == {}


@pytest.mark.parametrize("count", [2, 9, 24])
def test_each_message_of_a_stream_reaches_everybody_before_it_leaves_the_window(count):
    router, peers = router_of(count)
    window, offered = [], Counter()
    for beat in range(40):
        window = [*window, f"message-{beat}"][-GOSSIP_WINDOW_HEARTBEATS:]
        router.recent[TOPIC] = window
        for peer, messages in offers_of(router).items():
            assert messages <= set(window)
            offered.update((peer, message) for message in messages)
    settled = [f"message-{beat}" for beat in range(40 - guards.GOSSIP_TURNS)]
    assert all(offered[peer, message] == 1 for peer in peers for message in settled)
    assert set(offered.values()) == {1}


def test_who_is_long_in_the_mesh_is_offered_nothing_and_a_newcomer_for_a_while():
    router, _ = router_of(2, mesh=["peer-0"])
    named = []
    for beat in range(3 * guards.MESH_YOUTH_HEARTBEATS):
        router.recent[TOPIC] = [f"message-{beat}"]
        named.append("peer-0" in offers_of(router))
    youth = guards.MESH_YOUTH_HEARTBEATS - 1
    assert named == [True] * youth + [False] * (len(named) - youth)


def test_who_leaves_the_mesh_is_offered_again_and_is_young_when_it_comes_back():
    router, _ = router_of(1, mesh=["peer-0"])
    for _ in range(guards.MESH_YOUTH_HEARTBEATS):
        offers_of(router)
    router.recent[TOPIC] = ["a"]
    assert offers_of(router) == {}
    router.mesh[TOPIC].clear()
    assert offers_of(router) == {"peer-0": {"a"}}
    router.mesh[TOPIC].add("peer-0")
    router.recent[TOPIC] = ["a", "b"]
    assert offers_of(router) == {"peer-0": {"b"}}


def test_who_left_the_topic_and_came_back_is_offered_everything_again():
    router, _ = router_of(3)
    router.recent[TOPIC] = ["a", "b"]
    for _ in range(guards.GOSSIP_TURNS):
        offers_of(router)
    router.pubsub.peer_topics[TOPIC].discard("peer-1")
    assert offers_of(router) == {}
    router.pubsub.peer_topics[TOPIC].add("peer-1")
    assert offers_of(router) == {"peer-1": {"a", "b"}}


def test_a_newcomer_goes_before_those_that_had_a_turn():
    router, _ = router_of(40)
    router.recent[TOPIC] = ["a"]
    for _ in range(guards.GOSSIP_TURNS):
        offers_of(router)
    router.pubsub.peer_topics[TOPIC].add("late")
    router.peer_protocol["late"] = PROTOCOL
    assert offers_of(router) == {"late": {"a"}}


@pytest.mark.parametrize("left", ["the peers", "the topic"])
def test_nothing_is_remembered_of_peers_that_left(left):
    """Seen from outside: what the closure holds on to."""
    router, _ = router_of(9, mesh=["peer-0"])
    router.recent[TOPIC] = ["a"]
    for _ in range(guards.GOSSIP_TURNS):
        offers_of(router)
    cells = {
        name: cell.cell_contents
        for name, cell in zip(
            router.gossip_heartbeat.__code__.co_freevars,
            router.gossip_heartbeat.__closure__,
            strict=True,
        )
    }
    kept = [cells["ages"], cells["told"]]
    assert all(kept)
    if left == "the peers":
        router.pubsub.peer_topics[TOPIC].clear()
    else:
        del router.pubsub.peer_topics[TOPIC]
    router.mesh[TOPIC].clear()
    offers_of(router)
    assert not any(kept)


def test_two_topics_of_one_peer_are_not_confused():
    router, _ = router_of(2)
    router.mesh["rollouts"] = set()
    router.pubsub.peer_topics["rollouts"] = {"peer-0"}
    router.recent = {TOPIC: ["a"], "rollouts": ["b"]}
    assert router.gossip_heartbeat() == {
        "peer-0": {TOPIC: ["a"], "rollouts": ["b"]},
        "peer-1": {TOPIC: ["a"]},
    }
    router.pubsub.peer_topics["rollouts"].clear()
    router.gossip_heartbeat()
    router.pubsub.peer_topics["rollouts"].add("peer-0")
    assert router.gossip_heartbeat() == {"peer-0": {"rollouts": ["b"]}}


def test_who_speaks_another_protocol_is_offered_nothing_and_takes_no_turn():
    router, _ = router_of(8)
    router.recent[TOPIC] = ["a"]
    silent = {f"peer-{i}" for i in range(6)}
    for peer in silent:
        router.peer_protocol[peer] = "/floodsub/1.0.0"
    assert set(offers_of(router)) == {"peer-6", "peer-7"}


def test_a_heartbeat_without_messages_takes_nobodys_turn():
    router, _ = router_of(8)
    for _ in range(3):
        assert offers_of(router) == {}
    router.recent[TOPIC] = ["a"]
    seen = [peer for _ in range(guards.GOSSIP_TURNS) for peer in offers_of(router)]
    assert len(seen) == len(set(seen)) == 8
