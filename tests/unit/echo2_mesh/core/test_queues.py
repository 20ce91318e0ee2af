"""The tail of a version: what waits for a slower parent is asked of those who have time."""

from collections import Counter
from random import Random

import pytest

from echo2_mesh.core.fetch import Fetch
from echo2_mesh.core.fetching import (
    Announced,
    Ask,
    Cancel,
    ChunkArrived,
    ChunkRefused,
    Fault,
    ManifestHere,
    PeerHas,
    Ready,
    Seated,
)
from echo2_mesh.core.forest import Seat, plan
from echo2_mesh.core.machine import Woke
from echo2_mesh.core.queues import LATE_PASS_S, STEALS_MAX, STRAYS_OF_ONE_MAX
from echo2_mesh.wire.messages import ChunkRef
from echo2_mesh.wire.types import ChunkKind, Digest, NodeId, PolicyVersion, Reach

LEARNER, ME = NodeId("learner"), NodeId("me")
PARENTS = [NodeId(f"peer-{i}") for i in range(7)]
SEATS = tuple(Seat(node=node) for node in (ME, *PARENTS))
FOREST = plan(SEATS, LEARNER)
MANIFEST = ChunkRef(kind=ChunkKind.MANIFEST, digest=Digest(b"m" * 32), size_bytes=100)
SLOW, *FAST = PARENTS
SOON_S = 0.1
"""When the fast have delivered all but their last chunk."""


def ref(index):
    digest = Digest(index.to_bytes(2, "big") * 16)
    return ChunkRef(kind=ChunkKind.FULL, digest=digest, size_bytes=100)


def parent_of(index):
    return FOREST.parent_of(ME, index)


class Tail:
    """A node that fetches `count` chunks, told by hand what comes; every effect is kept.

    `asks` are the open ones by index; `stolen` those that were asked past their parents.
    """

    def __init__(self, count, seats=SEATS):
        assert plan(seats, LEARNER).deals == FOREST.deals
        self.count = count
        self.machine = Fetch(LEARNER, Random(1), ME)
        self.effects, self.asks, self.stolen = [], {}, []
        self.handle(Seated(seats=seats), 0.0)
        announced = Announced(incarnation_unix_ms=1, version=PolicyVersion(0), manifest=MANIFEST)
        self.handle(announced, 0.0)
        refs = tuple(ref(index) for index in range(count))
        here = ManifestHere(manifest=MANIFEST.digest, refs=refs, held=frozenset())
        self.handle(here, 0.0)

    def handle(self, event, now_s):
        effects = self.machine.handle(event, now_s)
        self.effects += effects
        for effect in effects:
            match effect:
                case Ask(ref=asked):
                    index = int.from_bytes(asked.digest[:2], "big")
                    assert index not in self.asks, "in flight from two peers"
                    self.asks[index] = effect
                    if effect.peer != parent_of(index):
                        self.stolen.append(effect)
                case Cancel(peer=peer, digest=digest):
                    index = int.from_bytes(digest[:2], "big")
                    assert self.asks.pop(index).peer == peer
        return effects

    def of(self, peer):
        """What `peer` is being asked for, in the order of asking."""
        return [index for index, ask in self.asks.items() if ask.peer == peer]

    def left_of(self, parent):
        """What is missing that is to come from `parent`."""
        held = self.machine.target.held()
        return [i for i in range(self.count) if parent_of(i) == parent and i not in held]

    def has(self, peer, indices, now_s):
        indices = frozenset(indices)
        return self.handle(PeerHas(peer=peer, manifest=MANIFEST.digest, indices=indices), now_s)

    def comes(self, index, now_s):
        ask = self.asks.pop(index)
        return self.handle(ChunkArrived(peer=ask.peer, digest=ask.ref.digest), now_s)

    def refused(self, index, fault, now_s):
        ask = self.asks.pop(index)
        event = ChunkRefused(peer=ask.peer, digest=ask.ref.digest, fault=fault)
        return self.handle(event, now_s)

    def deliver(self, parent, now_s, *, leave=0):
        """`parent` sends all but the last `leave` of its chunks."""
        while len(self.left_of(parent)) > leave:
            self.comes(self.of(parent)[0], now_s)

    def stolen_now(self):
        return {index: ask for index, ask in self.asks.items() if ask.peer != parent_of(index)}


