"""The fetch machine's books: one version being fetched, and what each peer is good for in it.

Owned by `core.fetch`, which makes every decision; this keeps the sets consistent.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from functools import lru_cache
from random import Random

import msgspec

from echo2_mesh import limits
from echo2_mesh.core.fetching import Announced, Fault
from echo2_mesh.core.machine import backoff_s
from echo2_mesh.wire.messages import ChunkRef
from echo2_mesh.wire.types import ChunkKind, Digest, NodeId

MANIFEST_INDEX = -1
"""Stands for the manifest itself among the indices of its blobs."""
RATE_BYTES_PER_S_MIN = 128 * limits.KIB
"""A holder slower than this is late; the deadline of a large chunk grows by it."""
LACKS_FOR_S = 2.0
COOL_FIRST_S = 0.25
COOL_LONGEST_S = 15.0
RESORT_INTERVAL_S = 0.5
PACE_MEMORY = 0.7
"""Weight of what was known of a peer's pace against one more silence as long as it."""
PACE_JUMP_MAX = 4.0
"""One silence, however long, does not make a peer slow."""
LIES_OF_THE_LEARNER_MAX = 3
"""Only the learner has every chunk: what may be a fault of its disk is asked for again."""
_HERE, _WANTED, _NEEDED = 1, 2, 4


class Pace:
    """Seconds of silence for each byte of the chunk that ends it, over chunks and versions.

    Chunks that land together share one silence, so each is weighed by its length: the estimate is
    of what somebody sees who looks at any moment, not of what the mean chunk had before it.
    """

    def __init__(self) -> None:
        self.s_per_byte: float | None = None

    def learn(self, seconds: float, size_bytes: int) -> None:
        """So long nothing came, then one more chunk."""
        now, old = seconds / max(1, size_bytes), self.s_per_byte
        if not old:
            self.s_per_byte = now
            return
        now = min(now, PACE_JUMP_MAX * old)
        self.s_per_byte = old + (1 - PACE_MEMORY) * min(1.0, now / old) * (now - old)


class Holder:
    """One peer, as a source."""

    def __init__(self, peer: NodeId, *, connected: bool = True) -> None:
        self.peer = peer
        self.connected = connected
        self.holds: frozenset[int] = frozenset()
        self.complete = False
        """It holds every data chunk and file; of patches it says so one by one."""
        self.failures = 0
        self.cool_until_s = 0.0
        """Nothing is asked of it before."""
        self.away_until_s = 0.0
        """Not before is it waited for at all: what it should send comes another way."""
        self.polled_s = float("-inf")
        self.patience = 1.0
        """Factor on its deadlines: grows when a slow peer is the only one left."""
        self.took_s: float | None = None
        """How long its last chunk took from question to store."""
        self.heard_s = float("-inf")
        """When it last delivered or answered anything."""
        self.missing_since_s: float | None = None
        """Since when it has answered only that it does not hold what was asked."""
        self.pace = Pace()
        self._lacks: dict[int, float] = {}

    def forget_version(self) -> None:
        """Another version is fetched from now on: what it held says nothing."""
        self.holds = frozenset()
        self.complete = False
        self.missing_since_s = None
        self._lacks = {}

    def has(self, index: int, now_s: float, learner: NodeId, *, patch: bool = False) -> bool:
        """Worth asking for `index`: it said so, or made the version, or may have the manifest."""
        if self._lacks and self._lacks.get(index, now_s) > now_s:
            return False
        return (
            index in self.holds
            or (self.complete and not patch)
            or self.peer == learner
            or index == MANIFEST_INDEX
        )

    def lacks(self, index: int, now_s: float) -> None:
        """It answered that it does not hold `index`: do not ask again at once."""
        self.holds -= {index}
        self._lacks[index] = now_s + LACKS_FOR_S

    def cool(self, now_s: float, rng: Random) -> None:
        """Leave it alone for a while, longer each time."""
        pause_s = backoff_s(self.failures, first_s=COOL_FIRST_S, longest_s=COOL_LONGEST_S)
        self.failures += 1
        self.cool_until_s = now_s + pause_s * rng.uniform(0.75, 1.25)

    def pass_over(self, now_s: float, first_s: float) -> None:
        """Do not wait for it for a while, longer each time."""
        longest_s = max(first_s, limits.PASS_OVER_LONGEST_S)
        pause_s = backoff_s(self.failures, first_s=first_s, longest_s=longest_s)
        self.failures += 1
        self.missing_since_s = None
        self.away_until_s = now_s + pause_s

    def deadline_s(self, ref: ChunkRef) -> float:
        """How long it may take to deliver `ref`."""
        return (limits.CHUNK_DEADLINE_S + ref.size_bytes / RATE_BYTES_PER_S_MIN) * self.patience


