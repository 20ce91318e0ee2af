"""The fetch of one version: who is asked for what, who is blamed, and what is late.

Made by `core.fetch` for each version that it begins; performs nothing, and appends what is to be
done to the effects of the event at hand. Peers, paces and pauses outlive it.
"""

from __future__ import annotations

from random import Random

from echo2_mesh import limits
from echo2_mesh.core.choice import Choice, neighbours_to_ask
from echo2_mesh.core.fetching import (
    Ask,
    AskHoldings,
    Blame,
    Cancel,
    ChunkArrived,
    ChunkRefused,
    Fault,
    FetchEffect,
    Look,
    Made,
    ManifestHere,
    PeerHas,
    StoreFailed,
)
from echo2_mesh.core.forest import Seat, plan
from echo2_mesh.core.machine import Arm, backoff_s
from echo2_mesh.core.queues import LOST_PASS_S, Queues
from echo2_mesh.core.swarm import (
    LIES_OF_THE_LEARNER_MAX,
    MANIFEST_INDEX,
    Flight,
    Holder,
    Pace,
    Target,
)
from echo2_mesh.wire.types import Digest, NodeId

STORE_RETRY_FIRST_S = 1.0
STORE_RETRY_LONGEST_S = 30.0
PARDON_AFTER_S = 1.0
"""Nothing in flight for so long: peers that were only slow may be asked again."""
YOUNG_S = 5.0
NEWCOMERS_SHARE = 0.25
"""Somebody more so soon, or so many more later, and the plan is made anew: nodes that start
together must plan alike."""
IDLE_WAKE_S = 0.5
MIN_WAKE_S = 0.02
WAKE = "fetch"
Effects = list[FetchEffect]


class Lasting:
    """What is remembered from one version to the next.

    Args:
        node: this node, as it is named in the seats; None follows no forest.
    """

    def __init__(self, learner: NodeId, node: NodeId | None, rng: Random) -> None:
        self.learner = learner
        self.node = node
        self.rng = rng
        self.peers: dict[NodeId, Holder] = {}
        self.seats: tuple[Seat, ...] = ()
        self.pace = Pace()
        self.paused_until_s = 0.0
        self.store_failures = 0
        self.wake_at_s = float("-inf")


