"""The fetch machine, told by hand what happens: whom it asks, blames, leaves alone and pardons."""

from random import Random

from echo2_mesh import limits
from echo2_mesh.core.download import PARDON_AFTER_S
from echo2_mesh.core.fetch import STUCK_AFTER_S, Fetch
from echo2_mesh.core.fetching import (
    Announced,
    Ask,
    AskHoldings,
    Blame,
    Cancel,
    ChunkArrived,
    ChunkRefused,
    Fault,
    Look,
    Made,
    ManifestAbsent,
    ManifestHere,
    ManifestUnfit,
    PeerGone,
    PeerHas,
    PeerUp,
    Ready,
    Seated,
    StoreFailed,
    WantMore,
)
from echo2_mesh.core.forest import Seat, plan
from echo2_mesh.core.machine import Arm, Woke
from echo2_mesh.wire.messages import ChunkRef
from echo2_mesh.wire.types import ChunkKind, Digest, NodeId, PolicyVersion

LEARNER, A, B = NodeId("learner"), NodeId("a"), NodeId("b")
WAKE = Woke(key="fetch")


def ref(number, version=0, kind=ChunkKind.FULL):
    return ChunkRef(kind=kind, digest=Digest(bytes([version, number]) * 16), size_bytes=100)


def manifest(version):
    return ref(255, version, ChunkKind.MANIFEST)


def announced(version, incarnation=1):
    return Announced(
        incarnation_unix_ms=incarnation,
        version=PolicyVersion(version),
        manifest=manifest(version),
    )


def refs(count, version=0):
    return tuple(ref(i, version) for i in range(count))


def here(count, version=0, held=()):
    return ManifestHere(
        manifest=manifest(version).digest, refs=refs(count, version), held=frozenset(held)
    )


def has(peer, *indices, version=0):
    return PeerHas(peer=peer, manifest=manifest(version).digest, indices=frozenset(indices))


def arrived(ask):
    return ChunkArrived(peer=ask.peer, digest=ask.ref.digest)


def refused(ask, fault):
    return ChunkRefused(peer=ask.peer, digest=ask.ref.digest, fault=fault)


def of(kind, effects):
    return [effect for effect in effects if isinstance(effect, kind)]


def fetching(count, *peers, version=0):
    """A machine that has read the manifest of `count` blobs and knows `peers`."""
    machine = Fetch(LEARNER, Random(1))
    machine.handle(announced(version), 0.0)
    effects = machine.handle(here(count, version), 0.0)
    for peer in peers:
        effects += machine.handle(PeerUp(peer=peer), 0.0)
    return machine, of(Ask, effects)


def test_an_announcement_is_looked_up_before_it_is_asked_for():
    machine = Fetch(LEARNER, Random(1))
    machine.handle(PeerUp(peer=LEARNER), 0.0)
    effects = machine.handle(announced(0), 0.0)
    assert of(Look, effects)
    assert not of(Ask, effects)
    asks = of(Ask, machine.handle(ManifestAbsent(manifest=manifest(0).digest), 0.0))
    assert [(ask.peer, ask.ref) for ask in asks] == [(LEARNER, manifest(0))]
    assert of(Look, machine.handle(arrived(asks[0]), 0.1))


def test_a_version_that_is_here_already_is_ready_at_once():
    machine = Fetch(LEARNER, Random(1))
    machine.handle(announced(0), 0.0)
    effects = machine.handle(here(3, held=(0, 1, 2)), 0.0)
    assert of(Ready, effects) == [Ready(version=PolicyVersion(0), manifest=manifest(0))]


def test_every_chunk_is_asked_once_and_then_the_version_is_ready():
    machine, asks = fetching(10, LEARNER)
    seen = []
    while asks:
        ask = asks.pop()
        seen.append(ask.ref.digest)
        effects = machine.handle(arrived(ask), 1.0)
        asks += of(Ask, effects)
    assert sorted(seen) == sorted(r.digest for r in refs(10))
    assert of(Ready, effects)


