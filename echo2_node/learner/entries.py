"""How one fact becomes rows. Called by the ledger, inside its transaction.

A row that breaks a constraint is a bug of ours and raises sqlite3.IntegrityError.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from typing import assert_never

import msgspec

from echo2_mesh.wire.types import Digest, Reason
from echo2_node.scheduler import records
from echo2_node.scheduler.records import Record

STRAY_ACTORS_MAX = 1024
"""Strangers counted by name; further ones are counted together."""
OTHERS = "others"


def write(
    sql: sqlite3.Connection, fact: Record, payloads: Mapping[Digest, bytes], now_unix_ms: int
) -> None:
    """Insert what `fact` says; `payloads` holds the envelopes of admitted trajectories."""
    row: tuple[object, ...]
    match fact:
        case records.GroupOpened():
            row = (fact.group_id, fact.item_index, fact.size, now_unix_ms)
            sql.execute("INSERT INTO groups VALUES (?, ?, ?, ?)", row)
        case records.LeaseGranted():
            indices = msgspec.json.encode(fact.indices).decode()
            row = (fact.lease_id, fact.group_id, fact.actor, indices)
            row = (*row, fact.version_min, fact.seed, now_unix_ms)
            sql.execute("INSERT INTO leases VALUES (?, ?, ?, ?, ?, ?, ?)", row)
        case records.LeaseEnded():
            row = (fact.lease_id, fact.how.value, fact.lost, now_unix_ms)
            sql.execute("INSERT INTO lease_ends VALUES (?, ?, ?, ?)", row)
        case records.Submission():
            _write_submission(sql, fact, payloads, now_unix_ms)
        case records.DuplicateSeen():
            row = (fact.lease_id, fact.index)
            sql.execute(
                "UPDATE submissions SET duplicates = duplicates + 1 "
                "WHERE lease_id = ? AND member = ?",
                row,
            )
        case records.StrayRefused():
            _write_stray(sql, fact)
        case records.GroupDropped():
            row = (fact.group_id, fact.reason.value, now_unix_ms)
            sql.execute("INSERT INTO drops VALUES (?, ?, ?)", row)
            forget_payloads(sql, "SELECT ?", (fact.group_id,))
        case records.StepTaken():
            _write_step(sql, fact, now_unix_ms)
        case records.VersionPublished():
            row = (fact.version, fact.manifest, now_unix_ms)
            sql.execute("INSERT OR REPLACE INTO published VALUES (?, ?, ?)", row)
        case _:
            assert_never(fact)


def forget_payloads(sql: sqlite3.Connection, groups: str, arguments: tuple[object, ...]) -> None:
    """Delete the payloads of the groups that the query `groups` selects."""
    sql.execute(
        "DELETE FROM payloads WHERE digest IN (SELECT digest FROM submissions "
        f"WHERE verdict = 'admitted' AND group_id IN ({groups}))",
        arguments,
    )


def _write_submission(
    sql: sqlite3.Connection,
    fact: records.Submission,
    payloads: Mapping[Digest, bytes],
    now_unix_ms: int,
) -> None:
    sql.execute(
        "INSERT INTO submissions VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 0)",
        (
            fact.lease_id,
            fact.index,
            fact.group_id,
            fact.actor,
            fact.verdict.value,
            fact.digest,
            fact.version_oldest,
            fact.version_newest,
            fact.tokens,
            fact.reward,
            now_unix_ms,
        ),
    )
    if fact.verdict is Reason.ADMITTED:
        sql.execute("INSERT INTO payloads VALUES (?, ?)", (fact.digest, payloads[fact.digest]))


def _write_stray(sql: sqlite3.Connection, fact: records.StrayRefused) -> None:
    known, actors = sql.execute(
        "SELECT coalesce(sum(actor = ?), 0), count(DISTINCT actor) FROM strays", (fact.actor,)
    ).fetchone()
    name = fact.actor if known or actors < STRAY_ACTORS_MAX else OTHERS
    sql.execute(
        "INSERT INTO strays VALUES (?, ?, 1) "
        "ON CONFLICT (actor, reason) DO UPDATE SET times = times + 1",
        (name, fact.reason.value),
    )


def _write_step(sql: sqlite3.Connection, fact: records.StepTaken, now_unix_ms: int) -> None:
    limit = sql.execute("SELECT value FROM run WHERE key = 'staleness_limit'").fetchone()
    assert limit is not None, "the run's settings are written before the first step"
    sql.execute(
        "INSERT INTO steps VALUES (?, ?, ?, ?, ?, 0)",
        (fact.step, fact.version_before, int(limit[0]), int(fact.skipped), now_unix_ms),
    )
    sql.executemany(
        "INSERT INTO consumption VALUES (?, ?, ?, 0)",
        [(group_id, fact.step, fact.version_before) for group_id in fact.group_ids],
    )
