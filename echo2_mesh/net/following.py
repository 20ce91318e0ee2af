"""Follows the learner's versions: the hands of `core.fetch`, and the shelf that others ask about.

Takes announcements (verified, from the learner alone, never an older one), fetches the manifest
and its blobs from whoever holds them, verifies, pins, and hands complete versions on. On the
learner it only announces and answers. Decides nothing about who is asked for what.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from random import Random
from typing import assert_never

import msgspec
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
from echo2_mesh.core.holdings import bitmap_of, blobs_of, held_in
from echo2_mesh.core.machine import Arm
from echo2_mesh.core.manifests import check_manifest
from echo2_mesh.errors import LocalError, PeerError
from echo2_mesh.net.blobs import BlobFault, Blobs, Workers
from echo2_mesh.net.driver import Driver, Guard
from echo2_mesh.net.envelopes import Envelopes
from echo2_mesh.net.questions import Questions
from echo2_mesh.net.topics import Topics
from echo2_mesh.wire.codec import Opened
from echo2_mesh.wire.messages import Announce, ChunkRef, Holdings, HoldingsAsk, Manifest
from echo2_mesh.wire.types import Digest, NodeId, PolicyVersion

ANNOUNCE_INTERVAL_S = 5.0
HOLDINGS_TIMEOUT_S = 5.0
SHELF_VERSIONS_MAX = 8
"""Complete versions whose holdings are answered; their chunks may outlive them in the store."""


class ReadyVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version whose every blob is in the store, verified and pinned."""

    version: PolicyVersion
    manifest: Manifest
    manifest_ref: ChunkRef


