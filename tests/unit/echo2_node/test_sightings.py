import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from echo2_mesh.errors import LocalError, UsageError
from echo2_node.sightings import find_folder, find_sightings, process_state, state_base
from echo2_node.status import Snapshot, write_snapshot


def now_unix_ms():
    return time.time_ns() // 1_000_000


def put(folder, **fields):
    folder.mkdir(parents=True, exist_ok=True)
    values = {
        "role": "learner",
        "node": "12D3KooWsomebody",
        "run_id": f"{folder.name}-0a1b2c3d",
        "state": "training",
        "pid": os.getpid(),
        "updated_unix_ms": now_unix_ms(),
        "started_unix_ms": now_unix_ms(),
    }
    snapshot = Snapshot(**{**values, **fields})
    write_snapshot(folder / "status.json", snapshot)
    return snapshot


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("ECHO2_STATE_BASE", str(tmp_path))
    return tmp_path


@pytest.fixture
def ended_pid():
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_the_base_follows_the_environment(base):
    assert state_base() == base


def test_a_living_process_runs_and_a_dead_one_has_stopped(base, ended_pid):
    put(base / "alive")
    put(base / "dead", pid=ended_pid, role="actor")
    found = {Path(one.folder).name: one for one in find_sightings()}
    assert found["alive"].state == "training"
    assert found["dead"].state == "stopped"
    assert [Path(one.folder).name for one in find_sightings()] == ["alive", "dead"]


def test_a_run_that_ended_says_so_after_its_process_is_gone(base, ended_pid):
    put(base / "done", pid=ended_pid, state="ended")
    (one,) = find_sightings()
    assert (one.process, one.state) == ("stopped", "ended")


def test_a_process_that_no_longer_writes_is_silent():
    snapshot = put_away(updated_unix_ms=now_unix_ms())
    assert process_state(snapshot, now_unix_ms=now_unix_ms() + 60_000) == "silent"


def test_another_process_with_the_old_number_is_not_the_daemon():
    assert process_state(put_away(updated_unix_ms=1_000_000), now_unix_ms=1_000_001) == "stopped"


def put_away(**fields):
    values = {
        "role": "learner",
        "node": "n",
        "run_id": "run-1",
        "state": "training",
        "pid": os.getpid(),
        "started_unix_ms": 1,
    }
    return Snapshot(**{**values, **fields})


def test_a_folder_of_folders_shows_all_its_nodes(base):
    put(base / "demo" / "learner")
    put(base / "demo" / "actor-1", role="actor")
    roles = [one.snapshot.role for one in find_sightings(base / "demo")]
    assert roles == ["learner", "actor"]


def test_an_empty_folder_that_was_named_is_an_error(base):
    with pytest.raises(UsageError, match="No node has ever run"):
        find_sightings(base)


def test_one_damaged_document_hides_no_other(base):
    put(base / "good")
    put(base / "bad")
    (base / "bad" / "status.json").write_text("{")
    assert [Path(one.folder).name for one in find_sightings()] == ["good"]
    (base / "good" / "status.json").unlink()
    with pytest.raises(LocalError, match="damaged"):
        find_sightings()


def test_a_person_may_name_a_run_by_folder_by_name_by_id_or_not_at_all(base):
    put(base / "sorting")
    assert find_folder(str(base / "sorting")) == base / "sorting"
    assert find_folder("sorting") == base / "sorting"
    assert find_folder("sorting-0a1b2c3d") == base / "sorting"
    assert find_folder(None) == base / "sorting"


def test_two_candidates_must_be_told_apart_unless_one_alone_runs(base, ended_pid):
    put(base / "one")
    put(base / "two")
    with pytest.raises(UsageError, match="more than one learner") as error:
        find_folder(None, role="learner")
    assert "one, two" in error.value.hint
    put(base / "two", pid=ended_pid)
    assert find_folder(None, role="learner") == base / "one"


def test_an_unknown_run_lists_what_is_known(base):
    put(base / "sorting")
    with pytest.raises(UsageError, match="no run 'sortign'") as error:
        find_folder("sortign")
    assert "sorting" in error.value.hint
