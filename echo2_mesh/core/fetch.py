"""Which chunk to ask of which holder next, until the newest version is complete here.

One version at a time. Rarest chunk first, ties by chance, so that nodes that start together
fetch different chunks and can serve one another; the learner is asked last where others hold the
chunk. Each chunk is in flight from exactly one peer. Late and lying holders are blamed and after
`BLAMES_BEFORE_BAN` left alone; a merely slow one is pardoned where nobody else can serve, with a
longer deadline. Never gives up while somebody announces a version. Decides only: `net.following`
moves the bytes, verifies them, and reports.
"""

from __future__ import annotations

from random import Random
from typing import assert_never

from echo2_mesh import limits
from echo2_mesh.core.choice import Choice
from echo2_mesh.core.fetching import (
    Announced,
    Ask,
    AskHoldings,
    Blame,
    Cancel,
    ChunkArrived,
    ChunkRefused,
    Fault,
    FetchEffect,
    FetchEvent,
    Look,
    ManifestAbsent,
    ManifestHere,
    ManifestUnfit,
    PeerGone,
    PeerHas,
    PeerUp,
    Ready,
    StoreFailed,
)
from echo2_mesh.core.machine import Arm, Woke, backoff_s
from echo2_mesh.core.swarm import Holder, Target
from echo2_mesh.wire.types import Digest, NodeId

SUPERSEDES_IN_A_ROW_MAX = 1
"""Unfinished versions dropped for newer ones before one must be finished: progress is certain."""
HOLDINGS_PEERS_PER_ROUND = 6
STORE_RETRY_FIRST_S = 1.0
STORE_RETRY_LONGEST_S = 30.0
PARDON_AFTER_S = 1.0
"""Nothing in flight for so long: peers that were only slow may be asked again."""
STUCK_AFTER_S = 5.0
"""Nothing in flight and nobody to ask for so long: a newer version is better than this one."""
_WAKE = "fetch"


