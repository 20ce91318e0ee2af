"""A learner and actors of the weight plane on hosts of their own, and what their links allow.

`open_forest(hosts, folder)` starts one `forest_node` on each of `hosts`, the learner on the first;
a `Forest` publishes versions, waits for them, disturbs nodes and asks what they counted.
`plain_goodput` measures what one plain TCP stream gets over the same links. Used by `test_forest`
and by `scripts/bench_forest.py`.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from tests.e2e.hosts import Host

ROOT = Path(__file__).resolve().parents[2]
START_TIMEOUT_S = 120.0
REPORT_TIMEOUT_S = 30.0
END_TIMEOUT_S = 15.0
STREAM_TIMEOUT_S = 60.0
LEARNER = "learner"
Event = dict[str, Any]
Caps = dict[str, dict[str, Any]]


class ForestNode:
    """One `forest_node` process. Its events are kept in the order in which they came."""

    def __init__(
        self,
        name: str,
        host: Host,
        folder: Path,
        *,
        know: Sequence[str],
        changed: threading.Condition,
        bulk: dict[str, Any],
    ) -> None:
        self.name, self.host = name, host
        self.folder = folder / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.events: list[Event] = []
        self._changed = changed
        self._numbers = itertools.count()
        settings = {
            "name": name,
            "folder": str(self.folder),
            "listen": [host.listen],
            "know": list(know),
            "bulk": bulk,
        }
        command = [sys.executable, "-m", "tests.e2e.forest_node", json.dumps(settings)]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [*host.prefix, *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            with self._changed:
                self.events.append(json.loads(line))
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def tell(self, do: str, **fields: Any) -> None:
        """One command; a node that has died does not hear it."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            self.process.stdin.flush()

    def find(self, event: str, **match: Any) -> Event | None:
        """The last event of this kind with these fields."""
        for found in reversed(self.events):
            if found["event"] == event and all(found.get(k) == v for k, v in match.items()):
                return found
        return None

    def wait(self, event: str, *, timeout_s: float, **match: Any) -> Event:
        """That event, now or later.

        Raises:
            RuntimeError: it has not come in time, or the process has ended.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while (found := self.find(event, **match)) is None:
                left_s = deadline_s - time.monotonic()
                if self.process.poll() is not None or not self._changed.wait(max(0.0, left_s)):
                    raise RuntimeError(f"{self.name}: no {event} {match}\n{self.last_words()}")
            return found

    def report(self) -> Event:
        """What it has counted since it started."""
        return self._ask("report", "report")

    def verify(self) -> tuple[int, int]:
        """(damaged, sound) blobs in its store, each hashed anew."""
        found = self._ask("verify", "verified")
        return found["bad"], found["good"]

    def _ask(self, command: str, answer: str) -> Event:
        number = next(self._numbers)
        self.tell(command, number=number)
        return self.wait(answer, number=number, timeout_s=REPORT_TIMEOUT_S)

    def last_words(self) -> str:
        lines = (self.folder / "log").read_text(errors="replace").splitlines()
        return "\n".join(lines[-25:])

    def kill(self) -> None:
        """SIGKILL; its sockets are closed by the kernel."""
        self.process.kill()
        self._gone()

    def end(self) -> None:
        """Let it leave, or end it."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(END_TIMEOUT_S)
        self.kill()

    def _gone(self) -> None:
        """Wait for its end and close its pipes."""
        self.process.wait(END_TIMEOUT_S)
        self._reader.join(END_TIMEOUT_S)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()


