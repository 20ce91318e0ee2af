"""Frames, and what happens when one end goes away."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import trio

from echo2_mesh import child as child_module
from echo2_mesh.child import open_child
from echo2_mesh.errors import LocalError

ECHO = """
from echo2_mesh.child import take_pipes
pipe = take_pipes()
print("a library that prints")
while (frame := pipe.read()) is not None:
    pipe.write(frame[::-1])
"""


def program(body: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(body)]


async def test_frames_come_back_whole_whatever_their_size(tmp_path: Path) -> None:
    async with open_child(program(ECHO), log_path=tmp_path / "log") as child:
        for size in (0, 1, 70_000, 1_000_000):
            data = os.urandom(size)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(child.send, data)
                with trio.fail_after(20):
                    assert await child.receive() == data[::-1]
    assert "a library that prints" in (tmp_path / "log").read_text()


async def test_a_cancelled_receive_loses_no_bytes(tmp_path: Path) -> None:
    async with open_child(program(ECHO), log_path=tmp_path / "log") as child:
        with trio.move_on_after(0.02):
            await child.receive()
        await child.send(b"abc")
        assert await child.receive() == b"cba"


async def test_a_child_that_ends_says_its_exit_code_and_last_words(tmp_path: Path) -> None:
    dying = "import sys; sys.stderr.write('no such model\\n'); sys.exit(0)"
    async with open_child(program(dying), log_path=tmp_path / "log") as child:
        with pytest.raises(LocalError, match=r"exit code 0[^$]*no such model"):
            await child.receive()


async def test_a_killed_child_is_an_error_at_once(tmp_path: Path) -> None:
    async with open_child(program(ECHO), log_path=tmp_path / "log") as child:
        os.kill(child.pid, signal.SIGKILL)
        with trio.fail_after(5), pytest.raises(LocalError, match="SIGKILL"):
            await child.receive()
        with pytest.raises(LocalError):
            await child.send(b"x")


async def test_leaving_the_context_ends_a_child_that_will_not_listen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child_module, "CLOSE_GRACE_S", 0.1)
    async with open_child(
        program("import time; time.sleep(600)"), log_path=tmp_path / "l"
    ) as child:
        pid = child.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_program_that_does_not_exist_is_a_local_error(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="cannot be started"):
        async with open_child(["/nonexistent/program"], log_path=tmp_path / "log"):
            pass


async def test_bytes_that_are_no_frame_are_an_error(tmp_path: Path) -> None:
    shouting = (
        "import sys, time; sys.stdout.buffer.write(b'\\xff' * 8); sys.stdout.flush(); time.sleep(9)"
    )
    async with open_child(program(shouting), log_path=tmp_path / "log") as child:
        with pytest.raises(LocalError, match="no frame"):
            await child.receive()


def test_a_child_ends_when_its_parent_is_killed(tmp_path: Path) -> None:
    parent_code = f"""
    import pathlib, sys, trio
    from echo2_mesh.child import open_child
    busy = "import time, echo2_mesh.child as c; c.take_pipes().write(b''); time.sleep(99)"
    log_path = pathlib.Path({str(tmp_path)!r}) / "log"
    async def main():
        async with open_child([sys.executable, "-c", busy], log_path=log_path) as child:
            await child.receive()
            print(child.pid, flush=True)
            await trio.sleep_forever()
    trio.run(main)
    """
    parent = subprocess.Popen(program(parent_code), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()

    async def gone() -> None:
        with trio.fail_after(10):
            while _alive(pid):
                await trio.sleep(0.02)

    trio.run(gone)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
