"""Hosts behind NATs on one machine: namespaces, a bridge for the Internet, nftables for routers.

`open_nats(public=2, houses=2)` gives hosts with public addresses, and hosts in houses of their own,
each behind a router that masquerades and lets nobody in who was not called. `keeps_ports=False`
makes the routers take a new random port for every connection ("symmetric"). Built on the hosts of
`tests.e2e.hosts` and swept like them. Needs root, `ip`, `nft` and `sysctl`; `why_not` says what is
missing. Used by e2e tests and by `scripts/bench_nat.py`.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass

from tests.e2e import hosts
from tests.e2e.hosts import Host, host_at, open_bridge, plug, run

PUBLIC_NETWORK = "203.0.113"
"""Reserved for documentation, and public as far as the product can tell."""
HOUSE_NETWORK = "10.77"
RULES = """
table ip echo2 {{
  chain leave {{
    type nat hook postrouting priority 100;
    oifname "{outside}" {masquerade}
  }}
  chain forward {{
    type filter hook forward priority 0; policy drop;
    ct state established,related accept
    iifname "{inside}" accept
  }}
  chain arrive {{
    type filter hook input priority 0; policy drop;
    ct state established,related accept
    iifname "{inside}" accept
    iifname "lo" accept
  }}
}}
"""


@dataclass(frozen=True, kw_only=True)
class Nats:
    """What `open_nats` made. `houses[i]` is behind `routers[i]`."""

    public: tuple[Host, ...]
    houses: tuple[Host, ...]
    routers: tuple[Host, ...]


def why_not() -> str:
    """Why this machine cannot have such hosts; empty where it can."""
    if reason := hosts.why_not():
        return reason
    missing = [name for name in ("nft", "sysctl") if shutil.which(name) is None]
    if missing:
        return f"needs {' and '.join(missing)}"
    name = f"e2probe{os.getpid()}"
    try:
        run("ip", "netns", "add", name)
        try:
            _nft(name, RULES.format(outside="a", inside="b", masquerade="masquerade"))
        finally:
            run("ip", "netns", "delete", name)
    except RuntimeError as error:
        return f"nftables is not permitted here: {error}"
    return ""


@contextlib.contextmanager
def open_nats(*, public: int, houses: int, keeps_ports: bool = True) -> Iterator[Nats]:
    """Hosts with public addresses, and hosts behind routers.

    Errors:
        RuntimeError: a command was refused; what had been made is removed.
    """
    masquerade = "masquerade" if keeps_ports else "masquerade fully-random"
    with contextlib.ExitStack() as undo:
        bridge = open_bridge(undo)
        outside = []
        for number in range(public + houses):
            host = host_at(number, f"{PUBLIC_NETWORK}.{number + 10}")
            outside.append(plug(undo, host, "master", bridge))
            run("ip", "-n", host.namespace, "link", "set", "lo", "up")
        routers, homes = tuple(outside[public:]), []
        for number, router in enumerate(routers):
            home = _house(undo, public + houses + number, router, number)
            rules = RULES.format(outside=router.device, inside=home.outer, masquerade=masquerade)
            _nft(router.namespace, rules)
            homes.append(home)
        yield Nats(public=tuple(outside[:public]), houses=tuple(homes), routers=routers)


def _house(undo: contextlib.ExitStack, number: int, router: Host, house: int) -> Host:
    """A host behind `router`, whose inner device is the host's `outer`."""
    network = f"{HOUSE_NETWORK}.{house + 1}"
    home = plug(undo, host_at(number, f"{network}.2"), "netns", router.namespace)
    inside = ("ip", "-n", router.namespace)
    run(*inside, "address", "add", f"{network}.1/24", "dev", home.outer)
    run("ip", "-n", home.namespace, "link", "set", "lo", "up")
    run("ip", "-n", home.namespace, "route", "add", "default", "via", f"{network}.1")
    run(*router.prefix, "sysctl", "-qw", "net.ipv4.ip_forward=1")
    return home


def _nft(namespace: str, rules: str) -> None:
    done = subprocess.run(
        ("ip", "netns", "exec", namespace, "nft", "-f", "-"),
        input=rules,
        capture_output=True,
        text=True,
        timeout=20,
    )
    if done.returncode != 0:
        raise RuntimeError(f"nft: {done.stderr.strip() or done.returncode}")
