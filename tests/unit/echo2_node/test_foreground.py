import os

import pytest
import trio

from echo2_mesh.errors import LocalError, UsageError
from echo2_node import foreground
from echo2_node.foreground import Interrupted, facts_of
from echo2_node.status import MemberRow, Snapshot, read_snapshot, write_snapshot


def make_snapshot(**fields):
    values = {
        "role": "learner",
        "node": "me",
        "run_id": "sort-1",
        "state": "training",
        "pid": os.getpid(),
        "updated_unix_ms": 1,
        "started_unix_ms": 1,
    }
    return Snapshot(**{**values, **fields})


def run(work, folder):
    """In a thread of its own: these tests are not themselves under trio."""
    return foreground._run(work, folder)


def test_a_second_node_in_the_same_folder_is_refused(tmp_path):
    with (
        foreground._state_folder(tmp_path),
        pytest.raises(LocalError, match="Another node is running"),
        foreground._state_folder(tmp_path),
    ):
        pass
    with foreground._state_folder(tmp_path):
        pass


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(LocalError, match="cannot be used"),
        foreground._state_folder(tmp_path / "file" / "state"),
    ):
        pass


def test_what_the_daemon_returns_is_returned(tmp_path):
    async def work():
        await trio.lowlevel.checkpoint()
        return "all steps done"

    assert run(work, tmp_path) == "all steps done"


def test_an_error_inside_nurseries_comes_out_plain_and_is_left_in_the_status(tmp_path):
    write_snapshot(tmp_path / "status.json", make_snapshot())

    async def fail():
        raise UsageError("There is no loss 'x'.", "Known: grpo.")

    async def work():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(fail)
        return ""

    with pytest.raises(UsageError, match="no loss"):
        run(work, tmp_path)
    left = read_snapshot(tmp_path / "status.json")
    assert left.state == "failed"
    assert left.last_error == "There is no loss 'x'. Known: grpo."


def test_the_status_of_another_process_is_left_alone(tmp_path):
    write_snapshot(tmp_path / "status.json", make_snapshot(pid=1))

    async def work():
        raise LocalError("The disk is full.")

    with pytest.raises(LocalError):
        run(work, tmp_path)
    assert read_snapshot(tmp_path / "status.json").state == "training"


def test_ctrl_c_inside_a_nursery_ends_quietly_with_130(tmp_path):
    async def press():
        raise KeyboardInterrupt

    async def work():
        async with trio.open_nursery() as nursery:
            nursery.start_soon(press)
        return ""

    with pytest.raises(Interrupted) as error:
        run(work, tmp_path)
    assert error.value.exit_code == 130


def test_a_bug_of_ours_is_not_dressed_up(tmp_path):
    async def work():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run(work, tmp_path)


def test_a_learners_line_counts_actors_that_are_not_gone():
    members = (
        MemberRow(node="me", role="learner", state="training"),
        MemberRow(node="a", role="actor", state="generating", tokens_per_s=1000.0),
        MemberRow(node="b", role="actor", state="generating", standing="gone", tokens_per_s=5.0),
    )
    facts, done, total = facts_of(
        make_snapshot(members=members, step=4, steps=9, reward_last=0.5, version=4)
    )
    assert (done, total) == (4, 9)
    assert "1 actor," in facts
    assert "1,000 tokens/s" in facts
    assert "reward 0.500" in facts


def test_an_actors_line_shows_the_fetch():
    own = MemberRow(
        node="me", role="actor", state="fetching", fetched_bytes=3, fetch_bytes=9, accepted=7
    )
    facts, done, total = facts_of(make_snapshot(role="actor", members=(own,)))
    assert (done, total) == (3, 9)
    assert "7 accepted" in facts


def test_a_fetch_is_a_percentage_and_a_run_is_steps():
    fetching = make_snapshot(role="actor", state="fetching")
    assert foreground._far(make_snapshot(), 4, 9) == "step 4/9, "
    assert foreground._far(fetching, 3, 9) == "33% fetched, "
    assert foreground._far(make_snapshot(role="actor", state="generating"), 3, 9) == ""