def test_no_peer_is_asked_more_than_its_share_at_once():
    _, asks = fetching(20, LEARNER)
    assert len(asks) == limits.SWARM_IN_FLIGHT_PER_PEER_MAX


def test_no_more_than_the_limit_is_in_flight_in_all():
    machine, asks = fetching(30, LEARNER)
    for i in range(6):
        peer = NodeId(f"p{i}")
        machine.handle(PeerUp(peer=peer), 0.0)
        asks += of(Ask, machine.handle(has(peer, *range(30)), 0.0))
    assert len(asks) == limits.SWARM_IN_FLIGHT_MAX


def test_a_holder_beside_the_learner_is_preferred():
    machine, _ = fetching(12)
    machine.handle(PeerUp(peer=A), 0.0)
    machine.handle(has(A, *range(12)), 0.0)
    asks = of(Ask, machine.handle(PeerUp(peer=LEARNER), 0.0))
    assert asks == [], "the other holder keeps our line busy; the learner is spared"


def test_the_rarest_chunk_goes_first():
    machine, _ = fetching(12)
    for peer in (A, B):
        machine.handle(PeerUp(peer=peer), 0.0)
    machine.handle(StoreFailed(peer=A, digest=ref(0).digest), 0.0)
    machine.handle(has(A, *range(12)), 0.0)
    machine.handle(has(B, *(i for i in range(12) if i not in (3, 7))), 0.0)
    asks = of(Ask, machine.handle(WAKE, 10.0))
    assert {ask.ref for ask in asks[:2]} == {ref(3), ref(7)}


def test_a_chunk_nobody_connected_holds_is_not_asked_for():
    machine, asks = fetching(4, A)
    assert asks == []
    asks = of(Ask, machine.handle(has(A, 2), 0.0))
    assert [ask.ref for ask in asks] == [ref(2)]


def test_a_late_chunk_is_asked_elsewhere_and_the_first_peer_blamed():
    machine, _ = fetching(1, A)
    (ask,) = of(Ask, machine.handle(has(A, 0), 0.0))
    machine.handle(PeerUp(peer=B), 0.0)
    machine.handle(has(B, 0), 0.0)
    effects = machine.handle(WAKE, ask.timeout_s + 0.1)
    assert of(Cancel, effects) == [Cancel(peer=A, digest=ref(0).digest)]
    assert of(Blame, effects) == [Blame(peer=A, fault=Fault.LATE, banned=False)]
    assert [again.peer for again in of(Ask, effects)] == [B]


def lies(peer):
    """How `peer` is blamed while it is asked for five chunks and lies each time."""
    machine, asks = fetching(5, peer)
    if peer != LEARNER:
        asks = of(Ask, machine.handle(has(peer, *range(5)), 0.0))
    now_s, blames = 0.0, []
    while asks:
        now_s += 20.0
        effects = machine.handle(refused(asks.pop(0), Fault.LIED), now_s)
        blames += of(Blame, effects)
        gone = {cancel.digest for cancel in of(Cancel, effects)}
        asks = [ask for ask in asks if ask.ref.digest not in gone] + of(Ask, effects)
    for _ in range(50):
        now_s += 20.0
        assert not of(Ask, machine.handle(WAKE, now_s)), "a liar is never pardoned"
    return [blame.banned for blame in blames]


def test_a_liar_is_left_alone_after_its_first_lie():
    assert lies(A)[0]


def test_only_the_learner_may_lie_twice():
    assert lies(LEARNER)[:3] == [False, False, True]


def test_the_only_holder_is_pardoned_for_being_slow_and_given_more_time():
    machine, _ = fetching(1, A)
    now_s, asks = 0.0, of(Ask, machine.handle(has(A, 0), 0.0))
    first_s = asks[0].timeout_s
    blamed = 0
    for _ in range(4000):
        now_s += PARDON_AFTER_S / 2
        effects = machine.handle(WAKE, now_s)
        blamed += len(of(Blame, effects))
        asks += of(Ask, effects)
        if asks[-1].timeout_s > first_s:
            break
    assert blamed == limits.BLAMES_BEFORE_BAN
    assert of(Ready, machine.handle(arrived(asks[-1]), now_s + 1.0))


