"""Which missing chunk waits for which source: the forest's plan, and the ways around it.

Every chunk waits in the queue of its parent in the chunk's stripe. While the parent is well it is
asked; while it is not, a few chunks at a time stray: each is asked of one other that is known to
hold it, or else of whom the forest names (`Forest.source_of`). So a parent that comes back goes
on where it was. Made for one version by `core.fetch`, which tells it what happened and performs
what it yields.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator
from random import Random

from echo2_mesh import limits
from echo2_mesh.core.fetching import Fault
from echo2_mesh.core.forest import Forest, Seat
from echo2_mesh.core.sources import Sources
from echo2_mesh.core.swarm import Flight, Holder, Pace, Target
from echo2_mesh.core.waits import Waits
from echo2_mesh.wire.types import NodeId

RETRY_S = 1.0
"""Nobody can be asked for a chunk: it is tried again so much later."""
HASTY_S = 0.25
"""So long before its time the answer of one who waits does not come: it is not expecting."""
MISSES_MAX = 2
"""So many times missed, and a chunk is asked of another: perhaps some wait in a circle, since
their plans differ."""
BUSY_MAX = 3
FIRST_WINDOW = 2
"""Chunks asked for at once of a parent that has never delivered; one more for each that comes: who
plans before everybody has come does not burden the learner much."""
STRAYS_OF_ONE_MAX = 2
STRAYS_MAX = 16
"""Chunks of one parent that are sought elsewhere at once."""
STEALS_MAX = 8
"""Chunks asked past a slow parent at once."""
FEW_PARENTS = 4
"""With fewer, a slow one is not gone around before others have what it should send."""
STEAL_WORTH_S = 1.0
"""What comes within this time by itself is not worth another's uplink."""
STEAL_FAR_S = 10.0
"""What takes longer is sought even where nobody is known to have it."""
LATE_PASS_S = 10.0
LOST_PASS_S = 2.0
"""A late or lost parent is gone around for so long, and for longer each time."""


