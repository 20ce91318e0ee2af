"""Keeps the engine on the newest complete policy version, and proves it before anything uses it.

The mesh says when a version is complete on this host; this room writes the files that travel
with the model, has the engine install the weights between two tokens, and compares the engine's
log-probs of the manifest's probe with the learner's. Only a proved version may take leases. It
fetches nothing and generates nothing; `actor.daemon` runs it.
"""

from __future__ import annotations

import time
from pathlib import Path

import structlog
import trio

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import Echo2Error, LocalError, UsageError
from echo2_mesh.mesh import Mesh, ReadyVersion
from echo2_mesh.wire.messages import Manifest
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

    async def wait_first(self) -> ReadyVersion:
        """The first complete version; waits as long as the mesh needs."""
        if self.newest is None:
            self.newest = await self._versions.receive()
        return self.newest

    async def wait_installed(self) -> ReadyVersion:
        """The proved version; waits until there is one."""
        while self.installed is None:
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
        target = await self.wait_first()
        while True:
            proved = await self._install(engine, target)
            if not proved:
                with trio.move_on_after(INSTALL_RETRY_S):
                    self.newest = await self._versions.receive()
            else:
                self.newest = await self._versions.receive()
            assert self.newest is not None
            target = self.newest

    async def _install(self, engine: EnginePort, target: ReadyVersion) -> bool:
        try:
            report = await engine.install(target.manifest_ref.digest)
        except UsageError as error:
            return self._failed(target, error)
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
        self.last_error = error.what
        log.warning("version refused", version=target.version, reason=str(error))
        return False
