"""Blobs on disk, named by BLAKE3 digest: verified, then written, then renamed into existence.

The file name is the index; there is no database to fall out of step. A name in the store means
the bytes hash to it, so readers never check again. Synchronous on purpose: daemons call it from
worker threads, trainers and engines directly. It decides nothing about which blobs are wanted;
owners pin what must stay and the quota evicts the least recently used of the rest.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

import blake3

from echo2_mesh import limits
from echo2_mesh.errors import LocalError, PeerError
from echo2_mesh.wire.messages import ChunkRef
from echo2_mesh.wire.types import ChunkKind, Digest

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_counter = itertools.count()


def digest_of(data: bytes | bytearray | memoryview) -> Digest:
    """BLAKE3 of `data`: its name in every store of the mesh."""
    return Digest(blake3.blake3(data).digest())


class ChunkStore:
    """A folder of verified blobs with a quota.

    Args:
        folder: created if missing; unfinished writes left by a crash are removed.
        quota_bytes: above it the least recently used unpinned blobs go.
    """

    def __init__(self, folder: Path, quota_bytes: int = limits.STORE_QUOTA_BYTES_DEFAULT) -> None:
        self.folder = folder
        self.quota_bytes = quota_bytes
        self._pinned: dict[str, frozenset[Digest]] = {}
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob("*.part"):
                leftover.unlink(missing_ok=True)
            self.used_bytes = sum(file.stat().st_size for _, file in self._files())
        except OSError as error:
            raise LocalError(f"The chunk store {folder} cannot be used: {error}.") from error

    def _files(self) -> Iterator[tuple[Digest, Path]]:
        for file in self.folder.iterdir():
            if len(file.name) == 64:
                with contextlib.suppress(ValueError):
                    yield Digest(bytes.fromhex(file.name)), file

    def path(self, digest: Digest) -> Path:
        """Where the blob lies (or would lie)."""
        return self.folder / digest.hex()

    def has(self, digest: Digest) -> bool:
        """True if the blob is here, verified."""
        return self.path(digest).exists()

    def put(self, ref: ChunkRef, data: bytes | bytearray | memoryview) -> None:
        """Verify a peer's bytes and store them.

        Raises:
            PeerError: the bytes do not have the promised size or digest; nothing is written.
            LocalError: disk full, or the folder cannot be written.
        """
        if len(data) != ref.size_bytes:
            raise PeerError(
                f"Chunk {ref.digest.hex()[:8]} has {len(data)} bytes, {ref.size_bytes} promised."
            )
        if digest_of(data) != ref.digest:
            raise PeerError(f"Chunk {ref.digest.hex()[:8]} does not hash to its name.")
        self._write(ref.digest, data)

    def add(self, kind: ChunkKind, data: bytes | bytearray | memoryview) -> ChunkRef:
        """Store this host's own bytes and name them.

        Raises:
            LocalError: disk full, or the folder cannot be written.
        """
        if len(data) > limits.CHUNK_SIZE_BYTES_MAX:
            raise LocalError(
                f"A {kind.value} blob of {len(data)} bytes is above the chunk limit of "
                f"{limits.CHUNK_SIZE_BYTES_MAX}."
            )
        digest = digest_of(data)
        self._write(digest, data)
        return ChunkRef(kind=kind, digest=digest, size_bytes=len(data))

    def _write(self, digest: Digest, data: bytes | bytearray | memoryview) -> None:
        target = self.path(digest)
        if target.exists():
            with contextlib.suppress(OSError):
                os.utime(target)
            return
        part = self.folder / f"{digest.hex()}.{os.getpid()}.{next(_counter)}.part"
        try:
            self._make_room(len(data))
            with part.open("xb") as file:
                file.write(data)
            part.rename(target)
        except OSError as error:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            if error.errno in _FULL_DISK:
                raise LocalError(
                    f"The disk of {self.folder} is full: a blob of {len(data)} bytes does not fit.",
                    "Free space there, or move the store with --state-dir; nothing already "
                    "stored was harmed.",
                ) from error
            raise LocalError(f"The chunk store {self.folder} cannot be written: {error}.") from error
        self.used_bytes += len(data)

    def read(self, digest: Digest) -> bytes:
        """The blob's bytes.

        Raises:
            KeyError: it is not here.
        """
        try:
            data = self.path(digest).read_bytes()
        except FileNotFoundError:
            raise KeyError(digest.hex()) from None
        return data

    @contextlib.contextmanager
    def view(self, digest: Digest) -> Iterator[memoryview]:
        """The blob mapped into memory, read only, without a copy.

        Raises:
            KeyError: it is not here.
        """
        try:
            with self.path(digest).open("rb") as file:
                if os.fstat(file.fileno()).st_size == 0:
                    yield memoryview(b"")
                    return
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise KeyError(digest.hex()) from None
        view = memoryview(mapped)
        try:
            yield view
        finally:
            view.release()
            mapped.close()

    def pin(self, owner: str, digests: Iterable[Digest]) -> None:
        """Keep these blobs, and no others, in the name of `owner`."""
        self._pinned[owner] = frozenset(digests)

    def unpin(self, owner: str) -> None:
        """Let go of everything `owner` pinned."""
        self._pinned.pop(owner, None)

    def remove(self, digest: Digest) -> None:
        """Delete a blob that nobody pinned; no error if it is gone."""
        if any(digest in kept for kept in self._pinned.values()):
            return
        with contextlib.suppress(FileNotFoundError):
            size = self.path(digest).stat().st_size
            self.path(digest).unlink()
            self.used_bytes -= size

    def _make_room(self, size_bytes: int) -> None:
        """Evict until `size_bytes` fit under the quota; pinned blobs never go."""
        if self.used_bytes + size_bytes <= self.quota_bytes:
            return
        kept = frozenset().union(*self._pinned.values()) if self._pinned else frozenset()
        candidates = []
        for digest, file in self._files():
            if digest not in kept:
                with contextlib.suppress(FileNotFoundError):
                    candidates.append((file.stat().st_mtime_ns, digest))
        for _, digest in sorted(candidates):
            if self.used_bytes + size_bytes <= self.quota_bytes:
                return
            self.remove(digest)
