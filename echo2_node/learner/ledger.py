"""The ledger: the truth about every lease, rollout, step and version of a run, in one SQLite file.

Everything else can be killed at any instant. Facts come in as the scheduler's records, a tuple
in one transaction; what was recorded before a kill is there after it. Synchronous: the learner's
journal calls it from one worker thread at a time, the command line directly (also while a learner
writes). It decides nothing.

Write-ahead log, synchronous=NORMAL: a killed process loses nothing, a power cut at most the last
moments; commits that hold a training step use FULL, which also makes all earlier ones durable.
"""

from __future__ import annotations

import contextlib
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import msgspec

from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.wire.types import Digest, NodeId, PolicyVersion, Reason
from echo2_node.learner import audit, entries, tables
from echo2_node.learner.audit import Summary
from echo2_node.scheduler import records
from echo2_node.scheduler.records import Member, OpenGroup, OpenLease, Record

BUSY_TIMEOUT_S = 5.0
"""How long to wait for another process's transaction."""
_FULL = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CANTOPEN,
)


class Ledger:
    """An open ledger file. Use `Ledger.open`."""

    def __init__(self, connection: sqlite3.Connection, path: Path) -> None:
        self._sql = connection
        self.path = path

    @classmethod
    def open(cls, path: Path) -> Ledger:
        """Open the file, creating an empty ledger where there is none.

        Raises:
            LocalError: it cannot be created or read, is damaged or is no ledger.
            UsageError: it was written by another version of this program.
        """
        new = not path.exists()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            connection = sqlite3.connect(
                path, timeout=BUSY_TIMEOUT_S, isolation_level=None, check_same_thread=False
            )
        except (OSError, sqlite3.Error) as error:
            raise LocalError(
                f"The ledger {path} cannot be opened: {error}.",
                "Check that the folder exists and is writable.",
            ) from error
        ledger = cls(connection, path)
        try:
            ledger._prepare()
        except BaseException:
            connection.close()
            if new:
                _remove_empty(path)
            raise
        return ledger

    def _prepare(self) -> None:
        with self._errors():
            self._sql.execute("PRAGMA journal_mode = WAL")
            self._sql.execute("PRAGMA synchronous = NORMAL")
            self._sql.execute("PRAGMA foreign_keys = ON")
            (found,) = self._sql.execute("PRAGMA user_version").fetchone()
            if found == 0:
                (count,) = self._sql.execute("SELECT count(*) FROM sqlite_master").fetchone()
                if count:
                    raise LocalError(f"{self.path} is a database, but not a ledger.")
                self._sql.executescript(f"BEGIN IMMEDIATE; {tables.SCHEMA} COMMIT;")
            elif found != tables.FORMAT:
                raise UsageError(
                    f"The ledger {self.path} has format {found}; this program writes format "
                    f"{tables.FORMAT}.",
                    "Use the version of echo2 that the run was started with.",
                )

    def close(self) -> None:
        """Close the file; nothing is pending at any time."""
        self._sql.close()

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    # --- the run --------------------------------------------------------------------------------

    def settings(self) -> dict[str, str]:
        """What `begin` wrote; empty for a new ledger."""
        with self._errors():
            return dict(self._sql.execute("SELECT key, value FROM run").fetchall())

    def begin(self, **settings: str | int) -> None:
        """Write the run's settings (run_id, seed, staleness_limit, ...); later values win.

        Raises:
            UsageError: the ledger belongs to another run.
        """
        known = self.settings().get("run_id")
        if known is not None and known != settings.get("run_id", known):
            raise UsageError(
                f"The ledger {self.path} belongs to run {known}, not to {settings['run_id']}.",
                "Resume that run, or choose another --state-dir.",
            )
        with self._transaction():
            self._sql.executemany(
                "INSERT OR REPLACE INTO run VALUES (?, ?)",
                [(key, str(value)) for key, value in settings.items()],
            )

    def is_empty(self) -> bool:
        """True if nothing has happened yet."""
        return self.published_max() is None and self.item_cursor() == 0

    def item_cursor(self) -> int:
        """The next prompt's item index."""
        return int(self._one("SELECT coalesce(max(item_index) + 1, 0) FROM groups"))

    def published_max(self) -> PolicyVersion | None:
        """The newest version that any actor can have."""
        newest = self._one("SELECT max(version) FROM published")
        return None if newest is None else PolicyVersion(newest)

    def version_max(self) -> int:
        """The newest version that was published or trained into, undone steps included; -1: none.

        A resumed run goes on above it, so that no version number names two policies.
        """
        return int(
            self._one(
                "SELECT max(coalesce((SELECT max(version) FROM published), -1), "
                "coalesce((SELECT max(version_before + NOT skipped) FROM steps), -1))"
            )
        )

    def last_step(self) -> int | None:
        """The last step of the surviving line."""
        step = self._one("SELECT max(step) FROM steps WHERE undone = 0")
        return None if step is None else int(step)

    # --- writing --------------------------------------------------------------------------------

    def apply(
        self,
        facts: Sequence[Record],
        payloads: Mapping[Digest, bytes],
        *,
        unix_ms: int | None = None,
    ) -> None:
        """Keep facts, and payloads of admitted trajectories, in one transaction.

        Raises:
            LocalError: disk full or file unwritable; nothing of it was written, try again later.
        """
        now = int(time.time() * 1000) if unix_ms is None else unix_ms
        durable = any(isinstance(fact, records.StepTaken) for fact in facts)
        with self._transaction(durable=durable):
            for fact in facts:
                entries.write(self._sql, fact, payloads, now)

    def covered(self, to_step: int) -> None:
        """A checkpoint that will not be deleted holds step `to_step`: its payloads may go."""
        with self._transaction():
            entries.forget_payloads(
                self._sql,
                "SELECT group_id FROM consumption WHERE undone = 0 AND step <= ?",
                (to_step,),
            )

    def roll_back(self, to_step: int) -> int:
        """Undo all steps after `to_step`: their groups are unconsumed again. Returns how many.

        Undone rows stay as history. A group whose payload is gone cannot be trained again and is
        dropped as `payload_unavailable` (only after resuming from a checkpoint older than the
        oldest one that was kept).
        """
        now = int(time.time() * 1000)
        with self._transaction(durable=True):
            mark = self._sql.execute(
                "INSERT INTO resumes (to_step, resumed_unix_ms) VALUES (?, ?)", (to_step, now)
            ).lastrowid
            for table in ("consumption", "steps"):
                count = self._sql.execute(
                    f"UPDATE {table} SET undone = ? WHERE undone = 0 AND step > ?", (mark, to_step)
                ).rowcount
            self._sql.execute(
                f"INSERT INTO drops SELECT DISTINCT submissions.group_id, ?, ? {_LOST_PAYLOADS}",
                (Reason.PAYLOAD_UNAVAILABLE.value, now),
            )
        return count

    # --- reading --------------------------------------------------------------------------------

    def pending_groups(self) -> list[OpenGroup]:
        """Groups neither trained nor dropped, in order of opening, with what they have."""
        with self._errors():
            rows = self._sql.execute(_PENDING).fetchall()
            return [self._pending(*row) for row in rows]

    def _pending(self, group_id: str, item_index: int, size: int) -> OpenGroup:
        members = self._sql.execute(
            "SELECT member, lease_id, actor, digest, version_oldest, reward FROM submissions "
            "WHERE group_id = ? AND verdict = 'admitted' ORDER BY member",
            (group_id,),
        ).fetchall()
        leases = self._sql.execute(
            "SELECT lease_id FROM leases WHERE group_id = ? "
            "AND lease_id NOT IN (SELECT lease_id FROM lease_ends)",
            (group_id,),
        ).fetchall()
        losses = self._one(
            "SELECT count(*) FROM lease_ends JOIN leases USING (lease_id) "
            "WHERE group_id = ? AND lost > 0 AND how != 'run_ended'",
            (group_id,),
        )
        opened = [self.lease(lease_id) for (lease_id,) in leases]
        return OpenGroup(
            group_id=group_id,
            item_index=item_index,
            size=size,
            losses=losses,
            members=tuple(
                Member(
                    index=index,
                    lease_id=lease_id,
                    actor=NodeId(actor),
                    digest=Digest(digest),
                    version_oldest=PolicyVersion(oldest),
                    reward=reward,
                )
                for index, lease_id, actor, digest, oldest, reward in members
            ),
            leases=tuple(lease for lease in opened if lease is not None),
        )

    def lease(self, lease_id: str) -> OpenLease | None:
        """A lease as recorded, ended or not, with the verdicts given on it."""
        with self._errors():
            row = self._sql.execute(
                "SELECT group_id, item_index, actor, indices, version_min, seed, "
                "EXISTS (SELECT 1 FROM lease_ends WHERE lease_ends.lease_id = leases.lease_id) "
                "FROM leases JOIN groups USING (group_id) WHERE lease_id = ?",
                (lease_id,),
            ).fetchone()
            if row is None:
                return None
            verdicts = self._sql.execute(
                "SELECT member, verdict FROM submissions WHERE lease_id = ?", (lease_id,)
            ).fetchall()
        group_id, item_index, actor, indices, version_min, seed, ended = row
        return OpenLease(
            lease_id=lease_id,
            group_id=group_id,
            actor=NodeId(actor),
            indices=msgspec.json.decode(indices, type=tuple[int, ...]),
            item_index=item_index,
            version_min=PolicyVersion(version_min),
            seed=seed,
            verdicts={member: Reason(verdict) for member, verdict in verdicts},
            ended=bool(ended),
        )

    def payload(self, digest: Digest) -> bytes:
        """The signed envelope of an admitted trajectory that may still be needed.

        Raises:
            LocalError: it is not here: the ledger was tampered with.
        """
        envelope = self._one("SELECT envelope FROM payloads WHERE digest = ?", (digest,))
        if envelope is None:
            raise LocalError(
                f"The ledger {self.path} misses payload {digest.hex()[:8]}.",
                "`echo2-node ledger verify` lists the damage.",
            )
        return bytes(envelope)

    def summary(self) -> Summary:
        """Counts for people: verdicts by actor and reason, staleness, steps, versions."""
        with self._errors():
            return audit.summarise(self._sql)

    def verify(self) -> list[str]:
        """Problems in the books, each a sentence; empty when everything adds up."""
        with self._errors():
            return audit.problems(self._sql)

    # --- small parts ----------------------------------------------------------------------------

    def _one(self, query: str, arguments: tuple[object, ...] = ()) -> int:
        with self._errors():
            row = self._sql.execute(query, arguments).fetchone()
        return None if row is None else row[0]  # type: ignore[return-value]

    @contextlib.contextmanager
    def _transaction(self, *, durable: bool = False) -> Iterator[None]:
        with self._errors():
            self._sql.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
            self._sql.execute("BEGIN IMMEDIATE")
            try:
                yield
                self._sql.execute("COMMIT")
            except BaseException:
                with contextlib.suppress(sqlite3.Error):
                    self._sql.execute("ROLLBACK")
                raise

    @contextlib.contextmanager
    def _errors(self) -> Iterator[None]:
        """SQLite's complaints about the host, as ours; constraint failures are bugs and pass."""
        try:
            yield
        except sqlite3.IntegrityError:
            raise
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT) & 0xFF
            if code in _FULL:
                raise LocalError(
                    f"The ledger {self.path} cannot be written: {error}.",
                    "Free space on its disk; what was recorded before is unharmed.",
                ) from error
            if code in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED):
                raise LocalError(
                    f"The ledger {self.path} is in use by another process.",
                    "Is this learner running twice?",
                ) from error
            if code in (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB):
                raise LocalError(
                    f"The ledger {self.path} is damaged: {error}.",
                    "Restore it from a backup, or start a new run with another --state-dir.",
                ) from error
            raise


_PENDING = """
SELECT group_id, item_index, size FROM groups
WHERE group_id NOT IN (SELECT group_id FROM drops)
  AND group_id NOT IN (SELECT group_id FROM consumption WHERE undone = 0)
ORDER BY groups.rowid
"""
_LOST_PAYLOADS = """
FROM submissions WHERE verdict = 'admitted'
  AND digest NOT IN (SELECT digest FROM payloads)
  AND group_id NOT IN (SELECT group_id FROM drops)
  AND group_id NOT IN (SELECT group_id FROM consumption WHERE undone = 0)
"""


def _remove_empty(path: Path) -> None:
    """A ledger that could not be created leaves nothing behind."""
    for suffix in ("", "-wal", "-shm"):
        with contextlib.suppress(OSError):
            path.with_name(path.name + suffix).unlink()