def test_a_chunk_that_a_peer_does_not_hold_after_all_costs_no_blame():
    machine, _ = fetching(1, A)
    (ask,) = of(Ask, machine.handle(has(A, 0), 0.0))
    effects = machine.handle(refused(ask, Fault.MISSING), 0.1)
    assert not of(Blame, effects)
    assert not of(Ask, effects)
    assert of(Ask, machine.handle(PeerUp(peer=LEARNER), 0.2))


def test_what_a_lost_peer_owed_is_asked_of_another():
    machine, asks = fetching(3, LEARNER)
    machine.handle(PeerUp(peer=A), 0.0)
    machine.handle(has(A, 0, 1, 2), 0.0)
    effects = machine.handle(PeerGone(peer=LEARNER), 1.0)
    assert len(of(Cancel, effects)) == len(asks) == 3
    assert [ask.peer for ask in of(Ask, effects)] == [A, A, A]


def test_a_full_disk_pauses_the_asking_and_the_fetch_goes_on_later():
    machine, asks = fetching(9, LEARNER)
    effects = machine.handle(StoreFailed(peer=LEARNER, digest=asks[0].ref.digest), 1.0)
    assert not of(Ask, effects)
    assert not of(Ask, machine.handle(WAKE, 1.5))
    assert of(Ask, machine.handle(WAKE, 3.0))


def test_a_newer_version_replaces_one_that_has_hardly_begun():
    machine, asks = fetching(8, LEARNER)
    effects = machine.handle(announced(1), 1.0)
    assert len(of(Cancel, effects)) == len(asks)
    assert [look.version for look in of(Look, effects)] == [1]


def test_a_version_more_than_half_here_is_finished_first():
    machine, asks = fetching(3, LEARNER)
    for ask in asks[:2]:
        machine.handle(arrived(ask), 1.0)
    assert not of(Look, machine.handle(announced(1), 1.0))
    effects = machine.handle(arrived(asks[2]), 2.0)
    assert [ready.version for ready in of(Ready, effects)] == [0]
    assert [look.version for look in of(Look, effects)] == [1]


def test_versions_that_come_faster_than_they_can_be_fetched_do_not_starve():
    machine, _ = fetching(8, LEARNER)
    machine.handle(announced(1), 1.0)
    asks = of(Ask, machine.handle(here(8, 1), 1.0))
    ready = []
    for version in range(2, 12):
        effects = machine.handle(announced(version), float(version))
        assert not of(Cancel, effects)
    while asks:
        effects = machine.handle(arrived(asks.pop()), 20.0)
        asks += of(Ask, effects)
        ready += of(Ready, effects)
    assert [effect.version for effect in ready] == [1]
    assert machine.target is not None
    assert machine.target.version == 11, "then straight to the newest"


def test_a_version_nobody_can_serve_gives_way_to_a_newer_one():
    machine, _ = fetching(8, LEARNER)
    machine.handle(announced(1), 0.1)
    machine.handle(here(8, 1), 0.1)
    machine.handle(PeerGone(peer=LEARNER), 0.2)
    machine.handle(announced(2), 0.3)
    assert not of(Look, machine.handle(WAKE, 0.4))
    assert [look.version for look in of(Look, machine.handle(WAKE, 0.5 + STUCK_AFTER_S))] == [2]


def test_an_older_announcement_starts_nothing():
    machine = Fetch(LEARNER, Random(1))
    machine.handle(announced(5), 0.0)
    machine.handle(here(1, 5, held=(0,)), 0.0)
    for old in (announced(5), announced(4), announced(9, incarnation=0)):
        assert not of(Look, machine.handle(old, 1.0))
    assert of(Look, machine.handle(announced(2, incarnation=2), 1.0)), "a resumed learner counts"


