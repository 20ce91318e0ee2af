"""Separate hosts on one machine: network namespaces on a bridge, each behind a slow link.

`open_hosts(4, mbit_per_s=20)` gives four hosts with addresses of their own. Whatever is started
with `host.prefix` before its command (`ip netns exec NAME`) lives there: it reaches the others
over the bridge alone, because its loopback is down. Both directions of every link are shaped with
a token bucket; `links` gives each host rates of its own, and `host.shape` changes them later.
Needs root, `ip` and `tc`; everything is removed when the block ends, and what a killed process
left is removed by the next one. A process left behind keeps its namespace alive, so end the
processes first. Used by e2e tests and by `scripts/bench_forest.py`; `nat_hosts` builds on
`open_bridge`, `host_at` and `plug`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

NETWORK = "10.89"
BURST = "64kb"
NAMESPACES = Path("/run/netns")
_CLONE_NEWNET = 0x40000000
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True)
class Link:
    """Rates of one host's link, in Mbit/s of Ethernet frames."""

    up_mbit_per_s: float
    down_mbit_per_s: float
    queue_ms: float = 400.0
    """How long a packet may wait in the bucket's queue before it is dropped."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One namespace."""

    namespace: str
    address: str
    device: str
    """The veth's end inside."""
    outer: str
    """The veth's end that hangs on the bridge."""

    @property
    def prefix(self) -> tuple[str, ...]:
        """Goes before a command that shall run on this host."""
        return ("ip", "netns", "exec", self.namespace)

    @property
    def listen(self) -> str:
        """A multiaddress with a port of the system's choice."""
        return f"/ip4/{self.address}/tcp/0"

    def bytes_moved(self) -> tuple[int, int]:
        """(received, sent) over its link, from inside."""
        folder = f"/sys/class/net/{self.device}/statistics"
        counts = run(*self.prefix, "cat", f"{folder}/rx_bytes", f"{folder}/tx_bytes").split()
        return int(counts[0]), int(counts[1])

    def shape(self, link: Link) -> None:
        """Give the link these rates from now on."""
        inside = ("tc", "-n", self.namespace)
        for command, device, rate in (
            (inside, self.device, link.up_mbit_per_s),
            (("tc",), self.outer, link.down_mbit_per_s),
        ):
            run(
                *command, "qdisc", "replace", "dev", device, "root", "tbf",
                "rate", f"{rate * 1000:.0f}kbit", "burst", BURST, "latency", f"{link.queue_ms:g}ms",
            )  # fmt: skip

    def cut(self) -> None:
        """Pull the plug: nothing comes or goes any more, and nobody is told."""
        run("ip", "link", "set", self.outer, "down")

    def mend(self) -> None:
        """Put the plug back."""
        run("ip", "link", "set", self.outer, "up")

    def inside(self, call: Callable[[], Result]) -> Result:
        """`call()` made on this host: a socket it opens belongs here for as long as it lives."""
        found: list[Result] = []
        failed: list[BaseException] = []

        def enter() -> None:
            try:
                with (NAMESPACES / self.namespace).open("rb") as file:
                    library = ctypes.CDLL(None, use_errno=True)
                    if library.setns(file.fileno(), _CLONE_NEWNET) != 0:
                        raise OSError(ctypes.get_errno(), f"setns {self.namespace}")
                found.append(call())
            except BaseException as error:
                failed.append(error)

        # Only the thread moves, and it ends here.
        thread = threading.Thread(target=enter, daemon=True)
        thread.start()
        thread.join()
        if failed:
            raise failed[0]
        return found[0]

    def connections(self) -> tuple[tuple[str, str], ...]:
        """(own, other) address of every established TCP connection."""
        rows = run(*self.prefix, "cat", "/proc/net/tcp").splitlines()[1:]
        found = [row.split() for row in rows]
        return tuple((_address(row[1]), _address(row[2])) for row in found if row[3] == "01")


