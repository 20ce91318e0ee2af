"""The fetch machine's books: one version being fetched, and what each peer is good for in it.

Owned by `core.fetch`, which makes every decision; this keeps the sets consistent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random

import msgspec

from echo2_mesh import limits
from echo2_mesh.core.fetching import Announced, Fault
from echo2_mesh.core.machine import backoff_s
from echo2_mesh.wire.messages import ChunkRef
from echo2_mesh.wire.types import Digest, NodeId

MANIFEST_INDEX = -1
"""Stands for the manifest itself among the indices of its blobs."""
RATE_BYTES_PER_S_MIN = 128 * limits.KIB
"""A holder slower than this is late; the deadline of a large chunk grows by it."""
LACKS_FOR_S = 2.0
COOL_FIRST_S = 0.25
COOL_LONGEST_S = 15.0
RESORT_INTERVAL_S = 0.5


class Holder:
    """One connected peer, as a source."""

    def __init__(self, peer: NodeId) -> None:
        self.peer = peer
        self.holds: set[int] = set()
        self.complete = False
        self.failures = 0
        self.cool_until_s = 0.0
        self.polled_s = float("-inf")
        self.patience = 1.0
        """Factor on its deadlines: grows when a slow peer is the only one left."""
        self.took_s: float | None = None
        """How long its last chunk took from question to store."""
        self._lacks: dict[int, float] = {}

    def forget_version(self) -> None:
        """Another version is fetched from now on: what it held says nothing."""
        self.holds = set()
        self.complete = False
        self._lacks = {}

    def has(self, index: int, now_s: float, learner: NodeId) -> bool:
        """Worth asking for `index`: it said so, or made the version, or may have the manifest."""
        if self._lacks.get(index, now_s) > now_s:
            return False
        return (
            self.complete or index in self.holds or self.peer == learner or index == MANIFEST_INDEX
        )

    def lacks(self, index: int, now_s: float) -> None:
        """It answered that it does not hold `index`: do not ask again at once."""
        self.holds.discard(index)
        self._lacks[index] = now_s + LACKS_FOR_S

    def cool(self, now_s: float, rng: Random) -> None:
        """Leave it alone for a while, longer each time."""
        pause_s = backoff_s(self.failures, first_s=COOL_FIRST_S, longest_s=COOL_LONGEST_S)
        self.failures += 1
        self.cool_until_s = now_s + pause_s * rng.uniform(0.75, 1.25)

    def deadline_s(self, ref: ChunkRef) -> float:
        """How long it may take to deliver `ref`."""
        return (limits.CHUNK_DEADLINE_S + ref.size_bytes / RATE_BYTES_PER_S_MIN) * self.patience


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk that was asked for."""

    index: int
    peer: NodeId
    asked_s: float
    deadline_s: float


