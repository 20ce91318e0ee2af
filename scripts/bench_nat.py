#!/usr/bin/env python3
"""Do two actors behind two NATs reach each other, how fast, and what if they cannot be punched?

Namespaces for hosts, nftables for routers (`tests/e2e/nat_hosts.py`): a public learner, further
public nodes that serve as relays, and two actors in houses of their own. Twice: with routers that
keep ports, where a direct bulk connection is the bar, `--trials` times; and with routers that take
a random port for each connection ("symmetric"), where the relay must carry, the reason be said, and
a killed relay be replaced. The speed of the relay is measured in the same run: the direct way is
compared with it. Needs root and nft; says so and skips elsewhere. Progress on standard error, one
JSON object as the last line of standard output; exits 0 whether or not a bar is met.

  scripts/bench_nat.py [--trials 5] [--size-mb 64] [--relay-size-mb 8]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("ECHO2_VENV") or ROOT / ".venv") / "bin" / "python"
if Path(sys.prefix) != PYTHON.parents[1] and PYTHON.exists():
    os.execv(PYTHON, [str(PYTHON), *sys.argv])
sys.path.insert(0, str(ROOT))

from tests.e2e.nat_hosts import Nats, open_nats, why_not  # noqa: E402
from tests.e2e.nat_kit import NatNode, carrying, open_node  # noqa: E402

BLOB_BYTES = 1 << 20
DIRECT_BAR_S = 10.0
RELAY_FACTOR_BAR = 10.0
PATIENCE_S = 90.0
RECOVER_BAR_S = 30.0


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def bar(name: str, value: float, unit: str, limit: float, ok: bool) -> dict[str, Any]:
    return {"name": name, "value": round(value, 3), "unit": unit, "bar": limit, "ok": bool(ok)}


@contextlib.contextmanager
def homes(nats: Nats, folder: Path, know: tuple[str, ...]) -> Iterator[tuple[NatNode, NatNode]]:
    """The two actors, both up and connected to the learner."""
    with (
        open_node("a", nats.houses[0], folder, know=know) as a,
        open_node("b", nats.houses[1], folder, know=know) as b,
    ):
        for node in (a, b):
            node.until(lambda s: s["ways"].get("learner") == "direct", "learner", PATIENCE_S)
        yield a, b


def fetch_mb_per_s(asker: NatNode, holder: NatNode, size_bytes: int) -> float:
    made = holder.ask("make", size_bytes=BLOB_BYTES, count=max(1, size_bytes // BLOB_BYTES))
    got = asker.ask("fetch", node=holder.node, timeout_s=PATIENCE_S, **made)
    if "seconds" not in got:
        say(f"  fetch: {got}")
        return 0.0
    return float(len(made["digests"]) * BLOB_BYTES / got["seconds"] / 1e6)


def until_direct_s(a: NatNode, b: NatNode) -> float:
    """From here to the first blob over a lane that no relay carries; infinite if there is none."""
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < PATIENCE_S:
        if a.state()["ways"].get("b") is not None:
            made = b.ask("make", size_bytes=BLOB_BYTES)
            got = a.ask("fetch", node=b.node, timeout_s=20.0, **made)
            if "seconds" in got and a.state()["lanes"].get("b"):
                return time.monotonic() - begun_s
        time.sleep(0.2)
    say(f"  no lane: {a.state()}")
    return float("inf")


def keeping_ports(trials: int, size_bytes: int) -> tuple[list[float], list[float], list[str]]:
    """(seconds to direct bulk, MB/s of it, how) of each trial; every trial has fresh actors."""
    seconds, rates, ways = [], [], []
    with (
        tempfile.TemporaryDirectory() as name,
        open_nats(public=2, houses=2) as nats,
        open_node("learner", nats.public[0], Path(name)) as learner,
        open_node("third", nats.public[1], Path(name), know=learner.addresses),
    ):
        for trial in range(trials):
            with homes(nats, Path(name) / str(trial), learner.addresses) as (a, b):
                seconds.append(until_direct_s(a, b))
                rates.append(fetch_mb_per_s(a, b, size_bytes))
                ways.append(a.state()["lanes"].get("b", "none"))
                say(f"  trial {trial}: {seconds[-1]:.1f} s, {rates[-1]:.0f} MB/s, {ways[-1]}")
    return seconds, rates, ways


def changing_ports(size_bytes: int) -> dict[str, Any]:
    """What the relay carries, what is said about it, and how long a killed relay is missed."""
    with (
        tempfile.TemporaryDirectory() as name,
        open_nats(public=3, houses=2, keeps_ports=False) as nats,
        open_node("learner", nats.public[0], Path(name), relay=False) as learner,
        open_node("third", nats.public[1], Path(name), know=learner.addresses) as third,
        open_node("fourth", nats.public[2], Path(name), know=learner.addresses) as fourth,
        homes(nats, Path(name), learner.addresses) as (a, b),
    ):
        a.until(lambda s: s["ways"].get("b") == "relayed", "relayed connection", PATIENCE_S)
        # The tries are over first: the rate is that of a relay which nothing else disturbs.
        tried_s = time.monotonic()
        while not any("punching failed" in n.state()["reason"] for n in (a, b)):
            if time.monotonic() - tried_s > PATIENCE_S:
                break
            time.sleep(0.5)
        fetch_mb_per_s(a, b, BLOB_BYTES)  # tries for a lane, in vain
        rate = fetch_mb_per_s(a, b, size_bytes)
        states = {node.name: node.state() for node in (a, b)}
        say(f"  relay: {rate:.1f} MB/s; a: {states['a']['reason']}; b: {states['b']['reason']}")
        (carrier, *_) = carrying((third, fourth))
        other = third if carrier is fourth else fourth
        carrier.kill()
        begun_s = time.monotonic()
        recovered_s = float("inf")
        while time.monotonic() - begun_s < PATIENCE_S:
            if "seconds" in a.ask("ask", node=b.node, timeout_s=5.0) and carrying((other,)):
                recovered_s = time.monotonic() - begun_s
                break
            time.sleep(0.2)
        return {
            "rate": rate,
            "relayed": all(s["reach"] == "relayed" for s in states.values()),
            "said": any("punching failed" in s["reason"] for s in states.values()),
            "recovered_s": recovered_s,
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--size-mb", type=int, default=64, help="over the direct way")
    parser.add_argument("--relay-size-mb", type=int, default=8, help="over the relay")
    options = parser.parse_args()
    if reason := why_not():
        say(f"skipped: {reason}")
        sys.stdout.write(json.dumps({"bench": "nat", "skipped": reason, "bars": []}) + "\n")
        return
    say("routers that keep ports")
    seconds, rates, ways = keeping_ports(options.trials, options.size_mb << 20)
    say("routers that change ports")
    relay = changing_ports(options.relay_size_mb << 20)
    worst_s = max(seconds, default=float("inf"))
    direct = sum(way != "none" and s <= DIRECT_BAR_S for way, s in zip(ways, seconds, strict=True))
    slowest = min(rates, default=0.0)
    # A relay that carried nothing is no relay that direct bulk was faster than.
    factor = slowest / relay["rate"] if relay["rate"] else 0.0
    bars = [
        bar("direct_bulk_within_10_s", direct, "trials", options.trials, direct == options.trials),
        bar("direct_bulk_worst", min(worst_s, 1e9), "s", DIRECT_BAR_S, worst_s <= DIRECT_BAR_S),
        bar("direct_over_relay", factor, "x", RELAY_FACTOR_BAR, factor >= RELAY_FACTOR_BAR),
        bar("symmetric_relay_rate", relay["rate"], "MB/s", 0.0, relay["rate"] > 0.0),
        bar("symmetric_is_relayed", relay["relayed"], "bool", 1, relay["relayed"]),
        bar("symmetric_says_so", relay["said"], "bool", 1, relay["said"]),
        bar(
            "relay_killed_recovers", min(relay["recovered_s"], 1e9), "s", RECOVER_BAR_S,
            relay["recovered_s"] <= RECOVER_BAR_S,
        ),
    ]  # fmt: skip
    extra = {"seconds": seconds, "mb_per_s": rates, "ways": ways}
    sys.stdout.write(json.dumps({"bench": "nat", "bars": bars, **extra}) + "\n")


if __name__ == "__main__":
    main()
