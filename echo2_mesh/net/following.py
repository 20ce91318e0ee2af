"""Follows the learner's versions: the hands of `core.fetch`.

Takes announcements (verified, from the learner alone, never an older one), fetches the manifest
and what the cheapest route to it needs from whoever holds it, has `net.rebuilding` make the rest,
and hands complete versions on; `net.shelf` keeps them. On the learner it only announces and
answers. Decides nothing about who is asked for what.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from pathlib import Path
from random import Random
from typing import assert_never

import trio

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore
from echo2_mesh.core.fetch import Fetch
from echo2_mesh.core.fetching import (
    Announced,
    Ask,
    AskHoldings,
    Blame,
    Cancel,
    ChunkArrived,
    ChunkRefused,
    Fault,
    FetchEvent,
    Look,
    ManifestAbsent,
    ManifestHere,
    ManifestUnfit,
    PeerGone,
    PeerHas,
    PeerUp,
    Ready,
    Seated,
    StoreFailed,
)
from echo2_mesh.core.forest import Seat
from echo2_mesh.core.holdings import bitmap_of, held_in
from echo2_mesh.core.machine import Arm
from echo2_mesh.core.manifests import check_manifest
from echo2_mesh.core.routes import Route, cheapest
from echo2_mesh.errors import LocalError, PeerError
from echo2_mesh.net.announcing import Announcing
from echo2_mesh.net.blobs import BlobFault, Blobs, Workers
from echo2_mesh.net.driver import Driver, Guard
from echo2_mesh.net.envelopes import Envelopes
from echo2_mesh.net.questions import Questions
from echo2_mesh.net.reading import Reading, ReadyVersion
from echo2_mesh.net.rebuilding import Rebuilding
from echo2_mesh.net.shelf import Shelf, held_of
from echo2_mesh.net.topics import Topics
from echo2_mesh.wire.messages import Announce, ChunkRef, Holdings, HoldingsAsk, Manifest
from echo2_mesh.wire.types import Digest, NodeId, PolicyVersion

HOLDINGS_TIMEOUT_S = 5.0
SEATS_INTERVAL_S = 0.5


class Following:
    """The weight plane of one node.

    Args:
        learner: whose announcements and manifests count.
        who_has: nodes that say they installed a version; a hint that saves questions.
        seats: who takes part now, this node included.
        versions_kept: complete versions that are never deleted.
        versions_path: the list of versions; None keeps none.
        rebuild_log_path: of the child that applies patches; None applies them in this process.
    """

    def __init__(
        self,
        *,
        learner: NodeId,
        envelopes: Envelopes,
        questions: Questions,
        topics: Topics,
        blobs: Blobs,
        store: ChunkStore,
        workers: Workers,
        guard: Guard,
        nursery: trio.Nursery,
        rng: Random,
        who_has: Callable[[PolicyVersion], Iterable[NodeId]],
        seats: Callable[[], tuple[Seat, ...]] = tuple,
        versions_kept: int = limits.KEPT_VERSIONS,
        versions_path: Path | None = None,
        rebuild_log_path: Path | None = None,
    ) -> None:
        self._learner = learner
        self._envelopes = envelopes
        self._questions = questions
        self._blobs = blobs
        self._store = store
        self._workers = workers
        self._guard = guard
        self._nursery = nursery
        self._who_has = who_has
        self._fetch = Fetch(learner, rng, envelopes.node)
        self._driver: Driver[FetchEvent] = Driver(self._fetch, self._perform)
        self._seats = seats
        self._shelf = Shelf(
            store,
            workers,
            kept=versions_kept,
            path=versions_path,
            open_manifest=self._open_manifest,
        )
        self._rebuilding = Rebuilding(
            store=store,
            workers=workers,
            guard=guard,
            post=self._driver.post,
            landed=self._made,
            log_path=rebuild_log_path,
        )
        self._announcing = Announcing(
            learner=learner, envelopes=envelopes, topics=topics, guard=guard, heard=self._heard
        )
        self._told: tuple[Seat, ...] = ()
        self._reading: Reading | None = None
        self._scopes: dict[tuple[NodeId, Digest], trio.CancelScope] = {}
        self._asking: set[NodeId] = set()
        self._offer, self.ready = trio.open_memory_channel[ReadyVersion](1)
        self._last_error = ""
        questions.answer(HoldingsAsk, self._answer_holdings)

    @property
    def announce_raw(self) -> bytes | None:
        """The newest announcement's envelope, to pass on."""
        return self._announcing.raw

    @property
    def last_error(self) -> str:
        """What keeps this node from the newest version, in words; empty where nothing does."""
        return self._last_error or self._rebuilding.last_error

    def progress_bytes(self) -> tuple[int, int]:
        """(here, wanted) of the version being fetched, or of the last complete one."""
        here, wanted = self._fetch.progress_bytes()
        complete = self._shelf.complete_bytes
        return (here, wanted) if wanted else (complete, complete)

    async def run(self) -> None:
        """Drive the machine and repeat the learner's announcement, until cancelled."""
        await self._shelf.recall()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._driver.run)
            nursery.start_soon(self._shelf.run)
            if self._learner == self._envelopes.node:
                nursery.start_soon(self._announcing.repeat)
            else:
                nursery.start_soon(self._rebuilding.run)
                nursery.start_soon(self._watch_seats)

    async def peer_up(self, peer: NodeId) -> None:
        """A connection to `peer` exists."""
        await self._driver.post(PeerUp(peer=peer))

    async def peer_gone(self, peer: NodeId) -> None:
        """No connection to `peer` is left."""
        await self._driver.post(PeerGone(peer=peer))

    def peer_installed(self, peer: NodeId, version: PolicyVersion) -> None:
        """`peer` says it runs `version`: it holds every blob of it."""
        target = self._fetch.target
        if target is not None and target.refs and target.version == version:
            self._driver.post_nowait(
                PeerHas(peer=peer, manifest=target.manifest.digest, indices=None)
            )

    # --- the learner's side --------------------------------------------------------------------

    async def announce(self, message: Announce) -> None:
        """Pin a version of this learner's own store, announce it now and again and again.

        Raises:
            PeerError, LocalError: the manifest is not in the store, or is not in order.
        """
        raw = await self._workers.run(self._store.read, message.manifest.digest)
        manifest = await self._workers.run(self._open_manifest, raw, message.version)
        self._shelf.add(message.manifest, manifest)
        await self._keep(message.manifest, manifest, 0)
        await self._announcing.say(message)

    async def _keep(self, ref: ChunkRef, manifest: Manifest, fetched_bytes: int) -> None:
        """Write the version into the list, and see which of its patches are here."""
        if not await self._shelf.record(ref, manifest, fetched_bytes):
            self._guard.counters["versions_file_failures"] += 1
        await self._shelf.look(ref.digest)

    async def _watch_seats(self) -> None:
        """Tell the machine who takes part, whenever that changes, twice a second at most."""
        while True:
            await self._tell_seats()
            await trio.sleep(SEATS_INTERVAL_S)

    async def _tell_seats(self) -> None:
        seats = self._seats()
        if seats != self._told:
            self._told = seats
            await self._driver.post(Seated(seats=seats))

    async def _heard(self, message: Announce) -> None:
        await self._driver.post(
            Announced(
                incarnation_unix_ms=message.incarnation_unix_ms,
                version=message.version,
                manifest=message.manifest,
            )
        )

    # --- holdings ------------------------------------------------------------------------------

    async def _answer_holdings(self, peer: NodeId, ask: HoldingsAsk) -> Holdings:
        target = self._fetch.target
        bitmap = b""
        if target is not None and target.refs and target.manifest.digest == ask.manifest:
            bitmap = bitmap_of(target.held(), len(target.refs))
        else:
            bitmap = self._shelf.bitmap(ask.manifest)
        return Holdings(manifest=ask.manifest, bitmap=bitmap)

    # --- the machine's hands -------------------------------------------------------------------

    def _perform(self, effect: Look | Ask | Cancel | AskHoldings | Blame | Ready | Arm) -> None:
        match effect:
            case Look(version=version, manifest=ref):
                self._nursery.start_soon(self._look, version, ref)
            case Ask():
                self._nursery.start_soon(self._get, effect)
            case Cancel(peer=peer, digest=digest):
                if (scope := self._scopes.get((peer, digest))) is not None:
                    scope.cancel()
            case AskHoldings(peer=peer, manifest=digest):
                self._nursery.start_soon(self._ask_holdings, peer, digest)
            case Blame(peer=peer, fault=fault, banned=banned):
                self._guard.counters[f"{fault.value}_chunks"] += 1
                self._guard.counters["banned_peers"] += banned
                if banned and fault is Fault.LIED:
                    self._blobs.hang_up(peer)
            case Ready(version=version, manifest=ref):
                self._finish(version, ref)
            case Arm():
                raise AssertionError("the driver keeps alarms")
            case _:
                assert_never(effect)

    async def _look(self, version: PolicyVersion, ref: ChunkRef) -> None:
        try:
            raw = await self._workers.run(self._store.read, ref.digest)
        except KeyError:
            self._blobs.expect((ref.digest,))  # others may wait here for it, as for any blob
            await self._driver.post(ManifestAbsent(manifest=ref.digest))
            return
        try:
            manifest = await self._workers.run(self._open_manifest, raw, version)
        except PeerError as error:
            self._guard.counters["refused_manifests"] += 1
            self._last_error = error.what
            await self._driver.post(ManifestUnfit(manifest=ref.digest))
            return
        await self._follow(version, ref, manifest)

    async def _follow(self, version: PolicyVersion, ref: ChunkRef, manifest: Manifest) -> None:
        """Choose the route to a version whose manifest is in order, and set everybody to work."""
        target = self._fetch.target
        if target is None or target.manifest.digest != ref.digest:
            return  # dropped for a newer one while its manifest was read
        if self._reading is not None and self._reading.ref != ref:
            # Dropped for a newer one: what it left behind may go unless that needs it.
            self._shelf.retire(blob.digest for blob in (self._reading.ref, *self._reading.refs))
        self._rebuilding.forget()
        reading = self._reading = Reading(ref, manifest, self._announcing.heard_s(version))
        route, held = await self._workers.run(self._plan, reading)
        if self._reading is not reading:
            return
        needed = reading.needed
        wanted = [reading.refs[index].digest for index in route.wanted]
        named = {ref.digest, *wanted, *(blob.digest for blob in reading.refs[:needed])}
        self._blobs.expect(named)
        if route.base is not None:
            named.update(route.base.chunks[index].digest for index in route.needs)
        # Patches that are here already and part of the route must stay as well.
        named.update(reading.refs[blob].digest for blobs in route.needs.values() for blob in blobs)
        self._store.pin("fetching", named)
        reading.held.update(held)
        # Before the machine begins to ask: it spares the learner where others are known to have it.
        await self._tell_seats()
        for node in tuple(self._who_has(version)):
            await self._driver.post(PeerHas(peer=node, manifest=ref.digest, indices=None))
        await self._driver.post(
            ManifestHere(
                manifest=ref.digest,
                refs=reading.refs,
                held=held,
                wanted=route.wanted,
                needed=needed,
            )
        )
        if self._reading is reading:
            self._rebuilding.begin(ref.digest, manifest, route, frozenset(reading.held))

    def _plan(self, reading: Reading) -> tuple[Route, frozenset[int]]:
        held = held_of(self._store, reading.refs)
        return cheapest(reading.manifest, self._shelf.bases(), held), held

    def _open_manifest(self, raw: bytes, version: PolicyVersion) -> Manifest:
        opened = self._envelopes.unseal(raw, size_bytes_max=limits.CHUNK_SIZE_BYTES_MAX)
        manifest = opened.message
        if not isinstance(manifest, Manifest):
            raise PeerError("The announced manifest is a message of another kind.")
        if opened.sender != self._learner:
            raise PeerError(f"The manifest is signed by {opened.sender[-8:]}, not the learner.")
        if manifest.run_id != self._envelopes.run_id or manifest.version != version:
            raise PeerError(f"The manifest of version {version} says {manifest.version}.")
        check_manifest(manifest)
        return manifest

    async def _get(self, ask: Ask) -> None:
        peer, ref = ask.peer, ask.ref
        key = (peer, ref.digest)
        event: FetchEvent
        with trio.CancelScope() as scope:
            self._scopes[key] = scope
            try:
                await self._blobs.fetch_from(peer, ref, timeout_s=ask.timeout_s, wait_s=ask.wait_s)
                event = ChunkArrived(peer=peer, digest=ref.digest)
                self._got(ref)
                self._last_error = ""
            except BlobFault as error:
                event = ChunkRefused(peer=peer, digest=ref.digest, fault=error.fault)
            except LocalError as error:
                self._guard.counters["store_failures"] += 1
                self._last_error = str(error)
                event = StoreFailed(peer=peer, digest=ref.digest)
            finally:
                if self._scopes.get(key) is scope:
                    del self._scopes[key]
            await self._driver.post(event)

    def _got(self, ref: ChunkRef) -> None:
        """A blob of the version being fetched came over the network."""
        reading = self._reading
        for index in reading.fetched(ref) if reading is not None else ():
            self._rebuilding.arrived(index)

    def _made(self, digests: tuple[Digest, ...]) -> None:
        """Data chunks of the version being fetched were rebuilt here."""
        if self._reading is not None:
            for digest in digests:
                self._reading.made(digest)
        self._blobs.landed(digests)

    async def _ask_holdings(self, peer: NodeId, digest: Digest) -> None:
        target = self._fetch.target
        if target is None or target.manifest.digest != digest or peer in self._asking:
            return
        self._asking.add(peer)  # a host that is slow to answer is not asked the more for it
        try:
            reply = await self._questions.ask(
                peer, HoldingsAsk(manifest=digest), timeout_s=HOLDINGS_TIMEOUT_S
            )
            if not isinstance(reply, Holdings) or reply.manifest != digest:
                raise PeerError(f"{peer[-8:]} answered a question about holdings with another.")
            indices = held_in(reply.bitmap, len(target.refs))
        except PeerError:
            self._guard.counters["failed_holdings_asks"] += 1
            return
        finally:
            self._asking.discard(peer)
        await self._driver.post(PeerHas(peer=peer, manifest=digest, indices=indices))

    def _finish(self, version: PolicyVersion, ref: ChunkRef) -> None:
        reading = self._reading
        assert reading is not None
        assert reading.ref == ref
        assert reading.manifest.version == version
        ready = reading.ready()
        self._reading = None
        self._rebuilding.forget()
        self._shelf.add(ref, reading.manifest)
        self._store.unpin("fetching")
        self._blobs.expect(())
        fetched_bytes = ready.fetched_full_bytes + ready.fetched_patch_bytes
        self._nursery.start_soon(self._keep, ref, reading.manifest, fetched_bytes)
        with contextlib.suppress(trio.WouldBlock):
            # One place: a version that nobody took yet is superseded.
            self.ready.receive_nowait()
        self._offer.send_nowait(ready)
