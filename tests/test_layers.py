"""Imports point down only, pure rooms stay pure: `.importlinter`, run as a test too."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def lint(folder, *arguments):
    return subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-cache", *arguments],
        cwd=folder,
        env={"PYTHONPATH": str(folder), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_imports_keep_every_contract():
    result = lint(ROOT)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr


@pytest.mark.parametrize(
    ("module", "line", "contract"),
    [
        ("echo2_mesh/core/membership.py", "import time", "pure"),
        ("echo2_node/tasks/registry.py", "import os.path", "pure"),
        ("echo2_mesh/wire/codec.py", "import echo2_mesh.chunks", "layers"),
        ("echo2_node/actor/daemon.py", "import torch", "heavy"),
        ("echo2_node/actor/daemon.py", "import echo2_mesh.net.carrier", "one-door"),
    ],
)
def test_a_planted_breach_is_noticed(tmp_path, module, line, contract):
    for package in ("echo2_mesh", "echo2_node"):
        for source in (ROOT / package).rglob("*.py"):
            target = tmp_path / source.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / ".importlinter").write_text((ROOT / ".importlinter").read_text())
    with (tmp_path / module).open("a", encoding="utf-8") as file:
        file.write(f"\n{line}\n")
    result = lint(tmp_path, "--contract", contract)
    assert result.returncode == 1, result.stdout[-2000:] + result.stderr
    assert "BROKEN" in result.stdout
