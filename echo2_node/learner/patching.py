"""Patches from the versions before to the one being exported, made while its chunks are written.

The trainer keeps no old weights: the data chunks of the versions before lie in the store, and a
new chunk is encoded against the one of the same index. Whatever does not fit (another layout, a
base that is gone, a codec that fails) costs the patch and never the version. `learner.stepper`
holds one `Patcher` for its life; the first version after a start or a resume has no patch.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore
from echo2_mesh.delta.codec import CLASSES_FAST, Slice, encode_chunk
from echo2_mesh.delta.patches import write_patch
from echo2_mesh.wire.messages import ChunkRef, Patch, PatchChunk
from echo2_mesh.wire.types import ChunkKind, Digest, PolicyVersion

Buffer = bytes | bytearray | memoryview
SKIPS_MAX = 3
"""Skips of 2, 4 and 8 published versions, as far as their bases are still in the store."""
BLOB_BYTES_MIN = 64 * limits.KIB
BLOB_BYTES_MAX = 1 * limits.MIB
BLOBS_PER_PATCH = 32
"""About so many blobs a patch, so that every tree of the forest has some to carry."""
WORTH_SHARE = 0.9
"""A patch above this share of the full chunks is not worth its trouble."""


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A published version, as a base."""

    version: PolicyVersion
    chunks: tuple[ChunkRef, ...]
    state_digest: Digest


class Difference:
    """One patch in the making. `take` data chunks in order, then `finish`.

    Args:
        pool: where chunks are encoded while the next are read; None encodes at once.
        classes: of small weights, see `encode_chunk`.
    """

    def __init__(
        self,
        base: Known,
        store: ChunkStore,
        blob_bytes: int,
        pool: ThreadPoolExecutor | None,
        classes: int = CLASSES_FAST,
    ) -> None:
        self.base = base
        self._classes = classes
        self.why_none = ""
        """Why there will be no patch; empty while all is well."""
        self._store = store
        self._blob_bytes = blob_bytes
        self._pool = pool
        self._waiting: deque[tuple[int, Future[bytes] | None]] = deque()
        self._waiting_max = 2 * limits.REBUILD_THREADS_MAX
        self._first = 0
        self._group: list[bytes] = []
        self._group_bytes = 0
        self._chunks: list[PatchChunk] = []
        self._taken = 0

    def take(self, ref: ChunkRef, data: Buffer, slices: Sequence[Slice]) -> None:
        """The next data chunk of the new version; `slices` are its runs of one item size.

        Errors:
            LocalError: the disk is full.
        """
        index = self._taken
        self._taken += 1
        if self.why_none:
            return
        if index >= len(self.base.chunks) or self.base.chunks[index].size_bytes != len(data):
            return self._drop("the tensors are cut elsewhere")
        old = self.base.chunks[index].digest
        if old == ref.digest:
            self._waiting.append((index, None))
        elif self._pool is None:
            self._waiting.append((index, self._encode_now(old, data, slices)))
        else:
            self._waiting.append((index, self._pool.submit(self._encode, old, data, slices)))
        while len(self._waiting) > self._waiting_max:
            self._settle()

    def finish(self, version: PolicyVersion, state_digest: Digest) -> Patch | None:
        """The patch, its blobs in the store; None where there is none (`why_none`).

        Errors:
            LocalError: the disk is full.
        """
        if self._taken != len(self.base.chunks):
            self._drop("the tensors are cut elsewhere")
        while self._waiting:
            self._settle()
        self._close()
        size_bytes = sum(chunk.ref.size_bytes for chunk in self._chunks)
        full_bytes = sum(ref.size_bytes for ref in self.base.chunks)
        if size_bytes > WORTH_SHARE * full_bytes:
            self._drop(f"{size_bytes} bytes for {full_bytes}")
        if self.why_none or self.base.state_digest == state_digest:
            return None
        return Patch(
            base=self.base.version,
            base_digest=self.base.state_digest,
            version=version,
            state_digest=state_digest,
            chunks=tuple(self._chunks),
        )

    def _encode(self, old: Digest, data: Buffer, slices: Sequence[Slice]) -> bytes:
        with self._store.view(old) as base:
            return encode_chunk(base, data, slices, classes=self._classes)

    def _encode_now(self, old: Digest, data: Buffer, slices: Sequence[Slice]) -> Future[bytes]:
        done: Future[bytes] = Future()
        try:
            done.set_result(self._encode(old, data, slices))
        except Exception as error:  # told where the result is taken, as a thread's would be
            done.set_exception(error)
        return done

    def _settle(self) -> None:
        """Take the oldest encoded chunk into the open blob."""
        index, pending = self._waiting.popleft()
        try:
            encoded = pending.result() if pending is not None else b""
        except KeyError as error:
            return self._drop(f"chunk {str(error)[1:9]} of the base is gone")
        except Exception as error:
            # A codec that fails on some weights must not end a run: they go out in full.
            return self._drop(f"chunk {index} cannot be encoded: {error!r}")
        if self.why_none:
            return
        if self._group_bytes + len(encoded) > self._blob_bytes:
            self._close()
        if not self._group:
            if not encoded:
                return
            self._first = index
        self._group.append(encoded)
        self._group_bytes += len(encoded)

    def _close(self) -> None:
        """Write the open blob."""
        while self._group and not self._group[-1]:
            self._group.pop()
        if not self._group or self.why_none:
            return
        blob = write_patch(self._group)
        if len(blob) > limits.CHUNK_SIZE_BYTES_MAX:
            return self._drop("a chunk changed too much")
        self._chunks.append(
            PatchChunk(
                ref=self._store.add(ChunkKind.PATCH, blob),
                first=self._first,
                count=len(self._group),
            )
        )
        self._group = []
        self._group_bytes = 0

    def _drop(self, why: str) -> None:
        self.why_none = self.why_none or why
        for _, pending in self._waiting:
            if pending is not None:
                pending.cancel()
        self._waiting.clear()
        self._group = []


