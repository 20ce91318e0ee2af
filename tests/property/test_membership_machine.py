"""Membership under any order of events: one order of heartbeats, bounded dials, bounded table."""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from echo2_mesh.core.machine import Woke
from echo2_mesh.core.members import (
    AddressesKnown,
    Connected,
    Dial,
    DialFailed,
    Disconnected,
    Forget,
    GoodbyeHeard,
    HeartbeatHeard,
    Standing,
)
from echo2_mesh.core.membership import NEIGHBOURS_WANTED, Membership
from echo2_mesh.wire.messages import Heartbeat
from echo2_mesh.wire.types import NodeId, Role

ME, LEARNER = NodeId("me"), NodeId("learner")
NODES = [ME, LEARNER, *(NodeId(f"n{i}") for i in range(20))]
MEMBERS_MAX = 16
nodes = st.sampled_from(NODES)


class MembershipWorld(RuleBasedStateMachine):
    """Events as gossip and a carrier may bring them, and a model that keeps the simple facts."""

    @initialize(seed=st.integers(0, 1000))
    def begin(self, seed):
        self.machine = Membership(ME, LEARNER, Random(seed), members_max=MEMBERS_MAX)
        self.now_s = 0.0
        self.connected = set()
        self.dialling = set()
        self.newest = {}

    def tell(self, event):
        effects = self.machine.handle(event, self.now_s)
        for effect in effects:
            if isinstance(effect, Dial):
                assert effect.node != ME
                assert effect.node not in self.connected | self.dialling
                assert effect.addresses
                self.dialling.add(effect.node)
            if isinstance(effect, Forget):
                assert effect.node not in self.connected
                self.newest.pop(effect.node, None)
        if any(isinstance(effect, Dial) and effect.node != LEARNER for effect in effects):
            assert len((self.connected | self.dialling) - {LEARNER}) <= NEIGHBOURS_WANTED

    @rule(
        node=nodes,
        incarnation=st.integers(1, 4),
        sequence=st.integers(0, 20),
        addresses=st.sampled_from([(), ("x",), ("y", "z")]),
    )
    def a_heartbeat_is_heard(self, node, incarnation, sequence, addresses):
        heartbeat = Heartbeat(
            role=Role.ACTOR,
            state="idle",
            incarnation_unix_ms=incarnation,
            sequence=sequence,
            addresses=addresses,
        )
        self.tell(HeartbeatHeard(node=node, heartbeat=heartbeat))

    @rule(node=nodes, incarnation=st.integers(0, 4))
    def a_goodbye_is_heard(self, node, incarnation):
        self.tell(GoodbyeHeard(node=node, incarnation_unix_ms=incarnation))

    @rule(node=nodes, place=st.sampled_from("abcdef"))
    def an_address_is_known(self, node, place):
        self.tell(AddressesKnown(node=node, addresses=(place,)))

    @rule(node=st.sampled_from(NODES[1:6]))
    def a_peer_connects(self, node):
        self.dialling.discard(node)
        self.connected.add(node)
        self.tell(Connected(node=node))

    @rule(node=st.sampled_from(NODES[1:6]))
    def a_peer_disconnects(self, node):
        if node in self.connected:
            self.connected.discard(node)
            self.tell(Disconnected(node=node))

    @rule(data=st.data())
    def a_dial_fails(self, data):
        if self.dialling:
            node = data.draw(st.sampled_from(sorted(self.dialling)))
            self.dialling.discard(node)
            self.tell(DialFailed(node=node))

    @rule(seconds=st.floats(0.0, 700.0))
    def time_passes(self, seconds):
        self.now_s += seconds
        self.tell(Woke(key="sweep"))

    @invariant()
    def the_table_is_bounded_and_heartbeats_never_go_back(self):
        members = self.machine.members(self.now_s)
        assert len(members) <= MEMBERS_MAX
        present = {member.node for member in members}
        for node in [n for n in self.newest if n not in present]:
            del self.newest[node]
        for member in members:
            order = (member.heartbeat.incarnation_unix_ms, member.heartbeat.sequence)
            assert order >= self.newest.get(member.node, order)
            self.newest[member.node] = order
            assert member.node != ME
            assert member.standing in Standing
            assert member.seen_s_ago >= 0.0

    def teardown(self):
        """Whatever happened: a learner with a known address is dialled before long."""
        if not hasattr(self, "machine"):
            return
        for node in sorted(self.dialling):
            self.dialling.discard(node)
            self.tell(DialFailed(node=node))
        self.now_s += 60.0
        if LEARNER in self.connected:
            return
        self.dialling.discard(LEARNER)
        self.tell(DialFailed(node=LEARNER))
        self.tell(AddressesKnown(node=LEARNER, addresses=("home",)))
        for _ in range(30):
            self.now_s += 0.5
            self.tell(Woke(key="sweep"))
        assert LEARNER in self.dialling


TestMembershipWorld = MembershipWorld.TestCase
TestMembershipWorld.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
