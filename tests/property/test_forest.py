"""The planner under any fleet: everybody is reached, nobody is overloaded, a loss stays local."""

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2_mesh.core.forest import Seat, plan
from echo2_mesh.wire.types import NodeId, Reach

LEARNER = NodeId("learner")
rates = st.sampled_from((0.0, 0.0, 0.1, 0.3, 1.0, 1.0, 1.0, 2.5, 10.0)).map(lambda r: r * 1e6)


@st.composite
def fleets(draw, most=40):
    count = draw(st.integers(1, most))
    names = Random(draw(st.integers(0, 10_000)))
    return tuple(
        Seat(
            node=NodeId(f"node-{names.getrandbits(48):x}"),
            uplink_bytes_per_s=draw(rates),
            downlink_bytes_per_s=draw(rates),
            reach=draw(st.sampled_from(Reach)),
        )
        for _ in range(count)
    )


def path(forest, node, index):
    """From `node` up to the learner."""
    nodes = [node]
    while nodes[-1] != LEARNER:
        assert len(nodes) <= len(forest.nodes), "a circle"
        nodes.append(forest.parent_of(nodes[-1], index))
    return nodes


def one_chunk_of_each_stripe(forest):
    return [forest.deals.index(stripe) for stripe in range(len(forest.stripes))]


@settings(max_examples=60, deadline=None)
@given(fleets())
def test_every_node_is_reached_in_every_stripe(seats):
    forest = plan(seats, LEARNER)
    for index in one_chunk_of_each_stripe(forest):
        for seat in seats:
            above = path(forest, seat.node, index)
            assert len(above) - 1 <= forest.depth
            assert seat.node in forest.children_of(above[1], index)


@settings(max_examples=60, deadline=None)
@given(fleets())
def test_a_node_forwards_in_one_stripe_at_most(seats):
    forest = plan(seats, LEARNER)
    for seat in seats:
        inner = [i for i in one_chunk_of_each_stripe(forest) if forest.children_of(seat.node, i)]
        assert len(inner) <= 1


@settings(max_examples=60, deadline=None)
@given(fleets())
def test_no_uplink_is_planned_beyond_what_it_counts_for(seats):
    forest = plan(seats, LEARNER)
    if len(seats) == 1:
        return
    for index in one_chunk_of_each_stripe(forest):
        share = forest.shares[forest.stripe_of(index)]
        for node, uplink in zip(forest.nodes, forest.uplinks, strict=True):
            sent = len(forest.children_of(node, index)) * share * forest.rate
            assert sent <= uplink * 1.000001
        assert len(forest.children_of(LEARNER, index)) == 1, "one copy in all"


@settings(max_examples=60, deadline=None)
@given(fleets())
def test_chunks_are_dealt_out_in_proportion_and_evenly(seats):
    forest = plan(seats, LEARNER)
    count = len(forest.deals)
    for stripe, share in enumerate(forest.shares):
        for end in (count // 3, count // 2, count):
            dealt = forest.deals[:end].count(stripe)
            assert abs(dealt - share * end) <= 2.5


@settings(max_examples=60, deadline=None)
@given(fleets(), st.randoms())
def test_the_plan_does_not_depend_on_the_order_of_the_seats(seats, random):
    mixed = list(seats)
    random.shuffle(mixed)
    one, other = plan(seats, LEARNER), plan(tuple(mixed), LEARNER)
    assert (one.nodes, one.deals) == (other.nodes, other.deals)
    assert [s.parents for s in one.stripes] == [s.parents for s in other.stripes]


@settings(max_examples=60, deadline=None)
@given(fleets(), st.data())
def test_losing_any_node_moves_its_children_only_and_serves_everybody(seats, data):
    forest = plan(seats, LEARNER)
    lost = {data.draw(st.sampled_from(forest.nodes))}
    if data.draw(st.booleans()):
        lost.add(data.draw(st.sampled_from(forest.nodes)))
    for index in one_chunk_of_each_stripe(forest):
        sources = {}
        for node in set(forest.nodes) - lost:
            source = forest.source_of(node, index, lambda peer: peer not in lost)
            parent = forest.parent_of(node, index)
            assert source not in lost | {node}
            assert source == parent or parent in lost
            sources[node] = source
        for node in sources:
            steps = 0
            while node != LEARNER:
                node = sources[node]
                steps += 1
                assert steps <= len(forest.nodes), "some wait for one another in a circle"


@settings(max_examples=60, deadline=None)
@given(fleets(), st.integers(-1, 10_000))
def test_the_alternate_of_a_chunk_depends_on_names_alone(seats, index):
    one = plan(seats, LEARNER)
    alike = tuple(Seat(node=seat.node) for seat in seats)
    other = plan(alike, LEARNER)
    found = other.alternate_of(index, lambda peer: True)
    assert found in other
    if found in [one.nodes[at] for at in one._inner]:
        assert one.alternate_of(index, lambda peer: True) == found


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 300))
def test_a_fleet_of_equal_lines_is_planned_near_its_bound(count):
    seats = tuple(
        Seat(node=NodeId(f"n{i}"), uplink_bytes_per_s=1e6, downlink_bytes_per_s=1e6)
        for i in range(count)
    )
    assert plan(seats, LEARNER).rate >= 0.9e6