class Patcher:
    """What one trainer has published, and the patches that are worth listing.

    Args:
        steps_max: patches on the longest way that is listed; 0 makes none at all.
        threads: that encode beside the one that writes; 1 encodes in place.
        classes: of small weights, see `encode_chunk`.
    """

    def __init__(
        self,
        store: ChunkStore,
        *,
        steps_max: int,
        threads: int = 1,
        classes: int = CLASSES_FAST,
    ) -> None:
        self._classes = classes
        self._store = store
        self._steps_max = steps_max
        self._threads = max(1, min(limits.REBUILD_THREADS_MAX, threads))
        self._known: deque[Known] = deque(maxlen=2**SKIPS_MAX)
        self._patches: list[Patch] = []
        self._published = 0
        self._blob_bytes = BLOB_BYTES_MAX // 2
        self._open: list[Difference] = []
        self._pool: ThreadPoolExecutor | None = None

    def begin(self) -> None:
        """A version is about to be written: `take` each of its chunks, then `finish`."""
        self.drop()
        if not self._steps_max:
            return
        spans = [1, *(2**j for j in range(1, SKIPS_MAX + 1) if self._published % 2**j == 0)]
        if self._threads > 1 and self._known:
            self._pool = ThreadPoolExecutor(max_workers=self._threads)
        self._open = [
            Difference(self._known[-span], self._store, self._blob_bytes, self._pool, self._classes)
            for span in spans
            if span <= min(len(self._known), self._steps_max)
        ]

    def take(self, ref: ChunkRef, data: Buffer, slices: Sequence[Slice]) -> None:
        """The next data chunk. Errors: LocalError if the disk is full."""
        for difference in self._open:
            difference.take(ref, data, slices)

    def finish(
        self, version: PolicyVersion, chunks: tuple[ChunkRef, ...], state_digest: Digest
    ) -> tuple[Patch, ...]:
        """The patches to list in the manifest of `version`, the newest first.

        Errors:
            LocalError: the disk is full.
        """
        made = [difference.finish(version, state_digest) for difference in self._open]
        for difference in self._open:
            if difference.why_none:
                sys.stderr.write(
                    f"no patch {difference.base.version} -> {version}: {difference.why_none}\n"
                )
        self.drop()
        new = [patch for patch in made if patch is not None]
        if new:
            step_bytes = _size_bytes(new[0])
            wanted_bytes = step_bytes // BLOBS_PER_PATCH
            self._blob_bytes = max(BLOB_BYTES_MIN, min(BLOB_BYTES_MAX, wanted_bytes))
        old = [patch for patch in self._patches if self._is_here(patch)]
        self._patches = worth_listing(
            [*new, *old],
            state_digest,
            full_bytes=sum(ref.size_bytes for ref in chunks),
            steps_max=self._steps_max,
            blobs_max=(limits.MANIFEST_CHUNKS_MAX - len(chunks)) // 2,
        )
        self._known.append(Known(version=version, chunks=chunks, state_digest=state_digest))
        self._published += 1
        return tuple(self._patches)

    def drop(self) -> None:
        """An export that failed: what was begun is forgotten."""
        self._open = []
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None

    def _is_here(self, patch: Patch) -> bool:
        return all(self._store.has(chunk.ref.digest) for chunk in patch.chunks)


def worth_listing(
    patches: Sequence[Patch],
    state_digest: Digest,
    *,
    full_bytes: int,
    steps_max: int,
    blobs_max: int,
) -> list[Patch]:
    """Those of `patches` by which some older version is reached in fewer bytes than the whole.

    Walks back from the newest weights: `ways` is, for each older version, the cheapest way from
    it (bytes, patches on it). Bounded by steps back, by patches, and by blobs in all.
    """
    ways: dict[Digest, tuple[int, int]] = {state_digest: (0, 0)}
    listed: list[Patch] = []
    blobs = 0
    for patch in sorted(patches, key=lambda p: (-p.version, -p.base)):
        way = ways.get(patch.state_digest)
        if way is None:
            continue
        cost, steps = way[0] + _size_bytes(patch), way[1] + 1
        if cost >= full_bytes or steps > steps_max or len(listed) >= limits.MANIFEST_PATCHES_MAX:
            continue
        if blobs + len(patch.chunks) > blobs_max:
            continue
        blobs += len(patch.chunks)
        listed.append(patch)
        known = ways.get(patch.base_digest)
        if known is None or cost < known[0]:
            ways[patch.base_digest] = (cost, steps)
    return listed


def _size_bytes(patch: Patch) -> int:
    return sum(chunk.ref.size_bytes for chunk in patch.chunks)
