"""`echo2-node demo`, whole: real processes on loopback, one killed, one late."""

import json
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(400)]


def start(*arguments, folder):
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
    command = [sys.executable, "-m", "echo2_node.cli", "demo", *map(str, arguments)]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )


def processes_under(folder):
    """Every process whose command line names `folder`: what a demo has started."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any(str(folder) in word for word in process.info["cmdline"] or ()):
            found.append(process)
    return found


def test_a_short_demo_ends_well_and_tells_all(tmp_path):
    out, plot = tmp_path / "out.json", tmp_path / "reward.png"
    with start(
        "--steps", 10, "--actors", 2, "--seed", 3, "--json", out, "--plot", plot, folder=tmp_path
    ) as demo:
        text, _ = demo.communicate(timeout=380)
    assert demo.returncode == 0, text
    summary = json.loads(out.read_text())
    assert summary["ledger_verified"] is True
    assert summary["seed"] == 3
    assert summary["steps"] == 10
    assert summary["staleness_steps_max"] <= summary["staleness_limit_steps"] == 3
    assert summary["versions_published"] >= 10
    assert sum(summary["staleness_histogram"].values()) == 10 * 16 * 8
    how = {actor["name"]: actor["how"] for actor in summary["actors"]}
    assert how == {"actor-1": "stayed", "actor-2": "killed", "actor-3": "late"}
    killed = next(actor for actor in summary["actors"] if actor["how"] == "killed")
    assert killed["left_s"] < summary["seconds"]["run"]
    assert sum(actor["accepted"] for actor in summary["actors"]) == summary["accepted"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    for words in ("actor-2 killed", "actor-3 joins", "verified", "reward"):
        assert words in text
    assert not list(tmp_path.glob("echo2-demo-*")), "state folders are removed"
    assert not processes_under(tmp_path)


def test_a_demo_that_is_told_to_stop_leaves_nothing_behind(tmp_path):
    with start("--steps", 500, "--no-chaos", "--actors", 1, folder=tmp_path) as demo:
        deadline = time.monotonic() + 200
        while not any("join" in " ".join(p.info["cmdline"]) for p in processes_under(tmp_path)):
            assert demo.poll() is None, demo.stdout.read()
            assert time.monotonic() < deadline
            time.sleep(0.1)
        demo.send_signal(signal.SIGTERM)
        text, _ = demo.communicate(timeout=60)
    assert demo.returncode == 130, text
    assert "Traceback" not in text
    deadline = time.monotonic() + 20
    while processes_under(tmp_path):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert not list(tmp_path.glob("echo2-demo-*"))


def test_an_unknown_task_is_refused_before_anything_starts(tmp_path):
    with start("--task", "sort_digit", folder=tmp_path) as demo:
        text, _ = demo.communicate(timeout=60)
    assert demo.returncode == 2
    assert "sort_digits" in text
    assert "Traceback" not in text