def why_not() -> str:
    """Why this machine cannot have such hosts; empty where it can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [name for name in ("ip", "tc") if shutil.which(name) is None]
    if missing:
        return f"needs {' and '.join(missing)} (iproute2)"
    name = f"e2probe{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        run("ip", "netns", "delete", name)
    except RuntimeError as error:
        return f"namespaces are not permitted here: {error}"
    return ""


@contextlib.contextmanager
def open_hosts(
    count: int, *, mbit_per_s: float | None = None, links: Sequence[Link] = ()
) -> Iterator[tuple[Host, ...]]:
    """`count` hosts that reach one another over one bridge.

    Args:
        mbit_per_s: rate of each link in each direction; None leaves it unshaped.
        links: rates of each host, in place of `mbit_per_s`.

    Errors:
        RuntimeError: a command was refused; what had been made is removed.
    """
    assert not links or len(links) == count
    net = f"{NETWORK}.{os.getpid() % 250 + 1}"
    hosts: list[Host] = []
    with contextlib.ExitStack() as undo:
        bridge = open_bridge(undo)
        for number in range(count):
            host = plug(undo, host_at(number, f"{net}.{number + 1}"), "master", bridge)
            # A burst of forty packets would fill the queue of a slow link, or be dropped whole.
            run("ip", "-n", host.namespace, "link", "set", host.device, "gso_max_segs", "4")
            if links:
                host.shape(links[number])
            elif mbit_per_s is not None:
                host.shape(Link(up_mbit_per_s=mbit_per_s, down_mbit_per_s=mbit_per_s))
            hosts.append(host)
        yield tuple(hosts)


def open_bridge(undo: contextlib.ExitStack) -> str:
    """This process's bridge, removed by `undo`; what killed processes left is swept first."""
    sweep_hosts()
    bridge = f"e2b{_mark()}"
    run("ip", "link", "add", bridge, "type", "bridge")
    undo.callback(attempt, "ip", "link", "delete", bridge)
    run("ip", "link", "set", bridge, "up")
    return bridge


def host_at(number: int, address: str) -> Host:
    """The names of this process's host `number`, which does not exist yet."""
    mark = _mark()
    return Host(
        namespace=f"e2n{mark}-{number}",
        address=address,
        device=f"e2i{mark}-{number}",
        outer=f"e2o{mark}-{number}",
    )


def plug(undo: contextlib.ExitStack, host: Host, *where: str) -> Host:
    """Make `host` and its link (of a /24), removed by `undo`; its loopback stays down.

    Args:
        where: what `ip link set` does with the outer end: ("master", bridge) or ("netns", name).
    """
    run("ip", "netns", "add", host.namespace)
    undo.callback(attempt, "ip", "netns", "delete", host.namespace)
    run("ip", "link", "add", host.outer, "type", "veth", "peer", "name", host.device)
    undo.callback(attempt, "ip", "link", "delete", host.outer)
    run("ip", "link", "set", host.device, "netns", host.namespace)
    run("ip", "link", "set", host.outer, *where, "up")
    inside = ("ip", "-n", host.namespace)
    run(*inside, "address", "add", f"{host.address}/24", "dev", host.device)
    run(*inside, "link", "set", host.device, "up")
    return host


def sweep_hosts() -> None:
    """Remove hosts whose process was killed before it could."""
    for name in _names(re.compile(r"e2n([0-9a-f]+)-\d+")):
        mark = name[3:].partition("-")[0]
        if not Path(f"/proc/{int(mark, 16)}").exists():
            attempt("ip", "netns", "delete", name)
            attempt("ip", "link", "delete", f"e2b{mark}")


def namespaces_left() -> tuple[str, ...]:
    """Namespaces of this process that still exist."""
    return _names(re.compile(rf"e2n{os.getpid():x}-\d+"))


def _names(pattern: re.Pattern[str]) -> tuple[str, ...]:
    names = sorted(path.name for path in NAMESPACES.iterdir()) if NAMESPACES.is_dir() else []
    return tuple(name for name in names if pattern.fullmatch(name))


def _mark() -> str:
    """Names of devices have at most 15 characters and belong to the whole machine."""
    return f"{os.getpid():x}"


def _address(field: str) -> str:
    """`0100007F:1F90` as 127.0.0.1."""
    raw = bytes.fromhex(field.partition(":")[0])
    return ".".join(str(byte) for byte in reversed(raw))


def run(*command: str) -> str:
    """What it wrote.

    Raises:
        RuntimeError: it was refused.
    """
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def attempt(*command: str) -> None:
    """Run it; a refusal does not matter."""
    with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
        run(*command)
