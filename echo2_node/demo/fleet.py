"""The demo's processes: started, killed on purpose, told to leave, and never left behind.

Each is a real `echo2-node` in a session of its own, so that its children go with it. Plain
subprocesses; knows nothing of training. Called by `demo.show`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from echo2_mesh.errors import LocalError

LEAVE_TIMEOUT_S = 15.0
KILL_TIMEOUT_S = 5.0
POLL_INTERVAL_S = 0.05
LOG_LINES = 15
LOG_TAIL_BYTES = 8192
_PR_SET_PDEATHSIG = 1


class Process:
    """One `echo2-node` with its state folder."""

    def __init__(self, name: str, arguments: Sequence[str], *, state_dir: Path) -> None:
        self.name = name
        self.state_dir = state_dir
        self.log_path = state_dir.parent / f"{name}.log"
        self.started_s = time.monotonic()
        self.ended_s: float | None = None
        self.killed = False
        self._told = False
        environment = dict(os.environ)
        # Several processes on a small host: one computing thread each, or they fight.
        for variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
            environment.setdefault(variable, "1")
        environment.pop("ECHO2_STATE_DIR", None)
        try:
            with self.log_path.open("ab") as log:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "echo2_node.cli", *arguments],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env=environment,
                    start_new_session=True,
                    preexec_fn=die_with_parent,
                )
        except OSError as error:
            raise LocalError(f"The process of {name} cannot be started: {error}.") from error

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """The exit code once it has ended (negative: the signal), None while it runs."""
        code = self._process.poll()
        if code is not None and self.ended_s is None:
            self.ended_s = time.monotonic()
        return code

    def kill(self) -> None:
        """SIGKILL to the daemon alone, as a crash would: its children must notice themselves."""
        self.killed = True
        self._process.kill()

    def tell_to_leave(self) -> None:
        """SIGTERM, once."""
        if not self._told and self.poll() is None:
            self._told = True
            self._process.terminate()

    def clear_away(self) -> None:
        """SIGKILL to whatever is left of the session, and reap."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(KILL_TIMEOUT_S)
        self.poll()

    def last_lines(self) -> str:
        """The end of its log, for a message."""
        try:
            with self.log_path.open("rb") as file:
                file.seek(0, os.SEEK_END)
                file.seek(max(0, file.tell() - LOG_TAIL_BYTES))
                text = file.read().decode(errors="replace")
        except OSError:
            return "(no log)"
        return "\n".join(text.splitlines()[-LOG_LINES:]) or "(its log is empty)"


def die_with_parent() -> None:
    """What a killed demo started goes with it; runs in the child before exec."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


class Fleet:
    """All processes of one demo, in the order they were started."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: list[Process] = []

    def start(self, name: str, arguments: Sequence[str]) -> Process:
        """Start `echo2-node ARGUMENTS --state-dir FOLDER/NAME`."""
        state_dir = self.folder / name
        state_dir.mkdir(parents=True, exist_ok=True)
        process = Process(name, [*arguments, "--state-dir", str(state_dir)], state_dir=state_dir)
        self.processes.append(process)
        return process

    def leave(self) -> None:
        """Tell all to leave and wait for them, at most LEAVE_TIMEOUT_S."""
        for process in self.processes:
            process.tell_to_leave()
        deadline = time.monotonic() + LEAVE_TIMEOUT_S
        while time.monotonic() < deadline:
            if all(process.poll() is not None for process in self.processes):
                return
            time.sleep(POLL_INTERVAL_S)


@contextlib.contextmanager
def open_fleet(folder: Path) -> Iterator[Fleet]:
    """A fleet that is gone, to the last child, when the block ends, however it ends."""
    fleet = Fleet(folder)
    try:
        yield fleet
        fleet.leave()
    finally:
        for process in fleet.processes:
            process.clear_away()


@contextlib.contextmanager
def ending_like_ctrl_c() -> Iterator[None]:
    """Inside, SIGTERM and a hang-up end as Ctrl-C does: through every `finally`."""
    numbers = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, _stop) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _stop(number: int, frame: object) -> None:
    raise KeyboardInterrupt
