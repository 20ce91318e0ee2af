"""The complete versions of one node: what others are told of them, how long they stay, their list.

Pins the newest versions and the patches that lead to the newest; gives the rest back to the disk
a while after it was last used. Writes one line per version into `versions.jsonl`, which a restart
reads to know what it may start patches from, and `echo2-node weights log` to tell what there was.
Used by `net.following` alone; decides nothing about what is fetched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec
import trio

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore
from echo2_mesh.core.holdings import bitmap_of, blobs_of, needed_of
from echo2_mesh.core.routes import Base
from echo2_mesh.errors import PeerError
from echo2_mesh.net.blobs import Workers
from echo2_mesh.versionlog import append_version, known_version, read_versions
from echo2_mesh.wire.messages import ChunkRef, Manifest
from echo2_mesh.wire.types import ChunkKind, Digest, PolicyVersion

SWEEP_INTERVAL_S = 5.0

OpenManifest = Callable[[bytes, PolicyVersion], Manifest]


class Shelved(msgspec.Struct, kw_only=True):
    """A version that was complete here."""

    ref: ChunkRef
    manifest: Manifest
    refs: tuple[ChunkRef, ...]
    held: frozenset[int]


class Shelf:
    """Complete versions, oldest first.

    Args:
        kept: how many of the newest are never deleted by this room.
        path: `versions.jsonl`; None writes and remembers nothing.
        open_manifest: verifies a sealed manifest and decodes it; PeerError where it is not one.
    """

    def __init__(
        self,
        store: ChunkStore,
        workers: Workers,
        *,
        kept: int,
        path: Path | None,
        open_manifest: OpenManifest,
    ) -> None:
        self._store = store
        self._workers = workers
        self._kept = kept
        self._path = path
        self._open_manifest = open_manifest
        self._versions: dict[Digest, Shelved] = {}
        self._retired: dict[Digest, tuple[int, float]] = {}
        """Blob -> (its last use when that was seen first, the time of that look)."""
        self.complete_bytes = 0
        """Of the newest version, data and files, each blob once."""

    # --- questions -----------------------------------------------------------------------------

    def bitmap(self, manifest: Digest) -> bytes:
        """What is here of a version; empty for an unknown one."""
        shelved = self._versions.get(manifest)
        return bitmap_of(shelved.held, len(shelved.refs)) if shelved is not None else b""

    def bases(self) -> tuple[Base, ...]:
        """What a patch may start from, the newest first. Looks at the disk: call from a worker."""
        return tuple(
            Base(
                state_digest=shelved.manifest.state_digest,
                chunks=shelved.manifest.chunks,
                here=frozenset(
                    index
                    for index, ref in enumerate(shelved.manifest.chunks)
                    if self._store.has(ref.digest)
                ),
            )
            for shelved in reversed(tuple(self._versions.values()))
        )

    # --- changes -------------------------------------------------------------------------------

    def add(self, ref: ChunkRef, manifest: Manifest) -> None:
        """`manifest` is complete here: answer for it, pin it, and let older ones go."""
        refs = blobs_of(manifest)
        needed = needed_of(manifest)
        self._versions.pop(ref.digest, None)
        self._versions[ref.digest] = Shelved(
            ref=ref, manifest=manifest, refs=refs, held=frozenset(range(needed))
        )
        distinct = {blob.digest: blob.size_bytes for blob in refs[:needed]}
        self.complete_bytes = sum(distinct.values())
        self._pin()
        versions = tuple(self._versions.values())
        if len(versions) > 1:
            before = versions[-2]
            self.retire(blob.digest for blob in before.refs[needed_of(before.manifest) :])
        if len(versions) > self._kept:
            leaving = versions[-self._kept - 1]
            self.retire(blob.digest for blob in (leaving.ref, *leaving.refs))

    def retire(self, digests: Iterable[Digest]) -> None:
        """These blobs may go, those excepted that are pinned when their time comes."""
        now_s = trio.current_time()
        for digest in digests:
            self._retired.setdefault(digest, (-1, now_s))

    def _pin(self) -> None:
        versions = tuple(self._versions.values())
        pinned = {
            blob.digest
            for shelved in versions[-self._kept :]
            for blob in (shelved.ref, *shelved.refs[: needed_of(shelved.manifest)])
        }
        newest = versions[-1].manifest
        pinned.update(chunk.ref.digest for patch in newest.patches for chunk in patch.chunks)
        self._store.pin("weights", pinned)

    async def look(self, manifest: Digest) -> None:
        """See which blobs of a version are here by now, patches included."""
        shelved = self._versions.get(manifest)
        if shelved is not None:
            shelved.held = await self._workers.run(held_of, self._store, shelved.refs)

    async def run(self) -> None:
        """Give back what is no longer needed, until cancelled."""
        while True:
            await trio.sleep(SWEEP_INTERVAL_S)
            await self.sweep()

    async def sweep(self) -> None:
        """Delete blobs that were retired and not used for `RETENTION_GRACE_S` since."""
        if not self._retired:
            return
        now_s = trio.current_time()
        due = {
            digest: used_ns
            for digest, (used_ns, since_s) in self._retired.items()
            if used_ns < 0 or now_s - since_s >= limits.RETENTION_GRACE_S
        }
        for digest, used_ns in (await self._workers.run(self._clear, due)).items():
            if used_ns is None:
                self._retired.pop(digest, None)
            else:
                self._retired[digest] = (used_ns, now_s)
        await self._forget_gone()

    def _clear(self, due: dict[Digest, int]) -> dict[Digest, int | None]:
        """In a worker: delete what lay still; the last use of the others, None where settled."""
        pinned = self._store.pinned()
        settled: dict[Digest, int | None] = {}
        still: list[Digest] = []
        for digest, seen_ns in due.items():
            used_ns = self._store.last_used_ns(digest)
            if digest in pinned or not used_ns:
                settled[digest] = None
            elif used_ns == seen_ns:
                still.append(digest)
                settled[digest] = None
            else:
                settled[digest] = used_ns
        self._store.remove_all(still)
        return settled

    async def _forget_gone(self) -> None:
        """Versions beyond the kept whose blobs are being deleted are answered for as they are."""
        for digest in tuple(self._versions)[: -self._kept]:
            await self.look(digest)
            shelved = self._versions.get(digest)
            if shelved is not None and not shelved.held.intersection(range(len(shelved.refs))):
                del self._versions[digest]
        while len(self._versions) > limits.SHELF_VERSIONS_MAX:
            del self._versions[next(iter(self._versions))]

    # --- the list ------------------------------------------------------------------------------

    async def record(self, ref: ChunkRef, manifest: Manifest, fetched_bytes: int) -> bool:
        """Append the version's line; False if the disk did not take it, which harms nothing."""
        if self._path is None:
            return True
        known = known_version(ref, manifest, fetched_bytes=fetched_bytes)
        try:
            await self._workers.run(append_version, self._path, known)
        except OSError:
            return False
        return True

    async def recall(self) -> None:
        """Know again the versions of an earlier life, as far as their blobs are here."""
        if self._path is None:
            return
        recalled = await self._workers.run(self._read_back)
        self._versions = {**recalled, **self._versions}
        if self._versions:
            self._pin()
            self.retire(
                blob.digest
                for shelved in self._versions.values()
                for blob in (shelved.ref, *shelved.refs)
            )

    def _read_back(self) -> dict[Digest, Shelved]:
        found: dict[Digest, Shelved] = {}
        for line in read_versions(self._path)[-limits.SHELF_VERSIONS_MAX :] if self._path else []:
            try:
                digest = Digest(bytes.fromhex(line.manifest))
                raw = self._store.read(digest)
                manifest = self._open_manifest(raw, PolicyVersion(line.version))
            except (KeyError, ValueError, PeerError):
                continue
            refs = blobs_of(manifest)
            ref = ChunkRef(kind=ChunkKind.MANIFEST, digest=digest, size_bytes=len(raw))
            found.pop(digest, None)
            found[digest] = Shelved(
                ref=ref, manifest=manifest, refs=refs, held=held_of(self._store, refs)
            )
        return found


def held_of(store: ChunkStore, refs: tuple[ChunkRef, ...]) -> frozenset[int]:
    """The indices of those blobs that are in the store."""
    return frozenset(index for index, ref in enumerate(refs) if store.has(ref.digest))
