"""Fetch under any order of events: its promises hold, and an honest holder is always enough."""

from random import Random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from echo2_mesh import limits
from echo2_mesh.core.fetch import Fetch
from echo2_mesh.core.fetching import (
    Announced,
    Ask,
    AskHoldings,
    Cancel,
    ChunkArrived,
    ChunkRefused,
    Fault,
    Look,
    Made,
    ManifestAbsent,
    ManifestHere,
    PeerGone,
    PeerHas,
    PeerUp,
    Ready,
    Seated,
    StoreFailed,
    WantMore,
)
from echo2_mesh.core.forest import Seat
from echo2_mesh.core.machine import Arm, Woke
from echo2_mesh.core.swarm import MANIFEST_INDEX
from echo2_mesh.wire.messages import ChunkRef
from echo2_mesh.wire.types import ChunkKind, Digest, NodeId, PolicyVersion

LEARNER = NodeId("learner")
PEERS = [LEARNER, *(NodeId(f"peer-{i}") for i in range(5))]
ME, OTHERS = NodeId("me"), [NodeId(f"seat-{i}") for i in range(34)]
NEEDED, BLOBS = 8, 12
"""Data chunks, and all blobs: the last are pieces of a patch."""


def ref(version, index):
    kind = ChunkKind.MANIFEST if index == MANIFEST_INDEX else ChunkKind.FULL
    if index >= NEEDED:
        kind = ChunkKind.PATCH
    return ChunkRef(
        kind=kind, digest=Digest(bytes([version, index + 1]) * 16), size_bytes=1000 + index
    )


