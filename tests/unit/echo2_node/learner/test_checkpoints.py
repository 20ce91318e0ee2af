import errno
import os
import signal

import pytest

from echo2_mesh.errors import LocalError
from echo2_node.learner import checkpoints
from echo2_node.learner.checkpoints import Checkpoints, Record, read_record, write_checkpoint
from echo2_node.learner.tensorfile import Entry, write_tensors

FILES = (checkpoints.MODEL, checkpoints.MASTERS, checkpoints.OPTIMIZER)


def save(base, step, fill=1):
    """A checkpoint of three small tensor files."""
    entry = Entry(name="w", dtype="U8", shape=(64,), read=lambda: memoryview(bytes([fill]) * 64))
    folder = Checkpoints(base, kept=2).folder_of(step)
    contents = dict.fromkeys(FILES, lambda file: write_tensors(file, [entry]))
    write_checkpoint(folder, Record(step=step, updates=step, version=step, rng=b"r"), contents)
    return folder


def test_a_written_checkpoint_is_the_newest_and_reads_back(tmp_path):
    assert Checkpoints(tmp_path / "none", kept=2).newest() is None
    save(tmp_path, 3)
    folder = save(tmp_path, 12)
    newest = Checkpoints(tmp_path, kept=2).newest()
    assert newest is not None
    assert (newest.step, newest.folder) == (12, folder)
    assert read_record(folder).updates == 12
    data = checkpoints.read_tensors(folder / checkpoints.MASTERS)
    assert bytes(data["w"][1]) == b"\x01" * 64


def test_only_the_newest_are_kept_and_unfinished_writes_are_cleared(tmp_path):
    for step in (1, 2, 3, 4):
        save(tmp_path, step)
    (tmp_path / "step-00000005.partial").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    Checkpoints(tmp_path, kept=2).retire()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt",
        "step-00000003",
        "step-00000004",
    ]


@pytest.mark.parametrize("name", FILES)
def test_a_truncated_file_is_named_and_the_checkpoint_before_is_the_newest(tmp_path, name):
    before, damaged = save(tmp_path, 1), save(tmp_path, 2)
    os.truncate(damaged / name, 40)
    with pytest.raises(LocalError, match=name):
        read_record(damaged)
    with pytest.raises(LocalError, match=name):
        checkpoints.read_tensors(damaged / name)
    newest = Checkpoints(tmp_path, kept=2).newest()
    assert newest is not None
    assert newest.folder == before


def test_a_missing_file_or_record_is_no_checkpoint(tmp_path):
    folder = save(tmp_path, 1)
    (folder / checkpoints.MASTERS).unlink()
    with pytest.raises(LocalError, match=r"masters\.safetensors is missing"):
        read_record(folder)
    (folder / checkpoints.RECORD).unlink()
    with pytest.raises(LocalError, match="not a complete checkpoint"):
        read_record(folder)
    assert Checkpoints(tmp_path, kept=2).newest() is None


def test_a_step_saved_twice_is_refused_and_a_damaged_one_is_set_aside(tmp_path):
    folder = save(tmp_path, 7, fill=1)
    with pytest.raises(LocalError, match="already a checkpoint"):
        save(tmp_path, 7)
    os.truncate(folder / checkpoints.MODEL, 10)
    save(tmp_path, 7, fill=2)
    assert bytes(checkpoints.read_tensors(folder / checkpoints.MODEL)["w"][1]) == b"\x02" * 64
    assert (tmp_path / "step-00000007.damaged").is_dir()


def test_a_full_disk_is_told_and_leaves_nothing_behind(tmp_path):
    before = save(tmp_path, 1)

    def full(file):
        file.write(b"some bytes")
        raise OSError(errno.ENOSPC, "No space left on device")

    record = Record(step=2, updates=2, version=2, rng=b"")
    with pytest.raises(LocalError, match="disk is full"):
        write_checkpoint(tmp_path / "step-00000002", record, {checkpoints.MODEL: full})
    assert list(tmp_path.iterdir()) == [before]
    save(tmp_path, 2)


def kill_while_saving(base, stage):
    """Save step 2 in a forked process that kills itself at its `stage`-th sync or rename.

    Its exit code: minus the signal, or how many such calls a whole save makes.
    """
    child = os.fork()
    if child == 0:
        calls = 0

        def dying(real):
            def call(*arguments):
                nonlocal calls
                calls += 1
                if calls == stage:
                    os.kill(os.getpid(), signal.SIGKILL)
                return real(*arguments)

            return call

        os.fsync, os.rename = dying(os.fsync), dying(os.rename)
        try:
            save(base, 2)
        finally:
            os._exit(calls)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_a_kill_at_any_moment_of_a_save_leaves_the_checkpoint_before(tmp_path):
    calls = kill_while_saving(tmp_path / "count", -1)
    assert calls == 7, "three tensor files, the record, two folders and the rename"
    for stage in range(1, calls + 1):
        base = tmp_path / f"stage-{stage}"
        before = save(base, 1)
        assert kill_while_saving(base, stage) == -signal.SIGKILL
        newest = Checkpoints(base, kept=2).newest()
        assert newest is not None
        # After the rename only the folder's own sync is missing: the new one is whole.
        assert newest.folder == before or (newest.step == 2 and stage == calls)
        read_record(newest.folder)
        Checkpoints(base, kept=2).retire()
        if newest.step == 1:
            save(base, 2)
        assert not list(base.glob("*.partial"))
