"""The planner on fleets drawn by hand; its laws under any fleet are in `tests/property`."""

import time

import pytest

from echo2_mesh.core.forest import Seat, lower_bound_s, plan
from echo2_mesh.wire.types import NodeId, Reach

LEARNER = NodeId("learner")


def fleet(*uplinks, **fields):
    return tuple(
        Seat(node=NodeId(f"n{i:04}"), uplink_bytes_per_s=uplink, **fields)
        for i, uplink in enumerate(uplinks)
    )


def forwarding(forest):
    return {
        node
        for node in forest.nodes
        for stripe in range(len(forest.stripes))
        if forest.children_of(node, forest.deals.index(stripe))
    }


def test_a_small_fleet_has_a_stripe_for_each_node_and_two_levels():
    forest = plan(fleet(*[1e6] * 12), LEARNER)
    assert len(forest.stripes) == 12
    assert forest.depth == 2
    assert forest.rate == pytest.approx(12 / 11 * 1e6)
    assert forest.deals[:12] == tuple(range(12))


def test_stripes_are_as_wide_as_uplinks():
    forest = plan(fleet(1e6, 2e6, 3e6), LEARNER)
    assert sorted(forest.shares) == pytest.approx([1 / 6, 2 / 6, 3 / 6], rel=0.1)


def test_a_larger_fleet_has_eight_trees_and_few_levels():
    forest = plan(fleet(*[1e6] * 1000), LEARNER)
    assert len(forest.stripes) == 8
    assert forest.depth <= 5
    assert forest.rate == pytest.approx(1e6)


def test_relayed_and_very_slow_nodes_only_receive():
    quick = fleet(*[1e6] * 10)
    relayed = Seat(node=NodeId("relayed"), uplink_bytes_per_s=9e6, reach=Reach.RELAYED)
    slow = Seat(node=NodeId("slow"), uplink_bytes_per_s=1e5)
    thin = Seat(node=NodeId("thin"), uplink_bytes_per_s=1e6, downlink_bytes_per_s=1e5)
    wide = tuple(Seat(node=s.node, uplink_bytes_per_s=1e6, downlink_bytes_per_s=1e6) for s in quick)
    forest = plan((*wide, relayed, slow, thin), LEARNER)
    assert forwarding(forest) == {seat.node for seat in quick}


def test_where_nobody_is_fit_to_forward_everybody_does():
    forest = plan(fleet(0.0, 0.0, 0.0, reach=Reach.RELAYED), LEARNER)
    assert len(forwarding(forest)) == 3


def test_an_unknown_uplink_counts_as_the_median():
    forest = plan(fleet(1e6, 0.0, 2e6, 4e6), LEARNER)
    assert forest.uplinks[1] == 2e6


def test_small_differences_between_measurements_change_no_plan():
    one = plan(fleet(1.00e6, 1.05e6, 0.93e6, 1.10e6), LEARNER)
    other = plan(fleet(1.02e6, 0.99e6, 1.00e6, 1.07e6), LEARNER)
    assert one.deals == other.deals
    assert one.shares == other.shares


def test_the_learners_own_seat_is_the_root_and_no_child():
    seats = (*fleet(1e6, 1e6), Seat(node=LEARNER, uplink_bytes_per_s=1e9))
    forest = plan(seats, LEARNER)
    assert LEARNER not in forest
    assert forest.children_of(LEARNER, 0) == (forest.nodes[forest.stripes[0].home],)


def test_a_lost_homes_children_share_its_place():
    forest = plan(fleet(*[1e6] * 10), LEARNER)
    lost = forest.children_of(LEARNER, 0)[0]
    mine = [i for i in range(1000) if forest.children_of(LEARNER, i)[0] == lost]
    heirs = []
    for index in mine:
        sources = {
            node: forest.source_of(node, index, lambda peer: peer != lost)
            for node in forest.nodes
            if node != lost
        }
        (heir,) = [node for node, source in sources.items() if source == LEARNER]
        assert set(sources.values()) == {LEARNER, heir}
        heirs.append(heir)
    loads = [heirs.count(node) for node in set(heirs)]
    assert len(loads) == 9
    assert max(loads) <= 2 * min(loads)


def test_the_orphans_of_an_inner_node_ask_all_over_the_tree():
    forest = plan(fleet(*[1e6] * 200), LEARNER)
    home = forest.children_of(LEARNER, 0)[0]
    lost = next(n for n in forest.children_of(home, 0) if forest.children_of(n, 0))
    orphan = forest.children_of(lost, 0)[0]
    stripe = [i for i in range(2000) if forest.stripe_of(i) == forest.stripe_of(0)]
    asked = {forest.source_of(orphan, i, lambda peer: peer != lost) for i in stripe}
    assert len(asked) > 50
    assert LEARNER not in asked


def test_a_thousand_seats_are_planned_in_a_moment():
    seats = fleet(*[1e6 * (1 + i % 3) for i in range(1000)])
    plan.cache_clear()
    began_s = time.process_time()
    plan(seats, LEARNER)
    assert time.process_time() - began_s < 0.2


def test_the_bound_is_the_tightest_of_three():
    assert lower_bound_s(100.0, 10.0, [100.0] * 4, [100.0] * 4) == 10.0
    assert lower_bound_s(100.0, 1000.0, [100.0] * 4, [5.0] * 4) == 20.0
    assert lower_bound_s(100.0, 20.0, [5.0] * 4, [100.0] * 4) == 10.0


def test_nobody_is_sent_to_a_slow_node_while_a_fit_one_is_left():
    slow = Seat(node=NodeId("slow"), uplink_bytes_per_s=1e5)
    forest = plan((*fleet(*[1e6] * 10), slow), LEARNER)
    assert not forest.forwards(slow.node)
    assert all(forest.forwards(node) for node in forest.nodes if node != slow.node)
    for lost in forest.nodes:

        def well(at, lost=lost):
            return at != lost

        for node in forest.nodes:
            assert slow.node not in {forest.source_of(node, i, well) for i in range(60)}
