#!/usr/bin/env python3
"""How close to the physical minimum do new weights reach every actor over slow links?

Makes hosts in network namespaces, each link shaped in both directions (`tc tbf`), and on them a
learner and actors of the real mesh without engines. Publishes one version of random weights per
scenario and notes when each actor holds all of it, what left the learner's link, and what the CPU
did. In the same run it measures the goodput of one plain TCP stream over the same links: the fluid
bound of the bars is made of that goodput; `bound_nominal_s` is made of the links' nominal rates.
The learner's own rate is the nominal one, scaled by the actors' ratio of goodput to rate.

Scenarios (all by default, in this order, after a warm-up from which nodes learn their rates):
  plain    everybody honest and alive
  kill     one actor is killed (SIGKILL) when it has four tenths of the version; a run in which that
           moment was missed meets no bar
  vanish   the link of one actor is cut at four tenths: nobody is told (not judged)
  joiner   an actor comes with an empty store when all others are complete
  liar     one actor flips a bit in every chunk that it serves
  stall    one actor takes every question for a chunk and never answers
  slow     one actor has a tenth of the uplink: `slow_first`, nobody knows yet (not judged), and
           `slow`, when it was started with its true rate as its cap
  rogues   a liar, a staller and a slow one together

Every node is told its link's rate (`--caps 0.95` of the nominal one, as settings of the bulk port);
`--caps 0` lets nodes find out by themselves.

Needs root, `ip` and `tc`; without them it says so and ends well. Namespaces and processes are gone
at the end, also after Ctrl-C; what SIGKILL leaves, the next run removes. Prints progress on
standard error and one JSON object as the last line of standard output; exits 0 whether or not a
bar is met.

  scripts/bench_forest.py [--scenario plain,kill] [--hosts 12] [--mbit 10] [--megabytes 48] [--json]
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("ECHO2_VENV") or ROOT / ".venv") / "bin" / "python"
if Path(sys.prefix) != PYTHON.parents[1] and PYTHON.exists():
    os.execv(PYTHON, [str(PYTHON), *sys.argv])
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
from bars import Bar, at_least, at_most, emit, ratio  # noqa: E402

from echo2_mesh.core.forest import lower_bound_s  # noqa: E402
from tests.e2e.forest_kit import (  # noqa: E402
    LEARNER,
    Forest,
    at_once,
    open_forest,
    plain_goodput,
)
from tests.e2e.hosts import Host, Link, open_hosts, why_not  # noqa: E402

SCENARIOS = ("plain", "kill", "vanish", "joiner", "liar", "stall", "slow", "rogues")
KILL_AT_TENTH = 4
GOODPUT_SECONDS = 4.0
"""Length of the plain streams, at the nominal rate."""
GIVE_UP_FACTOR = 5.0
GIVE_UP_EXTRA_S = 30.0
SETTLE_S = 3.0
"""Between scenarios: connections and membership come to rest."""


class Bench:
    """One fleet and everything measured on it."""

    def __init__(self, hosts: Sequence[Host], forest: Forest, options: argparse.Namespace) -> None:
        self.hosts, self.forest, self.options = hosts, forest, options
        self.names = [f"actor-{number}" for number in range(1, options.hosts + 1)]
        self.bars: list[Bar] = []
        self.figures: dict[str, Any] = {}
        self.chunk_bytes = options.chunk_kib * 1024
        self.chunks = max(1, round(options.megabytes * 1e6 / self.chunk_bytes))
        self.size_bytes = self.chunks * self.chunk_bytes
        self.plain_s: float | None = None

    def say(self, text: str) -> None:
        if not self.options.json:
            sys.stderr.write(text + "\n")
            sys.stderr.flush()

    # --- bounds --------------------------------------------------------------------------------

    def measure_bounds(self) -> None:
        """The fluid bound, from nominal rates and from the goodput of plain streams."""
        nominal = self.options.mbit * 1e6 / 8
        learner = self.options.learner_mbit * 1e6 / 8
        pairs = list(zip(self.hosts[1::2], self.hosts[2::2], strict=False))[:4]
        size_bytes = int(nominal * GOODPUT_SECONDS)
        goodputs = at_once([partial(plain_goodput, *pair, size_bytes=size_bytes) for pair in pairs])
        goodput = statistics.median(goodputs) if pairs else nominal
        bounds = {}
        for name, rate in (("nominal", nominal), ("measured", goodput)):
            links = [rate] * len(self.names)
            bounds[name] = lower_bound_s(self.size_bytes, learner * rate / nominal, links, links)
        self.bound_s = bounds["measured"]
        self.figures |= {
            "size_bytes": self.size_bytes,
            "chunks": self.chunks,
            "goodput_mbit_per_s": round(goodput * 8 / 1e6, 3),
            "bound_nominal_s": round(bounds["nominal"], 3),
            "bound_measured_s": round(bounds["measured"], 3),
        }
        self.say(
            f"{self.size_bytes / 1e6:.1f} MB to {len(self.names)} actors; one plain stream gets "
            f"{goodput * 8 / 1e6:.2f} Mbit/s; bound {bounds['measured']:.2f} s "
            f"(nominal {bounds['nominal']:.2f} s)"
        )

    # --- one version ---------------------------------------------------------------------------

    def spread(
        self,
        name: str,
        *,
        judged: Sequence[str] | None = None,
        meanwhile: Callable[[], bool] | None = None,
    ) -> dict[str, Any]:
        """Publish a version; until every actor of `judged` holds it.

        Args:
            meanwhile: done once the version is announced; tells whether it was in time.

        Returns:
            `seconds` from the learner's announcing to the last of `judged`, None where one of them
            never held it; `in_time`, what `meanwhile` told.
        """
        judged = self.names if judged is None else judged
        meter = Meter(self.forest)
        published = self.forest.publish(chunks=self.chunks, chunk_bytes=self.chunk_bytes)
        in_time = meanwhile is None or meanwhile()
        limit_s = GIVE_UP_FACTOR * self.bound_s + GIVE_UP_EXTRA_S
        ready_s = self.forest.wait_ready(judged, timeout_s=limit_s)
        figures = meter.read(self.size_bytes)
        took = {actor: at_s - published["at_s"] for actor, at_s in ready_s.items()}
        late = sorted(set(judged) - set(took))
        seconds = None if late else max(took.values())
        figures |= {
            "seconds": seconds,
            "of_bound": ratio(seconds, self.bound_s),
            "first_s": min(took.values(), default=None),
            "median_s": statistics.median(took.values()) if took else None,
            "never": late,
        }
        if meanwhile is not None:
            figures["in_time"] = in_time
        self.figures[name] = figures
        self.say(
            f"{name}: last {shown(seconds)} s = {shown(figures['of_bound'])} x bound, "
            f"median {shown(figures['median_s'])} s, "
            f"learner sent {figures['learner_copies']} copies, "
            f"CPU {figures['nodes_cores']} cores of nodes, machine {figures['machine_busy']} busy"
            + (f", never: {', '.join(late)}" if late else "")
            + ("" if in_time else ", disturbed too late")
        )
        if late and self.options.verbose:
            for actor in late:
                self.say(f"  {actor}: {self.forest.nodes[actor].report()}")
        return figures

    def settle(self) -> None:
        """Everybody is there, knows everybody, and has the newest version."""
        self.forest.wait_ready(self.names, timeout_s=GIVE_UP_FACTOR * self.bound_s)
        self.forest.wait_acquainted()
        time.sleep(SETTLE_S)

    # --- scenarios -----------------------------------------------------------------------------

    def plain(self) -> None:
        found = self.spread("plain")
        self.plain_s = found["seconds"]
        copies = None if found["never"] else found["learner_copies"]
        self.bars += [
            at_most("forest_last_actor", found["of_bound"], 1.10, "x bound"),
            at_most("forest_learner_egress", copies, 1.2, "copies"),
        ]

    def over_plain(self, scenario: str, seconds: float | None, most: float) -> None:
        """The bar of a scenario that is compared with the plain one; either may have no end."""
        self.bars.append(
            at_most(f"forest_{scenario}", ratio(seconds, self.plain_s), most, "x plain")
        )

    def kill(self) -> None:
        victim = self.names[-1]
        found = self.spread(
            "kill",
            judged=self.names[:-1],
            meanwhile=lambda: self._at_tenth(victim, lambda: self.forest.kill(victim)),
        )
        self.over_plain("kill", found["seconds"] if found["in_time"] else None, 1.15)
        self.forest.start(victim)

    def vanish(self) -> None:
        victim = self.names[-1]
        host = self.forest.hosts[victim]
        self.spread(
            "vanish",
            judged=self.names[:-1],
            meanwhile=lambda: self._at_tenth(victim, host.cut),
        )
        host.mend()

    def joiner(self) -> None:
        name = self.names[-1]
        folder = self.forest.nodes[name].folder
        self.forest.end(name)
        shutil.rmtree(folder)
        time.sleep(SETTLE_S)
        meter = Meter(self.forest)
        self.forest.start(name)
        up_s = self.forest.nodes[name].wait("up", timeout_s=60)["at_s"]
        limit_s = GIVE_UP_FACTOR * self.bound_s
        ready_s = self.forest.wait_ready([name], timeout_s=limit_s).get(name)
        seconds = None if ready_s is None else ready_s - up_s
        # Its downlink alone limits it: the others are complete.
        found = meter.read(self.size_bytes) | {
            "seconds": seconds,
            "of_bound": ratio(seconds, self.bound_s),
            "bytes_from": self.forest.nodes[name].report()["bytes_from"],
        }
        self.figures["joiner"] = found
        self.say(
            f"joiner: {shown(seconds)} s = {shown(found['of_bound'])} x bound, the learner sent "
            f"{found['learner_copies']} copies"
        )
        # What was sent to one that has not got everything says nothing.
        copies = None if seconds is None else found["learner_copies"]
        self.bars += [
            at_least("forest_joiner_completed", seconds is not None, 1, "bool"),
            at_most("forest_joiner_learner_egress", copies, 0.1, "copies"),
        ]

    def liar(self) -> None:
        with self._fault(self.names[0], "lie") as rest:
            found = self.spread("liar", judged=rest)
        self.over_plain("liar", found["seconds"], 1.25)
        self._judge_liar("liar", self.names[0], rest)

    def stall(self) -> None:
        with self._fault(self.names[1], "stall") as rest:
            found = self.spread("stall", judged=rest)
        self.over_plain("stall", found["seconds"], 1.25)

    def slow(self) -> None:
        slow = self.names[2]
        with self._slow(slow) as rest:
            self.spread("slow_first", judged=rest)
            self.settle()
            self.restart(slow, self.options.mbit / 10)
            found = self.spread("slow", judged=rest)
        self.restart(slow, self.options.mbit)
        self.over_plain("slow", found["seconds"], 1.25)

    def rogues(self) -> None:
        liar, staller, slow = self.names[:3]
        with self._slow(slow):
            self.restart(slow, self.options.mbit / 10)
            with self._fault(liar, "lie"), self._fault(staller, "stall"):
                found = self.spread("rogues", judged=self.names[3:])
        self.over_plain("rogues", found["seconds"], 1.25)
        self._judge_liar("rogues", liar, self.names[3:])

    def restart(self, name: str, up_mbit: float) -> None:
        """End a node and start it with what it has, told of this uplink."""
        if self.options.caps:
            self.forest.end(name)
            self.forest.caps[name] = cap_of(self.options, up_mbit, self.options.mbit)
            self.forest.start(name)
        self.settle()

    def _judge_liar(self, scenario: str, liar: str, rest: Sequence[str]) -> None:
        """Who was blamed for wrong bytes, and whether any wrong byte was kept by anybody."""
        blamed: set[str] = set()
        for name in rest:
            report = self.forest.nodes[name].report()
            blamed |= {who for who, fault, _ in report["faults"] if fault == "lied"}
        damaged = sum(self.forest.nodes[name].verify()[0] for name in rest)
        served = self.forest.nodes[liar].report()["served"]
        self.figures[scenario] |= {"blamed": sorted(blamed), "lies": served.get("lies", 0)}
        share = served.get("lie_bytes", 0) / self.size_bytes
        self.bars += [
            at_least(f"forest_{scenario}_blamed", blamed == {liar}, 1, "yes"),
            at_most(f"forest_{scenario}_wrong_bytes_kept", damaged, 0, "chunks"),
        ]
        self.figures[scenario]["lie_copies"] = round(share, 3)

    @contextlib.contextmanager
    def _fault(self, name: str, kind: str) -> Any:
        self.forest.nodes[name].tell("fault", kind=kind)
        try:
            yield [other for other in self.names if other != name]
        finally:
            self.forest.nodes[name].tell("fault", kind="")

    @contextlib.contextmanager
    def _slow(self, name: str) -> Any:
        host, mbit = self.forest.hosts[name], self.options.mbit
        host.shape(link_of(self.options, mbit / 10, mbit))
        try:
            yield [other for other in self.names if other != name]
        finally:
            host.shape(link_of(self.options, mbit, mbit))

    def _at_tenth(self, victim: str, call: Callable[[], None]) -> bool:
        """`call()` when `victim` says that it has four tenths of the newest version.

        Called all the same once `victim` is complete, and after twice the bound without a word.

        Returns:
            Whether four tenths were seen, and `victim` was still not complete after the call.
        """
        node, version, seen = self.forest.nodes[victim], self.forest.version, False
        began_s = time.monotonic()
        while not seen and time.monotonic() - began_s < 2 * self.bound_s:
            event = node.find("progress")
            if event and event["at_s"] > began_s and KILL_AT_TENTH <= event["tenth"] < 10:
                seen = True
            elif node.find("ready", version=version):
                break
            else:
                time.sleep(0.05)
        call()
        called_s = time.monotonic()
        ready = node.find("ready", version=version)
        return seen and (ready is None or ready["at_s"] > called_s)


def shown(figure: float | None) -> str:
    return "never" if figure is None else f"{figure:.2f}"


def link_of(options: argparse.Namespace, up_mbit: float, down_mbit: float) -> Link:
    return Link(up_mbit_per_s=up_mbit, down_mbit_per_s=down_mbit, queue_ms=options.queue_ms)


def cap_of(options: argparse.Namespace, up_mbit: float, down_mbit: float) -> dict[str, float]:
    """What a node is told of its own link."""
    scale = options.caps * 1e6 / 8
    if not scale:
        return {}
    return {"uplink_bytes_per_s": up_mbit * scale, "downlink_bytes_per_s": down_mbit * scale}


class Meter:
    """CPU and the learner's link between two moments."""

    def __init__(self, forest: Forest) -> None:
        self._forest = forest
        self._began_s = time.monotonic()
        self._cpu = self._cpu_s()
        self._machine = psutil.cpu_times()
        self._sent = forest.hosts[LEARNER].bytes_moved()[1]

    def read(self, size_bytes: int) -> dict[str, Any]:
        """What happened since; in copies of a version, and in cores."""
        sent = self._forest.hosts[LEARNER].bytes_moved()[1] - self._sent
        took_s = time.monotonic() - self._began_s
        now = self._cpu_s()
        used_s = sum(cpu_s - self._cpu.get(pid, 0.0) for pid, cpu_s in now.items())
        machine = psutil.cpu_times()
        idle_s = machine.idle - self._machine.idle
        return {
            "learner_copies": round(sent / size_bytes, 3),
            "nodes_cores": round(used_s / took_s, 2),
            "machine_busy": round(1 - idle_s / took_s / (os.cpu_count() or 1), 2),
        }

    def _cpu_s(self) -> dict[int, float]:
        """CPU seconds of every living process of the fleet."""
        found = {}
        for node in self._forest.nodes.values():
            with contextlib.suppress(psutil.Error):
                daemon = psutil.Process(node.process.pid)
                for process in (daemon, *daemon.children(recursive=True)):
                    with contextlib.suppress(psutil.Error):
                        times = process.cpu_times()
                        found[process.pid] = times.user + times.system
        return found


