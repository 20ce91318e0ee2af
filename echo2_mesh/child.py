"""Child processes and the frames on their pipes: both ends, and nothing about what is said.

A frame is a 4-byte big-endian length and that many bytes. The parent side runs on trio
(`open_child`); the child side is synchronous (`take_pipes`), because children hold torch or vLLM.
A child is the leader of its own process group, is killed with the whole group, ends when its
parent ends, and keeps its stderr (and whatever libraries print) in a log file. Used for
engines, trainers, and the mesh's own bulk and rebuilding processes, by the programs at both ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import trio

from echo2_mesh.errors import LocalError

FRAME_SIZE_BYTES_MAX = 512 * 1024 * 1024
"""One frame; a batch of long trajectories is the largest thing that is sent."""
SEND_TIMEOUT_S = 300.0
"""A child that has not read a frame in this time is taken for dead."""
CLOSE_GRACE_S = 5.0
"""From the end of its stdin until a child that has not ended is killed."""
REAP_TIMEOUT_S = 10.0
LOG_SIZE_BYTES_MAX = 8 * 1024 * 1024
"""A log above this is set aside as `<name>.1` when the next child starts."""
_TAIL_BYTES = 4096
_TAIL_LINES = 12
_READ_SIZE_BYTES = 1 << 18
_PARENT_CHECK_S = 1.0
_PARENT_VARIABLE = "ECHO2_PARENT_PID"
_PR_SET_PDEATHSIG = 1


# --- the child's side --------------------------------------------------------------------------


class ChildPipe:
    """The child's end: frames from and to the parent. One reading and one writing thread."""

    def __init__(self, read_fd: int, write_fd: int) -> None:
        # Unbuffered: a buffer's lock, held by a thread that reads, would abort the exit.
        self._source = os.fdopen(read_fd, "rb", buffering=0)
        self._target = os.fdopen(write_fd, "wb", buffering=0)

    def read(self) -> bytes | None:
        """The next frame, waiting for it as long as the parent lives; None when it has hung up.

        Raises:
            LocalError: the length is above `FRAME_SIZE_BYTES_MAX`: the two ends disagree.
        """
        header = self._read_exactly(4)
        if header is None:
            return None
        length = int.from_bytes(header, "big")
        if length > FRAME_SIZE_BYTES_MAX:
            raise LocalError(f"A frame of {length} bytes; the limit is {FRAME_SIZE_BYTES_MAX}.")
        return self._read_exactly(length)

    def _read_exactly(self, length: int) -> bytes | None:
        data = bytearray(length)
        view = memoryview(data)
        while view:
            count = self._source.readinto(view)
            if not count:
                return None
            view = view[count:]
        return bytes(data)

    def write(self, frame: bytes) -> None:
        """Send one frame; ends this process quietly where the parent has gone.

        Raises:
            LocalError: the frame is above `FRAME_SIZE_BYTES_MAX`.
        """
        if len(frame) > FRAME_SIZE_BYTES_MAX:
            raise LocalError(f"A frame of {len(frame)} bytes; the limit is {FRAME_SIZE_BYTES_MAX}.")
        view = memoryview(len(frame).to_bytes(4, "big") + frame)
        try:
            while view:
                view = view[self._target.write(view) or 0 :]
        except BrokenPipeError:
            raise SystemExit(0) from None


def take_pipes() -> ChildPipe:
    """Claim stdin and stdout for frames and tie this process's life to its parent's.

    Call it first, before heavy imports: afterwards file descriptor 1 is the log, so a library
    that prints cannot break a frame, and nothing else can read the parent's frames.
    """
    read_fd, write_fd = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    _die_with_parent()
    return ChildPipe(read_fd, write_fd)


def _die_with_parent() -> None:
    """Linux sends a signal; elsewhere, and for a parent that died before, a thread looks."""
    parent = int(os.environ.get(_PARENT_VARIABLE, "0")) or os.getppid()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_CHECK_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


# --- the parent's side -------------------------------------------------------------------------