class Queues:
    """The queues of one version.

    Args:
        forest: pinned for the version.
        holders: kept by the fetch machine; those who are asked first are added.
        pace: of all peers together.
    """

    def __init__(
        self,
        forest: Forest,
        node: NodeId,
        target: Target,
        holders: dict[NodeId, Holder],
        pace: Pace,
        rng: Random,
    ) -> None:
        self.forest = forest
        self._node = node
        self._target = target
        self._rng = rng
        self.waits = Waits(forest, pace)
        self.sources = Sources(forest, node, target, holders, rng)
        self._queues: dict[NodeId, list[int]] = {}
        """By parent."""
        self._strays: dict[NodeId, list[int]] = {}
        """What has left its parent's queue, by whom it is to be asked of."""
        self._astray: dict[int, NodeId] = {}
        """The parents of strays."""
        self._astray_of: Counter[NodeId] = Counter()
        self._out: set[int] = set()
        """Strays that were asked for, and how many of whom."""
        self._strays_flying: Counter[NodeId] = Counter()
        self._delivered: Counter[NodeId] = Counter()
        self._awake: dict[NodeId, None] = {}
        """Sources that may have room for a question."""
        self._later: list[tuple[float, int]] = []
        self._tried: dict[int, set[NodeId]] = {}
        self._misses: dict[int, int] = {}
        self._stolen: set[int] = set()
        """Asked past their parents and not here yet; and all that ever were."""
        self._once: set[int] = set()
        self._parents = 1

    # --- what waits for whom -------------------------------------------------------------------

    def add(self, indices: Iterable[int]) -> None:
        """These are missing."""
        for index in indices:
            if self._target.wants(index):
                self._stay(index)
                self._stolen.discard(index)
                parent = self.forest.parent_of(self._node, index)
                heapq.heappush(self._queues.setdefault(parent, []), index)
                self._awake[parent] = None
        self._parents = max(self._parents, len(self._queues))

    def forget(self, peer: NodeId, now_s: float) -> None:
        """`peer` is not well: what strayed to it goes elsewhere, what waits for it may stray."""
        self.sources.forget(peer)
        self._awake[peer] = None
        for index in self._strays.pop(peer, ()):
            self._stray(index, now_s)

    def stir(self) -> None:
        """Time has passed: parents, and those asked in their place, may be well again."""
        self._awake.update(dict.fromkeys((*self._queues, *self._strays)))

    def freed(self, flight: Flight, *, here: bool) -> None:
        """A question to a peer has ended."""
        self._awake[flight.peer] = None
        index = flight.index
        if index in self._out:
            self._out.discard(index)
            self._strays_flying[flight.peer] -= 1
        if here:
            self.sources.at_a_loss = False
            self._delivered[flight.peer] += 1
            self.here(index)

    def here(self, index: int) -> None:
        """The chunk is in the store, whoever it came from: it is in no book any more."""
        self._tried.pop(index, None)
        self._misses.pop(index, None)
        self._stolen.discard(index)
        self._stay(index)

    def _stay(self, index: int) -> None:
        """It is no stray any more."""
        parent = self._astray.pop(index, None)
        if parent is not None:
            self._astray_of[parent] -= 1
            self._awake[parent] = None

    def around(self, index: int, peer: NodeId, now_s: float) -> None:
        """`peer` did not deliver `index`: another is asked, `peer` not again for it."""
        if index in self._stolen:
            self.add((index,))
            return
        self._tried.setdefault(index, set()).add(peer)
        self._stray(index, now_s)

    def failed(self, flight: Flight, fault: Fault, now_s: float) -> None:
        """What was asked of a peer did not come, and not for want of it."""
        peer, holder = flight.peer, self.sources.holder(flight.peer)
        if fault is Fault.BUSY and holder.failures < BUSY_MAX:
            holder.cool(now_s, self._rng)
            self.add((flight.index,))
            return
        holder.pass_over(now_s, LATE_PASS_S if fault is Fault.LATE else LOST_PASS_S)
        if peer == self.forest.learner:
            holder.away_until_s = min(holder.away_until_s, now_s + LOST_PASS_S)
        self.forget(peer, now_s)
        self.around(flight.index, peer, now_s)

    def seat(self, seats: Iterable[Seat], now_s: float) -> None:
        """Who takes part has changed: nothing is expected of those who do not any more."""
        for node in sorted(set(self.forest.nodes) - {seat.node for seat in seats} - {self._node}):
            holder = self.sources.holder(node)
            if now_s >= holder.away_until_s and not holder.connected:
                holder.pass_over(now_s, LATE_PASS_S)
                self.forget(node, now_s)

    def missed(self, flight: Flight, now_s: float) -> None:
        """Its holder does not have the chunk yet, or does not expect it.

        A parent that waits for it itself is asked again; one that answers at once is not waiting.
        """
        index, holder = flight.index, self.sources.holder(flight.peer)
        parent = self.forest.parent_of(self._node, index) == flight.peer
        if parent and holder.missing_since_s is None:
            holder.missing_since_s = now_s
        quick = now_s - flight.asked_s < flight.wait_s - HASTY_S
        if index in self._stolen or flight.wait_s == 0.0:
            self.around(index, flight.peer, now_s)
            return
        misses = self._misses[index] = self._misses.get(index, 0) + 1
        if misses >= MISSES_MAX:
            self.around(index, flight.peer, now_s)
        elif quick:
            heapq.heappush(self._later, (now_s + HASTY_S, index))
        elif parent:
            self.add((index,))
        else:
            self._stray(index, now_s)
        patience_s = self.waits.missing_s(self._target.ref(index))
        since_s = now_s if holder.missing_since_s is None else holder.missing_since_s
        if parent and now_s - since_s >= patience_s:
            holder.pass_over(now_s, limits.MISSING_PATIENCE_S)
            self.forget(flight.peer, now_s)

    def wake_s(self) -> float:
        """When something is due that nobody will report."""
        return self._later[0][0] if self._later else float("inf")

    def loose(self, now_s: float) -> bool:
        """Something does not come by its planned way: it helps to know what others hold."""
        return bool(self._astray or self._once or self.sources.at_a_loss) or self._in_tail(now_s)

    # --- what to ask ---------------------------------------------------------------------------

    def due(self, now_s: float) -> Iterator[tuple[int, Holder, float]]:
        """(index, whom to ask, seconds it may wait), each to be asked before the next is taken."""
        while self._later and self._later[0][0] <= now_s:
            index = heapq.heappop(self._later)[1]
            if index in self._tried:
                self._stray(index, now_s)
            else:
                self.add((index,))
        while self._awake and len(self._target.flights) < limits.FETCH_IN_FLIGHT_MAX:
            # What the learner sends is what others wait for.
            learner = self.forest.learner
            peer = learner if learner in self._awake else next(iter(self._awake))
            del self._awake[peer]
            if now_s < self.sources.holder(peer).cool_until_s:
                continue
            if queue := self._queues.get(peer):
                if not self.sources.well(peer, now_s) or (
                    peer == self.forest.learner and self.sources.keepers
                ):
                    self._let_stray(queue, peer, now_s)
                if self.sources.well(peer, now_s):
                    yield from self._from(queue, peer)
            if strays := self._strays.get(peer):
                yield from self._from(strays, peer, astray=True)
                if not strays:
                    del self._strays[peer]
        yield from self._steals(now_s)

    def _from(
        self, queue: list[int], peer: NodeId, *, astray: bool = False
    ) -> Iterator[tuple[int, Holder, float]]:
        """As much of a queue as `peer` may be asked for now; strays never take a parent's room."""
        target, holder, flying = self._target, self.sources.holder(peer), self._strays_flying
        while queue:
            count, most = flying[peer], STRAYS_OF_ONE_MAX
            if not astray:
                count = target.flights_count(peer) - count
                most = self.waits.window(target.ref(queue[0]), holder, self._parents)
                if holder.pace.s_per_byte is None:
                    most = min(most, FIRST_WINDOW + self._delivered[peer])
            if count >= most or not self._room(peer):
                if len(target.flights) >= limits.FETCH_IN_FLIGHT_MAX:
                    self._awake[peer] = None
                return
            index = heapq.heappop(queue)
            if target.wants(index):
                if astray:
                    self._out.add(index)
                    flying[peer] += 1
                yield index, holder, self._wait_s(holder, index)

    def _room(self, peer: NodeId) -> bool:
        """One more question to `peer` is within the limits."""
        count, in_all = self._target.flights_count(peer), len(self._target.flights)
        most = limits.FETCH_IN_FLIGHT_PER_PEER_MAX
        return count < most and in_all < limits.FETCH_IN_FLIGHT_MAX

    def _let_stray(self, queue: list[int], peer: NodeId, now_s: float) -> None:
        """Some of what waits for `peer`, who is not well or is to be spared, goes around it."""
        while queue and self._astray_of[peer] < STRAYS_MAX:
            index = queue[0]
            if self._target.wants(index):
                if self._source(index, now_s) in (None, peer):
                    return
                self._stray(index, now_s)
            heapq.heappop(queue)

    def _in_tail(self, now_s: float) -> bool:
        """Some parent beside the learner has time for others."""
        return any(self._is_free(peer) and self.sources.well(peer, now_s) for peer in self._queues)

    def _is_free(self, peer: NodeId) -> bool:
        """It has delivered all that was to come from it as a parent, or all that did not go
        around it: one that has delivered nothing is not asked for more."""
        delivered = self._delivered[peer] and peer != self.forest.learner
        return bool(delivered) and self._is_done(peer)

    def _is_done(self, peer: NodeId) -> bool:
        """Nothing waits for it, or is awaited of it, as a parent."""
        return not self._queues.get(peer) and not self._awaited(peer)

    def _awaited(self, peer: NodeId) -> int:
        """Chunks in flight that `peer` was asked for as their parent."""
        return self._target.flights_count(peer) - self._strays_flying[peer]

    def _steals(self, now_s: float) -> Iterator[tuple[int, Holder, float]]:
        """The tail: what waits for a slower parent, asked or not, is asked of others, once each."""
        target = self._target
        if not target.missing or len(self._stolen) >= STEALS_MAX or not self._in_tail(now_s):
            return
        for peer in [peer for peer in self._queues if not self._is_done(peer)]:
            pace = self.sources.holder(peer).pace.s_per_byte
            waiting = sorted(self._queues[peer], reverse=True)
            ahead = self._awaited(peer)
            for position, index in enumerate([*waiting, *self._behind(peer)]):
                rest_s = STEAL_FAR_S
                if pace is not None:
                    # Each that is stolen or looked at before it has one fewer in front.
                    rest_s = pace * target.ref(index).size_bytes * (len(waiting) + ahead - position)
                if rest_s <= STEAL_WORTH_S or len(self._stolen) >= STEALS_MAX:
                    break
                if index in self._once or index in self._tried:
                    continue
                if position < len(waiting) and not target.wants(index):
                    continue
                other = self._past(index, peer, now_s, far=rest_s >= STEAL_FAR_S)
                if other is None or self._strays_flying[other.peer] >= STRAYS_OF_ONE_MAX:
                    continue
                if not self._room(other.peer):
                    continue
                yield index, other, self._wait_s(other, index)
                self._stolen.add(index)
                self._once.add(index)
                self._out.add(index)
                self._strays_flying[other.peer] += 1

    def _behind(self, peer: NodeId) -> list[int]:
        """What is awaited of a parent behind the chunk that it is sending, the newest first."""
        flights = [self._target.flights[digest] for digest in self._target.flights_of(peer)]
        flights = [flight for flight in flights if flight.index not in self._out]
        flights.sort(key=lambda flight: (-flight.asked_s, -flight.index))
        return [flight.index for flight in flights[:-1]]

    def _past(self, index: int, peer: NodeId, now_s: float, *, far: bool) -> Holder | None:
        """Who else may deliver what waits for `peer`; if the wait is `far` too long, who can get
        it."""
        busy = {at for at in self._queues if not self._is_free(at)}
        other = self.sources.other(index, busy.union(self._tried.get(index, ())), now_s)
        if other is not None and not self.forest.forwards(other.peer):
            other = None  # slow, or behind a relay: its child would wait longer than for `peer`
        if other is not None or not far or not self._target.wants(index):
            return other
        if peer == self.forest.learner or self._parents < FEW_PARENTS:
            return None
        source = self.forest.source_of(
            self._node, index, lambda at: at not in busy and self.sources.well(at, now_s)
        )
        fit = source == self.forest.learner or self.forest.forwards(source)
        return self.sources.holder(source) if fit and self.sources.well(source, now_s) else None

    # --- whom to ask ---------------------------------------------------------------------------

    def _stray(self, index: int, now_s: float) -> None:
        """Another source than the parent is sought for it."""
        if not self._target.wants(index):
            return
        source = self._source(index, now_s)
        if source is None:
            self._tried.pop(index, None)
            heapq.heappush(self._later, (now_s + RETRY_S, index))
            return
        if index not in self._astray:
            parent = self._astray[index] = self.forest.parent_of(self._node, index)
            self._astray_of[parent] += 1
        heapq.heappush(self._strays.setdefault(source, []), index)
        self._awake[source] = None

    def _source(self, index: int, now_s: float) -> NodeId | None:
        missed = self._misses.get(index, 0) >= MISSES_MAX
        return self.sources.of(index, self._tried.get(index, ()), now_s, missed=missed)

    def _wait_s(self, holder: Holder, index: int) -> float:
        """How long `holder` may wait for the chunk itself; 0 where it is known to have it."""
        known = self.sources.has(holder, index)
        return 0.0 if known else self.waits.wait_s(self._target.ref(index))
