from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys

import pytest

from echo2_mesh.chunks import digest_of
from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.wire.types import Digest, NodeId, PolicyVersion, Reason
from echo2_node.learner.ledger import Ledger
from echo2_node.scheduler.records import (
    DuplicateSeen,
    GroupDropped,
    GroupOpened,
    LeaseEnd,
    LeaseEnded,
    LeaseGranted,
    StepTaken,
    StrayRefused,
    Submission,
    VersionPublished,
)

ANN = NodeId("ann")


def opened(number):
    group = f"g{number}"
    return [
        GroupOpened(group_id=group, item_index=number, size=2),
        LeaseGranted(
            lease_id=f"l{number}",
            group_id=group,
            actor=ANN,
            indices=(0, 1),
            version_min=PolicyVersion(0),
            seed=number,
        ),
    ]


def payload(number, index):
    return f"trajectory {number}.{index}".encode()


def submission(number, index, verdict=Reason.ADMITTED, version=0):
    return Submission(
        lease_id=f"l{number}",
        index=index,
        group_id=f"g{number}",
        actor=ANN,
        verdict=verdict,
        digest=digest_of(payload(number, index)),
        version_oldest=PolicyVersion(version),
        version_newest=PolicyVersion(version),
        tokens=7,
        reward=float(index),
    )


def completed(number):
    return LeaseEnded(lease_id=f"l{number}", how=LeaseEnd.COMPLETED, lost=0)


def whole(number):
    return [*opened(number), submission(number, 0), submission(number, 1), completed(number)]


def step(number, *groups, version=0):
    return StepTaken(
        step=number,
        version_before=PolicyVersion(version),
        skipped=False,
        group_ids=tuple(f"g{group}" for group in groups),
    )


def payloads(*numbers):
    return {digest_of(payload(n, i)): payload(n, i) for n in numbers for i in (0, 1)}


PUBLISHED = VersionPublished(version=PolicyVersion(0), manifest=Digest(bytes(32)))


@pytest.fixture
def ledger(tmp_path):
    with Ledger.open(tmp_path / "ledger.sqlite") as ledger:
        ledger.begin(run_id="run", staleness_limit=1)
        ledger.apply([PUBLISHED], {})
        yield ledger


def test_what_was_applied_is_there_after_reopening(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with Ledger.open(path) as ledger:
        ledger.begin(run_id="run", staleness_limit=1)
        ledger.apply([PUBLISHED, *whole(0), *opened(1), submission(1, 1)], payloads(0, 1))
    with Ledger.open(path) as ledger:
        full, half = ledger.pending_groups()
        assert [member.index for member in full.members] == [0, 1]
        assert full.leases == ()
        assert [member.reward for member in half.members] == [1.0]
        assert half.leases[0].verdicts == {1: Reason.ADMITTED}
        assert ledger.item_cursor() == 2
        assert ledger.payload(half.members[0].digest) == payload(1, 1)
        assert ledger.verify() == []


def test_a_transaction_is_applied_whole_or_not_at_all(ledger):
    with pytest.raises(sqlite3.IntegrityError):
        ledger.apply([*whole(0), *opened(0)], payloads(0))
    assert ledger.is_empty() is False
    assert ledger.item_cursor() == 0
    assert ledger.pending_groups() == []


def test_a_group_cannot_be_consumed_twice(ledger):
    ledger.apply([*whole(0), step(1, 0)], payloads(0))
    with pytest.raises(sqlite3.IntegrityError):
        ledger.apply([step(2, 0, version=1)], {})


def test_a_lease_cannot_end_twice(ledger):
    ledger.apply(whole(0), payloads(0))
    with pytest.raises(sqlite3.IntegrityError):
        ledger.apply([completed(0)], {})


def test_roll_back_makes_groups_pending_again_and_keeps_the_history(ledger):
    ledger.apply([*whole(0), step(1, 0), *whole(1), step(2, 1, version=1)], payloads(0, 1))
    assert ledger.roll_back(1) == 1
    assert [group.group_id for group in ledger.pending_groups()] == ["g1"]
    assert ledger.last_step() == 1
    assert ledger.version_max() == 2
    ledger.apply([step(2, 1, version=1)], {})
    summary = ledger.summary()
    assert (summary.steps, summary.steps_undone, summary.resumes) == (2, 1, 1)
    assert summary.staleness_histogram == {0: 2, 1: 2}
    assert ledger.verify() == []


def test_rolling_back_behind_deleted_payloads_drops_what_is_lost(ledger):
    ledger.apply([*whole(0), step(1, 0)], payloads(0))
    ledger.covered(1)
    with pytest.raises(LocalError, match="misses payload"):
        ledger.payload(digest_of(payload(0, 0)))
    ledger.roll_back(0)
    assert ledger.pending_groups() == []
    assert ledger.summary().groups_dropped == {"payload_unavailable": 1}
    assert ledger.verify() == []


def test_covered_payloads_go_and_later_ones_stay(ledger):
    ledger.apply([*whole(0), *whole(1), step(1, 0), step(2, 1, version=1)], payloads(0, 1))
    ledger.covered(1)
    assert ledger.payload(digest_of(payload(1, 0)))
    assert ledger.verify() == []


def test_the_summary_counts_by_actor_and_reason(ledger):
    eve = NodeId("eve")
    facts = [
        *opened(0),
        submission(0, 0),
        submission(0, 1, Reason.STALE),
        DuplicateSeen(lease_id="l0", index=0),
        StrayRefused(actor=eve, reason=Reason.UNKNOWN_LEASE),
        StrayRefused(actor=eve, reason=Reason.UNKNOWN_LEASE),
        LeaseEnded(lease_id="l0", how=LeaseEnd.COMPLETED, lost=1),
        GroupDropped(group_id="g0", reason=Reason.GROUP_ABANDONED),
    ]
    ledger.apply(facts, payloads(0))
    summary = ledger.summary()
    ann, stranger = summary.actors
    assert (ann.accepted, ann.refused, ann.duplicates) == (1, 1, 1)
    assert ann.commonest_refusal == "stale"
    assert (stranger.actor, stranger.accepted, stranger.refused) == ("eve", 0, 2)
    assert summary.refusals == {"unknown_lease": 2, "stale": 1}
    assert summary.unused == {"group_abandoned": 1}
    assert ledger.verify() == []


DAMAGE = {
    "consumed 2 times": "DROP INDEX consumed_once; INSERT INTO consumption VALUES ('g0', 1, 0, 0)",
    "does not exist": "DELETE FROM steps",
    "does not hash": "UPDATE payloads SET envelope = x'00' WHERE rowid = 1",
    "members admitted": "UPDATE submissions SET verdict = 'late' WHERE member = 1",
    "not leased to": "UPDATE submissions SET actor = 'eve' WHERE member = 1",
    "no verdict": "DELETE FROM submissions WHERE member = 1",
    "never granted": "PRAGMA foreign_keys = OFF; DELETE FROM leases",
    "also dropped": "INSERT INTO drops VALUES ('g0', 'stale', 0)",
    "versions old; the limit is 1": "UPDATE submissions SET version_oldest = -2 WHERE member = 0",
    "CHECK constraint failed": "PRAGMA ignore_check_constraints = ON; "
    "UPDATE submissions SET verdict = 'because' WHERE member = 0",
}


@pytest.mark.parametrize("problem", DAMAGE)
def test_verify_finds_what_does_not_add_up(problem, tmp_path, ledger):
    ledger.apply([*whole(0), step(1, 0)], payloads(0))
    assert ledger.verify() == []
    with sqlite3.connect(ledger.path) as tamper:
        tamper.executescript(DAMAGE[problem])
    tamper.close()
    assert any(problem in line for line in ledger.verify())


def test_another_runs_ledger_is_refused(ledger):
    with pytest.raises(UsageError, match="belongs to run run"):
        ledger.begin(run_id="other")


def test_a_file_that_is_no_ledger_is_refused(tmp_path):
    path = tmp_path / "ledger.sqlite"
    path.write_bytes(b"not a database, but long enough to look at" * 200)
    with pytest.raises(LocalError, match="is damaged"):
        Ledger.open(path)
    other = tmp_path / "other.sqlite"
    with sqlite3.connect(other) as sql:
        sql.execute("CREATE TABLE things (name)")
    sql.close()
    with pytest.raises(LocalError, match="not a ledger"):
        Ledger.open(other)


def test_a_newer_format_is_refused(tmp_path, ledger):
    with sqlite3.connect(ledger.path) as sql:
        sql.execute("PRAGMA user_version = 99")
    sql.close()
    with pytest.raises(UsageError, match="format 99"):
        Ledger.open(ledger.path)


def test_a_folder_that_does_not_exist_and_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalError, match="cannot be opened"):
        Ledger.open(tmp_path / "file" / "ledger.sqlite")