class Download:
    """One version on its way.

    Args:
        lasting: shared by all of them.
    """

    def __init__(self, target: Target, lasting: Lasting) -> None:
        self.target = target
        self._lasting = lasting
        self._peers = lasting.peers
        self._learner = lasting.learner
        self._rng = lasting.rng
        for holder in self._peers.values():
            holder.forget_version()
        self._queues = self._plan()
        self._began_s = target.moved_s

    # --- what is wanted ------------------------------------------------------------------------

    def _plan(self) -> Queues | None:
        """Pin the forest, if it is known who takes part."""
        node, seats = self._lasting.node, self._lasting.seats
        if node is None or not seats:
            return None
        forest = plan(seats, self._learner)
        if node not in forest:
            return None
        return Queues(forest, node, self.target, self._peers, self._lasting.pace, self._rng)

    def seated(self, now_s: float) -> None:
        """Who takes part has changed: the plan stays, unless many came since it was made."""
        old, seats = self._queues, self._lasting.seats
        if old is not None:
            known = len(old.forest.nodes)
            others = sum(seat.node != self._learner for seat in seats)
            young = now_s - self._began_s < YOUNG_S and others > known
            if not young and others - known < NEWCOMERS_SHARE * known:
                old.seat(seats, now_s)
                return
        queues = self._plan()
        if queues is not None:
            self._queues = queues
            for holder in self._peers.values():
                queues.sources.knows(holder)
            queues.add(self.target.wanted())

    def want_manifest(self) -> None:
        """The manifest is not here."""
        self.target.want_manifest()
        if self._queues is not None:
            self._queues.add((MANIFEST_INDEX,))

    def want_chunks(self, event: ManifestHere, now_s: float) -> None:
        """The manifest is here and in order."""
        target = self.target
        more = target.want_chunks(event.refs, event.held, event.wanted, event.needed)
        target.poll_at_s = now_s + limits.HOLDINGS_INTERVAL_S * self._rng.uniform(0.5, 1.5)
        target.moved_s = now_s
        if self._queues is not None:
            self._queues.add(more)

    def want_more(self, indices: frozenset[int], now_s: float) -> None:
        """These must be fetched after all."""
        more = self.target.want_more(indices)
        self.target.moved_s = now_s
        if self._queues is not None:
            self._queues.add(more)

    def made(self, event: Made, now_s: float, effects: Effects) -> None:
        """Blobs came into the store otherwise."""
        target = self.target
        for index in event.indices:
            if not 0 <= index < len(target.refs):
                continue
            digest = target.refs[index].digest
            if digest in target.flights:
                flight = self._land(digest, here=True)
                effects.append(Cancel(peer=flight.peer, digest=digest))
            first = target.index_of(digest)
            assert first is not None
            self._arrived(first, now_s)

    def give_up(self, effects: Effects) -> None:
        """Another version is fetched instead, or this one is complete."""
        for digest, flight in self.target.flights.items():
            effects.append(Cancel(peer=flight.peer, digest=digest))

    # --- peers ---------------------------------------------------------------------------------

    def gone(self, holder: Holder, now_s: float, effects: Effects) -> None:
        """The connection of `holder` is lost; it is out of the books."""
        peer, queues = holder.peer, self._queues
        self.target.unsorted = True
        flights = self._forgo(peer, effects)
        if queues is not None:
            if peer in queues.forest or peer == self._learner:
                lost = self._peers[peer] = Holder(peer, connected=False)
                lost.failures = holder.failures
                lost.pass_over(now_s, LOST_PASS_S)
            queues.forget(peer, now_s)
            queues.add(flight.index for flight in flights)

    def _forgo(self, peer: NodeId, effects: Effects) -> tuple[Flight, ...]:
        """Wait for nothing more from `peer`."""
        digests = self.target.flights_of(peer)
        effects += [Cancel(peer=peer, digest=digest) for digest in digests]
        return tuple(self._land(digest, here=False) for digest in digests)

    def _land(self, digest: Digest, *, here: bool) -> Flight:
        flight = self.target.land(digest)
        if self._queues is not None:
            self._queues.freed(flight, here=here)
        return flight

    def has(self, event: PeerHas) -> None:
        """A peer says what it holds."""
        holder, target = self._peers.get(event.peer), self.target
        if holder is None:
            if self._queues is None or event.peer not in self._queues.forest:
                return
            holder = self._peers[event.peer] = Holder(event.peer, connected=False)
        if event.indices is None:
            holder.complete = True
        else:
            holder.holds = event.indices
            holder.complete = bool(target.needed) and event.indices.issuperset(range(target.needed))
        target.unsorted = True
        if self._queues is not None:
            self._queues.sources.knows(holder)

    # --- chunks --------------------------------------------------------------------------------

    def arrived(self, event: ChunkArrived, now_s: float, effects: Effects) -> None:
        """Verified and stored."""
        peer, digest, target = event.peer, event.digest, self.target
        flight = target.flights.get(digest)
        if flight is not None:
            self._land(digest, here=True)
            if flight.peer != peer:
                effects.append(Cancel(peer=flight.peer, digest=digest))
        self._lasting.store_failures = 0
        holder = self._peers.get(peer)
        if holder is not None:
            holder.failures = 0
            holder.missing_since_s = None
            if flight is not None and flight.peer == peer:
                holder.took_s = now_s - flight.asked_s
                gap_s = now_s - max(flight.asked_s, holder.heard_s)
                size_bytes = target.ref(flight.index).size_bytes
                holder.pace.learn(gap_s, size_bytes)
                self._lasting.pace.learn(gap_s, size_bytes)
            holder.heard_s = now_s
        if digest == target.manifest.digest:
            if target.manifest_wanted:
                target.manifest_wanted = False
                effects.append(Look(version=target.version, manifest=target.manifest))
        elif (index := target.index_of(digest)) is not None:
            self._arrived(index, now_s)

    def _arrived(self, index: int, now_s: float) -> None:
        self.target.arrived(index, now_s)
        if self._queues is not None:
            self._queues.here(index)

    def refused(self, event: ChunkRefused, now_s: float, effects: Effects) -> None:
        """It was not delivered."""
        flight = self.target.flights.get(event.digest)
        if flight is None or flight.peer != event.peer:
            return
        self._land(event.digest, here=False)
        if (holder := self._peers.get(event.peer)) is not None and event.fault is not Fault.LATE:
            holder.heard_s = now_s
        self._fault(flight, event.fault, now_s, effects)

    def _fault(self, flight: Flight, fault: Fault, now_s: float, effects: Effects) -> None:
        """Remember what went wrong with a peer, and for how long not to ask it."""
        peer, queues, target = flight.peer, self._queues, self.target
        holder = self._peers.setdefault(peer, Holder(peer, connected=False))
        if fault in (Fault.LIED, Fault.LATE):
            lies_max = LIES_OF_THE_LEARNER_MAX if peer == self._learner else 1
            target.blame(peer, fault, lies_max=lies_max)
            effects.append(Blame(peer=peer, fault=fault, banned=target.banned(peer)))
        if fault is Fault.MISSING:
            target.unsorted = True
            if queues is None or not flight.wait_s:
                holder.lacks(flight.index, now_s)
            if queues is not None:
                queues.missed(flight, now_s)
        elif queues is None:
            holder.cool(now_s, self._rng)
        else:
            queues.failed(flight, fault, now_s)
            if fault is Fault.LATE or target.banned(peer):
                for other in self._forgo(peer, effects):
                    queues.around(other.index, peer, now_s)

    def store_failed(self, event: StoreFailed, now_s: float) -> None:
        """It came and could not be written: nothing is asked of anybody for a while."""
        flight = self.target.flights.get(event.digest)
        if flight is not None and flight.peer == event.peer:
            self._land(event.digest, here=False)
            if self._queues is not None:
                self._queues.add((flight.index,))
        pause_s = backoff_s(
            self._lasting.store_failures,
            first_s=STORE_RETRY_FIRST_S,
            longest_s=STORE_RETRY_LONGEST_S,
        )
        if now_s >= self._lasting.paused_until_s:
            self._lasting.store_failures += 1
            self._lasting.paused_until_s = now_s + pause_s * self._rng.uniform(0.75, 1.25)

    def _deadline_s(self, flight: Flight) -> float:
        """When a chunk is late: its own time is up, or its peer has been silent for too long."""
        holder = self._peers.get(flight.peer)
        if self._queues is None or holder is None:
            return flight.deadline_s
        ref = self.target.ref(flight.index)
        silence_s = self._queues.waits.silence_s(holder, flight, ref)
        return min(flight.deadline_s, max(flight.asked_s, holder.heard_s) + silence_s)

    def expire(self, now_s: float, effects: Effects) -> None:
        """What is late by now is asked of others."""
        target = self.target
        if self._queues is not None:
            self._queues.stir()
        late = [d for d, flight in target.flights.items() if now_s >= self._deadline_s(flight)]
        for digest in late:
            if digest not in target.flights:
                continue  # given up together with another of the same peer
            flight = self._land(digest, here=False)
            effects.append(Cancel(peer=flight.peer, digest=digest))
            self._fault(flight, Fault.LATE, now_s, effects)

    # --- choosing ------------------------------------------------------------------------------

    def schedule(self, now_s: float, effects: Effects) -> None:
        """Ask for as much as may be asked for now."""
        target = self.target
        if now_s < self._lasting.paused_until_s:
            return
        if self._queues is not None:
            due = self._queues.due(now_s)
        else:
            due = Choice(target, self._peers, self._learner, self._rng, now_s).due()
        for index, holder, wait_s in due:
            ref = target.ref(index)
            if ref.digest in target.flights:  # had of another before its turn comes there
                flight = self._land(ref.digest, here=False)
                effects.append(Cancel(peer=flight.peer, digest=ref.digest))
            timeout_s = holder.deadline_s(ref) + wait_s
            target.fly(index, holder.peer, now_s, timeout_s, wait_s)
            effects.append(Ask(peer=holder.peer, ref=ref, timeout_s=timeout_s, wait_s=wait_s))

    def mind_being_stuck(self, now_s: float) -> None:
        """Nothing is in flight while something is missing, or nothing comes while for some of it
        there is nobody to ask: note since when, and pardon the slow. Patches of which nothing
        was made for long are given up."""
        target = self.target
        wanting = target.manifest_wanted or target.missing
        at_a_loss = self._queues is not None and self._queues.sources.at_a_loss
        if not wanting or (target.flights and not at_a_loss):
            target.stuck_since_s = None
            if target.refs and now_s - target.moved_s >= limits.REBUILD_PATIENCE_S:
                self.want_more(frozenset(target.absentees()), now_s)
            return
        if target.stuck_since_s is None:
            target.stuck_since_s = now_s
        stuck_s = now_s - target.stuck_since_s
        for peer in target.pardon() if stuck_s >= PARDON_AFTER_S else ():
            if (holder := self._peers.get(peer)) is not None:
                holder.patience = min(holder.patience * 2.0, 64.0)
                holder.cool(now_s, self._rng)

    def poll(self, now_s: float, effects: Effects) -> None:
        """Ask some neighbours what they hold by now, the longest unasked first."""
        target, queues = self.target, self._queues
        if not target.refs or now_s < target.poll_at_s:
            return
        target.poll_at_s = now_s + limits.HOLDINGS_INTERVAL_S * self._rng.uniform(0.75, 1.25)
        if not target.missing or (queues is not None and not queues.loose(now_s)):
            return
        for holder in neighbours_to_ask(
            target, self._peers.values(), self._learner, self._rng, now_s
        ):
            holder.polled_s = now_s
            effects.append(AskHoldings(peer=holder.peer, manifest=target.manifest.digest))

    def arm(self, now_s: float, effects: Effects) -> None:
        """One alarm at a time where a forest is followed: chunks come too often to set it anew."""
        target, queues = self.target, self._queues
        if queues is not None and self._lasting.wake_at_s > now_s:
            return
        times_s = [self._deadline_s(flight) for flight in target.flights.values()]
        times_s.append(now_s + IDLE_WAKE_S)
        if self._lasting.paused_until_s > now_s:
            times_s.append(self._lasting.paused_until_s)
        if queues is not None:
            times_s.append(max(queues.wake_s(), now_s + MIN_WAKE_S))
        else:
            times_s += [h.cool_until_s for h in self._peers.values() if h.cool_until_s > now_s]
            if target.refs:
                times_s.append(target.poll_at_s)
        self._lasting.wake_at_s = max(min(times_s), now_s)
        effects.append(Arm(key=WAKE, at_s=self._lasting.wake_at_s))