class Child:
    """A running child. `send` may be called by many tasks, `receive` by one at a time."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        stdin: trio.lowlevel.FdStream,
        stdout: trio.lowlevel.FdStream,
        log_path: Path,
        log_start: int,
    ) -> None:
        self._process = process
        self._stdin = stdin
        self._stdout = stdout
        self._log_path = log_path
        self._log_start = log_start
        self._buffer = bytearray()
        self._sending = trio.Lock()
        self._broken = False

    @property
    def pid(self) -> int:
        return self._process.pid

    async def send(self, frame: bytes) -> None:
        """Write one frame.

        Errors:
            LocalError: the frame is too large, or the child has ended or does not read. Being
                cancelled in the middle of a frame kills the child: its stream is cut.
        """
        if len(frame) > FRAME_SIZE_BYTES_MAX:
            raise LocalError(f"A frame of {len(frame)} bytes; the limit is {FRAME_SIZE_BYTES_MAX}.")
        async with self._sending:
            if self._broken:
                raise await self._ended()
            whole = False
            try:
                with trio.fail_after(SEND_TIMEOUT_S):
                    await self._stdin.send_all(len(frame).to_bytes(4, "big") + frame)
                whole = True
            except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
                raise await self._ended() from None
            finally:
                if not whole:
                    self._broken = True
                    self.kill()

    async def receive(self) -> bytes:
        """The next frame. Being cancelled loses nothing: the next call goes on.

        Errors:
            LocalError: the child ended, with whatever exit code, or wrote no frame.
        """
        while True:
            frame = self._frame_nowait()
            if frame is not None:
                return frame
            try:
                data = await self._stdout.receive_some(_READ_SIZE_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                data = b""
            if not data:
                raise await self._ended()
            self._buffer += data

    def _frame_nowait(self) -> bytes | None:
        if len(self._buffer) < 4:
            return None
        length = int.from_bytes(self._buffer[:4], "big")
        if length > FRAME_SIZE_BYTES_MAX:
            self.kill()
            raise LocalError(
                f"The child process {self.pid} wrote something that is no frame.",
                f"Its log is {self._log_path}.",
            )
        if len(self._buffer) < 4 + length:
            return None
        frame = bytes(memoryview(self._buffer)[4 : 4 + length])
        del self._buffer[: 4 + length]
        return frame

    def kill(self) -> None:
        """SIGKILL to the child's whole process group; no error if it has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _ended(self) -> LocalError:
        """The error that tells how the child ended; whatever is left of it is killed."""
        if self._process.poll() is None:
            await self.wait_exit(CLOSE_GRACE_S)
        code = self._process.poll()
        self.kill()
        how = "does not answer" if code is None else f"ended with {_exit_name(code)}"
        tail = self.log_tail()
        return LocalError(
            f"The child process {self.pid} {how}."
            + (f" Its last words:\n{tail}\n" if tail else ""),
            f"Its log is {self._log_path}.",
        )

    async def wait_exit(self, timeout_s: float) -> int | None:
        """Its exit code; None if it still runs after `timeout_s`."""
        with trio.move_on_after(timeout_s):
            while self._process.poll() is None:  # noqa: ASYNC110 - a process is not an Event
                await trio.sleep(0.01)
        return self._process.poll()

    def log_tail(self) -> str:
        """The last lines of this child's own log."""
        try:
            with self._log_path.open("rb") as file:
                size = file.seek(0, os.SEEK_END)
                file.seek(max(self._log_start, size - _TAIL_BYTES))
                text = file.read(_TAIL_BYTES).decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(text.strip().splitlines()[-_TAIL_LINES:])

    async def aclose(self) -> None:
        """Hang up, give it `CLOSE_GRACE_S` to end, then kill the group and reap it."""
        with trio.CancelScope(shield=True):
            await self._stdin.aclose()
            await self.wait_exit(CLOSE_GRACE_S)
            self.kill()
            await self.wait_exit(REAP_TIMEOUT_S)
            await self._stdout.aclose()


@asynccontextmanager
async def open_child(
    argv: Sequence[str], *, log_path: Path, env: Mapping[str, str] | None = None
) -> AsyncIterator[Child]:
    """Start a program that calls `take_pipes`.

    Args:
        argv: the program and its arguments; use `sys.executable, "-m", ...`.
        log_path: where its stderr is appended; the folder is created.
        env: added to this process's environment.

    Resources: one process group and two pipes, all gone when the context ends.

    Errors:
        LocalError: the program cannot be started or the log cannot be written.
    """
    child = _start(argv, log_path, {**os.environ, **(env or {})})
    try:
        yield child
    finally:
        await child.aclose()


def _start(argv: Sequence[str], log_path: Path, environment: dict[str, str]) -> Child:
    """Start the process from this thread, on purpose.

    trio starts processes from a worker thread, and Linux delivers the parent-death signal when
    the *thread* that started the child ends: an idle worker thread ends after ten seconds. A
    start takes about a millisecond.
    """
    read_in, write_in = os.pipe()
    read_out, write_out = os.pipe()
    environment[_PARENT_VARIABLE] = str(os.getpid())
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        if log_path.exists() and log_path.stat().st_size > LOG_SIZE_BYTES_MAX:
            log_path.replace(log_path.with_name(log_path.name + ".1"))
        with log_path.open("ab") as log:
            log_start = log.tell()
            process = subprocess.Popen(
                list(argv),
                stdin=read_in,
                stdout=write_out,
                stderr=log,
                env=environment,
                start_new_session=True,
            )
    except OSError as error:
        os.close(write_in)
        os.close(read_out)
        raise LocalError(f"The program {argv[0]} cannot be started: {error}.") from error
    finally:
        os.close(read_in)
        os.close(write_out)
    return Child(
        process,
        trio.lowlevel.FdStream(write_in),
        trio.lowlevel.FdStream(read_out),
        log_path,
        log_start,
    )


def _exit_name(code: int) -> str:
    if code >= 0:
        return f"exit code {code}"
    with contextlib.suppress(ValueError):
        return signal.Signals(-code).name
    return f"signal {-code}"
