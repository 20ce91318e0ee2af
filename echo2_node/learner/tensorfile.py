"""The safetensors layout, read and written without torch: a header of names, then plain bytes.

Carries headers and bytes; it never interprets a tensor. Called where a model folder is checked
before anything heavy is imported, by `export` (a version's data section is the body of such a
file) and by `checkpoints`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import BinaryIO

import msgspec

from echo2_mesh.errors import LocalError

DTYPE_SIZES_BYTES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1,
    "U16": 2, "I16": 2, "F16": 2, "BF16": 2,
    "U32": 4, "I32": 4, "F32": 4,
    "U64": 8, "I64": 8, "F64": 8,
}  # fmt: skip
HEADER_SIZE_BYTES_MAX = 100 * 1024 * 1024
"""The bound of the format's reference implementation."""
_ALIGNMENT_BYTES = 8


class Entry(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor, and how to get its bytes (little-endian, contiguous) when their turn comes.

    Reading late keeps one tensor in host memory at a time, however large the model is.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], memoryview]

    @property
    def size_bytes(self) -> int:
        return prod(self.shape) * DTYPE_SIZES_BYTES[self.dtype]


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor in a file: [start, end) counts from the end of the header."""

    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """What a file holds. `data_start` is where the first tensor byte lies in the file."""

    places: dict[str, Place]
    data_start: int


def header_bytes(tensors: Iterable[tuple[str, str, Sequence[int], int]]) -> bytes:
    """Length field and header of a file whose body is the tensors in this order, without gaps.

    Args:
        tensors: (name, dtype, shape, size in bytes).
    """
    table: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, dtype, shape, size_bytes in tensors:
        table[name] = {
            "dtype": dtype,
            "shape": list(shape),
            "data_offsets": [offset, offset + size_bytes],
        }
        offset += size_bytes
    text = msgspec.json.encode(table)
    text += b" " * (-len(text) % _ALIGNMENT_BYTES)
    return len(text).to_bytes(8, "little") + text


def write_tensors(file: BinaryIO, entries: Sequence[Entry]) -> None:
    """Write a whole file. `OSError` is the caller's."""
    file.write(header_bytes((e.name, e.dtype, e.shape, e.size_bytes) for e in entries))
    for entry in entries:
        file.write(entry.read())


def read_header(path: Path) -> Header:
    """Read and check the header; the file's size must be exactly what it promises.

    Raises:
        LocalError: not such a file, or bytes are missing (a truncated download or copy).
    """
    try:
        with path.open("rb") as file:
            size_bytes = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(8), "little")
            if size_bytes < 8 or not 2 <= length <= min(size_bytes - 8, HEADER_SIZE_BYTES_MAX):
                raise _damaged(path, f"its header does not fit in its {size_bytes} bytes")
            text = file.read(length)
    except OSError as error:
        raise LocalError(f"The tensor file {path} cannot be read: {error}.") from error
    try:
        table = msgspec.json.decode(text, type=dict[str, msgspec.Raw])
        table.pop("__metadata__", None)
        places = {name: msgspec.json.decode(raw, type=Place) for name, raw in table.items()}
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise _damaged(path, f"its header is no table of tensors ({error})") from error
    end_max = _check_places(path, places)
    if size_bytes != 8 + length + end_max:
        raise _damaged(path, f"it has {size_bytes} bytes where {8 + length + end_max} are promised")
    return Header(places=places, data_start=8 + length)


def read_tensor(file: BinaryIO, header: Header, name: str) -> bytearray:
    """One tensor's bytes, writable. `OSError` is the caller's."""
    place = header.places[name]
    start, end = place.data_offsets
    data = bytearray(end - start)
    file.seek(header.data_start + start)
    if file.readinto(data) != len(data):  # type: ignore[attr-defined]
        raise OSError(f"the tensor {name} is cut short")
    return data


def _check_places(path: Path, places: dict[str, Place]) -> int:
    """The end of the last tensor, once every place is plausible."""
    end_max = 0
    for name, place in places.items():
        start, end = place.data_offsets
        size_bytes = DTYPE_SIZES_BYTES.get(place.dtype)
        if size_bytes is None:
            raise _damaged(path, f"the tensor {name} has the unknown dtype {place.dtype}")
        if not 0 <= start <= end or end - start != prod(place.shape) * size_bytes:
            raise _damaged(path, f"the tensor {name} does not fit its place")
        end_max = max(end_max, end)
    return end_max


def _damaged(path: Path, why: str) -> LocalError:
    return LocalError(
        f"The tensor file {path} is damaged: {why}.",
        "Copy or download it again; if it is a checkpoint, remove its folder and resume from the "
        "one before.",
    )
