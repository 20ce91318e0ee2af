"""A version's tensors and files into content-addressed chunks.

Chunks are cut at tensor borders, so a tensor that did not change gives the same chunk again and
nobody fetches it twice; a tensor larger than a chunk is sliced. It signs nothing and announces
nothing. `learner.stepper` exports; `echo2_node.shelf` goes the other way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path

import blake3
import msgspec

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.delta.codec import Slice
from echo2_mesh.errors import LocalError
from echo2_mesh.wire.messages import ChunkRef, FileRef, TensorSpan
from echo2_mesh.wire.types import ChunkKind, Digest
from echo2_node.learner.modelfolder import TRAVELLING_FILES
from echo2_node.learner.tensorfile import DTYPE_SIZES_BYTES, Entry

PROBE_TOKENS = 32
_PROBE_STRIDE = 7919
"""A prime: successive probe tokens lie far apart in the vocabulary."""
_DTYPE_KEYS = ("dtype", "torch_dtype")


class DataSection(msgspec.Struct, frozen=True, kw_only=True):
    """All tensor bytes of a version, in order."""

    chunks: tuple[ChunkRef, ...]
    tensors: tuple[TensorSpan, ...]
    state_digest: Digest
    """BLAKE3 over the whole section."""


EachChunk = Callable[[ChunkRef, bytearray | memoryview, tuple[Slice, ...]], None]
"""Told of every data chunk as it is written: its name, its bytes, and its runs of one item size."""


def write_chunks(
    entries: Iterable[Entry],
    store: ChunkStore,
    chunk_size_bytes: int,
    each: EachChunk | None = None,
) -> DataSection:
    """Store tensors as chunks; holds one chunk and one tensor in memory at a time.

    Errors:
        LocalError: the disk is full or the store cannot be written.
    """
    chunks: list[ChunkRef] = []
    spans: list[TensorSpan] = []
    whole = blake3.blake3()
    open_chunk = bytearray()
    slices: list[Slice] = []
    offset_bytes = 0

    def write(data: bytearray | memoryview, runs: tuple[Slice, ...]) -> None:
        chunks.append(store.add(ChunkKind.FULL, data))
        if each is not None:
            each(chunks[-1], data, runs)

    def close() -> None:
        nonlocal open_chunk, slices
        if open_chunk:
            write(open_chunk, tuple(slices))
            open_chunk, slices = bytearray(), []

    for entry in entries:
        spans.append(
            TensorSpan(
                name=entry.name,
                dtype=entry.dtype,
                shape=entry.shape,
                offset_bytes=offset_bytes,
                size_bytes=entry.size_bytes,
            )
        )
        offset_bytes += entry.size_bytes
        data = entry.read()
        item_bytes = DTYPE_SIZES_BYTES[entry.dtype]
        codec_bytes = item_bytes if item_bytes in (2, 4) else 1
        whole.update(data)
        if len(open_chunk) + entry.size_bytes > chunk_size_bytes:
            close()
        if entry.size_bytes <= chunk_size_bytes:
            open_chunk += data
            slices.append(Slice(size_bytes=entry.size_bytes, item_bytes=codec_bytes))
            continue
        # Cut between items, so that the codec sees whole ones.
        step_bytes = chunk_size_bytes - chunk_size_bytes % item_bytes
        for start in range(0, entry.size_bytes, step_bytes):
            part = data[start : start + step_bytes]
            write(part, (Slice(size_bytes=len(part), item_bytes=codec_bytes),))
    close()
    return DataSection(
        chunks=tuple(chunks), tensors=tuple(spans), state_digest=Digest(whole.digest())
    )


def travelling_files(folder: Path) -> dict[str, bytes]:
    """The files that make a folder of tensors a model, by name; `config.json` names BF16.

    Errors:
        LocalError: a file cannot be read.
    """
    files: dict[str, bytes] = {}
    for name in TRAVELLING_FILES:
        path = folder / name
        try:
            if path.is_file():
                files[name] = path.read_bytes()
        except OSError as error:
            raise LocalError(f"The model file {path} cannot be read: {error}.") from error
    config = msgspec.json.decode(files["config.json"], type=dict[str, object])
    for key in _DTYPE_KEYS:
        if key in config or key == "dtype":
            config[key] = "bfloat16"
    encoded = msgspec.json.encode(config, order="sorted")
    files["config.json"] = msgspec.json.format(encoded, indent=2) + b"\n"
    return files


def write_files(
    files: dict[str, bytes], store: ChunkStore, chunk_size_bytes: int
) -> tuple[FileRef, ...]:
    """Store files as blobs; unchanged ones are not written again.

    Errors:
        LocalError: the disk is full or the store cannot be written.
    """
    return tuple(
        FileRef(
            name=name,
            chunks=tuple(
                store.add(ChunkKind.FILE, data[start : start + chunk_size_bytes])
                for start in range(0, len(data), chunk_size_bytes)
            ),
        )
        for name, data in files.items()
    )


def probe_tokens(vocabulary: int, positions_max: int) -> list[int]:
    """The fixed sequence that proves an installed version; the same for every version."""
    length = max(2, min(PROBE_TOKENS, positions_max))
    return [(1 + index * _PROBE_STRIDE) % vocabulary for index in range(length)]
