"""Blobs on disk, named by BLAKE3 digest: verified, then written, then renamed into existence.

The file name is the index; there is no database to fall out of step. Bytes are hashed before they
get a name and again whenever they are read (0.2 ms a MiB), so neither a peer nor a power cut can
have a wrong byte served or loaded: a damaged blob is simply not here any more. Synchronous on
purpose: daemons call it from worker threads, trainers and engines directly, each process with its
own `ChunkStore` on the same folder. It decides nothing about which blobs are wanted; owners pin
what must stay and the quota evicts the least recently used of the rest. Pins are known to their
process alone, so only the process that pins may evict: the others open with `quota_bytes=None`.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import mmap
import os
import shutil
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import blake3

from echo2_mesh import limits
from echo2_mesh.errors import DiskFull, LocalError, PeerError
from echo2_mesh.wire.messages import ChunkRef
from echo2_mesh.wire.types import ChunkKind, Digest

_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_WRITE_ATTEMPTS_MAX = 3
"""A part swept away by another process between its creation and its lock is written again."""
_WRITES_BETWEEN_COUNTS = 256
"""Other processes write here too, so the folder is counted anew after so many own writes."""
_counter = itertools.count()


def digest_of(data: bytes | bytearray | memoryview) -> Digest:
    """BLAKE3 of `data`: its name in every store of the mesh."""
    return Digest(blake3.blake3(data).digest())


class ChunkStore:
    """A folder of verified blobs with a quota. Safe to call from several threads and processes.

    Args:
        folder: created if missing; unfinished writes left by a crash are removed.
        quota_bytes: above it the least recently used unpinned blobs go; None never evicts.
    """

    def __init__(
        self, folder: Path, quota_bytes: int | None = limits.STORE_QUOTA_BYTES_DEFAULT
    ) -> None:
        self.folder = folder
        self.quota_bytes = quota_bytes
        # The one lock in our code (style 17): worker threads share the counters below.
        self._lock = threading.Lock()
        self._pinned: dict[str, frozenset[Digest]] = {}
        self._writes_until_count = _WRITES_BETWEEN_COUNTS
        self._crowded = False
        """The last count found more pinned than the quota allows: nothing to gain by another."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._sweep_parts()
            self.used_bytes = self._count_bytes()
        except OSError as error:
            raise LocalError(
                f"The chunk store {folder} cannot be used: {error}.",
                "Check its owner and mode, or choose another folder with --state-dir.",
            ) from error

    def path(self, digest: Digest) -> Path:
        """Where the blob lies (or would lie)."""
        return self.folder / digest.hex()

    def has(self, digest: Digest) -> bool:
        """True if the blob is here."""
        return self.path(digest).is_file()

    def put(self, ref: ChunkRef, data: bytes | bytearray | memoryview) -> None:
        """Verify a peer's bytes and store them.

        Raises:
            PeerError: the bytes do not have the promised size or digest; nothing is written.
            LocalError: disk full, or the folder cannot be written.
        """
        view = memoryview(data).cast("B")
        if len(view) != ref.size_bytes:
            raise PeerError(
                f"Chunk {ref.digest.hex()[:8]} has {len(view)} bytes, {ref.size_bytes} promised."
            )
        if digest_of(view) != ref.digest:
            raise PeerError(f"Chunk {ref.digest.hex()[:8]} does not hash to its name.")
        self._write(ref.digest, view)

    def add(self, kind: ChunkKind, data: bytes | bytearray | memoryview) -> ChunkRef:
        """Store this host's own bytes and name them.

        Raises:
            LocalError: disk full, or the folder cannot be written.
        """
        view = memoryview(data).cast("B")
        if len(view) > limits.CHUNK_SIZE_BYTES_MAX:
            raise LocalError(
                f"A {kind.value} blob of {len(view)} bytes is above the chunk limit of "
                f"{limits.CHUNK_SIZE_BYTES_MAX}."
            )
        digest = digest_of(view)
        self._write(digest, view)
        return ChunkRef(kind=kind, digest=digest, size_bytes=len(view))

    def read(self, digest: Digest) -> bytes:
        """The blob's bytes, verified.

        Raises:
            KeyError: it is not here, or was damaged on disk and has been removed.
        """
        try:
            data = self.path(digest).read_bytes()
        except FileNotFoundError:
            raise KeyError(digest.hex()) from None
        self._check(digest, data)
        return data

    @contextlib.contextmanager
    def view(self, digest: Digest) -> Iterator[memoryview]:
        """The blob mapped into memory, verified, read only, without a copy.

        Arrays made from the view may outlive the context: the mapping goes with the last of them.

        Raises:
            KeyError: it is not here, or was damaged on disk and has been removed.
        """
        with self.view_unverified(digest) as view:
            self._check(digest, view)
            yield view

    @contextlib.contextmanager
    def view_unverified(self, digest: Digest) -> Iterator[memoryview]:
        """As `view`, without the hash: only for bytes whose result is hashed before it is used.

        Raises:
            KeyError: it is not here.
        """
        mapped: mmap.mmap | bytes = b""
        try:
            with self.path(digest).open("rb") as file:
                if os.fstat(file.fileno()).st_size > 0:  # nothing cannot be mapped
                    mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise KeyError(digest.hex()) from None
        view = memoryview(mapped)
        try:
            yield view
        finally:
            with contextlib.suppress(BufferError):  # an array still looks at it
                view.release()
                if isinstance(mapped, mmap.mmap):
                    mapped.close()

    def pin(self, owner: str, digests: Iterable[Digest]) -> None:
        """Keep these blobs, and no others, in the name of `owner`."""
        kept = frozenset(digests)
        with self._lock:
            self._pinned[owner] = kept

    def unpin(self, owner: str) -> None:
        """Let go of everything `owner` pinned."""
        with self._lock:
            self._pinned.pop(owner, None)

    def pinned(self) -> frozenset[Digest]:
        """Every blob that somebody of this process pinned."""
        with self._lock:
            return self._kept()

    def remove(self, digest: Digest) -> None:
        """Delete a blob that nobody pinned; no error if it is gone."""
        with self._lock:
            if digest not in self._kept():
                self._forget(digest)

    def remove_all(self, digests: Iterable[Digest]) -> None:
        """Delete those of many blobs that nobody pinned; no error for what is gone."""
        with self._lock:
            for digest in set(digests) - self._kept():
                self._forget(digest)

    def last_used_ns(self, digest: Digest) -> int:
        """When the blob was last read, served or written: its file's mtime; 0 if it is not here."""
        try:
            return self.path(digest).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def landed(self, size_bytes: int) -> None:
        """Another process of this node stored so many bytes here: keep to the quota all the same.

        Such a process opens its own store without a quota, because only the one that pins may
        evict.
        """
        with self._lock:
            self.used_bytes += size_bytes
        self._make_room(0)

    def trim(self) -> None:
        """Count what all processes have written; evict down to the quota and the disk's reserve."""
        with self._lock:
            self._evict(0)

    def _write(self, digest: Digest, data: memoryview) -> None:
        if self.has(digest):
            with contextlib.suppress(OSError):
                os.utime(self.path(digest))
            return
        try:
            self._make_room(len(data))
            for attempt in range(1, _WRITE_ATTEMPTS_MAX + 1):
                try:
                    self._write_once(digest, data)
                    return
                except OSError as error:
                    full = error.errno in _FULL_DISK and self._could_hold(len(data))
                    gone = isinstance(error, FileNotFoundError)
                    if attempt == _WRITE_ATTEMPTS_MAX or not (full or gone):
                        raise
                    if full:
                        with self._lock:
                            self._evict(len(data))
        except OSError as error:
            if error.errno in _FULL_DISK:
                raise DiskFull(
                    f"The disk of {self.folder} is full: a blob of {len(data)} bytes does not fit.",
                    "Free space there, or move the store with --state-dir; nothing already "
                    "stored was harmed.",
                ) from error
            raise LocalError(
                f"The chunk store {self.folder} cannot be written: {error}.",
                "Check its owner and mode, or choose another folder with --state-dir.",
            ) from error

    def _write_once(self, digest: Digest, data: memoryview) -> None:
        """Write a part, locked as long as its writer lives, and give it its name."""
        part = self.folder / f"{digest.hex()}.{os.getpid()}.{next(_counter)}.part"
        try:
            with part.open("xb") as file:
                fcntl.flock(file, fcntl.LOCK_EX)
                file.write(data)
                file.flush()
                with self._lock:
                    known = self.has(digest)
                    part.rename(self.path(digest))
                    self.used_bytes += 0 if known else len(data)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise

    def _sweep_parts(self) -> None:
        """Remove parts whose writer died: a living one, in any process, holds the file's lock."""
        for part in self.folder.glob("*.part"):
            with contextlib.suppress(FileNotFoundError, BlockingIOError), part.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                part.unlink()

    def _files(self) -> Iterator[tuple[Digest, os.stat_result]]:
        """Blobs with their file's state, in no order; those that vanish meanwhile are left out."""
        with os.scandir(self.folder) as entries:
            for entry in entries:
                if len(entry.name) == 64:
                    with contextlib.suppress(ValueError, FileNotFoundError):
                        digest = Digest(bytes.fromhex(entry.name))
                        if len(digest) == 32:
                            yield digest, entry.stat(follow_symlinks=False)

    def _count_bytes(self) -> int:
        return sum(state.st_size for _, state in self._files())

    def _check(self, digest: Digest, data: bytes | memoryview) -> None:
        if digest_of(data) == digest:
            with contextlib.suppress(OSError):
                os.utime(self.path(digest))  # used just now
            return
        with self._lock:
            self._forget(digest)
        raise KeyError(digest.hex())

    def _forget(self, digest: Digest) -> None:
        with contextlib.suppress(FileNotFoundError):
            size_bytes = self.path(digest).stat().st_size
            self.path(digest).unlink()
            self.used_bytes -= size_bytes

    def _kept(self) -> frozenset[Digest]:
        return frozenset().union(*self._pinned.values())

    def _make_room(self, size_bytes: int) -> None:
        with self._lock:
            self._writes_until_count -= 1
            full = self.quota_bytes is not None and self.used_bytes + size_bytes > self.quota_bytes
            if (full and not self._crowded) or self._writes_until_count <= 0:
                self._evict(size_bytes)

    def _evict(self, size_bytes: int) -> None:
        """Evict until `size_bytes` fit under quota and disk reserve; pinned blobs never go.

        A sixteenth more than needed goes, so that a full store is not listed for every write.
        Where the pinned ones alone exceed the quota the blob is stored all the same: what a node
        needs to run comes before what it was asked to keep free.
        """
        files = sorted(
            (state.st_mtime_ns, digest, state.st_size) for digest, state in self._files()
        )
        self._writes_until_count = _WRITES_BETWEEN_COUNTS
        self.used_bytes = sum(size for _, _, size in files)
        budget_bytes = self._budget_bytes()
        if budget_bytes is None or self.used_bytes + size_bytes <= budget_bytes:
            self._crowded = False
            return
        kept = self._kept()
        goal_bytes = budget_bytes - budget_bytes // 16 - size_bytes
        for _, digest, _ in files:
            if self.used_bytes <= goal_bytes:
                break
            if digest not in kept:
                self._forget(digest)
        self._crowded = self.used_bytes + size_bytes > budget_bytes

    def _could_hold(self, size_bytes: int) -> bool:
        """True if evicting may help: never for a blob that is larger than the disk."""
        if self.quota_bytes is None:
            return False
        return size_bytes < shutil.disk_usage(self.folder).total

    def _budget_bytes(self) -> int | None:
        """What the store may hold: its quota, or less where the disk has less; None: any."""
        if self.quota_bytes is None:
            return None
        disk = shutil.disk_usage(self.folder)
        room_bytes = disk.free - disk.total // limits.DISK_RESERVE_SHARE
        return min(self.quota_bytes, max(0, self.used_bytes + room_bytes))
