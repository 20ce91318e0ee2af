"""Keeps the engine on the newest complete policy version, and proves it before anything uses it.

The mesh says when a version is complete on this host; this room writes the files that travel
with the model, has the engine install the weights between two tokens, and compares the engine's
log-probs of the manifest's probe with the learner's. Only a proved version may take leases; one
that fails is left for the version before, under which work goes on. Where a disk lost or damaged a
blob since, it is fetched again. `actor.daemon` runs it.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path

import msgspec
import structlog
import trio

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.core.machine import backoff_s
from echo2_mesh.errors import Echo2Error, LocalError, PeerError, UsageError
from echo2_mesh.mesh import Mesh, ReadyVersion
from echo2_mesh.wire.messages import ChunkRef, Manifest, VersionSpan
from echo2_mesh.wire.types import Digest, NodeId, PolicyVersion
from echo2_node.engines.fingerprint import Fingerprint, compare
from echo2_node.engines.port import EnginePort
from echo2_node.engines.protocol import InstallReport
from echo2_node.status import InstallRow
from echo2_node.telemetry import MetricsFile
from echo2_node.tokens import TokenCodec, template_digest, tokenizer_digest

log = structlog.get_logger()

INSTALL_RETRY_S = 5.0
INSTALL_RETRY_S_MAX = 60.0
"""The same version is tried less and less often: each try stops generation."""
INSTALLS_SHOWN_MAX = 8
REFUSED_REMEMBERED_MAX = 64


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
        self.installs: deque[InstallRow] = deque(maxlen=INSTALLS_SHOWN_MAX)
        self.last_error = ""
        self._whole_since_s = 0.0
        self._refused: deque[PolicyVersion] = deque(maxlen=REFUSED_REMEMBERED_MAX)
        """Versions under which this engine drew tokens before they failed their proof."""
        self._doubtful = False
        """An install went wrong: perhaps the blobs on this disk are not what they were."""

    async def wait_first(self) -> ReadyVersion:
        """The first complete version; waits as long as the mesh needs."""
        if self.newest is None:
            self._take(await self._versions.receive())
        assert self.newest is not None
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

    def trusts(self, segments: Iterable[VersionSpan]) -> bool:
        """False where tokens were drawn by weights that were refused or, later, gone back from."""
        versions = [span.version for span in segments]
        # A version twice was refused once and taken later: some of its tokens are of the first try.
        rising = all(before < after for before, after in pairwise(versions))
        return rising and not set(versions) & set(self._refused)

    async def follow(self, engine: EnginePort) -> None:
        """Install every newer version on `engine` until cancelled.

        A fresh engine has nothing installed, so it starts with the newest known version. A
        version that fails to install or to prove itself is tried again after growing pauses and
        overtaken by the next one; meanwhile leases are taken under the version before, if the
        engine still has it or takes it again.

        Errors:
            LocalError: the engine process died.
        """
        self.installed = None
        await self.wait_first()
        with contextlib.suppress(trio.WouldBlock):
            self._take(self._versions.receive_nowait())
        failures = 0
        while True:
            assert self.newest is not None
            pause_s = math.inf
            if not await self._install(engine, self.newest):
                pause_s = backoff_s(
                    failures, first_s=INSTALL_RETRY_S, longest_s=INSTALL_RETRY_S_MAX
                )
                failures += 1
            with trio.move_on_after(pause_s):
                self._take(await self._versions.receive())
                failures = 0

    def _take(self, ready: ReadyVersion) -> None:
        self.newest = ready
        self._whole_since_s = trio.current_time()

    async def _install(self, engine: EnginePort, target: ReadyVersion) -> bool:
        if self._doubtful and not await self._mend(target):
            return False
        before = self.installed
        try:
            report = await engine.install(target.manifest_ref.digest)
        except (UsageError, LocalError) as error:
            self._doubtful = True
            if not engine.alive:
                raise
            return self._failed(target, error)
        proof = _proof(target, report, engine)
        if not proof.matches:
            if target.version not in self._refused:
                self._refused.append(target.version)
            self.installed = None
            self._failed(
                target,
                LocalError(
                    f"Version {target.version} is not what the learner published: {proof.why}"
                ),
            )
            if before is not None and before.version != target.version:
                await self._go_back(engine, before)
            return False
        if target.version in self._refused:
            self._refused = deque(
                (v for v in self._refused if v != target.version), self._refused.maxlen
            )
        self.last_error = ""
        self._prove(target)
        self._record(target, report, proof)
        return True

    async def _go_back(self, engine: EnginePort, before: ReadyVersion) -> None:
        """Have the engine take the version again that it had; nothing is installed if it cannot."""
        try:
            report = await engine.install(before.manifest_ref.digest)
        except (UsageError, LocalError) as error:
            if not engine.alive:
                raise
            log.warning("not gone back", version=before.version, reason=str(error))
            return
        if _proof(before, report, engine).matches:
            log.info("gone back", version=before.version)
            self._prove(before)

    def _prove(self, version: ReadyVersion) -> None:
        """From now on work is done under `version`; its blobs stay, as the next one's base."""
        refs = blobs_of(version.manifest, version.manifest_ref)
        self._mesh.store.pin("installed", (ref.digest for ref in refs))
        self.installed = version
        self._changed.set()
        self._changed = trio.Event()

    def _record(self, target: ReadyVersion, report: InstallReport, proof: Fingerprint) -> None:
        waited_s = trio.current_time() - self._whole_since_s
        row = InstallRow(
            version=target.version,
            fetched_full_bytes=target.fetched_full_bytes,
            fetched_patch_bytes=target.fetched_patch_bytes,
            fetch_s=round(target.fetch_s, 4),
            since_announced_s=round(target.fetch_s + waited_s, 4),
            install_s=round(report.total_s, 4),
            pause_s=round(report.pause_s, 5),
            changed=report.changed,
        )
        self.installs.append(row)
        self._metrics.write(
            {
                "event": "installed",
                "unix_ms": int(time.time() * 1000),
                **msgspec.to_builtins(row),
                "probe_s": round(report.probe_s, 4),
                "probe_difference_max": round(proof.maximum, 6),
            }
        )
        log.debug("version installed", version=target.version, seconds=round(report.total_s, 3))

    def _failed(self, target: ReadyVersion, error: Echo2Error) -> bool:
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


def _proof(version: ReadyVersion, report: InstallReport, engine: EnginePort) -> Fingerprint:
    truth = version.manifest.probe.logprobs
    return compare(truth, report.probe_logprobs, dtype=engine.info.cohort.dtype)


def blobs_of(manifest: Manifest, manifest_ref: ChunkRef) -> tuple[ChunkRef, ...]:
    """Every blob that an install needs, the manifest's own included, each once: no patches."""
    files = (chunk for file in manifest.files for chunk in file.chunks)
    refs = {ref.digest: ref for ref in (manifest_ref, *files, *manifest.chunks)}
    return tuple(refs.values())


def _is_whole(store: ChunkStore, digest: Digest) -> bool:
    """True if the blob is here and hashes to its name; a damaged one is dropped by the store."""
    with contextlib.suppress(KeyError), store.view(digest):
        return True
    return False
