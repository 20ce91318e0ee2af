"""Separate hosts on one machine: network namespaces on a bridge, each behind a slow link.

`open_hosts(4, mbit_per_s=20)` gives four hosts with addresses of their own. Whatever is started
with `host.prefix` before its command (`ip netns exec NAME`) lives there: it reaches the others
over the bridge alone, because its loopback is down. Both directions of every link are shaped with
a token bucket. Needs root, `ip` and `tc`; everything is removed when the block ends. A process
left behind keeps its namespace alive, so end the processes first.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

NETWORK = "10.89"
BURST = "64kb"
LATENCY = "400ms"
"""How long a packet may wait in the bucket's queue before it is dropped."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """One namespace."""

    namespace: str
    address: str
    device: str
    """The veth's end inside; its other end hangs on the bridge."""

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
        counts = []
        for name in ("rx_bytes", "tx_bytes"):
            path = f"/sys/class/net/{self.device}/statistics/{name}"
            counts.append(int(_run(*self.prefix, "cat", path).strip()))
        return counts[0], counts[1]

    def connections(self) -> tuple[tuple[str, str], ...]:
        """(own, other) address of every established TCP connection."""
        rows = _run(*self.prefix, "cat", "/proc/net/tcp").splitlines()[1:]
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
        _run("ip", "netns", "add", name)
        _run("ip", "netns", "delete", name)
    except RuntimeError as error:
        return f"namespaces are not permitted here: {error}"
    return ""


@contextlib.contextmanager
def open_hosts(count: int, *, mbit_per_s: float | None = None) -> Iterator[tuple[Host, ...]]:
    """`count` hosts that reach one another over one bridge.

    Args:
        mbit_per_s: rate of each link in each direction; None leaves it unshaped.

    Errors:
        RuntimeError: a command was refused; what had been made is removed.
    """
    # Names of devices have at most 15 characters and belong to the whole machine.
    mark = f"{os.getpid() % 46656:x}"
    net = f"{NETWORK}.{os.getpid() % 250 + 1}"
    bridge = f"e2b{mark}"
    hosts: list[Host] = []
    with contextlib.ExitStack() as undo:
        _run("ip", "link", "add", bridge, "type", "bridge")
        undo.callback(_try, "ip", "link", "delete", bridge)
        _run("ip", "link", "set", bridge, "up")
        for number in range(count):
            outer, inner = f"e2o{mark}-{number}", f"e2i{mark}-{number}"
            host = Host(
                namespace=f"e2n{mark}-{number}", address=f"{net}.{number + 1}", device=inner
            )
            _run("ip", "netns", "add", host.namespace)
            undo.callback(_try, "ip", "netns", "delete", host.namespace)
            _run("ip", "link", "add", outer, "type", "veth", "peer", "name", inner)
            undo.callback(_try, "ip", "link", "delete", outer)
            _run("ip", "link", "set", inner, "netns", host.namespace)
            _run("ip", "link", "set", outer, "master", bridge, "up")
            inside = ("ip", "-n", host.namespace)
            _run(*inside, "address", "add", f"{host.address}/24", "dev", inner)
            _run(*inside, "link", "set", inner, "up")
            if mbit_per_s is not None:
                bucket = ("rate", f"{mbit_per_s}mbit", "burst", BURST, "latency", LATENCY)
                _run("tc", "qdisc", "add", "dev", outer, "root", "tbf", *bucket)
                _run(
                    "tc", "-n", host.namespace, "qdisc", "add", "dev", inner, "root", "tbf", *bucket
                )
            hosts.append(host)
        yield tuple(hosts)


def namespaces_left() -> tuple[str, ...]:
    """Namespaces of this process that still exist."""
    mark = f"e2n{os.getpid() % 46656:x}-"
    folder = Path("/run/netns")
    names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    return tuple(name for name in names if name.startswith(mark))


def _address(field: str) -> str:
    """`0100007F:1F90` as 127.0.0.1."""
    raw = bytes.fromhex(field.partition(":")[0])
    return ".".join(str(byte) for byte in reversed(raw))


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
    return done.stdout


def _try(*command: str) -> None:
    with contextlib.suppress(RuntimeError, subprocess.TimeoutExpired):
        _run(*command)
