"""A published version on its way from the chunk store into an engine: read, check, hand out views.

Reads blobs that the mesh has verified already (a name in the store means the bytes hash to it)
and never writes. It knows safetensors' dtype names but no tensor library; each engine copies the
views into its own parameters. Called by engines, in the worker process.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from math import prod
from pathlib import Path

import msgspec
import numpy as np

from echo2_mesh.chunks import digest_of
from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.wire.codec import Envelope
from echo2_mesh.wire.messages import ChunkRef, Manifest, TensorSpan
from echo2_mesh.wire.types import Digest

ITEM_SIZE_BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Published dtypes that engines take."""

_envelopes = msgspec.msgpack.Decoder(Envelope)
_manifests = msgspec.msgpack.Decoder(Manifest)


class Staged:
    """A version's whole data section in memory, as published: one copy, freed after the install."""

    def __init__(self, digest: Digest, manifest: Manifest, data: np.ndarray) -> None:
        self.digest = digest
        self.manifest = manifest
        self._data = data

    def tensors(self) -> Iterator[tuple[TensorSpan, np.ndarray]]:
        """Each stored tensor with its bytes, uint8[size_bytes], not copied."""
        for span in self.manifest.tensors:
            yield span, self._data[span.offset_bytes : span.offset_bytes + span.size_bytes]


def read_manifest(store_dir: Path, digest: Digest) -> Manifest:
    """The manifest in a blob of the store.

    Raises:
        LocalError: the blob is missing.
        UsageError: it is not a manifest.
    """
    raw = _path(store_dir, digest)
    try:
        envelope = _envelopes.decode(raw.read_bytes())
        if envelope.kind != "manifest":
            raise UsageError(f"Blob {digest.hex()[:8]} is a {envelope.kind}, not a manifest.")
        return _manifests.decode(envelope.payload)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise UsageError(f"Blob {digest.hex()[:8]} is not a manifest: {error}.") from error
    except OSError as error:
        raise LocalError(f"Manifest {digest.hex()[:8]} cannot be read: {error}.") from error


def stage(store_dir: Path, digest: Digest) -> Staged:
    """Read a whole version; takes as much memory as the published weights.

    Raises:
        LocalError: a blob is missing or shorter than promised.
        UsageError: not a manifest, or tensors that do not lie inside the data.
    """
    manifest = read_checked(store_dir, digest)
    total_bytes = sum(chunk.size_bytes for chunk in manifest.chunks)
    data = np.empty(total_bytes, dtype=np.uint8)
    offset = 0
    for chunk in manifest.chunks:
        _read_whole(store_dir, chunk, data[offset : offset + chunk.size_bytes])
        offset += chunk.size_bytes
    return Staged(digest, manifest, data)


def read_checked(store_dir: Path, digest: Digest) -> Manifest:
    """A manifest whose tensors engines can take.

    Raises:
        LocalError: the blob is missing.
        UsageError: not a manifest, or tensors that do not lie inside the data.
    """
    manifest = read_manifest(store_dir, digest)
    _check_spans(manifest, sum(chunk.size_bytes for chunk in manifest.chunks))
    return manifest


def read_chunk(store_dir: Path, chunk: ChunkRef) -> np.ndarray:
    """A blob's bytes, uint8[size_bytes], hashed.

    Raises:
        LocalError: it is missing, cut, or does not hash to its name.
    """
    data = np.empty(chunk.size_bytes, dtype=np.uint8)
    _read_whole(store_dir, chunk, data)
    if digest_of(data.data) != chunk.digest:
        raise LocalError(
            f"Chunk {chunk.digest.hex()[:8]} is damaged on the disk.",
            "Delete that file; it will be fetched again.",
        )
    return data


def _read_whole(store_dir: Path, chunk: ChunkRef, data: np.ndarray) -> None:
    try:
        with _path(store_dir, chunk.digest).open("rb", buffering=0) as file:
            read_bytes = _read_into(file, data.data)
    except OSError as error:
        raise LocalError(f"Chunk {chunk.digest.hex()[:8]} cannot be read: {error}.") from error
    if read_bytes != chunk.size_bytes:
        raise LocalError(
            f"Chunk {chunk.digest.hex()[:8]} is cut: {read_bytes} of {chunk.size_bytes} bytes.",
            "Delete that file; it will be fetched again.",
        )


def _read_into(file: object, view: memoryview) -> int:
    done = 0
    while done < len(view):
        count = file.readinto(view[done:])  # type: ignore[attr-defined]
        if not count:
            break
        done += count
    return done


def _path(store_dir: Path, digest: Digest) -> Path:
    """A blob's place by the naming rule of `echo2_mesh.chunks`.

    A `ChunkStore` is not opened here: opening one tidies up after crashes, and this folder
    belongs to the running daemon.
    """
    return store_dir / digest.hex()


def _check_spans(manifest: Manifest, total_bytes: int) -> None:
    """Every tensor has a known dtype, the size of its shape, and lies inside the data, once."""
    for span in manifest.tensors:
        item = ITEM_SIZE_BYTES.get(span.dtype)
        if item is None:
            raise UsageError(
                f"Tensor {span.name} of version {manifest.version} has dtype {span.dtype}; engines "
                f"take {', '.join(ITEM_SIZE_BYTES)}."
            )
        if span.size_bytes != item * prod(span.shape):
            raise UsageError(
                f"Tensor {span.name} of version {manifest.version}: {span.size_bytes} bytes are "
                f"not {list(span.shape)} of {span.dtype}."
            )
    ordered = sorted((s.offset_bytes, s.offset_bytes + s.size_bytes) for s in manifest.tensors)
    if ordered and ordered[-1][1] > total_bytes:
        raise UsageError(
            f"Version {manifest.version} names tensor bytes up to {ordered[-1][1]}, but has "
            f"{total_bytes}."
        )
    if any(before[1] > after[0] for before, after in itertools.pairwise(ordered)):
        raise UsageError(f"Tensors of version {manifest.version} overlap.")
    names = [span.name for span in manifest.tensors]
    if len(set(names)) != len(names):
        raise UsageError(f"Version {manifest.version} names a tensor twice.")
