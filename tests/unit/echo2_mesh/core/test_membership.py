"""The member table: who stands how, whom it wants dialled, and what it refuses to believe."""

from random import Random

from echo2_mesh import limits
from echo2_mesh.core.machine import Arm, Woke
from echo2_mesh.core.members import (
    AddressesKnown,
    Changed,
    Connected,
    Dial,
    DialFailed,
    Disconnected,
    Forget,
    GoodbyeHeard,
    Greet,
    HeartbeatHeard,
    Standing,
)
from echo2_mesh.core.membership import (
    CONTACT_FAILURES_MAX,
    FORGET_AFTER_S,
    NEIGHBOURS_WANTED,
    Membership,
    heartbeat_interval_s,
)
from echo2_mesh.wire.messages import Heartbeat
from echo2_mesh.wire.types import NodeId, Reach, Role

ME, LEARNER = NodeId("me"), NodeId("learner")


def table(**kwargs):
    return Membership(ME, LEARNER, Random(1), **kwargs)


def beat(node="a", *, incarnation=1, sequence=1, addresses=(), reach=Reach.UNKNOWN):
    return HeartbeatHeard(
        node=NodeId(node),
        heartbeat=Heartbeat(
            role=Role.ACTOR,
            state="generating",
            incarnation_unix_ms=incarnation,
            sequence=sequence,
            addresses=addresses,
            reach=reach,
        ),
        raw=f"{node}{incarnation}.{sequence}".encode(),
    )


def known(node, place="/ip4/10.0.0.1/tcp/1"):
    return AddressesKnown(node=NodeId(node), addresses=(place,))


def sweep(machine, now_s):
    return machine.handle(Woke(key="sweep"), now_s)


def standing(machine, node="a", now_s=0.0):
    return next(m.standing for m in machine.members(now_s) if m.node == node)


def dialled(effects):
    return [effect.node for effect in effects if isinstance(effect, Dial)]


def test_a_silent_member_is_suspected_then_gone_then_forgotten():
    machine = table()
    assert Changed(node=NodeId("a"), standing=Standing.UP) in machine.handle(beat(), 0.0)
    sweep(machine, limits.SUSPECT_AFTER_S)
    assert standing(machine) is Standing.UP
    sweep(machine, limits.SUSPECT_AFTER_S + 0.1)
    assert standing(machine) is Standing.SUSPECT
    sweep(machine, limits.GONE_AFTER_S + 0.1)
    assert standing(machine) is Standing.GONE
    assert Forget(node=NodeId("a")) in sweep(machine, FORGET_AFTER_S + 0.1)
    assert machine.members(0.0) == ()


def test_a_suspect_that_beats_again_is_up():
    machine = table()
    machine.handle(beat(), 0.0)
    sweep(machine, limits.SUSPECT_AFTER_S + 0.1)
    machine.handle(beat(sequence=2), limits.SUSPECT_AFTER_S + 0.2)
    assert standing(machine) is Standing.UP


def test_an_older_or_repeated_heartbeat_changes_nothing():
    machine = table()
    machine.handle(beat(incarnation=2, sequence=5), 0.0)
    sweep(machine, limits.GONE_AFTER_S + 0.1)
    for old in (beat(incarnation=2, sequence=5), beat(incarnation=1, sequence=99)):
        machine.handle(old, limits.GONE_AFTER_S + 0.2)
        assert standing(machine) is Standing.GONE
    assert machine.replays == 2


def test_a_newer_incarnation_replaces_the_old_one_whatever_its_sequence():
    machine = table()
    machine.handle(beat(incarnation=1, sequence=500, addresses=("old",)), 0.0)
    machine.handle(beat(incarnation=2, sequence=1, addresses=("new",)), 1.0)
    assert machine.addresses_of(NodeId("a")) == ("new",)
    assert machine.members(1.0)[0].heartbeat.incarnation_unix_ms == 2