class Flight(msgspec.Struct, frozen=True, kw_only=True):
    """A chunk that was asked for."""

    index: int
    peer: NodeId
    asked_s: float
    deadline_s: float
    wait_s: float = 0.0


class Book:
    """The blobs of one manifest, by index and by digest; never changes."""

    def __init__(self, refs: tuple[ChunkRef, ...]) -> None:
        self.refs = refs
        self.first: dict[Digest, int] = {}
        """The first index of each distinct blob stands for all."""
        self.twins: dict[int, list[int]] = {}
        for index, ref in enumerate(refs):
            first = self.first.setdefault(ref.digest, index)
            if first != index:
                self.twins.setdefault(first, [first]).append(index)
        patches = (i for i, ref in enumerate(refs) if ref.kind is ChunkKind.PATCH)
        self.needed = next(patches, len(refs))
        """So many from the first are data and files: with them the version is complete."""


book_of = lru_cache(maxsize=2)(Book)


class Target:
    """The version being fetched."""

    def __init__(self, announced: Announced) -> None:
        self.version = announced.version
        self.manifest = announced.manifest
        self.order = (announced.incarnation_unix_ms, int(announced.version))
        self.manifest_wanted = False
        self.refs: tuple[ChunkRef, ...] = ()
        self.needed = 0
        """So many blobs from the first are data and files, the rest patches."""
        self.missing = 0
        """Distinct blobs to be fetched that are not here yet."""
        self.absent = 0
        """Distinct data chunks and files that are not here yet, fetched or to be made."""
        self.flights: dict[Digest, Flight] = {}
        self.poll_at_s = 0.0
        self.stuck_since_s: float | None = None
        self.moved_s = 0.0
        """When a blob last came or was made."""
        self.unsorted = True
        self._book = book_of(())
        self._state = bytearray()
        self._flying: dict[NodeId, int] = {}
        self._held_bytes = 0
        self._wanted_bytes = 0
        self._queue: list[int] = []
        self._front = 0
        self._sorted_s = float("-inf")
        self._blames: dict[NodeId, Counter[Fault]] = {}
        self._banned: set[NodeId] = set()

    def want_manifest(self) -> None:
        """The manifest is not here."""
        self.manifest_wanted = True

    def want_chunks(
        self,
        refs: tuple[ChunkRef, ...],
        held: frozenset[int],
        wanted: frozenset[int] | None = None,
        needed: int | None = None,
    ) -> tuple[int, ...]:
        """The manifest is here: `held` of its blobs are too, `wanted` are to be fetched.

        Returns:
            The indices to fetch, each distinct blob once.
        """
        self.manifest_wanted = False
        book = self._book = book_of(refs)
        self.refs = refs
        self.needed = book.needed if needed is None else needed
        state = self._state = bytearray(len(refs))
        for first in book.first.values():
            if first < self.needed:
                state[first] = _NEEDED
        self.absent = len(state) - state.count(0)
        for index in held:
            first = book.first[refs[index].digest]
            self.absent -= state[first] == _NEEDED
            state[first] |= _HERE
        more = self.want_more(range(self.needed) if wanted is None else wanted)
        self._held_bytes = self._wanted_bytes = sum(
            refs[index].size_bytes for index, flags in enumerate(state) if flags & _HERE
        )
        self._wanted_bytes += sum(refs[index].size_bytes for index in more)
        self.unsorted = True
        return more

    def want_more(self, indices: Iterable[int]) -> tuple[int, ...]:
        """Fetch these as well. Returns those that were not wanted nor here before."""
        first, state = self._book.first, self._state
        more = []
        for index in indices:
            if not 0 <= index < len(state):
                continue
            at = first[self.refs[index].digest]
            if not state[at] & (_HERE | _WANTED):
                state[at] |= _WANTED
                more.append(at)
        self.missing += len(more)
        self._wanted_bytes += sum(self.refs[index].size_bytes for index in more)
        self.unsorted = True
        return tuple(sorted(more))

    def absentees(self) -> tuple[int, ...]:
        """Data chunks and files that are not here yet."""
        return tuple(
            i for i, flags in enumerate(self._state) if flags & _NEEDED and not flags & _HERE
        )

    def wanted(self) -> tuple[int, ...]:
        """What is to be fetched and not here, the manifest before its blobs are known."""
        if not self.refs:
            return (MANIFEST_INDEX,) if self.manifest_wanted else ()
        return tuple(i for i, f in enumerate(self._state) if f & (_WANTED | _HERE) == _WANTED)

    def ref(self, index: int) -> ChunkRef:
        """The blob of that index."""
        return self.manifest if index == MANIFEST_INDEX else self.refs[index]

    def index_of(self, digest: Digest) -> int | None:
        """The index that stands for a blob of this version; None for any other."""
        return self._book.first.get(digest)

    def is_patch(self, index: int) -> bool:
        """The blob is a piece of a patch."""
        return index >= self.needed > 0

    def wants(self, index: int) -> bool:
        """It is to be fetched, not here, and not being asked for."""
        if index == MANIFEST_INDEX:
            return self.manifest_wanted and self.manifest.digest not in self.flights
        flags = self._state[index]
        return flags & (_WANTED | _HERE) == _WANTED and self.refs[index].digest not in self.flights

    def arrived(self, index: int, now_s: float) -> None:
        """A verified blob is in the store."""
        flags = self._state[index]
        if flags & _HERE:
            return
        self._state[index] = flags | _HERE
        self.moved_s = now_s
        self.absent -= flags >> 2
        if flags & _WANTED:
            self.missing -= 1
            self._held_bytes += self.refs[index].size_bytes

    def held(self) -> frozenset[int]:
        """Every index whose blob is here, for whoever asks."""
        here = {i for i, flags in enumerate(self._state) if flags & _HERE}
        for first, twins in self._book.twins.items():
            if first in here:
                here.update(twins)
        return frozenset(here)

    def progress_bytes(self) -> tuple[int, int]:
        """(here, wanted), each distinct blob counted once; (0, 0) before the manifest is read."""
        return self._held_bytes, self._wanted_bytes

    # --- flights -------------------------------------------------------------------------------

    def fly(
        self, index: int, peer: NodeId, asked_s: float, timeout_s: float, wait_s: float
    ) -> Flight:
        """Asked `peer` for `index`."""
        digest = self.ref(index).digest
        assert digest not in self.flights
        flight = self.flights[digest] = Flight(
            index=index, peer=peer, asked_s=asked_s, deadline_s=asked_s + timeout_s, wait_s=wait_s
        )
        self._flying[peer] = self._flying.get(peer, 0) + 1
        return flight

    def land(self, digest: Digest) -> Flight:
        """It came, or it is no longer waited for."""
        flight = self.flights.pop(digest)
        self._flying[flight.peer] -= 1
        return flight

    def flights_count(self, peer: NodeId) -> int:
        """How many chunks are awaited from `peer`."""
        return self._flying.get(peer, 0)

    def flights_of(self, peer: NodeId) -> tuple[Digest, ...]:
        """The chunks awaited from `peer`."""
        if not self._flying.get(peer):
            return ()
        return tuple(d for d, flight in self.flights.items() if flight.peer == peer)

    def queue(
        self, holders: Iterable[Holder], learner: NodeId, rng: Random, now_s: float
    ) -> Iterable[int]:
        """Indices to ask for next: the rarest first, ties by chance."""
        if not self.refs:
            if self.wants(MANIFEST_INDEX):
                yield MANIFEST_INDEX
            return
        if self.unsorted and (now_s - self._sorted_s >= RESORT_INTERVAL_S or not self.flights):
            self._sort(holders, learner, rng, now_s)
        here = _HERE
        while self._front < len(self._queue) and self._state[self._queue[self._front]] & here:
            self._front += 1
        for position in range(self._front, len(self._queue)):
            if self.wants(index := self._queue[position]):
                yield index

    def _sort(self, holders: Iterable[Holder], learner: NodeId, rng: Random, now_s: float) -> None:
        rarity: Counter[int] = Counter()
        everywhere = 0
        queue = [i for i, f in enumerate(self._state) if f & (_WANTED | _HERE) == _WANTED]
        missing = frozenset(queue)
        for holder in holders:
            if not holder.connected or self.banned(holder.peer):
                continue
            if holder.complete or holder.peer == learner:
                everywhere += 1
            else:
                rarity.update(missing & holder.holds)
        rng.shuffle(queue)
        queue.sort(key=lambda index: rarity[index])
        nowhere = [index for index in queue if rarity[index] == 0 and not everywhere]
        self._queue = [index for index in queue if rarity[index] or everywhere] + nowhere
        self._front = 0
        self._sorted_s = now_s
        self.unsorted = False

    # --- blame ---------------------------------------------------------------------------------

    def blame(self, peer: NodeId, fault: Fault, *, lies_max: int = 1) -> None:
        """`peer` sent wrong bytes or came too late: nothing more is asked of it after `lies_max`
        lies, or after being late too often, for this version."""
        blames = self._blames.setdefault(peer, Counter())
        blames[fault] += 1
        if blames[Fault.LIED] >= lies_max or blames.total() >= limits.BLAMES_BEFORE_BAN:
            self._banned.add(peer)

    def banned(self, peer: NodeId) -> bool:
        """Nothing more is asked of it for this version."""
        return peer in self._banned

    def pardon(self) -> tuple[NodeId, ...]:
        """Lift the ban of peers that were only slow; returns them."""
        slow = tuple(
            peer
            for peer, blames in self._blames.items()
            if peer in self._banned and blames[Fault.LIED] == 0
        )
        for peer in slow:
            del self._blames[peer]
            self._banned.discard(peer)
        if slow:
            self.unsorted = True
        return slow
