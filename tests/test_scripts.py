"""The commands of `scripts/`: they explain themselves, and set up only what is missing."""

import os
import runpy
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[1] / "scripts"


def run(name, *arguments, venv, python=None):
    environment = {**os.environ, "ECHO2_VENV": str(venv)}
    command = [python, str(SCRIPTS / name)] if python else [str(SCRIPTS / name)]
    return subprocess.run(
        [*command, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("name", ["demo", "test", "check", "environment"])
def test_help_explains_and_installs_nothing(name, tmp_path):
    result = run(name, "--help", venv=tmp_path / "venv")
    assert result.returncode == 0, result.stderr
    assert f"scripts/{name}" in result.stdout
    assert not (tmp_path / "venv").exists()


def test_an_environment_that_fits_its_stamp_is_used_at_once(tmp_path):
    script = runpy.run_path(str(SCRIPTS / "environment"), run_name="environment")
    python = tmp_path / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(sys.executable)
    (tmp_path / "venv" / "echo2-stamp").write_text(script["stamp"]())
    began = time.monotonic()
    result = run("environment", venv=tmp_path / "venv", python=sys.executable)
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == str(python)
    assert result.stderr == ""
    assert time.monotonic() - began < 5


def test_a_folder_that_is_no_environment_is_never_removed(tmp_path):
    (tmp_path / "thesis.txt").write_text("ten years")
    result = run("environment", venv=tmp_path, python=sys.executable)
    assert result.returncode == 3
    assert "is no virtual environment" in result.stderr
    assert (tmp_path / "thesis.txt").read_text() == "ten years"


def test_an_old_python_is_told_which_one_is_wanted(tmp_path):
    program = (
        "import runpy, sys; sys.version_info = (3, 9, 0, 'final', 0); sys.argv[1:] = []\n"
        f"runpy.run_path({str(SCRIPTS / 'environment')!r}, run_name='__main__')"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={"ECHO2_VENV": str(tmp_path / "venv"), "PATH": "", "ECHO2_PYTHON_TRIED": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 3
    assert "needs Python 3.11" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_overrides_that_spare_a_compiler_are_read_from_the_project():
    script = runpy.run_path(str(SCRIPTS / "environment"), run_name="environment")
    assert any(line.startswith("fastecdsa>=3") for line in script["read_overrides"]())