class FetchWorld(RuleBasedStateMachine):
    """A world that obeys the machine's effects honestly, lies for liars, and keeps score."""

    @initialize(seed=st.integers(0, 1000), patched=st.booleans())
    def begin(self, seed, patched):
        self.machine = Fetch(LEARNER, Random(seed), ME)
        self.patched = patched
        self.seats = set()
        self.now_s = 0.0
        self.connected = set()
        self.said = {}
        self.flights = {}
        self.stored = set()
        self.ready = []
        self.newest = -1
        self.alarm_s = None

    def tell(self, event):
        for effect in self.machine.handle(event, self.now_s):
            match effect:
                case Look(version=version, manifest=manifest):
                    self.look(version, manifest)
                case Ask():
                    self.on_ask(effect)
                case Cancel(peer=peer, digest=digest):
                    if self.flights.get(digest, (None,))[0] == peer:
                        del self.flights[digest]
                case Ready(version=version):
                    blobs = {ref(version, i).digest for i in range(MANIFEST_INDEX, NEEDED)}
                    assert blobs <= self.stored, "ready without a verified blob"
                    assert not self.ready or version > self.ready[-1]
                    self.ready.append(version)
                case AskHoldings(peer=peer):
                    assert peer in self.connected
                case Arm(at_s=at_s):
                    assert at_s >= self.now_s
                    self.alarm_s = at_s

    def look(self, version, manifest):
        """Answered in a later rule, as the store does."""
        self.pending = (version, manifest)

    def on_ask(self, ask):
        assert ask.peer in self.connected or self.seats, "asked somebody who is not there"
        assert ask.peer in self.connected | self.seats | set(PEERS)
        assert ask.peer != ME
        assert ask.ref.digest not in self.flights, "asked two peers for one chunk"
        assert ask.ref.digest not in self.stored, "asked for what is here"
        version, number = ask.ref.digest[0], ask.ref.digest[1] - 1
        is_manifest = ask.ref.digest == ref(version, MANIFEST_INDEX).digest
        assert (
            self.seats
            or ask.peer == LEARNER
            or is_manifest
            or number in self.said.get((ask.peer, version), ())
        ), "asked somebody who never said it holds the chunk"
        self.flights[ask.ref.digest] = (ask.peer, ask.ref)

    pending = None

    def answer_look(self):
        version, manifest = self.pending
        self.pending = None
        if manifest.digest in self.stored:
            held = frozenset(i for i in range(BLOBS) if ref(version, i).digest in self.stored)
            refs = tuple(ref(version, i) for i in range(BLOBS))
            wanted = frozenset(range(NEEDED, BLOBS)) if self.patched else None
            self.tell(
                ManifestHere(
                    manifest=manifest.digest, refs=refs, held=held, wanted=wanted, needed=NEEDED
                )
            )
        else:
            self.tell(ManifestAbsent(manifest=manifest.digest))

    @precondition(lambda self: self.pending is not None)
    @rule()
    def the_store_answers(self):
        self.answer_look()

    @precondition(lambda self: self.newest < 200)
    @rule(skip=st.integers(0, 2))
    def a_version_is_announced(self, skip):
        self.newest += 1 + skip
        self.tell(
            Announced(
                incarnation_unix_ms=1,
                version=PolicyVersion(self.newest),
                manifest=ref(self.newest, MANIFEST_INDEX),
            )
        )

    @rule(peer=st.sampled_from(PEERS))
    def a_peer_connects(self, peer):
        self.connected.add(peer)
        self.tell(PeerUp(peer=peer))

    @rule(peer=st.sampled_from(PEERS))
    def a_peer_leaves(self, peer):
        self.connected.discard(peer)
        for digest in [d for d, flight in self.flights.items() if flight[0] == peer]:
            del self.flights[digest]
        self.tell(PeerGone(peer=peer))

    @precondition(lambda self: self.newest >= 0)
    @rule(
        peer=st.sampled_from(PEERS[1:]),
        indices=st.none() | st.frozensets(st.integers(0, BLOBS - 1)),
    )
    def a_peer_says_what_it_holds(self, peer, indices):
        version = self.machine.target.version if self.machine.target else self.newest
        said = self.said.setdefault((peer, version), set())
        said |= set(range(NEEDED)) if indices is None else indices
        manifest = ref(version, MANIFEST_INDEX).digest
        self.tell(PeerHas(peer=peer, manifest=manifest, indices=indices))

    @rule(
        seats=st.lists(st.sampled_from(OTHERS + PEERS), max_size=18)
        | st.just(OTHERS + PEERS),  # so many that not everybody is a parent of everybody
        rates=st.sampled_from(((0.0,), (1e6,), (1e5, 1e6, 1e7))),
    )
    def some_take_part(self, seats, rates):
        self.seats |= {ME, *seats}
        seen = tuple(
            Seat(node=node, uplink_bytes_per_s=rates[i % len(rates)])
            for i, node in enumerate({ME: None} | dict.fromkeys(seats))
        )
        self.tell(Seated(seats=seen))

    @precondition(lambda self: self.machine.target and self.machine.target.refs)
    @rule(indices=st.frozensets(st.integers(0, NEEDED - 1)))
    def data_is_rebuilt(self, indices):
        target = self.machine.target
        for index in indices:
            self.stored.add(target.refs[index].digest)
            self.flights.pop(target.refs[index].digest, None)
        self.tell(Made(manifest=target.manifest.digest, indices=indices))

    @precondition(lambda self: self.machine.target and self.machine.target.refs)
    @rule(indices=st.frozensets(st.integers(0, BLOBS - 1)))
    def a_patch_is_no_good(self, indices):
        self.tell(WantMore(manifest=self.machine.target.manifest.digest, indices=indices))

    def pick(self, data):
        digest = data.draw(st.sampled_from(sorted(self.flights)))
        return self.flights.pop(digest)

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def a_chunk_arrives(self, data):
        peer, chunk = self.pick(data)
        self.stored.add(chunk.digest)
        self.tell(ChunkArrived(peer=peer, digest=chunk.digest))

    @precondition(lambda self: self.machine.target and self.machine.target.refs)
    @rule(index=st.integers(0, BLOBS - 1), peer=st.sampled_from(PEERS))
    def a_chunk_arrives_of_a_question_that_was_cancelled(self, index, peer):
        digest = self.machine.target.refs[index].digest
        self.stored.add(digest)
        self.flights.pop(digest, None)
        self.tell(ChunkArrived(peer=peer, digest=digest))

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), fault=st.sampled_from(Fault))
    def a_chunk_is_refused(self, data, fault):
        peer, chunk = self.pick(data)
        self.tell(ChunkRefused(peer=peer, digest=chunk.digest, fault=fault))

    @precondition(lambda self: self.flights)
    @rule(data=st.data(), peer=st.sampled_from(PEERS), fault=st.sampled_from(Fault))
    def a_refusal_comes_of_a_question_that_was_cancelled(self, data, peer, fault):
        digest = data.draw(st.sampled_from(sorted(self.flights)))
        if self.flights[digest][0] != peer:
            self.tell(ChunkRefused(peer=peer, digest=digest, fault=fault))
            assert digest in self.flights

    @precondition(lambda self: self.flights)
    @rule(data=st.data())
    def the_disk_is_full(self, data):
        peer, chunk = self.pick(data)
        self.tell(StoreFailed(peer=peer, digest=chunk.digest))

    @rule(seconds=st.floats(0.0, 60.0))
    def time_passes(self, seconds):
        self.now_s += seconds
        self.tell(Woke(key="fetch"))

    @invariant()
    def limits_are_kept(self):
        peers = [peer for peer, _ in self.flights.values()]
        assert len(peers) <= limits.FETCH_IN_FLIGHT_MAX
        most = limits.FETCH_IN_FLIGHT_PER_PEER_MAX
        assert all(peers.count(p) <= most for p in set(peers))
        if not self.seats:
            assert len(peers) <= limits.SWARM_IN_FLIGHT_MAX
            most = limits.SWARM_IN_FLIGHT_PER_PEER_MAX
            assert all(peers.count(p) <= most for p in set(peers))

    def teardown(self):
        """From any state: with one honest holder that never leaves, the newest is fetched."""
        if not hasattr(self, "machine") or self.newest < 0:
            return
        honest = NodeId("honest")
        for peer in PEERS:
            self.a_peer_leaves(peer)
        self.connected.add(honest)
        self.tell(PeerUp(peer=honest))
        for turn in range(6000):
            if self.pending is not None:
                self.answer_look()
            target = self.machine.target
            if target is None:
                break
            manifest = target.manifest.digest
            if target.refs:
                self.said[honest, target.version] = set(range(BLOBS))
                everything = frozenset(range(BLOBS))
                self.tell(PeerHas(peer=honest, manifest=manifest, indices=everything))
                if self.machine.target is target and not target.missing:
                    self.a_patch_is_no_good(frozenset(range(NEEDED)))
            for digest, (peer, _) in list(self.flights.items()):
                self.flights.pop(digest, None)
                if peer == honest or digest == manifest:
                    self.stored.add(digest)
                    self.tell(ChunkArrived(peer=peer, digest=digest))
                else:
                    fault = (Fault.BROKEN, Fault.BUSY, Fault.MISSING)[turn // 3 % 3]
                    self.tell(ChunkRefused(peer=peer, digest=digest, fault=fault))
            self.now_s += 0.5
            self.tell(Woke(key="fetch"))
        assert self.ready, "an honest holder was there and nothing became ready"
        assert self.ready[-1] == self.newest


TestFetchWorld = FetchWorld.TestCase
TestFetchWorld.settings = settings(max_examples=60, stateful_step_count=60, deadline=None)
