"""Which versions were whole on this node: `versions.jsonl` in its state folder, a line each.

The chunk store knows blobs by digest and not what they are for; this says which manifest is which
version. `net.shelf` writes it and reads it after a restart, to know what patches may start from;
`echo2-node weights` reads it beside a running node. Lines outlive the blobs, so that the sizes of
a whole run can be looked at.
"""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from echo2_mesh import limits
from echo2_mesh.wire.messages import ChunkRef, Manifest

VERSIONS_FILE = "versions.jsonl"


class PatchSize(msgspec.Struct, frozen=True, kw_only=True):
    """A way to the version from `base` in one patch."""

    base: int
    size_bytes: int


class KnownVersion(msgspec.Struct, frozen=True, kw_only=True):
    """One line. Fields are only ever added; readers ignore what they do not know."""

    version: int
    manifest: str
    """Digest of its manifest blob, hexadecimal."""
    state_digest: str = ""
    size_bytes: int
    """Its data section, published whole."""
    patches: tuple[PatchSize, ...] = ()
    fetched_bytes: int = 0
    """What this node fetched of it; 0 where it was made here."""
    created_unix_ms: int = 0
    """By the learner's clock."""
    noted_unix_ms: int = 0
    """When it was whole here, by this host's clock."""


def known_version(ref: ChunkRef, manifest: Manifest, *, fetched_bytes: int) -> KnownVersion:
    """The line of a version that is whole here now."""
    return KnownVersion(
        version=manifest.version,
        manifest=ref.digest.hex(),
        state_digest=manifest.state_digest.hex(),
        size_bytes=sum(chunk.size_bytes for chunk in manifest.chunks),
        patches=tuple(
            PatchSize(base=p.base, size_bytes=sum(chunk.ref.size_bytes for chunk in p.chunks))
            for p in manifest.patches
            if p.version == manifest.version
        ),
        fetched_bytes=fetched_bytes,
        created_unix_ms=manifest.created_unix_ms,
        noted_unix_ms=time.time_ns() // 1_000_000,
    )


def append_version(path: Path, known: KnownVersion) -> None:
    """Append a line; a file of twice the allowed length is cut to the newest half first.

    Errors:
        OSError: the disk does not take it.
    """
    line = msgspec.json.encode(known) + b"\n"
    if path.exists() and path.stat().st_size > 2 * limits.VERSION_LINES_MAX * len(line):
        newest = path.read_bytes().splitlines(keepends=True)[-limits.VERSION_LINES_MAX :]
        part = path.with_name(path.name + ".part")
        part.write_bytes(b"".join(newest))
        part.replace(path)
    with path.open("ab") as file:
        file.write(line)


def read_versions(path: Path) -> list[KnownVersion]:
    """The lines in order, torn and unknown ones left out; none where there is no file."""
    try:
        raw = path.read_bytes()
    except OSError:
        return []
    lines = []
    for text in raw.splitlines()[-limits.VERSION_LINES_MAX :]:
        try:
            known = msgspec.json.decode(text, type=KnownVersion)
            bytes.fromhex(known.manifest)
        except (msgspec.MsgspecError, ValueError):
            continue
        lines.append(known)
    return lines
