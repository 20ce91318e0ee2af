"""A version on its way here, and a version that has arrived: values of `net.following`."""

from __future__ import annotations

from collections import Counter

import msgspec
import trio

from echo2_mesh.core.holdings import blobs_of, needed_of
from echo2_mesh.wire.messages import ChunkRef, Manifest
from echo2_mesh.wire.types import ChunkKind, Digest, PolicyVersion


class ReadyVersion(msgspec.Struct, frozen=True, kw_only=True):
    """A version whose data and files are in the store, verified and pinned.

    `fetched_full_bytes` (data and files) and `fetched_patch_bytes` came over the network for it,
    in `fetch_s` from hearing of it.
    """

    version: PolicyVersion
    manifest: Manifest
    manifest_ref: ChunkRef
    fetched_full_bytes: int = 0
    fetched_patch_bytes: int = 0
    fetch_s: float = 0.0


class Reading:
    """A version whose manifest was read and whose blobs are being fetched and made."""

    def __init__(self, ref: ChunkRef, manifest: Manifest, heard_s: float) -> None:
        self.ref = ref
        self.manifest = manifest
        self.refs = blobs_of(manifest)
        self.needed = needed_of(manifest)
        self.held: set[int] = set()
        self._heard_s = heard_s
        self._fetched_bytes: Counter[ChunkKind] = Counter()
        self._indices: dict[Digest, list[int]] = {}
        for index, blob in enumerate(self.refs):
            self._indices.setdefault(blob.digest, []).append(index)

    def fetched(self, ref: ChunkRef) -> tuple[int, ...]:
        """A blob came over the network: the indices it has in this version, maybe none."""
        indices = self.made(ref.digest)
        if indices:
            self._fetched_bytes[ref.kind] += ref.size_bytes
        return indices

    def made(self, digest: Digest) -> tuple[int, ...]:
        """A blob is in the store: the indices it has in this version, maybe none."""
        indices = tuple(self._indices.get(digest, ()))
        self.held.update(indices)
        return indices

    def ready(self) -> ReadyVersion:
        """What is handed on: every data chunk and file is here."""
        assert self.held.issuperset(range(self.needed))
        by_kind = self._fetched_bytes
        return ReadyVersion(
            version=self.manifest.version,
            manifest=self.manifest,
            manifest_ref=self.ref,
            fetched_full_bytes=by_kind[ChunkKind.FULL] + by_kind[ChunkKind.FILE],
            fetched_patch_bytes=by_kind[ChunkKind.PATCH],
            fetch_s=trio.current_time() - self._heard_s,
        )