def test_a_full_disk_writes_nothing_and_can_be_tried_again(ledger):
    pages = ledger._sql.execute("PRAGMA page_count").fetchone()[0]
    ledger._sql.execute(f"PRAGMA max_page_count = {pages}")
    big = {digest: data * 20_000 for digest, data in payloads(0).items()}
    with pytest.raises(LocalError, match="cannot be written"):
        ledger.apply(whole(0), big)
    assert ledger.pending_groups() == []
    ledger._sql.execute("PRAGMA max_page_count = 100000")
    ledger.apply(whole(0), payloads(0))
    assert ledger.verify() == []


def test_a_copy_taken_at_any_moment_adds_up(tmp_path, ledger):
    """What a kill leaves behind: file and write-ahead log as they are on disk."""
    for number in range(6):
        for fact in [*whole(number), step(number + 1, number, version=min(number, 1))]:
            ledger.apply([fact], payloads(number))
            copy = tmp_path / f"copy{number}"
            copy.mkdir(exist_ok=True)
            for suffix in ("", "-wal"):
                shutil.copy(f"{ledger.path}{suffix}", copy / f"ledger.sqlite{suffix}")
            with Ledger.open(copy / "ledger.sqlite") as reopened:
                assert reopened.verify() == []
                assert reopened.summary() == ledger.summary()


WRITER = """
import sys
sys.path.insert(0, sys.argv[2])
from pathlib import Path
from test_ledger import PUBLISHED, payloads, step, whole
from echo2_node.learner.ledger import Ledger
ledger = Ledger.open(Path(sys.argv[1]))
ledger.begin(run_id="run", staleness_limit=10**9)
ledger.apply([PUBLISHED], {})
for number in range(10**6):
    ledger.apply(whole(number), payloads(number))
    ledger.apply([step(number + 1, number, version=number)], {})
    sys.stdout.write(f"{number}\\n")
    sys.stdout.flush()
"""


@pytest.mark.parametrize("lines", [1, 7, 40])
def test_a_killed_writer_loses_nothing_it_had_reported(lines, tmp_path):
    path = tmp_path / "ledger.sqlite"
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, str(path), os.path.dirname(__file__)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": os.getcwd()},
    )
    try:
        reported = [int(writer.stdout.readline()) for _ in range(lines)][-1]
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait(timeout=10)
        writer.stdout.close()
    with Ledger.open(path) as ledger:
        assert ledger.verify() == []
        assert ledger.last_step() >= reported + 1
        ledger.roll_back(1)
        assert ledger.verify() == []