class Forest:
    """Nodes by name; `learner` on the first host, `actor-1`, `actor-2`, ... on the others."""

    def __init__(self, hosts: Sequence[Host], folder: Path, caps: Caps) -> None:
        self.hosts = {f"actor-{n}" if n else LEARNER: host for n, host in enumerate(hosts)}
        self.nodes: dict[str, ForestNode] = {}
        self.version = 0
        self._folder = folder
        self.caps = caps
        self._changed = threading.Condition()
        self._know: tuple[str, ...] = ()

    @property
    def actors(self) -> dict[str, ForestNode]:
        return {name: node for name, node in self.nodes.items() if name != LEARNER}

    def start(self, *names: str) -> None:
        """Start nodes, the learner before any other; returns when each says that it is up."""
        for name in names:
            self.nodes[name] = ForestNode(
                name,
                self.hosts[name],
                self._folder,
                know=self._know,
                changed=self._changed,
                bulk=self.caps.get(name, {}),
            )
            if name == LEARNER:
                up = self.nodes[name].wait("up", timeout_s=START_TIMEOUT_S)
                self._know = tuple(up["addresses"])
        for name in names:
            self.nodes[name].wait("up", timeout_s=START_TIMEOUT_S)

    def wait_acquainted(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until every node has heard of every other: planning starts from equal knowledge."""
        deadline_s = time.monotonic() + timeout_s
        waiting = dict(self.nodes)
        while waiting:
            for name, node in tuple(waiting.items()):
                if set(self.nodes) - {name} <= set(node.report()["members"]):
                    del waiting[name]
            if waiting and time.monotonic() > deadline_s:
                raise RuntimeError(f"not everybody knows everybody: {sorted(waiting)}")
            time.sleep(0.2 if waiting else 0.0)

    def publish(self, *, chunks: int, chunk_bytes: int) -> Event:
        """The learner announces the next version; the moment before it said so."""
        self.version += 1
        self.nodes[LEARNER].tell(
            "publish", version=self.version, chunks=chunks, chunk_bytes=chunk_bytes
        )
        return self.nodes[LEARNER].wait(
            "publishing", version=self.version, timeout_s=REPORT_TIMEOUT_S
        )

    def wait_ready(self, names: Sequence[str], *, timeout_s: float) -> dict[str, float]:
        """When each of `names` had the newest version; those that never had it are left out."""
        deadline_s = time.monotonic() + timeout_s
        found = {}
        for name in names:
            with contextlib.suppress(RuntimeError):
                left_s = max(0.0, deadline_s - time.monotonic())
                ready = self.nodes[name].wait("ready", version=self.version, timeout_s=left_s)
                found[name] = ready["at_s"]
        return found

    def kill(self, name: str) -> None:
        self.nodes.pop(name).kill()

    def end(self, *names: str) -> None:
        """End these nodes, or all."""
        chosen = names or tuple(self.nodes)
        threads = [threading.Thread(target=self.nodes.pop(name).end) for name in chosen]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def open_forest(
    hosts: Sequence[Host], folder: Path, *, caps: Caps | None = None
) -> Iterator[Forest]:
    """Nothing runs yet; whatever is started ends with the block.

    Args:
        caps: `BulkSettings` fields of the nodes named: what they know of their own links.
    """
    forest = Forest(hosts, folder, caps or {})
    try:
        yield forest
    finally:
        forest.end()


def plain_goodput(source: Host, target: Host, *, size_bytes: int) -> float:
    """Bytes per second of one plain TCP stream of `size_bytes`, from connecting to the last byte.

    Raises:
        OSError: no connection, or nothing for `STREAM_TIMEOUT_S`.
    """
    server = target.inside(lambda: socket.create_server((target.address, 0)))
    with server:
        server.settimeout(STREAM_TIMEOUT_S)
        client = source.inside(socket.socket)
        client.settimeout(STREAM_TIMEOUT_S)
        sender = threading.Thread(
            target=_send, args=(client, server.getsockname(), size_bytes), daemon=True
        )
        began_s = time.monotonic()
        sender.start()
        stream, _ = server.accept()
        with stream:
            stream.settimeout(STREAM_TIMEOUT_S)
            buffer, left = bytearray(1 << 16), size_bytes
            while left > 0 and (count := stream.recv_into(buffer)):
                left -= count
        took_s = time.monotonic() - began_s
        sender.join()
    if left > 0:
        raise OSError(f"the stream ended {left} bytes early")
    return size_bytes / took_s


def _send(client: socket.socket, address: tuple[str, int], size_bytes: int) -> None:
    with client, contextlib.suppress(OSError):
        client.connect(address)
        block = bytes(1 << 16)
        left = size_bytes
        while left > 0:
            left -= client.send(block[: min(left, len(block))])


def at_once(calls: Sequence[Callable[[], float]]) -> list[float]:
    """The results of `calls`, made side by side; all have ended when an error of one is raised."""
    with ThreadPoolExecutor(max(1, len(calls))) as pool:
        made = [pool.submit(call) for call in calls]
    return [each.result() for each in made]