class Target:
    """The version being fetched."""

    def __init__(self, announced: Announced) -> None:
        self.version = announced.version
        self.manifest = announced.manifest
        self.order = (announced.incarnation_unix_ms, int(announced.version))
        self.manifest_wanted = False
        self.refs: tuple[ChunkRef, ...] = ()
        self.missing: set[int] = set()
        """First index of each distinct blob that is not here yet."""
        self.flights: dict[Digest, Flight] = {}
        self.poll_at_s = 0.0
        self.stuck_since_s: float | None = None
        self.unsorted = True
        self._indices: dict[Digest, list[int]] = {}
        self._held_bytes = 0
        self._wanted_bytes = 0
        self._queue: list[int] = []
        self._front = 0
        self._sorted_s = float("-inf")
        self._blames: dict[NodeId, Counter[Fault]] = {}

    def want_manifest(self) -> None:
        """The manifest is not here."""
        self.manifest_wanted = True

    def want_chunks(self, refs: tuple[ChunkRef, ...], held: frozenset[int]) -> None:
        """The manifest is here: `held` of its blobs are too."""
        self.manifest_wanted = False
        self.refs = refs
        for index, ref in enumerate(refs):
            self._indices.setdefault(ref.digest, []).append(index)
        self.missing = {same[0] for same in self._indices.values() if not held.intersection(same)}
        wanted = {same[0] for same in self._indices.values()}
        self._wanted_bytes = sum(refs[index].size_bytes for index in wanted)
        self._held_bytes = self._wanted_bytes - sum(refs[i].size_bytes for i in self.missing)
        self.unsorted = True

    def ref(self, index: int) -> ChunkRef:
        """The blob of that index."""
        return self.manifest if index == MANIFEST_INDEX else self.refs[index]

    def arrived(self, digest: Digest) -> None:
        """A verified blob is in the store."""
        same = self._indices.get(digest)
        if same is not None and same[0] in self.missing:
            self.missing.discard(same[0])
            self._held_bytes += self.refs[same[0]].size_bytes

    def held(self) -> frozenset[int]:
        """Every index whose blob is here, for whoever asks."""
        return frozenset(
            index
            for same in self._indices.values()
            if same[0] not in self.missing
            for index in same
        )

    def progress_bytes(self) -> tuple[int, int]:
        """(here, wanted), each distinct blob counted once; (0, 0) before the manifest is read."""
        return self._held_bytes, self._wanted_bytes

    # --- flights -------------------------------------------------------------------------------

    def fly(self, index: int, peer: NodeId, asked_s: float, deadline_s: float) -> None:
        """Asked `peer` for `index`."""
        digest = self.ref(index).digest
        assert digest not in self.flights
        assert index == MANIFEST_INDEX or index in self.missing
        self.flights[digest] = Flight(
            index=index, peer=peer, asked_s=asked_s, deadline_s=deadline_s
        )

    def flights_count(self, peer: NodeId) -> int:
        """How many chunks are awaited from `peer`."""
        return sum(flight.peer == peer for flight in self.flights.values())

    def flights_of(self, peer: NodeId) -> tuple[Digest, ...]:
        """The chunks awaited from `peer`."""
        return tuple(d for d, flight in self.flights.items() if flight.peer == peer)

    def queue(
        self, holders: Iterable[Holder], learner: NodeId, rng: Random, now_s: float
    ) -> Iterable[int]:
        """Indices to ask for next: the rarest first, ties by chance."""
        if not self.refs:
            if self.manifest_wanted and self.manifest.digest not in self.flights:
                yield MANIFEST_INDEX
            return
        if self.unsorted and (now_s - self._sorted_s >= RESORT_INTERVAL_S or not self.flights):
            self._sort(holders, learner, rng, now_s)
        while self._front < len(self._queue) and self._queue[self._front] not in self.missing:
            self._front += 1
        for position in range(self._front, len(self._queue)):
            index = self._queue[position]
            if index in self.missing and self.refs[index].digest not in self.flights:
                yield index

    def _sort(self, holders: Iterable[Holder], learner: NodeId, rng: Random, now_s: float) -> None:
        rarity: Counter[int] = Counter()
        everywhere = 0
        for holder in holders:
            if self.banned(holder.peer):
                continue
            if holder.complete or holder.peer == learner:
                everywhere += 1
            else:
                rarity.update(self.missing & holder.holds)
        queue = sorted(self.missing)
        rng.shuffle(queue)
        queue.sort(key=lambda index: rarity[index])
        nowhere = [index for index in queue if rarity[index] == 0 and not everywhere]
        self._queue = [index for index in queue if rarity[index] or everywhere] + nowhere
        self._front = 0
        self._sorted_s = now_s
        self.unsorted = False

    # --- blame ---------------------------------------------------------------------------------

    def blame(self, peer: NodeId, fault: Fault) -> None:
        """`peer` sent wrong bytes or came too late."""
        self._blames.setdefault(peer, Counter())[fault] += 1

    def banned(self, peer: NodeId) -> bool:
        """Blamed so often that nothing more is asked of it for this version."""
        blames = self._blames.get(peer)
        return blames is not None and blames.total() >= limits.BLAMES_BEFORE_BAN

    def pardon(self) -> tuple[NodeId, ...]:
        """Lift the ban of peers that were only slow; returns them."""
        slow = tuple(
            peer
            for peer, blames in self._blames.items()
            if self.banned(peer) and blames[Fault.LIED] == 0
        )
        for peer in slow:
            del self._blames[peer]
        if slow:
            self.unsorted = True
        return slow
