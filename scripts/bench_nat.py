#!/usr/bin/env python3
"""Do two actors behind two NATs reach each other, how fast, and what if they cannot be punched?

Namespaces for hosts, nftables for routers (`tests/e2e/nat_hosts.py`): a public learner, further
public nodes that serve as relays, and two actors in houses of their own. Twice: with routers that
keep ports, where a direct bulk connection is the bar, `--trials` times; and with routers that take
a random port for each connection ("symmetric"), where the relay must carry, the reason be said, and
a killed relay be replaced. The speed of the relay is measured in the same run: the direct way is
compared with it. What does not happen in time is null, and its bar is not met. Needs root and nft;
says so and skips elsewhere. Progress on standard error, one JSON object as the last line of
standard output; exits 0 whether or not a bar is met.

  scripts/bench_nat.py [--trials 5] [--size-mb 64] [--relay-size-mb 8]
"""

from __future__ import annotations

import argparse
import contextlib
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

from bars import at_least, at_most, emit, ratio  # noqa: E402

from tests.e2e.nat_hosts import Nats, open_nats, why_not  # noqa: E402
from tests.e2e.nat_kit import NatNode, NodeFailed, carrying, open_node  # noqa: E402

BLOB_BYTES = 1 << 20
DIRECT_BAR_S = 10.0
RELAY_FACTOR_BAR = 10.0
PATIENCE_S = 90.0
RECOVER_BAR_S = 30.0


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


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


def fetch_mb_per_s(asker: NatNode, holder: NatNode, size_bytes: int) -> float | None:
    """MB/s of `size_bytes` in blobs; None where they do not come."""
    made = holder.ask("make", size_bytes=BLOB_BYTES, count=max(1, size_bytes // BLOB_BYTES))
    got = asker.ask("fetch", node=holder.node, timeout_s=PATIENCE_S, **made)
    if "seconds" not in got:
        say(f"  fetch: {got}")
        return None
    return float(len(made["digests"]) * BLOB_BYTES / got["seconds"] / 1e6)


def until_direct_s(a: NatNode, b: NatNode) -> float | None:
    """From here to the first blob over a lane that no relay carries; None if there is none."""
    begun_s = time.monotonic()
    while time.monotonic() - begun_s < PATIENCE_S:
        if a.state()["ways"].get("b") is not None:
            made = b.ask("make", size_bytes=BLOB_BYTES)
            got = a.ask("fetch", node=b.node, timeout_s=20.0, **made)
            if "seconds" in got and a.state()["lanes"].get("b"):
                return time.monotonic() - begun_s
        time.sleep(0.2)
    say(f"  no lane: {a.state()}")
    return None


Trial = tuple[float | None, float | None, str]
NOTHING: Trial = (None, None, "none")


def keeping_ports(trials: int, size_bytes: int) -> list[Trial]:
    """(seconds to direct bulk, MB/s of it, how) of each trial; every trial has fresh actors."""
    found: list[Trial] = []
    try:
        public_trials(trials, size_bytes, found)
    except (NodeFailed, OSError) as error:
        say(f"  {error}")
    return found + [NOTHING] * (trials - len(found))


def public_trials(trials: int, size_bytes: int, found: list[Trial]) -> None:
    """As `keeping_ports`: adds trials to `found`, as far as the public nodes live."""
    with (
        tempfile.TemporaryDirectory() as name,
        open_nats(public=2, houses=2) as nats,
        open_node("learner", nats.public[0], Path(name)) as learner,
        open_node("third", nats.public[1], Path(name), know=learner.addresses),
    ):
        for trial in range(trials):
            found.append(one_trial(nats, Path(name) / str(trial), learner.addresses, size_bytes))
            say("  trial {}: {} s, {} MB/s, {}".format(trial, *found[-1]))


def one_trial(nats: Nats, folder: Path, know: tuple[str, ...], size_bytes: int) -> Trial:
    """One trial; `NOTHING` where a node fails."""
    try:
        with homes(nats, folder, know) as (a, b):
            seconds = until_direct_s(a, b)
            rate = fetch_mb_per_s(a, b, size_bytes)
            return seconds, rate, a.state()["lanes"].get("b", "none")
    except (NodeFailed, OSError) as error:
        say(f"  {error}")
        return NOTHING


def changing_ports(size_bytes: int) -> dict[str, Any]:
    """What the relay carries, what is said about it, and how long a killed relay is missed."""
    found: dict[str, Any] = {"rate": None, "relayed": False, "said": False, "recovered_s": None}
    try:
        carry(size_bytes, found)
    except (NodeFailed, OSError) as error:
        say(f"  {error}")
    return found


def carry(size_bytes: int, found: dict[str, Any]) -> None:
    """As `changing_ports`: notes in `found` what happens, as far as it does."""
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
        found["rate"] = fetch_mb_per_s(a, b, size_bytes)
        states = [node.state() for node in (a, b)]
        found["relayed"] = all(state["reach"] == "relayed" for state in states)
        found["said"] = any("punching failed" in state["reason"] for state in states)
        say(f"  relay: {found['rate']} MB/s; a: {states[0]['reason']}; b: {states[1]['reason']}")
        carriers = carrying((third, fourth))
        if not carriers:
            say("  no relay has carried anything")
            return
        other = third if carriers[0] is fourth else fourth
        carriers[0].kill()
        begun_s = time.monotonic()
        while time.monotonic() - begun_s < PATIENCE_S:
            if "seconds" in a.ask("ask", node=b.node, timeout_s=5.0) and carrying((other,)):
                found["recovered_s"] = time.monotonic() - begun_s
                break
            time.sleep(0.2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--trials", type=int, default=5)
    parser.add_argument("--size-mb", type=int, default=64, help="over the direct way")
    parser.add_argument("--relay-size-mb", type=int, default=8, help="over the relay")
    options = parser.parse_args()
    if options.trials < 1:
        parser.error("--trials is 1 or more")
    if reason := why_not():
        say(f"skipped: {reason}")
        emit("nat", [], skipped=reason)
        return
    say("routers that keep ports")
    trials = keeping_ports(options.trials, options.size_mb << 20)
    say("routers that change ports")
    relay = changing_ports(options.relay_size_mb << 20)
    times = [seconds for seconds, _, way in trials if seconds is not None and way != "none"]
    rates = [rate for _, rate, _ in trials if rate is not None]
    # One trial that fails leaves nothing to compare: the worst of them is the measure.
    worst_s = max(times) if len(times) == len(trials) else None
    slowest = min(rates) if len(rates) == len(trials) else None
    direct = sum(seconds <= DIRECT_BAR_S for seconds in times)
    bars = [
        at_least("direct_bulk_within_10_s", direct, options.trials, "trials"),
        at_most("direct_bulk_worst", worst_s, DIRECT_BAR_S, "s"),
        at_least("direct_over_relay", ratio(slowest, relay["rate"]), RELAY_FACTOR_BAR, "x"),
        at_least("symmetric_relay_rate", relay["rate"], 0, "MB/s"),
        at_least("symmetric_is_relayed", relay["relayed"], 1, "bool"),
        at_least("symmetric_says_so", relay["said"], 1, "bool"),
        at_most("relay_killed_recovers", relay["recovered_s"], RECOVER_BAR_S, "s"),
    ]
    columns = zip(("seconds", "mb_per_s", "ways"), zip(*trials, strict=True), strict=True)
    emit("nat", bars, **dict(columns))


if __name__ == "__main__":
    main()
