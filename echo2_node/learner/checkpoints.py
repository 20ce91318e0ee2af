"""Checkpoint folders: whole or not there. Written beside, synced, renamed; sizes recorded.

A folder `step-00000010` is a Hugging Face model folder with the masters and the optimizer beside
the published weights. It appears by one rename, after everything in it is on the disk, so a kill
at any moment leaves the one before intact. It knows nothing of tensors' meaning, and no torch:
the daemon asks for the newest one before any child exists. `learner.stepper` writes and reads.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from echo2_mesh.errors import DiskFull, LocalError
from echo2_node.learner import tensorfile

RECORD = "checkpoint.json"
MODEL = "model.safetensors"
MASTERS = "masters.safetensors"
OPTIMIZER = "optimizer.safetensors"
FORMAT = 1
_NAME = re.compile(r"^step-([0-9]{8})$")
_PARTIAL = ".partial"
_DAMAGED = ".damaged"
_FULL_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """What a checkpoint is, and the size of each of its files: written last.

    `step` is the training step it was taken after; `updates` the optimizer steps really applied
    (skipped steps do not count); `version` the newest one exported by then.
    """

    format: int = FORMAT
    step: int
    updates: int
    version: int | None
    rng: bytes
    """The framework's random state."""
    sizes_bytes: dict[str, int] = {}


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A complete checkpoint and where it lies."""

    step: int
    folder: Path


class Checkpoints:
    """The checkpoints of one run.

    Args:
        base: their folder; need not exist.
        kept: how many `retire` leaves.
    """

    def __init__(self, base: Path, *, kept: int) -> None:
        self._base = base
        self._kept = max(1, kept)

    def folder_of(self, step: int) -> Path:
        """Where the checkpoint after `step` lies, or would lie."""
        return self._base / f"step-{step:08d}"

    def complete(self) -> tuple[Checkpoint, ...]:
        """All complete ones, oldest first. Damaged ones are passed over."""
        found = []
        with contextlib.suppress(FileNotFoundError):
            for folder in self._base.iterdir():
                if (match := _NAME.match(folder.name)) and is_complete(folder):
                    found.append(Checkpoint(step=int(match[1]), folder=folder))
        return tuple(sorted(found, key=lambda checkpoint: checkpoint.step))

    def newest(self) -> Checkpoint | None:
        """The one to resume from; None if there is none."""
        found = self.complete()
        return found[-1] if found else None

    def retire(self) -> tuple[Path, ...]:
        """Remove all but the newest `kept`, and what unfinished writes left.

        Call it only while none is being written. Damaged folders stay for a person to see.

        Returns: what was removed.

        Errors:
            LocalError: a folder cannot be removed.
        """
        doomed = [checkpoint.folder for checkpoint in self.complete()[: -self._kept]]
        doomed += self._base.glob(f"step-*{_PARTIAL}") if self._base.is_dir() else []
        try:
            for folder in doomed:
                # Without its record a half-removed folder is no checkpoint any more.
                (folder / RECORD).unlink(missing_ok=True)
                shutil.rmtree(folder)
        except OSError as error:
            raise LocalError(
                f"An old checkpoint cannot be removed: {error}.", "Check the folder's owner."
            ) from error
        return tuple(doomed)


def write_checkpoint(
    folder: Path, record: Record, contents: Mapping[str, Callable[[BinaryIO], None]]
) -> None:
    """Make `folder` appear, complete.

    Args:
        folder: holds no complete checkpoint yet; an unfinished attempt at it is removed, a
            damaged one (passed over by a resume) is set aside.
        contents: by file name, what writes the file.

    Errors:
        LocalError: it exists, the disk is full, or it cannot be written; nothing new is left.
    """
    partial = folder.with_name(folder.name + _PARTIAL)
    if is_complete(folder):
        raise LocalError(
            f"There is already a checkpoint at {folder}.", "Resume the run with --resume."
        )
    try:
        if partial.exists():
            shutil.rmtree(partial)
        if folder.exists():
            aside = folder.with_name(folder.name + _DAMAGED)
            shutil.rmtree(aside, ignore_errors=True)
            folder.rename(aside)
        partial.mkdir(parents=True)
        sizes = {}
        for name, write in contents.items():
            sizes[name] = _write_synced(partial / name, write)
        whole = msgspec.json.encode(msgspec.structs.replace(record, sizes_bytes=sizes))
        _write_synced(partial / RECORD, lambda file: _write_all(file, whole))
        _sync_folder(partial)
        partial.rename(folder)
        _sync_folder(folder.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            shutil.rmtree(partial)
        if error.errno in _FULL_DISK:
            raise DiskFull(
                f"The disk is full: the checkpoint {folder.name} cannot be written to "
                f"{folder.parent}.",
                "Free space there or keep fewer (learner.checkpoints_kept); the checkpoints "
                "already written are unharmed.",
            ) from error
        raise LocalError(f"The checkpoint {folder} cannot be written: {error}.") from error


def read_record(folder: Path) -> Record:
    """The record of a checkpoint whose files all have their recorded sizes.

    Errors:
        LocalError: no checkpoint, or a file is missing or truncated; the file is named.
    """
    path = folder / RECORD
    hint = "Resume from the checkpoint before it: move this folder away and try again."
    try:
        record = msgspec.json.decode(path.read_bytes(), type=Record)
    except FileNotFoundError as error:
        raise LocalError(f"{folder} is not a complete checkpoint: no {RECORD}.", hint) from error
    except (OSError, msgspec.MsgspecError, ValueError) as error:
        raise LocalError(f"The checkpoint record {path} is damaged: {error}.", hint) from error
    if record.format != FORMAT:
        raise LocalError(
            f"The checkpoint {folder} has format {record.format}; this program reads {FORMAT}.",
            "Resume it with the release of echo2 that wrote it.",
        )
    for name, size_bytes in record.sizes_bytes.items():
        file = folder / name
        found = file.stat().st_size if file.is_file() else None
        if found is None:
            raise LocalError(f"The checkpoint file {file} is missing.", hint)
        if found != size_bytes:
            raise LocalError(
                f"The checkpoint file {file} is damaged: {found} bytes of {size_bytes}.", hint
            )
    for name in (MODEL, MASTERS, OPTIMIZER):
        tensorfile.read_header(folder / name)
    return record


def is_complete(folder: Path) -> bool:
    """True if `read_record` would accept it."""
    try:
        read_record(folder)
    except LocalError:
        return False
    return True


def read_tensors(path: Path) -> dict[str, tuple[tensorfile.Place, bytearray]]:
    """All tensors of a file by name, as writable bytes.

    Errors:
        LocalError: missing or damaged; the file is named.
    """
    header = tensorfile.read_header(path)
    try:
        with path.open("rb") as file:
            return {
                name: (place, tensorfile.read_tensor(file, header, name))
                for name, place in header.places.items()
            }
    except OSError as error:
        raise LocalError(f"The checkpoint file {path} cannot be read: {error}.") from error


def _write_synced(path: Path, write: Callable[[BinaryIO], None]) -> int:
    with path.open("wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
        return file.tell()


def _write_all(file: BinaryIO, data: Any) -> None:
    file.write(data)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