def test_an_unfit_manifest_is_given_up_and_the_next_version_taken():
    machine = Fetch(LEARNER, Random(1))
    machine.handle(announced(0), 0.0)
    machine.handle(ManifestUnfit(manifest=manifest(0).digest), 0.0)
    assert not of(Look, machine.handle(announced(0), 1.0))
    assert of(Look, machine.handle(announced(1), 1.0))


def test_a_blob_that_occurs_twice_is_fetched_once_and_held_twice():
    machine = Fetch(LEARNER, Random(1))
    machine.handle(announced(0), 0.0)
    machine.handle(PeerUp(peer=LEARNER), 0.0)
    same = (ref(0), ref(1), ref(0))
    effects = machine.handle(
        ManifestHere(manifest=manifest(0).digest, refs=same, held=frozenset()), 0.0
    )
    asks = of(Ask, effects)
    assert len(asks) == 2
    machine.handle(arrived(next(ask for ask in asks if ask.ref == ref(0))), 1.0)
    assert machine.target is not None
    assert machine.target.held() == {0, 2}
    assert machine.progress_bytes() == (100, 200)


def test_neighbours_are_asked_for_their_holdings_while_something_is_missing():
    machine, _ = fetching(4, A, LEARNER)
    later_s = 2 * limits.HOLDINGS_INTERVAL_S
    assert [poll.peer for poll in of(AskHoldings, machine.handle(WAKE, later_s))] == [A]
    assert not of(AskHoldings, machine.handle(WAKE, later_s + 0.01))


def test_a_running_fetch_always_has_an_alarm():
    machine, _ = fetching(4)
    for now_s in (0.5, 1.0, 100.0):
        assert of(Arm, machine.handle(WAKE, now_s))


# --- with a forest -----------------------------------------------------------------------------

ME = NodeId("me")
FLEET = [ME, *(NodeId(f"peer-{i}") for i in range(7))]


def planned(count, *, wanted=None, needed=None, kinds=ChunkKind.FULL, seats=FLEET):
    """A machine that knows its fleet and has read the manifest of `count` blobs."""
    machine = Fetch(LEARNER, Random(1), ME)
    machine.handle(Seated(seats=tuple(Seat(node=node) for node in seats)), 0.0)
    machine.handle(announced(0), 0.0)
    event = ManifestHere(
        manifest=manifest(0).digest,
        refs=tuple(ref(i, kind=kinds) for i in range(count)),
        held=frozenset(),
        wanted=wanted,
        needed=needed,
    )
    forest = plan(tuple(Seat(node=node) for node in seats), LEARNER)
    return machine, forest, list(of(Ask, machine.handle(event, 0.0)))


def index_of(ask):
    return ask.ref.digest[1]


def test_each_chunk_is_asked_of_its_parent_who_may_wait_for_it():
    machine, forest, asks = planned(64)
    seen = set()
    while asks:
        ask = asks.pop(0)
        seen.add(index_of(ask))
        assert ask.peer == forest.parent_of(ME, index_of(ask))
        assert (ask.wait_s > 0) == (ask.peer != LEARNER)
        assert len(asks) < limits.FETCH_IN_FLIGHT_MAX
        effects = machine.handle(arrived(ask), 0.1)
        asks += of(Ask, effects)
    assert seen == set(range(64))
    assert of(Ready, effects)


def test_the_manifest_too_comes_down_the_tree():
    machine = Fetch(LEARNER, Random(1), ME)
    seats = tuple(Seat(node=node) for node in FLEET)
    machine.handle(Seated(seats=seats), 0.0)
    machine.handle(announced(0), 0.0)
    (ask,) = of(Ask, machine.handle(ManifestAbsent(manifest=manifest(0).digest), 0.0))
    assert ask.peer == plan(seats, LEARNER).parent_of(ME, -1)


def test_a_parent_that_breaks_off_is_gone_around_at_once():
    machine, forest, asks = planned(64)
    ask = next(ask for ask in asks if ask.peer != LEARNER)
    effects = machine.handle(refused(ask, Fault.BROKEN), 0.1)
    again = next(other for other in of(Ask, effects) if other.ref == ask.ref)
    assert again.peer == forest.source_of(ME, index_of(ask), lambda peer: peer != ask.peer)


