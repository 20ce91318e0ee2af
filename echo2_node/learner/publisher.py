"""From the trainer's weights to an announced version: export, manifest, signature, announcement.

The trainer's process writes the chunks; this room, which has the key, signs the manifest that
names them and has the version recorded before anybody hears of it: a number that an actor may
know is never given to other weights. Also prints the ticket, whose manifest digest is the run's
first. Called by `learner.daemon`.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from functools import partial

import structlog
import trio

from echo2_mesh.mesh import Mesh
from echo2_mesh.wire.messages import ChunkRef, Manifest
from echo2_mesh.wire.ticket import RunTicket, write_ticket
from echo2_mesh.wire.types import ChunkKind, Digest, PolicyVersion
from echo2_node.config import RunConfig
from echo2_node.learner.patience import Patience
from echo2_node.learner.place import Place
from echo2_node.learner.port import Exported, Trainer
from echo2_node.tasks.protocol import Task
from echo2_node.tasks.registry import task_spec

log = structlog.get_logger()

Record = Callable[[PolicyVersion, Digest], Awaitable[None]]
"""Returns when the ledger knows that actors may have this version, named by its manifest."""


class Publisher:
    """Publishes versions of one run."""

    def __init__(
        self,
        mesh: Mesh,
        trainer: Trainer,
        *,
        place: Place,
        task: Task,
        config: RunConfig,
        secret: bytes | None,
        record: Record,
    ) -> None:
        self._mesh = mesh
        self._trainer = trainer
        self._place = place
        self._task = task_spec(task)
        self._config = config
        self._secret = secret
        self._record = record
        self._open = False
        self.patience = Patience(mesh.store, config.weights.full_disk_wait_s)

    async def publish(self, version: PolicyVersion) -> ChunkRef:
        """Export, sign, record and announce `version`; the manifest's reference.

        Errors:
            LocalError: the trainer died or the disk is full.
        """
        return await self.announce(await self.export(version))

    async def export(self, version: PolicyVersion) -> Exported:
        """Have the trainer write `version` into the store; nobody hears of it yet.

        Errors:
            LocalError: the trainer died, or the disk stayed full.
        """
        return await self.patience.run(partial(self._trainer.export, version))

    async def announce(self, exported: Exported) -> ChunkRef:
        """Sign, record and announce what was exported. Needs no trainer: it may train meanwhile.

        Errors:
            LocalError: the disk stayed full.
        """
        version = exported.version
        manifest = Manifest(
            run_id=self._mesh.run_id,
            version=version,
            chunks=exported.chunks,
            patches=exported.patches,
            tensors=exported.tensors,
            tied=exported.tied,
            files=exported.files,
            state_digest=exported.state_digest,
            tokenizer_digest=exported.tokenizer_digest,
            template_digest=exported.template_digest,
            task=self._task,
            probe=exported.probe,
            created_unix_ms=int(time.time() * 1000),
        )
        sealed = self._mesh.seal(manifest)
        add = partial(self._mesh.store.add, ChunkKind.MANIFEST, sealed)
        ref = await self.patience.run(partial(trio.to_thread.run_sync, add))
        size_bytes = sum(chunk.size_bytes for chunk in exported.chunks)
        await self._record(version, ref.digest)
        await self._mesh.announce_version(ref, version, size_bytes)
        self._write_ticket(ref)
        # The trainer writes the same store and never evicts: only this process knows the pins.
        await trio.to_thread.run_sync(self._mesh.store.trim)
        log.debug("version published", version=version, bytes=size_bytes, seconds=exported.seconds)
        return ref

    def _write_ticket(self, ref: ChunkRef) -> None:
        """The ticket names the addresses of now and the manifest of the first version."""
        first = self._place.folder / "first_manifest"
        if not first.exists():
            self._place.write("first_manifest", ref.digest.hex() + "\n")
        hours = self._config.mesh.ticket_hours
        ticket = write_ticket(
            RunTicket(
                run_id=self._mesh.run_id,
                learner=self._mesh.node,
                addresses=self._mesh.addresses(),
                manifest=Digest(bytes.fromhex(first.read_text(encoding="ascii").strip())),
                secret=self._secret,
                expires_unix_s=int(time.time() + 3600 * hours) if hours else None,
            )
        )
        if not self._place.ticket.exists() or self._place.ticket.read_text().strip() != ticket:
            self._place.write("ticket.txt", ticket + "\n", mode=0o600)
        if not self._open:
            self._open = True
            # The ticket may hold the run's secret: its place is logged, never the word.
            log.info("open for actors", ticket=str(self._place.ticket))