def everybody_busy(count, pace_s, *, slow=(SLOW,), seats=SEATS):
    """All have one chunk left at least; each of `slow` has sent one, after `pace_s`."""
    tail = Tail(count, seats)
    for parent in (LEARNER, *PARENTS):
        if parent not in slow:
            tail.deliver(parent, SOON_S, leave=1)
    for parent in slow:
        tail.comes(tail.of(parent)[0], pace_s)
    assert not tail.stolen
    return tail


def end(tail, parents, now_s):
    for parent in parents:
        tail.deliver(parent, now_s)


def test_what_waits_for_a_slow_parent_is_asked_of_those_who_are_done_and_have_it():
    tail = everybody_busy(64, 0.6)
    end(tail, (LEARNER, *FAST), 0.7)
    assert not tail.stolen, "nobody is known to have it, and it comes soon"
    waiting, flying = tail.left_of(SLOW), tail.of(SLOW)
    assert len(waiting) == 7
    assert len(flying) == 3
    for helper in FAST[:3]:
        effects = tail.has(helper, range(64), 0.8)
        asks = [effect for effect in effects if isinstance(effect, Ask)]
        assert [ask.peer for ask in asks if ask.peer != SLOW] == [helper] * STRAYS_OF_ONE_MAX
    assert {ask.wait_s for ask in tail.stolen} == {0.0}, "it has them already"
    stolen = sorted(tail.stolen_now())
    assert stolen == waiting[1:], "all but the one that the slow parent is sending"
    assert tail.of(SLOW) == waiting[:1] == flying[:1]


def test_the_last_in_the_queue_are_taken_first():
    tail = everybody_busy(64, 0.6)
    end(tail, (LEARNER, *FAST), 0.7)
    tail.has(FAST[0], range(64), 0.8)
    assert sorted(tail.stolen_now()) == tail.left_of(SLOW)[-STRAYS_OF_ONE_MAX:]


def test_a_stolen_chunk_in_flight_is_called_off_before_it_is_asked_for():
    tail = everybody_busy(64, 0.6)
    end(tail, (LEARNER, *FAST), 0.7)
    flying = tail.of(SLOW)
    digests = {ref(index).digest for index in flying}
    told = []
    for helper in FAST[:3]:
        for effect in tail.has(helper, range(64), 0.8):
            match effect:
                case Cancel(peer=peer, digest=digest):
                    told.append(("cancel", peer, digest))
                case Ask(peer=peer, ref=asked) if asked.digest in digests:
                    told.append(("ask", peer, asked.digest))
    cancels = [digest for word, peer, digest in told if (word, peer) == ("cancel", SLOW)]
    assert len(told) == 2 * len(cancels)
    assert cancels == [ref(index).digest for index in reversed(flying[1:])]
    for digest in cancels:
        at = told.index(("cancel", SLOW, digest))
        assert told[at + 1][::2] == ("ask", digest)
        assert told[at + 1][1] in FAST


@pytest.mark.parametrize("pace_s", [1.2, 4.0, 30.0])
def test_the_chunk_that_a_parent_is_sending_is_never_taken(pace_s):
    tail = everybody_busy(64, pace_s)
    for helper in FAST:
        tail.has(helper, range(64), pace_s)
    first = tail.of(SLOW)[0]
    end(tail, (LEARNER, *FAST), pace_s + 0.1)
    for _ in range(100):
        if not tail.stolen_now():
            break
        tail.comes(min(tail.stolen_now()), pace_s + 0.2)
    assert tail.left_of(SLOW) == tail.of(SLOW) == [first]
    assert any(isinstance(effect, Ready) for effect in tail.comes(first, pace_s + 0.3))


