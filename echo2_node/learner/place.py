"""The state folder of a run: which file is what, and whether a run may start or resume in it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import blake3

from echo2_mesh.errors import Echo2Error, LocalError, UsageError
from echo2_mesh.identity import Identity
from echo2_mesh.versionlog import VERSIONS_FILE
from echo2_node.learner.ledger import Ledger


class Place:
    """Paths of one run, and the few small files that this room writes itself.

    Args:
        folder: created if missing.
        resume: True needs a run to be there already; False needs that there is none.
        name: the run's name in the configuration, for messages and the run id.

    Raises:
        UsageError: a run is there and `resume` is False, or the other way round.
        LocalError: the folder cannot be written.
    """

    def __init__(self, folder: Path, *, resume: bool, name: str) -> None:
        self.folder = folder
        self._name = name
        exists = self.ledger.exists()
        if exists and not resume:
            raise UsageError(
                f"There is already a run '{name}' in {folder}.",
                "Continue it with --resume, or give the new one another run.name or --state-dir.",
            )
        if resume and not exists:
            raise UsageError(
                f"There is no run to resume in {folder}.",
                "Leave --resume out to start one, or point --state-dir at the run's folder.",
            )
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise LocalError(
                f"The state folder {folder} cannot be made: {error}.",
                "Choose another with --state-dir.",
            ) from error

    @property
    def key(self) -> Path:
        return self.folder / "key"

    @property
    def chunks(self) -> Path:
        return self.folder / "chunks"

    @property
    def ledger(self) -> Path:
        return self.folder / "ledger.sqlite"

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.folder / "metrics.jsonl"

    @property
    def members(self) -> Path:
        return self.folder / "members.json"

    @property
    def versions(self) -> Path:
        return self.folder / VERSIONS_FILE

    @property
    def status(self) -> Path:
        return self.folder / "status.json"

    @property
    def ticket(self) -> Path:
        return self.folder / "ticket.txt"

    def run_id(self, identity: Identity) -> str:
        """The run's id: name and a word of its own, the same after every resume."""
        path = self.folder / "run_id"
        if not path.exists():
            word = blake3.blake3(os.urandom(16) + identity.node.encode()).hexdigest()[:8]
            self.write("run_id", f"{self._name}-{word}\n")
        return path.read_text(encoding="ascii").strip()

    def secret(self) -> bytes:
        """The secret of a run that is not open to everyone; made once, readable by the owner."""
        path = self.folder / "secret"
        if not path.exists():
            self.write("secret", os.urandom(24).hex() + "\n", mode=0o600)
        return bytes.fromhex(path.read_text(encoding="ascii").strip())

    @contextlib.contextmanager
    def forgotten_if_nothing_happened(self, ledger: Ledger) -> Iterator[None]:
        """A start that fails before anything was published leaves no run to be resumed."""
        try:
            yield
        except Echo2Error:
            if ledger.is_empty():
                for path in self.folder.glob(f"{self.ledger.name}*"):
                    path.unlink(missing_ok=True)
            raise

    def write(self, name: str, text: str, *, mode: int = 0o644) -> None:
        """Write a small file whole or not at all.

        Raises:
            LocalError: it cannot be written; an older file of that name is unharmed.
        """
        path, part = self.folder / name, self.folder / f"{name}.part"
        try:
            handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(text)
            part.rename(path)
        except OSError as error:
            part.unlink(missing_ok=True)
            raise LocalError(
                f"{path} cannot be written: {error}.", "Free disk space there and try again."
            ) from error
