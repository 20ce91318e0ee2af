"""How a node judges its own reach, and what it does where nobody can dial it."""

import itertools
from random import Random

import pytest

from echo2_mesh import limits
from echo2_mesh.core import reach as reach_module
from echo2_mesh.core.reach import ReachMachine, scope_of
from echo2_mesh.core.reaching import (
    Answered,
    AskBack,
    Link,
    Looked,
    NotReserved,
    Punch,
    PunchEnded,
    Reserve,
    Reserved,
    Retire,
    Unanswered,
    Way,
)
from echo2_mesh.wire.types import NodeId, Reach

LEARNER, A, B, C = (NodeId(name) for name in ("learner", "aaaa", "bbbb", "cccc"))
SEEN = "/ip4/203.0.113.21/tcp/40001"


def dialled(node, ip="203.0.113.10"):
    return Link(node=node, way=Way.DIRECT, dialled=True, ip=ip, port=4001)


def inbound(node, ip="203.0.113.30"):
    return Link(node=node, way=Way.DIRECT, dialled=False, ip=ip, port=50000)


def relayed(node, *, by_us=False):
    return Link(node=node, way=Way.RELAYED, dialled=by_us)


def punched(node):
    return Link(node=node, way=Way.PUNCHED, dialled=False, ip="203.0.113.22", port=40002)


def machine(*, listening=True):
    return ReachMachine(LEARNER, Random(1), listening=listening)


def look(m, now_s, *links, public=(), own_ips=()):
    return m.handle(Looked(links=links, public=frozenset(public), own_ips=own_ips), now_s)


def behind_a_nat(*links):
    """A machine that was told by the learner that nobody is at its address."""
    m = machine()
    assert AskBack(node=LEARNER) in look(m, 0.0, dialled(LEARNER), *links)
    m.handle(Answered(node=LEARNER, observed=SEEN, kept=True, foreign=True), 1.0)
    assert m.reach is Reach.RELAYED
    return m


@pytest.mark.parametrize(
    ("ip", "scope"),
    [
        ("127.0.0.1", 0),
        ("::1", 0),
        ("10.77.1.2", 1),
        ("192.168.1.5", 1),
        ("100.64.3.4", 1),
        ("fe80::1%eth0", 1),
        ("fd00::5", 1),
        ("203.0.113.9", 2),
        ("2001:db8::1", 2),
        ("", -1),
        ("example.org", -1),
    ],
)
def test_scopes(ip, scope):
    assert scope_of(ip) == scope


def test_on_loopback_whoever_was_dialled_is_direct_at_once():
    m = machine()
    assert m.reach is Reach.UNKNOWN
    assert look(m, 0.0, inbound(A, "127.0.0.1")) == ()
    assert m.reach is Reach.DIRECT
    assert "aaaa" in m.reason


def test_a_neighbour_of_the_household_is_no_proof_to_the_internet():
    m = machine()
    effects = look(m, 0.0, dialled(LEARNER), inbound(A, "10.77.1.9"))
    assert effects == (AskBack(node=LEARNER),)
    assert m.reach is Reach.UNKNOWN
    look(m, 0.5, dialled(LEARNER), inbound(B, "203.0.113.30"))
    assert m.reach is Reach.DIRECT


def test_a_successful_dial_back_is_proof_for_a_while_and_is_announced():
    m = machine()
    look(m, 0.0, dialled(LEARNER))
    m.handle(Answered(node=LEARNER, observed=SEEN, reached=("/ip4/203.0.113.21/tcp/4001",)), 1.0)
    assert m.reach is Reach.DIRECT
    assert m.reached == ("/ip4/203.0.113.21/tcp/4001",)
    assert m.observed_ip == "203.0.113.21"
    assert "/ip4/203.0.113.21/tcp/4001" in m.reason
    assert look(m, reach_module.PROOF_S, dialled(LEARNER)) == ()
    assert look(m, reach_module.PROOF_S + 2, dialled(LEARNER)) == (AskBack(node=LEARNER),)