class Following:
    """The weight plane of one node.

    Args:
        learner: whose announcements and manifests count.
        who_has: nodes that say they installed a version; a hint that saves questions.
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
    ) -> None:
        self._learner = learner
        self._envelopes = envelopes
        self._questions = questions
        self._topics = topics
        self._blobs = blobs
        self._store = store
        self._workers = workers
        self._guard = guard
        self._nursery = nursery
        self._who_has = who_has
        self._fetch = Fetch(learner, rng)
        self._driver: Driver[FetchEvent] = Driver(self._fetch, self._perform)
        self._announce: Opened | None = None
        self._reading: tuple[Digest, Manifest] | None = None
        self._shelf: dict[Digest, tuple[ChunkRef, ...]] = {}
        self._scopes: dict[tuple[NodeId, Digest], trio.CancelScope] = {}
        self._offer, self.ready = trio.open_memory_channel[ReadyVersion](1)
        self._complete_bytes = 0
        self.last_error = ""
        questions.answer(HoldingsAsk, self._answer_holdings)
        topics.hear_opened(Announce, self._hear_announce)

    @property
    def announce_raw(self) -> bytes | None:
        """The newest announcement's envelope, to pass on."""
        return self._announce.raw if self._announce else None

    def progress_bytes(self) -> tuple[int, int]:
        """(here, wanted) of the version being fetched, or of the last complete one."""
        here, wanted = self._fetch.progress_bytes()
        return (here, wanted) if wanted else (self._complete_bytes, self._complete_bytes)

    async def run(self) -> None:
        """Drive the machine and repeat the learner's announcement, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._driver.run)
            if self._learner == self._envelopes.node:
                nursery.start_soon(self._repeat)

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
        self._shelve(message.manifest, manifest)
        envelope = await self._topics.gossip(message)
        self._announce = Opened(sender=self._envelopes.node, message=message, raw=envelope)

    async def _repeat(self) -> None:
        while True:
            await trio.sleep(ANNOUNCE_INTERVAL_S)
            if self._announce is not None:
                await self._topics.publish(Announce, self._announce.raw)

    # --- announcements -------------------------------------------------------------------------

    async def _hear_announce(self, opened: Opened) -> None:
        message = opened.message
        assert isinstance(message, Announce)
        if opened.sender != self._learner:
            self._guard.counters["forged_announces"] += 1
            raise PeerError(f"{opened.sender[-8:]} announces a version and is not the learner.")
        if self._learner == self._envelopes.node:
            return
        if self._announce is not None:
            known = self._announce.message
            assert isinstance(known, Announce)
            if _order(message) < _order(known):
                self._guard.counters["replayed_announces"] += 1
                return
            if _order(message) == _order(known):
                return
        self._announce = opened
        await self._driver.post(
            Announced(
                incarnation_unix_ms=message.incarnation_unix_ms,
                version=message.version,
                manifest=message.manifest,
            )
        )

    async def _answer_holdings(self, peer: NodeId, ask: HoldingsAsk) -> Holdings:
        target = self._fetch.target
        bitmap = b""
        if target is not None and target.refs and target.manifest.digest == ask.manifest:
            bitmap = bitmap_of(target.held(), len(target.refs))
        elif (refs := self._shelf.get(ask.manifest)) is not None:
            bitmap = bitmap_of(range(len(refs)), len(refs))
        return Holdings(manifest=ask.manifest, bitmap=bitmap)

    # --- the machine's hands -------------------------------------------------------------------

    def _perform(self, effect: Look | Ask | Cancel | AskHoldings | Blame | Ready | Arm) -> None:
        match effect:
            case Look(version=version, manifest=ref):
                self._nursery.start_soon(self._look, version, ref)
            case Ask(peer=peer, ref=ref, timeout_s=timeout_s):
                self._nursery.start_soon(self._get, peer, ref, timeout_s)
            case Cancel(peer=peer, digest=digest):
                if (scope := self._scopes.get((peer, digest))) is not None:
                    scope.cancel()
            case AskHoldings(peer=peer, manifest=digest):
                self._nursery.start_soon(self._ask_holdings, peer, digest)
            case Blame(fault=fault, banned=banned):
                self._guard.counters[f"{fault.value}_chunks"] += 1
                self._guard.counters["banned_peers"] += banned
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
            await self._driver.post(ManifestAbsent(manifest=ref.digest))
            return
        try:
            manifest = await self._workers.run(self._open_manifest, raw, version)
        except PeerError as error:
            self._guard.counters["refused_manifests"] += 1
            self.last_error = error.what
            await self._driver.post(ManifestUnfit(manifest=ref.digest))
            return
        refs = blobs_of(manifest)
        self._store.pin("fetching", {ref.digest, *(blob.digest for blob in refs)})
        held = await self._workers.run(self._held, refs)
        self._reading = (ref.digest, manifest)
        await self._driver.post(ManifestHere(manifest=ref.digest, refs=refs, held=held))
        for node in tuple(self._who_has(version)):
            await self._driver.post(PeerHas(peer=node, manifest=ref.digest, indices=None))

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

    def _held(self, refs: tuple[ChunkRef, ...]) -> frozenset[int]:
        return frozenset(i for i, ref in enumerate(refs) if self._store.has(ref.digest))

    async def _get(self, peer: NodeId, ref: ChunkRef, timeout_s: float) -> None:
        key = (peer, ref.digest)
        event: FetchEvent
        with trio.CancelScope() as scope:
            self._scopes[key] = scope
            try:
                await self._blobs.fetch_from(peer, ref, timeout_s=timeout_s)
                event = ChunkArrived(peer=peer, digest=ref.digest)
                self.last_error = ""
            except BlobFault as error:
                event = ChunkRefused(peer=peer, digest=ref.digest, fault=error.fault)
            except LocalError as error:
                self._guard.counters["store_failures"] += 1
                self.last_error = str(error)
                event = StoreFailed(peer=peer, digest=ref.digest)
            finally:
                if self._scopes.get(key) is scope:
                    del self._scopes[key]
            await self._driver.post(event)

    async def _ask_holdings(self, peer: NodeId, digest: Digest) -> None:
        target = self._fetch.target
        if target is None or target.manifest.digest != digest:
            return
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
        await self._driver.post(PeerHas(peer=peer, manifest=digest, indices=indices))

    def _finish(self, version: PolicyVersion, ref: ChunkRef) -> None:
        assert self._reading is not None
        digest, manifest = self._reading
        assert digest == ref.digest
        assert manifest.version == version
        self._reading = None
        self._shelve(ref, manifest)
        self._store.unpin("fetching")
        ready = ReadyVersion(version=version, manifest=manifest, manifest_ref=ref)
        with contextlib.suppress(trio.WouldBlock):
            # One place: a version that nobody took yet is superseded.
            self.ready.receive_nowait()
        self._offer.send_nowait(ready)

    def _shelve(self, ref: ChunkRef, manifest: Manifest) -> None:
        """Keep a complete version: answer for it, and pin it and the one before."""
        blobs = blobs_of(manifest)
        self._shelf.pop(ref.digest, None)
        self._shelf[ref.digest] = blobs
        while len(self._shelf) > SHELF_VERSIONS_MAX:
            del self._shelf[next(iter(self._shelf))]
        kept = list(self._shelf)[-limits.KEPT_VERSIONS :]
        self._store.pin(
            "weights", {*kept, *(blob.digest for digest in kept for blob in self._shelf[digest])}
        )
        distinct = {blob.digest: blob.size_bytes for blob in blobs}
        self._complete_bytes = sum(distinct.values())


def _order(message: Announce) -> tuple[int, int]:
    return message.incarnation_unix_ms, int(message.version)
