"""Keeps the engine on the newest complete policy version, and proves it before anything uses it.

The mesh says when a version is complete on this host; this room writes the files that travel
with the model, has the engine install the weights between two tokens, and compares the engine's
log-probs of the manifest's probe with the learner's. Only a proved version may take leases. Where
a disk lost or damaged a blob since, it is fetched again. `actor.daemon` runs it.
"""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import structlog
import trio

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import Echo2Error, LocalError, PeerError, UsageError
from echo2_mesh.mesh import Mesh, ReadyVersion
from echo2_mesh.wire.messages import ChunkRef, Manifest
from echo2_mesh.wire.types import Digest, NodeId, PolicyVersion
from echo2_node.engines.fingerprint import compare
from echo2_node.engines.port import EnginePort
from echo2_node.telemetry import MetricsFile
from echo2_node.tokens import TokenCodec, template_digest, tokenizer_digest

log = structlog.get_logger()

INSTALL_RETRY_S = 5.0


def write_model_files(manifest: Manifest, store: ChunkStore, folder: Path) -> None:
    """Put the files that travel with a version (config, tokenizer, template) into `folder`.

    Raises:
        LocalError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file in manifest.files:
            data = b"".join(store.read(chunk.digest) for chunk in file.chunks)
            part = folder / f"{file.name}.part"
            part.write_bytes(data)
            part.rename(folder / file.name)
    except OSError as error:
        raise LocalError(
            f"The model's files cannot be written to {folder}: {error}.",
            "Free disk space there or choose another --state-dir.",
        ) from error


def check_first_version(first: ReadyVersion, expected: Digest | None) -> None:
    """Where this node sees the run's first version, it must be the one its ticket names.

    Raises:
        UsageError: the learner began the run with another model than the ticket's.
    """
    if expected is not None and first.version == 0 and first.manifest_ref.digest != expected:
        raise UsageError(
            f"The run '{first.manifest.run_id}' began with manifest "
            f"{first.manifest_ref.digest.hex()[:8]}, the ticket names {expected.hex()[:8]}: "
            "another model than you were invited to.",
            "Ask whoever runs the learner for a new ticket.",
        )


def open_codec(manifest: Manifest, folder: Path) -> TokenCodec:
    """The tokenizer that travelled with the version, checked against the manifest's digests.

    Raises:
        UsageError: the folder holds another tokenizer or chat template.
    """
    found = (tokenizer_digest(folder), template_digest(folder))
    if found != (manifest.tokenizer_digest, manifest.template_digest):
        raise UsageError(
            f"The tokenizer or chat template in {folder} is not the one the learner signed.",
            "Delete that folder and join again.",
        )
    return TokenCodec.load(folder)


class Weights:
    """Which version is installed and proved; the one owner of `engine.install`."""

    def __init__(self, mesh: Mesh, metrics: MetricsFile) -> None:
        self._mesh = mesh
        self._metrics = metrics
        self._versions = mesh.versions()
        self._changed = trio.Event()
        self.newest: ReadyVersion | None = None
        self.installed: ReadyVersion | None = None
        self.last_error = ""
        self._doubtful = False
        """An install went wrong: perhaps the blobs on this disk are not what they were."""

    async def wait_first(self) -> ReadyVersion:
        """The first complete version; waits as long as the mesh needs."""
        if self.newest is None:
            self.newest = await self._versions.receive()
        return self.newest

    async def wait_whole(self, target: ReadyVersion) -> None:
        """Return when every blob of `target` on this disk hashes to its name.

        The mesh takes a blob that lies here from an earlier life by its name; this reads it.
        """
        while True:
            if await self._mend(target):
                return
            await trio.sleep(INSTALL_RETRY_S)

    async def wait_installed(self) -> ReadyVersion:
        """The proved version; waits until there is one."""
        while self.installed is None:
            await self._changed.wait()
        return self.installed

    async def wait_newer(self, version: PolicyVersion) -> ReadyVersion:
        """The proved version, once it is another than `version`."""
        while self.installed is None or self.installed.version == version:
            await self._changed.wait()
        return self.installed

    async def follow(self, engine: EnginePort) -> None:
        """Install every newer version on `engine` until cancelled.

        A fresh engine has nothing installed, so it starts with the newest known version. A
        version that fails to install or to prove itself is tried again after a pause and
        overtaken by the next one; meanwhile no leases are taken.

        Errors:
            LocalError: the engine process died.
        """
        self.installed = None
        await self.wait_first()
        with contextlib.suppress(trio.WouldBlock):
            self.newest = self._versions.receive_nowait()
        while True:
            assert self.newest is not None
            if await self._install(engine, self.newest):
                self.newest = await self._versions.receive()
            else:
                with trio.move_on_after(INSTALL_RETRY_S):
                    self.newest = await self._versions.receive()

    async def _install(self, engine: EnginePort, target: ReadyVersion) -> bool:
        if self._doubtful and not await self._mend(target):
            return False
        try:
            report = await engine.install(target.manifest_ref.digest)
        except UsageError as error:
            return self._failed(target, error)
        except LocalError:
            self._doubtful = True
            raise
        proof = compare(
            target.manifest.probe.logprobs,
            report.probe_logprobs,
            dtype=engine.info.cohort.dtype,
        )
        if not proof.matches:
            return self._failed(
                target,
                LocalError(
                    f"Version {target.version} is not what the learner published: {proof.why}"
                ),
            )
        self.installed = target
        self.last_error = ""
        self._changed.set()
        self._changed = trio.Event()
        self._metrics.write(
            {
                "event": "installed",
                "version": target.version,
                "unix_ms": int(time.time() * 1000),
                "install_s": round(report.total_s, 4),
                "pause_s": round(report.pause_s, 4),
                "probe_difference_max": round(proof.maximum, 6),
            }
        )
        log.debug("version installed", version=target.version, seconds=round(report.total_s, 3))
        return True

    def _failed(self, target: ReadyVersion, error: Echo2Error) -> bool:
        self.installed = None
        self._doubtful = True
        self.last_error = error.what
        log.warning("version refused", version=target.version, reason=str(error))
        return False

    async def _mend(self, target: ReadyVersion) -> bool:
        """Read all of a version and fetch again what is damaged or gone; False: try again later."""
        holders = self._holders(target)
        for ref in blobs_of(target.manifest, target.manifest_ref):
            if await trio.to_thread.run_sync(_is_whole, self._mesh.store, ref.digest):
                continue
            log.warning("blob damaged or gone", version=target.version, chunk=ref.digest.hex()[:8])
            try:
                await self._mesh.fetch_blob(ref, holders)
            except (PeerError, LocalError) as error:
                self.last_error = error.what
                log.warning("blob not fetched", version=target.version, reason=str(error))
                return False
        self._doubtful = False
        return True

    def _holders(self, target: ReadyVersion) -> tuple[NodeId, ...]:
        """The learner, then everybody who runs this version."""
        others = (
            member.node
            for member in self._mesh.members()
            if member.heartbeat.version == target.version and member.node != self._mesh.learner
        )
        return (self._mesh.learner, *others)


def blobs_of(manifest: Manifest, manifest_ref: ChunkRef) -> tuple[ChunkRef, ...]:
    """Every blob of a version, the manifest's own included, each once."""
    files = (chunk for file in manifest.files for chunk in file.chunks)
    refs = {ref.digest: ref for ref in (manifest_ref, *files, *manifest.chunks)}
    return tuple(refs.values())


def _is_whole(store: ChunkStore, digest: Digest) -> bool:
    """True if the blob is here and hashes to its name; a damaged one is dropped by the store."""
    with contextlib.suppress(KeyError), store.view(digest):
        return True
    return False