def test_a_parent_that_still_waits_is_asked_again_and_then_gone_around():
    machine, forest, asks = planned(64)
    ask = next(ask for ask in asks if ask.peer != LEARNER)
    asked = [ask.peer]
    now_s = 0.0
    for _ in range(2):
        now_s += ask.wait_s
        effects = machine.handle(refused(ask, Fault.MISSING), now_s)
        assert not of(Blame, effects)
        ask = next(other for other in of(Ask, effects) if other.ref == ask.ref)
        asked.append(ask.peer)
    alternate = forest.alternate_of(index_of(ask), lambda peer: peer != asked[0])
    assert asked == [asked[0], asked[0], LEARNER if alternate == ME else alternate]


def test_a_lying_parent_is_asked_nothing_more_and_all_its_chunks_come_another_way():
    machine, _, asks = planned(64)
    liar = next(ask.peer for ask in asks if ask.peer != LEARNER)
    mine = [ask for ask in asks if ask.peer == liar]
    effects = machine.handle(refused(mine[0], Fault.LIED), 0.1)
    assert of(Blame, effects) == [Blame(peer=liar, fault=Fault.LIED, banned=True)]
    assert len(of(Cancel, effects)) == len(mine) - 1
    for _ in range(200):
        asks += of(Ask, effects)
        asks = [ask for ask in asks if ask.peer != liar]
        if not asks:
            break
        effects = machine.handle(arrived(asks.pop(0)), 0.2)
        assert liar not in [ask.peer for ask in of(Ask, effects)]
    assert of(Ready, effects)


def test_a_silent_parent_costs_one_deadline_and_one_blame():
    machine, _, asks = planned(64)
    stalled = next(ask.peer for ask in asks if ask.peer != LEARNER)
    now_s, blames, late_s = 0.0, [], None
    for _ in range(2000):
        answered = [ask for ask in asks if ask.peer != stalled]
        asks = [ask for ask in asks if ask.peer == stalled]
        now_s += 0.05
        effects = [e for ask in answered for e in machine.handle(arrived(ask), now_s)]
        effects += machine.handle(WAKE, now_s)
        gone = {cancel.digest for cancel in of(Cancel, effects)}
        asks = [ask for ask in asks if ask.ref.digest not in gone] + of(Ask, effects)
        if of(Blame, effects):
            blames += of(Blame, effects)
            late_s = late_s or now_s
        if of(Ready, effects):
            break
    assert of(Ready, effects)
    assert [blame.peer for blame in blames] == [stalled]
    assert late_s < limits.CHUNK_WAIT_S_MAX + limits.CHUNK_SLACK_S_MIN


def test_a_home_that_joins_late_spares_the_learner():
    machine, _, asks = planned(64)
    machine.handle(PeerUp(peer=FLEET[1]), 0.0)
    machine.handle(PeerHas(peer=FLEET[1], manifest=manifest(0).digest, indices=None), 0.0)
    first = [ask for ask in asks if ask.peer == LEARNER]
    for ask in asks:
        assert LEARNER not in [again.peer for again in of(Ask, machine.handle(arrived(ask), 0.1))]
    assert len(first) == 2


def test_only_what_is_wanted_is_fetched_and_ready_waits_for_what_is_made_of_it():
    machine, _, asks = planned(8, wanted=frozenset({4, 5, 6, 7}), needed=4)
    assert {index_of(ask) for ask in asks} == {4, 5, 6, 7}
    for ask in asks:
        assert not of(Ready, machine.handle(arrived(ask), 0.1))
    assert machine.target.held() == {4, 5, 6, 7}
    digest = manifest(0).digest
    machine.handle(Made(manifest=digest, indices=frozenset({0, 1, 2})), 0.2)
    effects = machine.handle(WantMore(manifest=digest, indices=frozenset({3})), 0.3)
    (ask,) = of(Ask, effects)
    assert index_of(ask) == 3
    assert of(Ready, machine.handle(arrived(ask), 0.4))