def test_what_a_parent_brings_soon_is_left_to_it():
    tail = everybody_busy(64, 0.11)
    for helper in FAST:
        tail.has(helper, range(64), 0.2)
    end(tail, (LEARNER, *FAST), 0.2)
    assert not tail.stolen


def test_nothing_is_taken_while_every_parent_is_busy():
    tail = everybody_busy(64, 4.0)
    for helper in FAST:
        tail.has(helper, range(64), 4.0)
    for number in range(20):
        tail.handle(Woke(key="fetch"), 4.0 + number / 100)
    tail.deliver(LEARNER, 4.3)
    assert not tail.stolen, "the learner is never counted as having time"
    tail.deliver(FAST[0], 4.4)
    assert {ask.peer for ask in tail.stolen} == {FAST[0]}


def test_what_is_asked_already_is_not_called_off_where_nobody_is_known_to_have_it():
    tail = everybody_busy(64, 4.0)
    flying = tail.of(SLOW)
    end(tail, (LEARNER, *FAST), 4.1)
    assert tail.stolen, "what only waits for it is sought even so"
    assert not [effect for effect in tail.effects if isinstance(effect, Cancel)]
    assert tail.of(SLOW) == flying


def test_only_what_a_helper_is_known_to_hold_is_asked_of_it():
    tail = everybody_busy(64, 0.6)
    end(tail, (LEARNER, *FAST), 0.7)
    *_, one, _ = tail.left_of(SLOW)
    tail.has(FAST[0], set(range(64)) - set(tail.left_of(SLOW)) | {one}, 0.8)
    assert {index: ask.peer for index, ask in tail.stolen_now().items()} == {one: FAST[0]}


def test_so_many_at_most_are_taken_at_once_and_each_is_taken_once():
    tail = everybody_busy(240, 0.6)
    for helper in FAST:
        tail.has(helper, range(240), 0.6)
    first = tail.of(SLOW)[0]
    mine = tail.left_of(SLOW)
    end(tail, (LEARNER, *FAST), 0.7)
    assert len(tail.stolen_now()) == STEALS_MAX < len(mine)
    for _ in range(len(mine)):
        now = tail.stolen_now()
        assert len(now) <= STEALS_MAX
        assert max(Counter(ask.peer for ask in now.values()).values()) <= STRAYS_OF_ONE_MAX
        if len(tail.left_of(SLOW)) <= 2:
            break
        tail.comes(Random(len(now)).choice(sorted(now)), 0.8)
    taken = Counter(ask.ref.digest for ask in tail.stolen)
    assert set(taken.values()) == {1}
    assert ref(first).digest not in taken
    assert len(taken) == len(mine) - 1


def test_a_chunk_that_a_helper_does_not_bring_is_its_parents_again_for_good():
    tail = everybody_busy(64, 0.6)
    end(tail, (LEARNER, *FAST), 0.7)
    tail.has(FAST[0], range(64), 0.8)
    gone = sorted(tail.stolen_now())
    for index in gone:
        tail.refused(index, Fault.MISSING, 0.9)
    for helper in FAST[1:]:
        tail.has(helper, range(64), 1.0)
    assert not set(gone) & set(tail.stolen_now()), "each is taken once"
    for _ in range(64):
        if not tail.asks:
            break
        tail.comes(next(iter(tail.asks)), 1.1)
    assert tail.machine.target is None, "all came, those from their parent"


def test_a_busy_parent_is_no_helper_even_if_it_alone_has_the_chunk():
    other = FAST[0]
    tail = everybody_busy(64, 0.6, slow=(SLOW, other))
    end(tail, (LEARNER, *FAST[1:]), 0.7)
    for parent in (SLOW, other):
        tail.has(parent, range(64), 0.8)
    assert not tail.stolen
    tail.has(FAST[1], range(64), 0.9)
    assert {ask.peer for ask in tail.stolen} == {FAST[1]}