def test_goodbye_ends_an_incarnation_and_not_the_next_one():
    machine = table()
    machine.handle(beat(incarnation=1, sequence=1), 0.0)
    machine.handle(GoodbyeHeard(node=NodeId("a"), incarnation_unix_ms=1), 1.0)
    assert standing(machine) is Standing.GONE
    machine.handle(beat(incarnation=1, sequence=2), 1.1)
    assert standing(machine) is Standing.GONE, "a late heartbeat does not raise the dead"
    machine.handle(beat(incarnation=2, sequence=1), 2.0)
    assert standing(machine) is Standing.UP
    machine.handle(GoodbyeHeard(node=NodeId("a"), incarnation_unix_ms=1), 3.0)
    assert standing(machine) is Standing.UP, "a replayed goodbye ends nobody"


def test_the_learner_is_dialled_even_when_there_are_neighbours_enough():
    machine = table()
    for i in range(NEIGHBOURS_WANTED):
        machine.handle(Connected(node=NodeId(f"n{i}")), 0.0)
    assert dialled(machine.handle(known("other"), 0.0)) == []
    assert dialled(machine.handle(known("learner"), 0.0)) == [LEARNER]


def test_no_more_neighbours_are_dialled_than_wanted():
    machine = table()
    effects = [e for i in range(30) for e in machine.handle(known(f"n{i}"), 0.0)]
    assert len(dialled(effects)) == NEIGHBOURS_WANTED


def test_members_that_only_a_relay_leads_to_come_after_those_that_can_be_dialled():
    machine = table()
    places = [f"/ip4/10.0.0.{number}/tcp/1" for number in range(2 * NEIGHBOURS_WANTED)]
    ranks = {}
    for number, place in enumerate(places):
        reach = Reach.RELAYED if number % 2 else Reach.DIRECT
        ranks[NodeId(f"n{number}")] = reach
        machine.handle(Connected(node=NodeId(f"n{number}")), 0.0)
        machine.handle(beat(f"n{number}", addresses=(place,), reach=reach), 0.0)
    for node in ranks:
        machine.handle(Disconnected(node=node), 0.0)
    chosen = dialled(sweep(machine, 5.0))
    assert len(chosen) == NEIGHBOURS_WANTED
    assert {ranks[node] for node in chosen} == {Reach.DIRECT}


def test_a_failed_dial_is_repeated_ever_more_rarely_and_the_learner_never_given_up():
    machine = table()
    now_s, pauses = 0.0, []
    assert dialled(machine.handle(known("learner"), now_s)) == [LEARNER]
    for _ in range(12):
        effects = machine.handle(DialFailed(node=LEARNER), now_s)
        since_s = now_s
        while not dialled(effects):
            now_s += 0.1
            effects = sweep(machine, now_s)
        pauses.append(now_s - since_s)
    assert pauses[0] < 1.0 < pauses[-1] < 10.0


def test_an_address_nobody_answers_at_is_dropped_after_some_tries():
    machine = table()
    machine.handle(known("ghost"), 0.0)
    now_s = 0.0
    for _ in range(CONTACT_FAILURES_MAX):
        machine.handle(DialFailed(node=NodeId("ghost")), now_s)
        now_s += 60.0
        effects = sweep(machine, now_s)
    if NodeId("ghost") in dialled(effects):
        machine.handle(DialFailed(node=NodeId("ghost")), now_s)
        effects = sweep(machine, now_s)
    assert Forget(node=NodeId("ghost")) in effects
    assert machine.addresses_of(NodeId("ghost")) == ()


def test_a_new_address_ends_the_wait_for_the_next_try():
    machine = table()
    machine.handle(known("learner"), 0.0)
    for _ in range(5):
        machine.handle(DialFailed(node=LEARNER), 0.0)
    effects = machine.handle(known("learner", "/ip4/10.0.0.1/tcp/2"), 0.01)
    assert dialled(effects) == [LEARNER]
    assert machine.addresses_of(LEARNER)[0] == "/ip4/10.0.0.1/tcp/2"


def test_each_new_connection_is_greeted_once():
    machine = table()
    assert Greet(node=NodeId("a")) in machine.handle(Connected(node=NodeId("a")), 0.0)
    assert machine.handle(Connected(node=NodeId("a")), 0.1) == ()
    machine.handle(Disconnected(node=NodeId("a")), 0.2)
    assert Greet(node=NodeId("a")) in machine.handle(Connected(node=NodeId("a")), 0.3)


