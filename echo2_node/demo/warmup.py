"""The demo's starting model: made once by `echo2_node.learner.starter`, kept between runs.

Runs that module as a program, because it loads torch, and passes its progress on. Called by
`demo.show`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import platformdirs

from echo2_mesh.errors import LocalError, UsageError
from echo2_node.demo.fleet import die_with_parent

WARM_UP_TIMEOUT_S = 300.0
ERROR_LINES = 12


def starting_model(
    task_id: str,
    task_args: Mapping[str, Any],
    *,
    tell: Callable[[str], None],
    name: str = "",
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """The folder of a tiny model that is a little able at the task.

    Args:
        name: where it is cached, for models beside the task's usual one.
        settings: of `learner.starter.StarterSettings`; None for the task's usual ones.
        tell: gets a line whenever there is something to say.

    Errors:
        UsageError: the task has no demonstrations to warm up on.
        LocalError: it could not be made; the message ends with what the program printed.
    """
    folder = platformdirs.user_cache_path("echo2") / "starters" / (name or task_id)
    command = [sys.executable, "-m", "echo2_node.learner.starter", "--task", task_id]
    command += ["--args", json.dumps(dict(task_args)), "--out", str(folder)]
    if settings is not None:
        command += ["--settings", json.dumps(dict(settings))]
    printed: deque[str] = deque(maxlen=ERROR_LINES)
    last: dict[str, Any] = {}
    with subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        # Computing threads that wait by spinning make a busy host many times slower.
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
        preexec_fn=die_with_parent,
    ) as process:
        timer = threading.Timer(WARM_UP_TIMEOUT_S, process.kill)
        timer.start()
        try:
            assert process.stdout is not None
            for line in process.stdout:
                printed.append(line.rstrip())
                if values := _object(line):
                    last = values
                    _pass_on(values, tell)
        except BaseException:
            process.kill()
            raise
        finally:
            timer.cancel()
    if "error" in last:
        kind = UsageError if process.returncode == UsageError.exit_code else LocalError
        raise kind(str(last["error"]), str(last.get("hint", "")))
    if process.returncode != 0 or "folder" not in last:
        raise LocalError(
            f"The starting model for '{task_id}' could not be made (exit {process.returncode}).",
            "\n".join(printed),
        )
    return Path(str(last["folder"]))


def _pass_on(values: Mapping[str, Any], tell: Callable[[str], None]) -> None:
    """A line at the start and at each quarter of the warm-up, and where it is."""
    if "folder" in values:
        made = "found" if values.get("cached") else "made"
        tell(f"starting model {made}: {values['folder']}")
        return
    step, steps = int(values.get("step", -1)), int(values.get("steps", 0))
    if step == 0:
        tell("looking for the starting model")
    elif steps and step * 4 // steps > (step - 1) * 4 // steps:
        tell(f"warm-up of the starting model: step {step}/{steps}")


def _object(line: str) -> dict[str, Any]:
    try:
        values = json.loads(line)
    except ValueError:
        return {}
    return values if isinstance(values, dict) else {}
