import os
from types import SimpleNamespace

import msgspec
import pytest

from echo2_mesh.core.members import Member, Standing
from echo2_mesh.errors import LocalError
from echo2_mesh.net.traffic import Flow, TrafficReport
from echo2_mesh.wire.messages import Heartbeat
from echo2_mesh.wire.types import ChunkKind, NodeId, PolicyVersion, Reach, Reason, Role
from echo2_node.status import (
    MEMBERS_SHOWN_MAX,
    FlowRow,
    MemberRow,
    Reporter,
    Snapshot,
    Tally,
    read_snapshot,
    write_snapshot,
)


def make_snapshot(**fields):
    values = {
        "role": "learner",
        "node": "12D3KooWlearner",
        "run_id": "sort-0a1b2c3d",
        "state": "training",
        "step": 7,
        "steps": 100,
        "version": 7,
        "pid": os.getpid(),
        "updated_unix_ms": 2_000_000_000_000,
        "started_unix_ms": 1_900_000_000_000,
        "members": (MemberRow(node="12D3KooWactor", role="actor", state="generating"),),
    }
    return Snapshot(**{**values, **fields})


def make_beat(*, role=Role.ACTOR, version=None, **fields):
    return Heartbeat(
        role=role,
        state="generating",
        incarnation_unix_ms=1,
        sequence=1,
        version=None if version is None else PolicyVersion(version),
        **fields,
    )


def make_member(node, **fields):
    return Member(
        node=NodeId(node),
        heartbeat=make_beat(**fields),
        standing=Standing.UP,
        connected=True,
        seen_s_ago=0.5,
    )


def make_mesh(*members, **own):
    traffic = TrafficReport(
        kinds={ChunkKind.FULL: Flow(in_bytes=9, out_bytes=4), ChunkKind.PATCH: Flow(in_bytes=1)},
        peers={NodeId("a"): Flow(in_bytes=10)},
        lanes={NodeId("a"): "reverse"},
        uplink_bytes_per_s=0.0,
        downlink_bytes_per_s=0.0,
    )
    return SimpleNamespace(
        node="me",
        run_id="sort-0a1b2c3d",
        counters={"bad_envelopes": 2},
        members=lambda: members,
        traffic=lambda: traffic,
        reach=lambda: (Reach.PUNCHED, "nobody could dial it"),
        heartbeat=lambda: make_beat(role=Role.LEARNER, **own),
    )


def test_a_snapshot_comes_back_as_it_was_written(tmp_path):
    path = tmp_path / "status.json"
    assert write_snapshot(path, make_snapshot())
    assert read_snapshot(path) == make_snapshot()
    assert list(tmp_path.iterdir()) == [path]


def test_nothing_written_is_nothing_read(tmp_path):
    assert read_snapshot(tmp_path / "status.json") is None


def test_a_field_of_a_later_program_is_ignored(tmp_path):
    path = tmp_path / "status.json"
    values = {**msgspec.to_builtins(make_snapshot()), "mood": "good"}
    path.write_bytes(msgspec.json.encode(values))
    assert read_snapshot(path) == make_snapshot()


@pytest.mark.parametrize("content", [b"", b'{"role": "lea', b"[]", b"\xff\xfe", b'{"format": 1}'])
def test_a_damaged_status_file_is_told_with_its_path(tmp_path, content):
    path = tmp_path / "status.json"
    path.write_bytes(content)
    with pytest.raises(LocalError, match=r"status\.json is damaged"):
        read_snapshot(path)


def test_a_later_format_is_refused(tmp_path):
    path = tmp_path / "status.json"
    write_snapshot(path, make_snapshot(format=2))
    with pytest.raises(LocalError, match="format 2"):
        read_snapshot(path)