def test_two_denials_are_wanted_unless_there_is_one_neighbour_or_a_nat():
    m = machine()
    links = (dialled(LEARNER), dialled(A))
    (first,) = look(m, 0.0, *links)
    m.handle(Answered(node=first.node, observed=SEEN), 1.0)
    assert m.reach is Reach.UNKNOWN
    (second,) = look(m, 1.5, *links)
    assert second.node != first.node
    m.handle(Answered(node=second.node, observed=SEEN), 2.0)
    assert m.reach is Reach.RELAYED

    alone = machine()
    look(alone, 0.0, dialled(LEARNER))
    alone.handle(Answered(node=LEARNER, observed=SEEN), 1.0)
    look(alone, 1.0 + reach_module.LONE_DENIAL_S, dialled(LEARNER))
    assert alone.reach is Reach.RELAYED

    assert behind_a_nat().reach is Reach.RELAYED


def test_nobody_is_asked_twice_within_the_limit_that_they_keep():
    m = machine()
    assert look(m, 0.0, dialled(LEARNER)) == (AskBack(node=LEARNER),)
    assert look(m, 0.5, dialled(LEARNER)) == (), "one question at a time"
    m.handle(Unanswered(node=LEARNER), 5.0)
    assert look(m, limits.DIAL_BACK_INTERVAL_S, dialled(LEARNER)) == ()
    assert look(m, limits.DIAL_BACK_INTERVAL_S + 2, dialled(LEARNER)) == (AskBack(node=LEARNER),)


def test_a_node_that_only_dials_says_so_and_reserves_at_once():
    m = machine(listening=False)
    effects = look(m, 0.0, dialled(LEARNER))
    assert set(effects) == {AskBack(node=LEARNER), Reserve(relay=LEARNER)}
    assert m.reach is Reach.RELAYED
    assert "only dials out" in m.reason
    look(m, 0.5, dialled(LEARNER), inbound(A, "203.0.113.99"))
    assert m.reach is Reach.RELAYED, "there is no listener that could have been dialled"


def test_who_is_most_likely_behind_a_nat_reserves_while_the_dial_back_is_out():
    m = machine()
    effects = look(m, 0.0, dialled(LEARNER), own_ips=("10.77.1.2",))
    assert set(effects) == {AskBack(node=LEARNER), Reserve(relay=LEARNER)}
    assert m.reach is Reach.UNKNOWN
    for own_ips in (("10.77.1.2", "203.0.113.9"), ()):
        assert look(machine(), 0.0, dialled(LEARNER), own_ips=own_ips) == (AskBack(node=LEARNER),)
    lan = look(machine(), 0.0, dialled(LEARNER, "10.77.1.1"), own_ips=("10.77.1.2",))
    assert lan == (AskBack(node=LEARNER),)


def test_two_relays_the_learner_last_and_another_when_one_dies():
    m = behind_a_nat()
    home = "10.77.1.9"
    links = (dialled(LEARNER), dialled(A), inbound(B, home), inbound(C, home))
    effects = look(m, 1.5, *links, public={B})
    assert set(effects) == {Reserve(relay=A), Reserve(relay=B)}, "C is not known to be public"
    for relay in (A, B):
        m.handle(Reserved(relay=relay, lasts_s=600.0), 2.0)
    assert m.relays() == (A, B)
    assert look(m, 3.0, *links, public={B}) == ()
    # A dies: its link is gone.
    left = (dialled(LEARNER), inbound(B, home), inbound(C, home))
    assert look(m, 4.0, *left, public={B}) == (Reserve(relay=LEARNER),)
    assert m.relays() == (B,)
    m.handle(Reserved(relay=LEARNER, lasts_s=600.0), 5.0)
    assert m.relays() == (B, LEARNER)


