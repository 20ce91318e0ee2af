"""The ledger's tables. Constraints say in SQL what the scheduler asserts in code.

A closed set of reasons, one verdict for each (lease, index), one end for each lease, one
admitted trajectory for each (group, index), one surviving consumption for each group. Only text;
`learner.ledger` runs it.
"""

from __future__ import annotations

from enum import Enum

from echo2_mesh.wire.types import Reason
from echo2_node.scheduler.records import LeaseEnd

FORMAT = 1
"""`PRAGMA user_version` of the file; another number is refused."""


def _one_of(values: type[Enum]) -> str:
    return "(" + ", ".join(f"'{value.value}'" for value in values) + ")"


SCHEMA = f"""
CREATE TABLE run (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE groups (
    group_id TEXT PRIMARY KEY,
    item_index INTEGER NOT NULL,
    size INTEGER NOT NULL,
    opened_unix_ms INTEGER NOT NULL
);
CREATE TABLE drops (
    group_id TEXT PRIMARY KEY REFERENCES groups,
    reason TEXT NOT NULL CHECK (reason IN {_one_of(Reason)}),
    dropped_unix_ms INTEGER NOT NULL
);
CREATE TABLE leases (
    lease_id TEXT PRIMARY KEY,
    group_id TEXT NOT NULL REFERENCES groups,
    actor TEXT NOT NULL,
    indices TEXT NOT NULL,
    version_min INTEGER NOT NULL,
    seed INTEGER NOT NULL,
    granted_unix_ms INTEGER NOT NULL
);
CREATE INDEX leases_of_group ON leases (group_id);
CREATE TABLE lease_ends (
    lease_id TEXT PRIMARY KEY REFERENCES leases,
    how TEXT NOT NULL CHECK (how IN {_one_of(LeaseEnd)}),
    lost INTEGER NOT NULL,
    ended_unix_ms INTEGER NOT NULL
);
CREATE TABLE submissions (
    lease_id TEXT NOT NULL REFERENCES leases,
    member INTEGER NOT NULL,
    group_id TEXT NOT NULL REFERENCES groups,
    actor TEXT NOT NULL,
    verdict TEXT NOT NULL CHECK (verdict IN {_one_of(Reason)}),
    digest BLOB NOT NULL CHECK (length(digest) = 32),
    version_oldest INTEGER NOT NULL,
    version_newest INTEGER NOT NULL,
    tokens INTEGER NOT NULL,
    reward REAL NOT NULL,
    recorded_unix_ms INTEGER NOT NULL,
    duplicates INTEGER NOT NULL DEFAULT 0,
    PRIMARY KEY (lease_id, member)
) WITHOUT ROWID;
CREATE UNIQUE INDEX admitted_once ON submissions (group_id, member) WHERE verdict = 'admitted';
CREATE TABLE strays (
    actor TEXT NOT NULL,
    reason TEXT NOT NULL CHECK (reason IN {_one_of(Reason)}),
    times INTEGER NOT NULL,
    PRIMARY KEY (actor, reason)
) WITHOUT ROWID;
CREATE TABLE payloads (digest BLOB PRIMARY KEY, envelope BLOB NOT NULL);
CREATE TABLE resumes (
    resume INTEGER PRIMARY KEY AUTOINCREMENT,
    to_step INTEGER NOT NULL,
    resumed_unix_ms INTEGER NOT NULL
);
CREATE TABLE steps (
    step INTEGER NOT NULL,
    version_before INTEGER NOT NULL,
    staleness_limit INTEGER NOT NULL,
    skipped INTEGER NOT NULL,
    taken_unix_ms INTEGER NOT NULL,
    undone INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX step_once ON steps (step) WHERE undone = 0;
CREATE TABLE consumption (
    group_id TEXT NOT NULL REFERENCES groups,
    step INTEGER NOT NULL,
    version_before INTEGER NOT NULL,
    undone INTEGER NOT NULL DEFAULT 0
);
CREATE UNIQUE INDEX consumed_once ON consumption (group_id) WHERE undone = 0;
CREATE INDEX consumed_at ON consumption (step);
CREATE TABLE published (
    version INTEGER PRIMARY KEY,
    manifest BLOB NOT NULL,
    published_unix_ms INTEGER NOT NULL
);
PRAGMA user_version = {FORMAT};
"""