def test_patches_of_which_nothing_is_ever_made_are_given_up():
    machine, _, asks = planned(8, wanted=frozenset({4, 5, 6, 7}), needed=4)
    for ask in asks:
        machine.handle(arrived(ask), 0.1)
    machine.handle(WAKE, 1.0 + limits.REBUILD_PATIENCE_S)
    effects = machine.handle(WAKE, 1.1 + limits.REBUILD_PATIENCE_S)
    assert {index_of(ask) for ask in of(Ask, effects)} == {0, 1, 2, 3}


def test_a_plan_made_before_the_others_came_is_made_anew():
    machine, _, asks = planned(64, seats=[ME])
    assert {ask.peer for ask in asks} == {LEARNER}
    assert len(asks) == 2, "who knows nobody does not burden the learner much"
    effects = machine.handle(Seated(seats=tuple(Seat(node=node) for node in FLEET)), 0.5)
    assert len({ask.peer for ask in of(Ask, effects)}) == len(FLEET) - 1


def test_whoever_was_busy_in_place_of_a_parent_is_asked_again():
    """In a large fleet the nodes asked around a lost parent are no parents of this one."""
    nodes = [NodeId(f"node-{i:02}") for i in range(60)]
    seats = tuple(Seat(node=node, uplink_bytes_per_s=1e6) for node in nodes)
    me, count = nodes[7], 200
    forest = plan(seats, LEARNER)
    lost = {p for i in range(count) if (p := forest.parent_of(me, i)) not in (LEARNER, me)}
    lost = set(sorted(lost)[:4])
    machine, chance, now_s = Fetch(LEARNER, Random(5), me), Random(6), 0.0
    effects = [*machine.handle(Seated(seats=seats), now_s)]
    for node in (LEARNER, *nodes):
        if node != me:
            effects += machine.handle(PeerUp(peer=node), now_s)
    effects += machine.handle(announced(0), now_s)
    effects += machine.handle(here(count), now_s)
    ready = False
    while not ready and now_s < 60.0:
        asks, effects = of(Ask, effects), []
        for ask in asks:
            if ask.peer in lost:
                event = refused(ask, Fault.BROKEN)
            elif ask.peer != LEARNER and chance.random() < 0.5:
                event = refused(ask, Fault.BUSY)
            else:
                event = arrived(ask)
            effects += machine.handle(event, now_s)
        now_s += 0.25
        effects += machine.handle(WAKE, now_s)
        ready = bool(of(Ready, effects))
    assert ready, f"{machine.target.missing} chunks still missing after {now_s} s"


def test_a_chunk_that_comes_of_itself_is_in_no_book_any_more():
    """What strays around a lost parent is bounded: a place that nobody frees is lost for ever."""
    nodes = [NodeId(f"node-{i:02}") for i in range(12)]
    seats = tuple(Seat(node=node, uplink_bytes_per_s=1e6) for node in nodes)
    me, count = nodes[3], 100
    forest = plan(seats, LEARNER)
    gone = next(p for i in range(count) if (p := forest.parent_of(me, i)) not in (LEARNER, me))
    machine = Fetch(LEARNER, Random(5), me)
    machine.handle(Seated(seats=seats), 0.0)
    for node in (LEARNER, *nodes):
        if node not in (me, gone):
            machine.handle(PeerUp(peer=node), 0.0)
    machine.handle(announced(0), 0.0)
    asks = of(Ask, machine.handle(here(count), 0.0))
    lost = [ask for ask in asks if ask.peer == gone]
    assert lost
    for ask in lost:
        asks += of(Ask, machine.handle(refused(ask, Fault.BROKEN), 0.0))
    queues = machine._download._queues
    assert queues.loose
    for index in [*queues._astray]:
        digest = refs(count)[index].digest
        for ask in asks:
            if ask.ref.digest == digest and ask.peer != gone:
                machine.handle(refused(ask, Fault.BROKEN), 0.0)
        made = Made(manifest=manifest(0).digest, indices=frozenset((index,)))
        machine.handle(made, 0.0)
        assert index not in queues._astray
        assert index not in queues._tried