def test_a_lost_neighbour_with_an_address_is_dialled_again():
    machine = table()
    machine.handle(beat("learner", addresses=("x",)), 0.0)
    machine.handle(Connected(node=LEARNER), 0.0)
    machine.handle(Disconnected(node=LEARNER), 1.0)
    assert dialled(sweep(machine, 2.0)) == [LEARNER]


def test_a_full_table_keeps_the_living_and_makes_room_for_the_learner():
    machine = table(members_max=3)
    for name in "abc":
        machine.handle(beat(name), 0.0)
    machine.handle(beat("d"), 0.1)
    assert {m.node for m in machine.members(0.1)} == {"a", "b", "c"}
    machine.handle(beat("learner"), 0.2)
    assert LEARNER in {m.node for m in machine.members(0.2)}
    machine = table(members_max=3)
    for name in "abc":
        machine.handle(beat(name), 0.0)
    sweep(machine, limits.GONE_AFTER_S + 1.0)
    machine.handle(beat("d"), limits.GONE_AFTER_S + 1.0)
    assert "d" in {m.node for m in machine.members(0.0)}


def test_this_node_is_never_its_own_member():
    machine = table()
    machine.handle(beat("me"), 0.0)
    machine.handle(known("me"), 0.0)
    assert machine.members(0.0) == ()


def test_only_members_that_are_up_are_passed_on():
    machine = table()
    machine.handle(beat("a"), 0.0)
    machine.handle(beat("b"), 5.0)
    sweep(machine, limits.SUSPECT_AFTER_S + 0.5)
    assert machine.raw_heartbeats(10) == (b"b1.1",)


def test_a_large_fleet_beats_more_slowly_and_is_suspected_later():
    assert heartbeat_interval_s(10) == limits.HEARTBEAT_INTERVAL_S
    assert heartbeat_interval_s(1000) == 40.0
    machine = table()
    for i in range(1000):
        machine.handle(beat(f"n{i}"), 0.0)
    sweep(machine, limits.GONE_AFTER_S + 1.0)
    assert standing(machine, "n7") is Standing.UP


def test_the_sweep_arms_its_next_one():
    assert any(isinstance(effect, Arm) for effect in sweep(table(), 3.0))


def test_a_full_table_has_a_place_for_who_is_connected():
    machine = table(members_max=4)
    for number in range(4):
        machine.handle(beat(f"invented {number}"), now_s=0.1 * number)
    effects = machine.handle(Connected(node=NodeId("honest")), now_s=1.0)
    assert Greet(node=NodeId("honest")) in effects
    machine.handle(beat("honest"), now_s=1.1)
    assert "honest" in {member.node for member in machine.members(1.2)}
    machine.handle(beat("one more"), now_s=1.3)
    assert "one more" not in {member.node for member in machine.members(1.4)}


def test_what_a_node_signed_is_not_crowded_out_by_what_others_say_of_it():
    machine = table()
    machine.handle(beat(addresses=("/ip4/10.0.0.1/tcp/1",)), now_s=0.0)
    lies = tuple(f"/ip4/192.0.2.{n}/tcp/1" for n in range(limits.ADDRESSES_MAX))
    machine.handle(AddressesKnown(node=NodeId("a"), addresses=lies), now_s=1.0)
    addresses = machine.addresses_of(NodeId("a"))
    assert "/ip4/10.0.0.1/tcp/1" in addresses[:2]
    assert len(addresses) == limits.ADDRESSES_MAX


def test_long_heartbeats_of_many_do_not_outgrow_an_answer_and_the_learners_is_in_it():
    machine = table()
    machine.handle(beat("learner"), now_s=0.0)
    for number in range(limits.CATCH_UP_HEARTBEATS_MAX):
        long = beat(f"long {number}")
        padding = bytes(limits.HEARTBEAT_SIZE_BYTES_MAX)
        machine.handle(
            HeartbeatHeard(node=long.node, heartbeat=long.heartbeat, raw=padding), now_s=1.0
        )
    raws = machine.raw_heartbeats(limits.CATCH_UP_HEARTBEATS_MAX)
    assert raws[0] == b"learner1.1"
    assert sum(map(len, raws)) <= limits.CAUGHT_UP_SIZE_BYTES_MAX
