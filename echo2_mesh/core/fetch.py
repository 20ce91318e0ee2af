"""Which chunk to ask of which holder next, until the newest version is complete here.

One version at a time, by one of two ways. Where it is known who takes part (`Seated`), each chunk
comes down the tree of its stripe, and failures are gone around (`core.forest`, `core.queues`).
Where it is not, rarest chunk first, ties by chance, the learner last (`core.choice`). Each chunk
is in flight from exactly one peer. Late holders are blamed and after `BLAMES_BEFORE_BAN` left
alone, lying ones at once; a merely slow one is pardoned where nobody else can serve, with a
longer deadline. Never gives up while somebody announces a version. Decides only: `net.following`
moves the bytes, verifies them, and reports.
"""

from __future__ import annotations

from random import Random
from typing import assert_never

from echo2_mesh import limits
from echo2_mesh.core.download import Download, Lasting
from echo2_mesh.core.fetching import (
    Announced,
    Ask,
    ChunkArrived,
    ChunkRefused,
    FetchEffect,
    FetchEvent,
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
from echo2_mesh.core.machine import Woke
from echo2_mesh.core.swarm import Holder, Target
from echo2_mesh.core.versions import Versions
from echo2_mesh.wire.types import NodeId

STUCK_AFTER_S = 5.0
"""Nothing in flight and nobody to ask for so long: a newer version is better than this one."""


class Fetch:
    """The fetch of one node. Holds no clock and no socket.

    Args:
        learner: holds every chunk of what it announces.
        rng: breaks ties.
        node: this node, as it is named in `Seated`; without it no forest is followed.
    """

    def __init__(self, learner: NodeId, rng: Random, node: NodeId | None = None) -> None:
        self._lasting = Lasting(learner, node, rng)
        self._versions = Versions()
        self._download: Download | None = None

    # --- questions -----------------------------------------------------------------------------

    @property
    def target(self) -> Target | None:
        """The version being fetched, to be read only."""
        return self._download.target if self._download else None

    def progress_bytes(self) -> tuple[int, int]:
        """(here, wanted) of the version being fetched; (0, 0) while there is none."""
        return self._download.target.progress_bytes() if self._download else (0, 0)

    # --- the machine ---------------------------------------------------------------------------

    def handle(self, event: FetchEvent, now_s: float) -> tuple[FetchEffect, ...]:
        """Take one event; return what to do, in order."""
        effects: list[FetchEffect] = []
        download, lasting = self._download, self._lasting
        match event:
            case ChunkArrived() if download:
                download.arrived(event, now_s, effects)
            case ChunkRefused() if download:
                download.refused(event, now_s, effects)
            case StoreFailed() if download:
                download.store_failed(event, now_s)
            case Announced():
                self._announced(event, effects)
            case ManifestHere() | ManifestAbsent() | ManifestUnfit():
                self._looked(event, now_s, effects)
            case Seated(seats=seats):
                lasting.seats = seats
                if download:
                    download.seated(now_s)
            case PeerUp(peer=peer):
                holder = lasting.peers.setdefault(peer, Holder(peer))
                holder.connected = True
                holder.away_until_s = 0.0
            case PeerGone(peer=peer):
                gone = lasting.peers.pop(peer, None)
                if download and gone:
                    download.gone(gone, now_s, effects)
            case PeerHas() | Made() | WantMore():
                self._heard(event, now_s, effects)
            case Woke():
                lasting.wake_at_s = float("-inf")
                if download:
                    download.expire(now_s, effects)
            case ChunkArrived() | ChunkRefused() | StoreFailed():
                pass  # of a version that was given up
            case _:
                assert_never(event)
        self._finish(effects)
        self._start(now_s, effects)
        self._go_on(now_s, effects)
        self._check(effects)
        return tuple(effects)

    def _announced(self, event: Announced, effects: list[FetchEffect]) -> None:
        news, target = self._versions.hear(event), self.target
        if news and target is not None and self._versions.may_drop(*target.progress_bytes()):
            self._versions.drop()
            self._give_up(effects)

    def _give_up(self, effects: list[FetchEffect]) -> None:
        if self._download is not None:
            self._download.give_up(effects)
        self._download = None

    def _start(self, now_s: float, effects: list[FetchEffect]) -> None:
        """Begin the newest announced version if nothing is being fetched."""
        event = self._versions.next()
        if self._download is not None or event is None:
            return
        target = Target(event)
        target.moved_s = now_s
        self._download = Download(target, self._lasting)
        effects.append(Look(version=event.version, manifest=event.manifest))

    def _looked(
        self,
        event: ManifestHere | ManifestAbsent | ManifestUnfit,
        now_s: float,
        effects: list[FetchEffect],
    ) -> None:
        download, target = self._download, self.target
        if download is None or target is None or target.refs:
            return
        if event.manifest != target.manifest.digest:
            return
        match event:
            case ManifestAbsent():
                download.want_manifest()
            case ManifestUnfit():
                self._versions.unfit(target.order)
                self._give_up(effects)
            case ManifestHere():
                assert event.refs
                download.want_chunks(event, now_s)
            case _:
                assert_never(event)

    def _heard(
        self, event: PeerHas | Made | WantMore, now_s: float, effects: list[FetchEffect]
    ) -> None:
        """Something about the blobs of a version: of this one?"""
        download = self._download
        if download is None or event.manifest != download.target.manifest.digest:
            return
        match event:
            case PeerHas():
                download.has(event)
            case Made():
                download.made(event, now_s, effects)
            case WantMore():
                download.want_more(event.indices, now_s)
            case _:
                assert_never(event)

    def _finish(self, effects: list[FetchEffect]) -> None:
        target = self.target
        if target is not None and target.refs and not target.absent:
            self._versions.finish(target.order)
            self._give_up(effects)
            effects.append(Ready(version=target.version, manifest=target.manifest))

    def _go_on(self, now_s: float, effects: list[FetchEffect]) -> None:
        download = self._download
        if download is None:
            return
        target = download.target
        since_s = target.stuck_since_s
        stuck = since_s is not None and now_s - since_s >= STUCK_AFTER_S
        if stuck and self._versions.newer_than(target.order):
            self._versions.drop()
            self._give_up(effects)
            self._start(now_s, effects)
            download = self._download
            assert download is not None
        download.schedule(now_s, effects)
        download.mind_being_stuck(now_s)
        download.poll(now_s, effects)
        download.arm(now_s, effects)

    def _check(self, effects: list[FetchEffect]) -> None:
        target = self.target
        if target is None:
            return
        assert len(target.flights) <= limits.FETCH_IN_FLIGHT_MAX
        for effect in effects:
            if isinstance(effect, Ask):
                count = target.flights_count(effect.peer)
                assert 0 < count <= limits.FETCH_IN_FLIGHT_PER_PEER_MAX
