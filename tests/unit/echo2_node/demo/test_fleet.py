import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from echo2_node.demo import fleet
from echo2_node.demo.fleet import ending_like_ctrl_c, open_fleet

ROOT = Path(__file__).resolve().parents[4]


def wait_until(condition, *, seconds=20):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def is_gone(pid):
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """A program in place of `echo2-node`: starts a child and then waits, deaf or not."""
    package = tmp_path / "modules" / "echo2_node"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "cli.py").write_text(
        textwrap.dedent(
            """
            import pathlib, signal, subprocess, sys, time
            if "deaf" in sys.argv:
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            folder = pathlib.Path(sys.argv[sys.argv.index("--state-dir") + 1])
            if "fail" in sys.argv:
                sys.exit("the port is in use")
            if "alone" in sys.argv:
                (folder / "child").write_text("")
                time.sleep(600)
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            (folder / "child.part").write_text(str(child.pid))
            (folder / "child.part").rename(folder / "child")
            time.sleep(600)
            """
        )
    )
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.chdir(package.parent)


def child_of(process):
    path = process.state_dir / "child"
    wait_until(path.exists)
    return int(path.read_text())


def test_leaving_is_asked_for_and_nothing_stays(tmp_path, stand_in):
    with open_fleet(tmp_path) as ships:
        one = ships.start("one", ["join"])
        child = child_of(one)
    assert one.poll() == -signal.SIGTERM
    wait_until(lambda: is_gone(child))


def test_whoever_does_not_listen_is_killed_with_its_children(tmp_path, stand_in, monkeypatch):
    monkeypatch.setattr(fleet, "LEAVE_TIMEOUT_S", 0.1)
    with open_fleet(tmp_path) as ships:
        one = ships.start("one", ["deaf"])
        child = child_of(one)
    assert one.poll() == -signal.SIGKILL
    wait_until(lambda: is_gone(child))


def test_an_exception_in_the_demo_leaves_no_process(tmp_path, stand_in):
    pids = []

    def fail():
        with open_fleet(tmp_path) as ships:
            one = ships.start("one", ["join"])
            pids.extend([one.pid, child_of(one)])
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    wait_until(lambda: all(is_gone(pid) for pid in pids))


def test_sigterm_to_the_demo_ends_it_like_ctrl_c(tmp_path, stand_in):
    def fail():
        with ending_like_ctrl_c(), open_fleet(tmp_path) as ships:
            pids.append(ships.start("one", ["alone"]).pid)
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(20)

    pids = []

    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt):
        fail()
    assert signal.getsignal(signal.SIGTERM) is before
    assert is_gone(pids[0])


def test_a_kill_hits_the_daemon_alone_as_a_crash_would(tmp_path, stand_in):
    with open_fleet(tmp_path) as ships:
        one = ships.start("one", ["join"])
        child = child_of(one)
        one.kill()
        wait_until(lambda: one.poll() is not None)
        assert one.killed
        assert one.ended_s is not None
        assert not is_gone(child)
    wait_until(lambda: is_gone(child))


def test_the_end_of_a_failed_nodes_log_is_at_hand(tmp_path, stand_in):
    with open_fleet(tmp_path) as ships:
        one = ships.start("one", ["fail"])
        wait_until(lambda: one.poll() is not None)
        assert one.poll() == 1
        assert "the port is in use" in one.last_lines()


def test_a_demo_that_is_killed_takes_its_processes_along(tmp_path, stand_in):
    if sys.platform != "linux":
        pytest.skip("needs the parent-death signal")
    program = (
        "import sys, time\n"
        f"sys.path[0] = {str(ROOT)!r}\n"
        "from pathlib import Path\n"
        "from echo2_node.demo.fleet import Fleet\n"
        f"one = Fleet(Path({str(tmp_path)!r})).start('one', ['alone'])\n"
        "while not (one.state_dir / 'child').exists(): time.sleep(0.01)\n"
        "print(one.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=environment
    ) as demo:
        pid = int(demo.stdout.readline())
        assert not is_gone(pid)
        demo.kill()
    wait_until(lambda: is_gone(pid))