def test_a_full_disk_keeps_the_older_document_and_raises_nothing(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    write_snapshot(path, make_snapshot(step=1))
    part = tmp_path / f".status.json.{os.getpid()}.part"
    if not os.path.exists("/dev/full"):
        pytest.skip("this system has no /dev/full")
    part.symlink_to("/dev/full")
    assert not write_snapshot(path, make_snapshot(step=2))
    assert read_snapshot(path).step == 1
    assert not part.exists()


def test_an_unwritable_folder_is_an_error_of_this_host(tmp_path):
    with pytest.raises(LocalError, match="cannot be written"):
        write_snapshot(tmp_path / "missing" / "status.json", make_snapshot())


def test_a_reporter_counts_lag_from_the_newest_version_anybody_has(tmp_path):
    reporter = Reporter(tmp_path, role="learner", name="sorting", steps=100)
    mesh = make_mesh(
        make_member("a", version=3, tokens_per_s=9.0), make_member("b"), version=5, name="sorting"
    )
    snapshot = reporter.write(mesh, state="training", step=5, version=5)
    rows = {row.node: row for row in snapshot.members}
    assert rows["a"].lag == 2
    assert rows["b"].lag is None
    assert rows["me"].lag == 0
    assert rows["me"].name == "sorting"
    assert snapshot.counters == {"bad_envelopes": 2}
    assert read_snapshot(tmp_path / "status.json") == snapshot


def test_what_a_node_counted_itself_wins_over_what_the_other_claims(tmp_path):
    reporter = Reporter(tmp_path, role="learner")
    boaster = make_member("a", accepted=1000, refused=0, commonest_refusal=Reason.LATE, version=0)
    tallies = {"a": Tally(accepted=1, refused=2, commonest_refusal="stale")}
    snapshot = reporter.write(make_mesh(boaster), state="training", tallies=tallies)
    row = next(row for row in snapshot.members if row.node == "a")
    assert (row.accepted, row.refused, row.commonest_refusal) == (1, 2, "stale")
    claimed = reporter.write(make_mesh(boaster), state="training")
    row = next(row for row in claimed.members if row.node == "a")
    assert (row.accepted, row.commonest_refusal) == (1000, "late")


def test_what_weights_cost_and_how_nodes_are_reached_is_in_the_document(tmp_path):
    member = make_member("a", uplink_bytes_per_s=5e6, downlink_bytes_per_s=9e6, reach=Reach.RELAYED)
    snapshot = Reporter(tmp_path, role="actor").write(make_mesh(member), state="generating")
    assert snapshot.traffic == {
        "full": FlowRow(in_bytes=9, out_bytes=4),
        "patch": FlowRow(in_bytes=1),
    }
    assert snapshot.traffic_by_peer == {"a": FlowRow(in_bytes=10)}
    assert snapshot.reach == "punched: nobody could dial it"
    row = next(row for row in snapshot.members if row.node == "a")
    assert (row.uplink_bytes_per_s, row.downlink_bytes_per_s) == (5e6, 9e6)
    assert (row.reach, row.way) == ("relayed", "reverse")
    assert read_snapshot(tmp_path / "status.json") == snapshot


def test_a_member_joined_when_it_was_first_seen_here(tmp_path):
    reporter = Reporter(tmp_path, role="learner")
    first = reporter.write(make_mesh(make_member("a")), state="training")
    again = reporter.write(make_mesh(make_member("a"), make_member("b")), state="training")
    joined = {row.node: row.joined_unix_ms for row in again.members}
    before = {row.node: row.joined_unix_ms for row in first.members}
    assert joined["a"] == before["a"]
    assert joined["a"] <= joined["b"] <= again.updated_unix_ms


def test_keys_of_counters_are_plain_words_whatever_the_daemon_counts_by(tmp_path):
    reporter = Reporter(tmp_path, role="learner")
    snapshot = reporter.write(
        make_mesh(),
        state="training",
        refusals={Reason.STALE: 1, Reason.ADMITTED: 9},
        staleness_histogram={0: 4, 2: 1},
    )
    assert snapshot.refusals == {"stale": 1}
    assert snapshot.staleness_histogram == {"0": 4, "2": 1}
    assert read_snapshot(tmp_path / "status.json") == snapshot


def test_a_flood_of_members_neither_bloats_the_document_nor_hides_who_works(tmp_path):
    reporter = Reporter(tmp_path, role="learner")
    strangers = tuple(make_member(f"stranger {n}") for n in range(MEMBERS_SHOWN_MAX))
    worker = make_member("worker")
    tallies = {NodeId("worker"): Tally(accepted=1, refused=0)}
    mesh = make_mesh(*strangers, worker)
    snapshot = reporter.write(mesh, state="training", tallies=tallies)
    assert len(snapshot.members) == MEMBERS_SHOWN_MAX + 1
    assert "worker" in {row.node for row in snapshot.members}
    for number in range(3):
        others = tuple(make_member(f"{number} {n}") for n in range(MEMBERS_SHOWN_MAX))
        reporter.write(make_mesh(*others), state="training")
    assert len(reporter._joined_unix_ms) == MEMBERS_SHOWN_MAX + 1