def test_places_are_prolonged_at_half_their_time():
    m = behind_a_nat()
    look(m, 1.5, dialled(LEARNER))
    m.handle(Reserved(relay=LEARNER, lasts_s=100.0), 2.0)
    assert look(m, 51.0, dialled(LEARNER)) == ()
    assert look(m, 52.0, dialled(LEARNER)) == (Reserve(relay=LEARNER),)
    assert look(m, 53.0, dialled(LEARNER)) == ()
    m.handle(Reserved(relay=LEARNER, lasts_s=100.0), 54.0)
    assert m.relays() == (LEARNER,)


def test_a_relay_that_refuses_is_asked_again_ever_later_and_named():
    m = behind_a_nat()
    now_s, pauses = 1.5, []
    for _ in range(5):
        while Reserve(relay=LEARNER) not in look(m, now_s, dialled(LEARNER)):
            now_s += 0.5
        m.handle(NotReserved(relay=LEARNER, why="it is full"), now_s)
        pauses.append(now_s)
    gaps = [later - sooner for sooner, later in itertools.pairwise(pauses)]
    assert gaps[-1] > 3 * gaps[0]
    assert "it is full" in m.reason


def test_a_relayed_connection_is_punched_by_whoever_was_reached_a_bounded_number_of_times():
    m = behind_a_nat()
    links = (dialled(LEARNER), relayed(A), relayed(B, by_us=True))
    tries, now_s = 0, 2.0
    while now_s < 600.0:
        for effect in look(m, now_s, *links):
            if isinstance(effect, Punch):
                assert effect.node == A, "the one that dialled waits for the other to begin"
                tries += 1
                m.handle(PunchEnded(node=A, why="no answer"), now_s)
            if isinstance(effect, Reserve):
                m.handle(Reserved(relay=effect.relay, lasts_s=600.0), now_s)
        now_s += 0.5
    assert tries == limits.PUNCH_TRIES_MAX
    assert m.reach is Reach.RELAYED
    assert "punching failed 3 times" in m.reason
    assert "no answer" in m.reason


def test_a_punched_connection_makes_the_class_and_retires_the_relayed_one():
    m = behind_a_nat()
    assert Punch(node=A) in look(m, 2.0, dialled(LEARNER), relayed(A))
    m.handle(PunchEnded(node=A), 3.0)
    both = (dialled(LEARNER), relayed(A), punched(A))
    effects = look(m, 3.0, *both)
    assert Retire(node=A) not in effects
    assert m.reach is Reach.PUNCHED
    assert "opening from both sides works" in m.reason
    assert Retire(node=A) in look(m, 3.0 + reach_module.GRACE_S, *both)
    look(m, 20.0, dialled(LEARNER), punched(A))
    look(m, 30.0, dialled(LEARNER))
    assert m.reach is Reach.PUNCHED, "believed for a while after it ended"
    look(m, 31.0 + reach_module.PROOF_S, dialled(LEARNER))
    assert m.reach is Reach.RELAYED


def test_a_nat_that_changes_ports_is_said():
    m = machine()
    look(m, 0.0, dialled(LEARNER))
    m.handle(Answered(node=LEARNER, observed=SEEN, kept=False, foreign=True), 1.0)
    assert "changes ports" in m.reason


def test_an_answer_without_a_try_tells_the_address_and_denies_nothing_but_a_nat():
    m = machine()
    look(m, 0.0, dialled(LEARNER))
    m.handle(Answered(node=LEARNER, observed=SEEN, tried=False), 1.0)
    assert (m.observed_ip, m.reach) == ("203.0.113.21", Reach.UNKNOWN)
    look(m, 1.0 + reach_module.LONE_DENIAL_S, dialled(LEARNER))
    assert m.reach is Reach.UNKNOWN
    m.handle(Answered(node=LEARNER, observed=SEEN, tried=False, foreign=True), 70.0)
    assert m.reach is Reach.RELAYED


def test_a_useless_answer_changes_nothing():
    m = machine()
    look(m, 0.0, dialled(LEARNER))
    m.handle(Answered(node=LEARNER, observed=""), 1.0)
    assert m.reach is Reach.UNKNOWN
    assert m.observed_ip is None
    m.handle(Answered(node=LEARNER, observed="nonsense"), 2.0)
    assert m.observed_ip is None
