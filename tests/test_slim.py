"""What a command loads before it answers: help and status must not wait for torch or libp2p."""

import json
import subprocess
import sys

import pytest

HEAVY = ("torch", "transformers", "vllm", "libp2p", "matplotlib")
CPU_S_MAX = 1.5
"""About 0.5 s on an idle core; torch alone would be above this."""


def run_and_list(code):
    """Run `code` in a fresh interpreter; the modules loaded afterwards and the CPU seconds."""
    script = (
        "import json, sys, time\n"
        f"try:\n    {code}\nexcept SystemExit:\n    pass\n"
        "sys.stderr.write(json.dumps([sorted(sys.modules), time.process_time()]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return json.loads(result.stderr.splitlines()[-1])


@pytest.mark.parametrize(
    "arguments", [["--help"], ["status", "--help"], ["demo", "--help"], ["weights", "--help"]]
)
def test_help_loads_nothing_heavy_and_is_quick(arguments):
    code = f"sys.argv[1:] = {arguments!r}; from echo2_node.cli import main; main()"
    modules, cpu_s = run_and_list(code)
    assert not [name for name in HEAVY if name in modules]
    assert "trio" not in modules
    assert "echo2_node.cli" in modules
    assert cpu_s < CPU_S_MAX


def test_status_itself_loads_nothing_heavy(tmp_path, monkeypatch):
    monkeypatch.setenv("ECHO2_STATE_BASE", str(tmp_path))
    modules, _ = run_and_list("sys.argv[1:] = ['status']; from echo2_node.cli import main; main()")
    assert not [name for name in (*HEAVY, "trio") if name in modules]


@pytest.mark.parametrize(
    "module", ["echo2_mesh", "echo2_mesh.wire.messages", "echo2_mesh.wire.ticket"]
)
def test_the_pure_face_of_the_mesh_loads_no_network(module):
    modules, _ = run_and_list(f"import {module}")
    assert not [name for name in ("trio", "libp2p", "socketserver", *HEAVY) if name in modules]


def test_the_scheduler_and_the_tasks_load_no_event_loop():
    modules, _ = run_and_list("import echo2_node.tasks.registry, echo2_node.scheduler")
    assert not [name for name in ("trio", *HEAVY) if name in modules]