class Fetch:
    """The fetch of one node. Holds no clock and no socket.

    Args:
        learner: holds every chunk of what it announces.
        rng: breaks ties.
    """

    def __init__(self, learner: NodeId, rng: Random) -> None:
        self._learner = learner
        self._rng = rng
        self._peers: dict[NodeId, Holder] = {}
        self._target: Target | None = None
        self._newest: Announced | None = None
        self._done: tuple[int, int] = (-1, -1)
        self._superseded = 0
        self._paused_until_s = 0.0
        self._store_failures = 0

    # --- questions -----------------------------------------------------------------------------

    @property
    def target(self) -> Target | None:
        """The version being fetched, to be read only."""
        return self._target

    def progress_bytes(self) -> tuple[int, int]:
        """(here, wanted) of the version being fetched; (0, 0) while there is none."""
        return self._target.progress_bytes() if self._target else (0, 0)

    # --- the machine ---------------------------------------------------------------------------

    def handle(self, event: FetchEvent, now_s: float) -> tuple[FetchEffect, ...]:
        """Take one event; return what to do, in order."""
        effects: list[FetchEffect] = []
        match event:
            case Announced():
                self._announced(event, effects)
            case ManifestHere() | ManifestAbsent() | ManifestUnfit():
                self._looked(event, now_s, effects)
            case PeerUp(peer=peer):
                self._peers.setdefault(peer, Holder(peer))
            case PeerGone(peer=peer):
                self._gone(peer, effects)
            case PeerHas():
                self._has(event)
            case ChunkArrived(peer=peer, digest=digest):
                self._arrived(peer, digest, now_s, effects)
            case ChunkRefused():
                self._refused(event, now_s, effects)
            case StoreFailed(peer=peer, digest=digest):
                self._store_failed(peer, digest, now_s)
            case Woke():
                self._expire(now_s, effects)
            case _:
                assert_never(event)
        self._finish(effects)
        self._start(effects)
        self._schedule(now_s, effects)
        self._poll(now_s, effects)
        self._arm(now_s, effects)
        self._check(effects)
        return tuple(effects)

    def _announced(self, event: Announced, effects: list[FetchEffect]) -> None:
        order = (event.incarnation_unix_ms, event.version)
        newest = self._newest
        if order <= self._done or (
            newest is not None and order <= (newest.incarnation_unix_ms, newest.version)
        ):
            return
        self._newest = event
        target = self._target
        if target is not None and self._superseded < SUPERSEDES_IN_A_ROW_MAX:
            here, wanted = target.progress_bytes()
            if 2 * here <= wanted:
                self._abandon(effects)

    def _abandon(self, effects: list[FetchEffect]) -> None:
        assert self._target is not None
        for digest, flight in self._target.flights.items():
            effects.append(Cancel(peer=flight.peer, digest=digest))
        self._superseded += 1
        self._target = None

    def _start(self, effects: list[FetchEffect]) -> None:
        """Begin the newest announced version if nothing is being fetched."""
        event = self._newest
        if self._target is not None or event is None:
            return
        if (event.incarnation_unix_ms, event.version) <= self._done:
            return
        for holder in self._peers.values():
            holder.forget_version()
        self._target = Target(event)
        effects.append(Look(version=event.version, manifest=event.manifest))

    def _looked(
        self,
        event: ManifestHere | ManifestAbsent | ManifestUnfit,
        now_s: float,
        effects: list[FetchEffect],
    ) -> None:
        target = self._target
        if target is None or event.manifest != target.manifest.digest or target.refs:
            return
        match event:
            case ManifestAbsent():
                target.want_manifest()
            case ManifestUnfit():
                self._done = target.order
                for digest, flight in target.flights.items():
                    effects.append(Cancel(peer=flight.peer, digest=digest))
                self._target = None
            case ManifestHere():
                assert event.refs
                target.want_chunks(event.refs, event.held)
                target.poll_at_s = now_s + limits.HOLDINGS_INTERVAL_S * self._rng.uniform(0.5, 1.5)
            case _:
                assert_never(event)

    def _gone(self, peer: NodeId, effects: list[FetchEffect]) -> None:
        self._peers.pop(peer, None)
        if self._target is None:
            return
        self._target.unsorted = True
        for digest in self._target.flights_of(peer):
            del self._target.flights[digest]
            effects.append(Cancel(peer=peer, digest=digest))

    def _has(self, event: PeerHas) -> None:
        holder, target = self._peers.get(event.peer), self._target
        if holder is None or target is None or event.manifest != target.manifest.digest:
            return
        holder.complete = event.indices is None
        holder.holds = set(event.indices or ())
        target.unsorted = True

    def _arrived(
        self, peer: NodeId, digest: Digest, now_s: float, effects: list[FetchEffect]
    ) -> None:
        target = self._target
        if target is None:
            return
        flight = target.flights.get(digest)
        if flight is not None:
            del target.flights[digest]
            if flight.peer != peer:
                effects.append(Cancel(peer=flight.peer, digest=digest))
        self._store_failures = 0
        if (holder := self._peers.get(peer)) is not None:
            holder.failures = 0
            if flight is not None and flight.peer == peer:
                holder.took_s = now_s - flight.asked_s
        if digest == target.manifest.digest:
            if target.manifest_wanted:
                target.manifest_wanted = False
                effects.append(Look(version=target.version, manifest=target.manifest))
        else:
            target.arrived(digest)

    def _refused(self, event: ChunkRefused, now_s: float, effects: list[FetchEffect]) -> None:
        target = self._target
        if target is None:
            return
        flight = target.flights.get(event.digest)
        if flight is None or flight.peer != event.peer:
            return
        del target.flights[event.digest]
        self._fault(event.peer, flight.index, event.fault, now_s, effects)

    def _fault(
        self,
        peer: NodeId,
        index: int,
        fault: Fault,
        now_s: float,
        effects: list[FetchEffect],
    ) -> None:
        """Remember what went wrong with `peer`, and for how long not to ask it."""
        target, holder = self._target, self._peers.get(peer)
        assert target is not None
        if fault in (Fault.LIED, Fault.LATE):
            target.blame(peer, fault)
            effects.append(Blame(peer=peer, fault=fault, banned=target.banned(peer)))
        if holder is None:
            return
        if fault is Fault.MISSING:
            holder.lacks(index, now_s)
            target.unsorted = True
        else:
            holder.cool(now_s, self._rng)

    def _store_failed(self, peer: NodeId, digest: Digest, now_s: float) -> None:
        if self._target is not None:
            flight = self._target.flights.get(digest)
            if flight is not None and flight.peer == peer:
                del self._target.flights[digest]
        pause_s = backoff_s(
            self._store_failures, first_s=STORE_RETRY_FIRST_S, longest_s=STORE_RETRY_LONGEST_S
        )
        if now_s >= self._paused_until_s:
            self._store_failures += 1
            self._paused_until_s = now_s + pause_s * self._rng.uniform(0.75, 1.25)

    def _expire(self, now_s: float, effects: list[FetchEffect]) -> None:
        target = self._target
        if target is None:
            return
        for digest, flight in tuple(target.flights.items()):
            if now_s >= flight.deadline_s:
                del target.flights[digest]
                effects.append(Cancel(peer=flight.peer, digest=digest))
                self._fault(flight.peer, flight.index, Fault.LATE, now_s, effects)

    def _finish(self, effects: list[FetchEffect]) -> None:
        target = self._target
        if target is not None and target.refs and not target.missing:
            assert not target.flights
            self._done = target.order
            self._superseded = 0
            self._target = None
            effects.append(Ready(version=target.version, manifest=target.manifest))

    # --- choosing ------------------------------------------------------------------------------

    def _schedule(self, now_s: float, effects: list[FetchEffect]) -> None:
        target = self._target
        if target is None or now_s < self._paused_until_s:
            return
        choice = Choice(target, self._peers, self._learner, self._rng, now_s)
        for index in target.queue(self._peers.values(), self._learner, self._rng, now_s):
            if len(target.flights) >= limits.FETCH_IN_FLIGHT_MAX:
                break
            holder = choice.holder_for(index)
            if holder is not None:
                timeout_s = holder.deadline_s(target.ref(index))
                target.fly(index, holder.peer, now_s, now_s + timeout_s)
                effects.append(Ask(peer=holder.peer, ref=target.ref(index), timeout_s=timeout_s))
            elif not choice.anyone_free():
                break
        self._mind_being_stuck(target, now_s, effects)

    def _mind_being_stuck(self, target: Target, now_s: float, effects: list[FetchEffect]) -> None:
        """Nothing in flight: pardon the slow, and in the end move on to a newer version."""
        if target.flights or not (target.manifest_wanted or target.missing):
            target.stuck_since_s = None
            return
        if target.stuck_since_s is None:
            target.stuck_since_s = now_s
        stuck_s = now_s - target.stuck_since_s
        for peer in target.pardon() if stuck_s >= PARDON_AFTER_S else ():
            if (holder := self._peers.get(peer)) is not None:
                holder.patience = min(holder.patience * 2.0, 64.0)
                holder.cool(now_s, self._rng)
        newest = self._newest
        if (
            stuck_s >= STUCK_AFTER_S
            and newest is not None
            and (newest.incarnation_unix_ms, newest.version) > target.order
        ):
            self._abandon(effects)
            self._start(effects)

    def _poll(self, now_s: float, effects: list[FetchEffect]) -> None:
        """Ask some neighbours what they hold by now, the longest unasked first."""
        target = self._target
        if target is None or not target.refs or now_s < target.poll_at_s:
            return
        target.poll_at_s = now_s + limits.HOLDINGS_INTERVAL_S * self._rng.uniform(0.75, 1.25)
        askable = [
            holder
            for holder in self._peers.values()
            if holder.peer != self._learner
            and not holder.complete
            and now_s >= holder.cool_until_s
            and not target.banned(holder.peer)
        ]
        self._rng.shuffle(askable)
        askable.sort(key=lambda holder: holder.polled_s)
        for holder in askable[:HOLDINGS_PEERS_PER_ROUND]:
            holder.polled_s = now_s
            effects.append(AskHoldings(peer=holder.peer, manifest=target.manifest.digest))

    def _arm(self, now_s: float, effects: list[FetchEffect]) -> None:
        target = self._target
        if target is None:
            return
        times_s = [flight.deadline_s for flight in target.flights.values()]
        if target.refs:
            times_s.append(target.poll_at_s)
        if self._paused_until_s > now_s:
            times_s.append(self._paused_until_s)
        for holder in self._peers.values():
            if holder.cool_until_s > now_s:
                times_s.append(holder.cool_until_s)
        times_s.append(now_s + limits.HOLDINGS_INTERVAL_S)
        effects.append(Arm(key=_WAKE, at_s=max(min(times_s), now_s)))

    def _check(self, effects: list[FetchEffect]) -> None:
        target = self._target
        if target is None:
            return
        assert len(target.flights) <= limits.FETCH_IN_FLIGHT_MAX
        for holder in self._peers.values():
            count = target.flights_count(holder.peer)
            assert count <= limits.FETCH_IN_FLIGHT_PER_PEER_MAX
        assert all(flight.peer in self._peers for flight in target.flights.values())
        asked = [effect.ref.digest for effect in effects if isinstance(effect, Ask)]
        assert len(asked) == len(set(asked))
