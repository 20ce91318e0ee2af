"""The versions in a node's state folder, looked at from outside: which are whole, and as a folder.

Reads the chunk store's files beside a daemon that may be running: it opens no store, touches and
deletes nothing there, and what the daemon lets go meanwhile is no fault. It never asks a peer.
Called by `weightscommands`.
"""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

from echo2_mesh.core.holdings import blobs_of, needed_of
from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.versionlog import VERSIONS_FILE, KnownVersion, read_versions
from echo2_mesh.wire.messages import ChunkRef, Manifest
from echo2_mesh.wire.types import ChunkKind, Digest
from echo2_node.engines.weights import read_chunk, read_manifest
from echo2_node.learner.tensorfile import header_bytes
from echo2_node.telemetry import FULL_DISK

LATEST = "latest"
NAMES_SHOWN_MAX = 12
_MODEL = "model.safetensors"


class Finding(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one version's blobs here: its manifest, data chunks, files, and patches.

    `state` is complete, damaged, missing (it ought to be whole and is not) or let go (older, and
    no longer whole: retention at work). Patches may be absent; present ones are checked.
    """

    version: int
    manifest: str
    state: str
    blobs: int
    size_bytes: int
    missing: tuple[str, ...] = ()
    damaged: tuple[str, ...] = ()

    @property
    def wrong(self) -> bool:
        """True where somebody should do something."""
        return self.state in ("damaged", "missing")


def known_versions(state_dir: Path) -> tuple[KnownVersion, ...]:
    """Every version that was whole in this state folder, oldest first, by its latest line.

    Raises:
        UsageError: there is none.
    """
    latest = {known.version: known for known in read_versions(state_dir / VERSIONS_FILE)}
    versions = tuple(latest[version] for version in sorted(latest))
    if not versions:
        raise UsageError(
            f"No version of a model is known in {state_dir}: its {VERSIONS_FILE} names none.",
            "A learner writes one when it publishes, an actor when its first version is complete.",
        )
    return versions


def choose(versions: tuple[KnownVersion, ...], word: str) -> KnownVersion:
    """The version that a person means: a number, or `latest`.

    Raises:
        UsageError: there is none of that number; names those there are.
    """
    if word == LATEST:
        return versions[-1]
    for known in versions:
        if word == str(known.version):
            return known
    numbers = [str(known.version) for known in versions[-NAMES_SHOWN_MAX:]]
    earlier = "..., " if len(versions) > len(numbers) else ""
    raise UsageError(
        f"There is no version '{word}' here.",
        f"Known here: {earlier}{', '.join(numbers)}, or {LATEST}.",
    )


def is_whole(store_dir: Path, known: KnownVersion) -> bool:
    """True if every file of the version is there, in its size; nothing is hashed."""
    with contextlib.suppress(LocalError, UsageError):
        manifest = _manifest(store_dir, known)
        return all(_size(store_dir, ref) == ref.size_bytes for ref in _needed(manifest))
    return False


def verify(state_dir: Path, wanted: KnownVersion | None = None) -> tuple[Finding, ...]:
    """Hash the blobs of `wanted`, or of every version of which there is anything left.

    Raises:
        UsageError: no version is known here.
    """
    store_dir = state_dir / "chunks"
    versions = known_versions(state_dir)
    checked: dict[Digest, str] = {}
    chosen = (wanted,) if wanted is not None else versions
    findings = [_finding(store_dir, known, checked) for known in chosen]
    if wanted is None:
        findings = [one for one in findings if one.blobs or one.version == versions[-1].version]
    newest = known_versions(state_dir)[-1].version
    return tuple(
        # Older versions are let go, and a version may have become old just now.
        msgspec.structs.replace(one, state="let go")
        if one.state == "missing" and one.version != newest and wanted is None
        else one
        for one in findings
    )


def _finding(store_dir: Path, known: KnownVersion, checked: dict[Digest, str]) -> Finding:
    digest = Digest(bytes.fromhex(known.manifest))
    state = _check_manifest(store_dir, digest)
    if state != "complete":
        gone = state == "missing"
        return Finding(
            version=known.version,
            manifest=known.manifest,
            state=state,
            blobs=0 if gone else 1,
            size_bytes=0,
            missing=(known.manifest,) if gone else (),
            damaged=() if gone else (known.manifest,),
        )
    try:
        manifest = read_manifest(store_dir, digest)
    except UsageError:
        # It hashes right and is no manifest: the list names what it should not.
        return Finding(
            version=known.version,
            manifest=known.manifest,
            state="damaged",
            blobs=1,
            size_bytes=0,
            damaged=(known.manifest,),
        )
    needed = {ref.digest: ref for ref in _needed(manifest)}
    patches = (chunk.ref for patch in manifest.patches for chunk in patch.chunks)
    optional = {ref.digest: ref for ref in patches if _size(store_dir, ref) is not None}
    states = {}
    for ref in (needed | optional).values():
        if ref.digest not in checked:
            checked[ref.digest] = _check(store_dir, ref)
        states[ref.digest] = checked[ref.digest]
    missing = tuple(d.hex() for d, state in states.items() if state == "missing" and d in needed)
    damaged = tuple(d.hex() for d, state in states.items() if state == "damaged")
    here = [ref for ref in (needed | optional).values() if states[ref.digest] != "missing"]
    return Finding(
        version=known.version,
        manifest=known.manifest,
        state="damaged" if damaged else "missing" if missing else "complete",
        blobs=1 + len(here),
        size_bytes=sum(ref.size_bytes for ref in here),
        missing=missing,
        damaged=damaged,
    )


def write_folder(manifest: Manifest, store_dir: Path, folder: Path) -> int:
    """Write a version as a Hugging Face folder: its size in bytes.

    Every blob is hashed on its way. Files of the same names are replaced, each only once its
    successor is whole, the weights last.

    Raises:
        LocalError: a blob is missing or damaged, or the folder cannot be written or is full;
            nothing half-written stays.
    """
    size_bytes = sum(ref.size_bytes for ref in _needed(manifest))
    new = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if shutil.disk_usage(folder).free < size_bytes:
            raise OSError(errno.ENOSPC, "the disk is full")
        for file in manifest.files:
            with _replacing(folder / file.name) as target:
                _copy(file.chunks, manifest, store_dir, target)
        with _replacing(folder / _MODEL) as target:
            tensors = sorted(manifest.tensors, key=lambda tensor: tensor.offset_bytes)
            target.write(header_bytes((t.name, t.dtype, t.shape, t.size_bytes) for t in tensors))
            _copy(manifest.chunks, manifest, store_dir, target)
    except (OSError, LocalError) as error:
        if new:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, LocalError):
            raise
        if error.errno in FULL_DISK:
            raise LocalError(
                f"The disk of {folder} has no room for version {manifest.version}: it takes "
                f"{size_bytes} bytes.",
                "Free space there, or choose a folder on another disk.",
            ) from error
        raise LocalError(f"The model folder {folder} cannot be written: {error}.") from error
    return size_bytes


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that gets its name when it is whole, and leaves nothing behind when it is not."""
    part = path.with_name(path.name + ".part")
    try:
        with part.open("wb") as file:
            yield file
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def _copy(
    chunks: tuple[ChunkRef, ...], manifest: Manifest, store_dir: Path, target: BinaryIO
) -> None:
    for chunk in chunks:
        try:
            data = read_chunk(store_dir, chunk)
        except LocalError as error:
            raise LocalError(
                f"Version {manifest.version} is not whole here: {error.what}",
                "Choose a newer version, or export where another node has it whole; "
                "`echo2-node weights verify` tells which are.",
            ) from error
        target.write(data.data)


def open_version(state_dir: Path, known: KnownVersion) -> Manifest:
    """The manifest of a known version.

    Raises:
        LocalError: it is not here any more, or damaged.
    """
    return _manifest(state_dir / "chunks", known)


def _manifest(store_dir: Path, known: KnownVersion) -> Manifest:
    digest = Digest(bytes.fromhex(known.manifest))
    state = _check_manifest(store_dir, digest)
    if state != "complete":
        gone = "not kept here any more" if state == "missing" else "damaged here"
        raise LocalError(
            f"Version {known.version} is {gone}: its manifest {known.manifest[:8]} is {state}.",
            "Nodes keep the newest versions; `echo2-node weights log` tells which.",
        )
    return read_manifest(store_dir, digest)


def _check_manifest(store_dir: Path, digest: Digest) -> str:
    try:
        size_bytes = (store_dir / digest.hex()).stat().st_size
    except OSError:
        return "missing"
    ref = ChunkRef(kind=ChunkKind.MANIFEST, digest=digest, size_bytes=size_bytes)
    return _check(store_dir, ref)


def _check(store_dir: Path, ref: ChunkRef) -> str:
    """complete, missing or damaged."""
    try:
        read_chunk(store_dir, ref)
    except LocalError:
        return "missing" if _size(store_dir, ref) is None else "damaged"
    return "complete"


def _size(store_dir: Path, ref: ChunkRef) -> int | None:
    try:
        return (store_dir / ref.digest.hex()).stat().st_size
    except OSError:
        return None


def _needed(manifest: Manifest) -> tuple[ChunkRef, ...]:
    """The blobs without which the version is not whole: data and files, each once."""
    refs = blobs_of(manifest)[: needed_of(manifest)]
    return tuple({ref.digest: ref for ref in refs}.values())
