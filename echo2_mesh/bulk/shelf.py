"""The store as lanes see it: blobs mapped for sending without hashing them twice, and kept.

A file that this process has verified is known by inode, time and size, and not hashed again until
one of them changes. Blocking: called in the worker threads of `bulk.hub`, except `known`.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
from collections import OrderedDict
from pathlib import Path

from echo2_mesh.chunks import ChunkStore, digest_of
from echo2_mesh.wire.messages import ChunkRef
from echo2_mesh.wire.types import Digest

KNOWN_MAX = 131_072
MAPPED_MAX = 64
"""Blobs that stay mapped: siblings ask for the same one within moments."""


class Shelf:
    """Verified blobs of one folder. Safe to call from several threads."""

    def __init__(self, folder: Path) -> None:
        self._store = ChunkStore(folder, quota_bytes=None)
        self._lock = threading.Lock()
        self._known: OrderedDict[Digest, tuple[int, int, int]] = OrderedDict()
        self._mapped: OrderedDict[Digest, memoryview] = OrderedDict()

    def keep(self, ref: ChunkRef, data: memoryview) -> None:
        """Verify and write.

        Raises:
            PeerError: size or digest differ; nothing was written.
            LocalError: the store cannot take it.
        """
        self._store.put(ref, data)
        self._remember(ref.digest, self._store.path(ref.digest))

    def known(self, digest: Digest, size_bytes: int) -> memoryview | None:
        """The blob, where it is at hand and needs no hashing: quick enough for the loop."""
        path = self._store.path(digest)
        mark = _mark(path)
        if mark is None or mark[2] != size_bytes:
            return None
        with self._lock:
            if self._known.get(digest) != mark:
                self._mapped.pop(digest, None)
                return None
            view = self._mapped.get(digest)
        return view if view is not None else self._map(digest, path)

    def exists(self, digest: Digest) -> bool:
        return self._store.has(digest)

    def vouch(self, digest: Digest, size_bytes: int) -> memoryview | None:
        """The blob, verified now if need be; None: it is not here, damaged, or of another size."""
        view = self.known(digest, size_bytes)
        if view is not None:
            return view
        path = self._store.path(digest)
        mark = _mark(path)
        if mark is None or mark[2] != size_bytes:
            return None
        view = self._map(digest, path)
        if view is None or digest_of(view) != digest:
            with self._lock:
                self._mapped.pop(digest, None)
            return None
        self._remember(digest, path)
        return view

    def _map(self, digest: Digest, path: Path) -> memoryview | None:
        try:
            with path.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                view = memoryview(
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if size else b""
                )
        except OSError:
            return None
        with self._lock:
            self._mapped[digest] = view
            while len(self._mapped) > MAPPED_MAX:
                self._mapped.popitem(last=False)
        return view

    def _remember(self, digest: Digest, path: Path) -> None:
        with contextlib.suppress(OSError):
            os.utime(path)  # used just now: eviction goes by it
        mark = _mark(path)
        if mark is not None:
            with self._lock:
                self._known[digest] = mark
                while len(self._known) > KNOWN_MAX:
                    self._known.popitem(last=False)


def _mark(path: Path) -> tuple[int, int, int] | None:
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_ino, state.st_mtime_ns, state.st_size
