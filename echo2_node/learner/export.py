"""A version's tensors into content-addressed chunks, and a manifest back into a model folder.

Chunks are cut at tensor borders, so a tensor that did not change gives the same chunk again and
nobody fetches it twice; a tensor larger than a chunk is sliced. It signs nothing and announces
nothing. `learner.stepper` exports; whoever wants a folder that `from_pretrained` loads calls
`write_folder`.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import blake3
import msgspec

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import LocalError
from echo2_mesh.wire.messages import ChunkRef, FileRef, Manifest, TensorSpan
from echo2_mesh.wire.types import ChunkKind, Digest
from echo2_node.learner.modelfolder import TRAVELLING_FILES
from echo2_node.learner.tensorfile import Entry, header_bytes

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


def write_chunks(entries: Iterable[Entry], store: ChunkStore, chunk_size_bytes: int) -> DataSection:
    """Store tensors as chunks; holds one chunk and one tensor in memory at a time.

    Errors:
        LocalError: the disk is full or the store cannot be written.
    """
    chunks: list[ChunkRef] = []
    spans: list[TensorSpan] = []
    whole = blake3.blake3()
    open_chunk = bytearray()
    offset_bytes = 0

    def close() -> None:
        nonlocal open_chunk
        if open_chunk:
            chunks.append(store.add(ChunkKind.FULL, open_chunk))
            open_chunk = bytearray()

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
        whole.update(data)
        if len(open_chunk) + entry.size_bytes > chunk_size_bytes:
            close()
        if entry.size_bytes <= chunk_size_bytes:
            open_chunk += data
            continue
        for start in range(0, entry.size_bytes, chunk_size_bytes):
            chunks.append(store.add(ChunkKind.FULL, data[start : start + chunk_size_bytes]))
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


def write_folder(manifest: Manifest, store: ChunkStore, folder: Path) -> None:
    """Write a version as a Hugging Face folder; existing files of the same names are replaced.

    Errors:
        LocalError: a chunk is not in the store, or the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in manifest.files:
            (folder / file.name).write_bytes(
                b"".join(store.read(chunk.digest) for chunk in file.chunks)
            )
        part = folder / "model.safetensors.part"
        with part.open("wb") as target:
            target.write(
                header_bytes((t.name, t.dtype, t.shape, t.size_bytes) for t in manifest.tensors)
            )
            for chunk in manifest.chunks:
                with store.view(chunk.digest) as data:
                    target.write(data)
        part.replace(folder / "model.safetensors")
    except KeyError as error:
        raise LocalError(
            f"Version {manifest.version} is not whole here: chunk {str(error)[1:9]} is missing.",
            "Fetch the version again before writing it as a folder.",
        ) from error
    except OSError as error:
        raise LocalError(f"The model folder {folder} cannot be written: {error}.") from error
