"""Mesh nodes in namespaces with NATs, and how to talk to them.

`open_node(name, host, folder, know=...)` starts one `nat_node`; `ask` puts a command to it. Used by
`test_nat` and by `scripts/bench_nat.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from tests.e2e.hosts import Host

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
ANSWER_TIMEOUT_S = 60.0
END_TIMEOUT_S = 15.0
Answer = dict[str, Any]


class NodeFailed(AssertionError):
    """A node said nothing, or did not come to the state that was waited for, in time."""


class NatNode:
    """One `nat_node` process. Several start side by side: nothing waits until it is asked."""

    def __init__(
        self,
        name: str,
        host: Host,
        folder: Path,
        *,
        know: tuple[str, ...],
        listen: bool = True,
        relay: bool = True,
    ) -> None:
        self.name, self.host = name, host
        self.folder = folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self._answers: list[Answer] = []
        self._ended = False
        self._changed = threading.Condition()
        settings = {
            "name": name,
            "folder": str(self.folder),
            "listen": [host.listen] if listen else [],
            "know": list(know),
            "mesh": {"relay": relay},
        }
        self._log = (self.folder / "stderr.log").open("wb")
        self._process = subprocess.Popen(
            [*host.prefix, sys.executable, "-m", "tests.e2e.nat_node", json.dumps(settings)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        threading.Thread(target=self._read, daemon=True).start()
        self._first: Answer | None = None

    @property
    def node(self) -> str:
        """Its id; waits until it is up."""
        return str(self._up()["node"])

    @property
    def addresses(self) -> tuple[str, ...]:
        """Where it listens, each with /p2p/<node>; waits until it is up."""
        return tuple(self._up()["addresses"])

    def _up(self) -> Answer:
        if self._first is None:
            self._first = self._take(START_TIMEOUT_S)
        return self._first

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._answers.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def _take(self, timeout_s: float) -> Answer:
        with self._changed:
            self._changed.wait_for(lambda: self._answers or self._ended, timeout_s)
            if not self._answers:
                words = (self.folder / "stderr.log").read_text(errors="replace")[-2000:]
                raise NodeFailed(f"{self.name} says nothing: {words}")
            return self._answers.pop(0)

    def ask(self, do: str, *, timeout_s: float = ANSWER_TIMEOUT_S, **fields: Any) -> Answer:
        """Put one command and wait for its answer.

        Raises:
            NodeFailed: there is none in time.
            OSError: the process has ended.
        """
        self._up()
        assert self._process.stdin is not None
        line = json.dumps({"do": do, "timeout_s": timeout_s, **fields}) + "\n"
        self._process.stdin.write(line.encode())
        self._process.stdin.flush()
        return self._take(timeout_s + 5.0)

    def state(self) -> Answer:
        """What it knows of its own reach."""
        return self.ask("state", timeout_s=20.0)

    def until(self, true: Callable[[Answer], bool], what: str, timeout_s: float) -> Answer:
        """Wait for a state, and return it. Its start does not count.

        Raises:
            NodeFailed: it does not come to it in time.
            OSError: the process has ended.
        """
        self._up()
        begun_s = time.monotonic()
        while True:
            state = self.state()
            if true(state):
                return state
            if time.monotonic() - begun_s > timeout_s:
                raise NodeFailed(f"{self.name}: no {what} in {timeout_s:g} s: {state}")
            time.sleep(0.1)

    def kill(self) -> None:
        """End it without a word."""
        self._process.kill()
        self._process.wait()

    def close(self) -> None:
        """Let it leave; kill it if it does not."""
        with contextlib.suppress(OSError):
            assert self._process.stdin is not None
            self._process.stdin.close()
        try:
            self._process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        self._log.close()


def carrying(relays: Iterable[NatNode]) -> list[NatNode]:
    """Those that have carried a circuit."""
    return [node for node in relays if node.state()["counters"].get("relay_circuits", 0)]


@contextlib.contextmanager
def open_node(
    name: str,
    host: Host,
    folder: Path,
    *,
    know: tuple[str, ...] = (),
    listen: bool = True,
    relay: bool = True,
) -> Iterator[NatNode]:
    """A node for the length of the block; it may not be up yet."""
    node = NatNode(name, host, folder, know=know, listen=listen, relay=relay)
    try:
        yield node
    finally:
        node.close()