def run(options: argparse.Namespace) -> tuple[list[Bar], dict[str, Any]]:
    """(bars, figures) of every scenario asked for, on one fleet."""
    mbit, learner_mbit = options.mbit, options.learner_mbit
    links = [link_of(options, learner_mbit, learner_mbit)]
    links += [link_of(options, mbit, mbit)] * options.hosts
    caps = {LEARNER: cap_of(options, learner_mbit, learner_mbit)}
    caps |= {f"actor-{n}": cap_of(options, mbit, mbit) for n in range(1, options.hosts + 1)}
    chosen = options.scenario.split(",")
    # Everything else is compared with it.
    chosen = [name for name in SCENARIOS if name in chosen or name == "plain"]
    with (
        tempfile.TemporaryDirectory(prefix="echo2-forest-", dir=options.folder) as folder,
        open_hosts(1 + options.hosts, links=links) as hosts,
        open_forest(hosts, Path(folder), caps=caps) as forest,
    ):
        bench = Bench(hosts, forest, options)
        bench.measure_bounds()
        forest.start(LEARNER)
        forest.start(*bench.names)
        forest.wait_acquainted()
        time.sleep(SETTLE_S)
        bench.spread("warm_up")
        for name in chosen:
            bench.settle()
            getattr(bench, name)()
        return bench.bars, bench.figures


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--scenario", default=",".join(SCENARIOS), help="names with commas")
    parser.add_argument("--hosts", type=int, default=12, help="actors")
    parser.add_argument("--mbit", type=float, default=10.0, help="each actor's link, both ways")
    parser.add_argument("--learner-mbit", type=float, default=0.0, help="default: 5 x --mbit")
    parser.add_argument("--queue-ms", type=float, default=200.0, help="of each link's bucket")
    parser.add_argument("--megabytes", type=float, default=48.0)
    parser.add_argument("--chunk-kib", type=int, default=128)
    parser.add_argument("--caps", type=float, default=0.95, help="share of each link; 0: no cap")
    parser.add_argument("--folder", default="/dev/shm", help="for stores; default in memory")
    parser.add_argument("--verbose", action="store_true", help="say what a late actor counted")
    parser.add_argument("--json", action="store_true", help="no progress on standard error")
    options = parser.parse_args()
    options.learner_mbit = options.learner_mbit or 5 * options.mbit
    if unknown := set(options.scenario.split(",")) - set(SCENARIOS):
        parser.error(f"no such scenario: {', '.join(sorted(unknown))}")
    if reason := why_not():
        emit("forest", [], skipped=reason)
        return
    # A polite end unwinds as Ctrl-C does.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    bars, figures = run(options)
    settings = ("hosts", "mbit", "learner_mbit", "caps", "queue_ms")
    figures |= {name: getattr(options, name) for name in settings}
    emit("forest", bars, **figures, cores=os.cpu_count())


if __name__ == "__main__":
    main()