def test_a_busy_parent_is_no_helper_where_the_wait_is_far_too_long_either():
    busy = FAST[:3]
    tail = everybody_busy(64, 4.0, slow=(SLOW, *busy))
    end(tail, (LEARNER, *FAST[3:]), 4.1)
    assert tail.stolen
    assert not {ask.peer for ask in tail.stolen} & {SLOW, *busy}


def test_a_lost_parent_is_not_one_that_has_time():
    tail = Tail(64)
    lost = FAST[0]
    tail.refused(tail.of(lost)[0], Fault.BROKEN, 0.1)
    for index in [*tail.of(lost)]:
        tail.refused(index, Fault.BROKEN, 0.1)
    assert not [ask for ask in tail.stolen if parent_of_ask(ask) != lost]


def parent_of_ask(ask):
    return parent_of(int.from_bytes(ask.ref.digest[:2], "big"))


def test_a_node_that_the_forest_spares_is_no_helper():
    """It has most chunks and no uplink: eleven neighbours asked one for them, and all waited."""
    leaf = NodeId("leaf")
    tail = everybody_busy(120, 3.0, seats=(*SEATS, Seat(node=leaf, reach=Reach.RELAYED)))
    tail.has(leaf, range(tail.count), 3.1)
    for parent in FAST:
        tail.deliver(parent, 3.2)
    tail.handle(Woke(key="fetch"), 4.0)
    assert tail.stolen
    assert leaf not in {ask.peer for ask in tail.stolen}


def test_a_parent_that_delivered_nothing_is_no_helper():
    """All that it should send has gone around it; that it waits for nobody proves nothing."""
    silent, *others = FAST
    tail = Tail(120)
    while tail.of(silent):
        tail.refused(tail.of(silent)[0], Fault.LATE, SOON_S)
    now_s = SOON_S
    while now_s < LATE_PASS_S + 1.0:  # by then it would be asked again
        now_s += 1.0
        for index in [i for i, ask in tail.asks.items() if ask.peer not in (SLOW, silent)]:
            tail.comes(index, now_s)
        if len(tail.left_of(SLOW)) > 4 and tail.of(SLOW):
            tail.comes(tail.of(SLOW)[0], now_s)
        tail.handle(Woke(key="fetch"), now_s)
    assert not tail.left_of(silent)
    assert tail.left_of(SLOW)
    before = len(tail.stolen)
    tail.has(silent, range(tail.count), now_s)
    tail.handle(Woke(key="fetch"), now_s + 0.1)
    assert len(tail.stolen) == before
    tail.has(others[0], range(tail.count), now_s + 0.1)
    tail.handle(Woke(key="fetch"), now_s + 0.2)
    assert {ask.peer for ask in tail.stolen[before:]} == {others[0]}


def test_a_helper_that_says_it_has_all_and_sends_nothing_holds_up_the_end_once():
    """It delivered its own share, so it is trusted, and then goes silent on every favour."""
    liar = FAST[0]
    tail = everybody_busy(64, 0.6)
    tail.has(liar, range(tail.count), 0.7)
    end(tail, (LEARNER, *FAST), 0.7)
    assert {ask.peer for ask in tail.stolen} == {liar}
    now_s = 0.7
    while tail.machine.target is not None and tail.machine.target.missing:
        now_s += 0.5
        assert now_s < 60.0
        tail.handle(Woke(key="fetch"), now_s)
        for index in [i for i, ask in tail.asks.items() if ask.peer != liar]:
            tail.comes(index, now_s)
    assert now_s < 30.0, "one deadline, and its own parent is asked again"
    assert len(tail.stolen) <= STRAYS_OF_ONE_MAX
