#!/usr/bin/env python3
"""How close does the seed forest come to the physical bound, in fleets that no desk can hold?

Runs the planner and the fetch machine of the mesh, unchanged, one machine for each node, on a
virtual clock. Every transfer is simulated chunk by chunk: an uplink serves one chunk after the
other in the order in which they were asked for and are there, a downlink takes one after the
other, each message is one delay on its way, and a chunk is verified before it is passed on. A
version's time begins when its announcement is sent; the manifest is fetched like everything else.

Payloads: `full`, 60 GB in chunks of 16 MiB; `delta`, 0.32 GB in patch chunks of 1 MiB. The bound
is the fluid one (max of S/u0, S/min d, N S/(u0 + sum u)). `clean` is always simulated, for the
others are compared with it. Prints one line for each scenario on standard error and one JSON
object as the last line of standard output; exits 0 whether or not a bar is met.

  scripts/sim_forest.py [--nodes 24,200,1000] [--payloads full,delta] [--quick] [--seed 1]
                        [--scenarios clean,churn,mixed,liars,stallers,joiner]
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter, deque
from collections.abc import Sequence
from heapq import heappop, heappush
from pathlib import Path
from random import Random
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("ECHO2_VENV") or ROOT / ".venv") / "bin" / "python"
if __name__ == "__main__" and Path(sys.prefix) != PYTHON.parents[1] and PYTHON.exists():
    os.execv(PYTHON, [str(PYTHON), *sys.argv])
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from bars import Bar, at_least, at_most, emit, finite, ratio  # noqa: E402

from echo2_mesh import limits  # noqa: E402
from echo2_mesh.core import fetching as say  # noqa: E402
from echo2_mesh.core.fetch import Fetch  # noqa: E402
from echo2_mesh.core.forest import Seat, lower_bound_s, plan  # noqa: E402
from echo2_mesh.core.machine import Arm, Woke  # noqa: E402
from echo2_mesh.wire.messages import ChunkRef  # noqa: E402
from echo2_mesh.wire.types import ChunkKind, Digest, NodeId, PolicyVersion  # noqa: E402

MIB = 1024 * 1024
ACTOR_BYTES_PER_S = 1e9 / 8
LEARNER_BYTES_PER_S = 10e9 / 8
DELAY_S = 0.05
VERIFY_BYTES_PER_S = 2e9
"""What one core hashes and writes."""
MANIFEST_BYTES = 1 * MIB
UNEXPECTED_WAIT_S = 1.0
GOSSIP_HOPS_MAX = 3
SEATS_INTERVAL_S = 20.0
"""How long the others believe in a node that is gone."""
HINTS_MAX = 16
DEADLINE_S = limits.CHUNK_WAIT_S_MIN + limits.CHUNK_SLACK_S_MIN
SCENARIOS = ("clean", "churn", "mixed", "liars", "stallers", "joiner")
PAYLOADS = {"full": (60e9, 16 * MIB), "delta": (0.32e9, 1 * MIB)}
MOST = {
    ("clean", "full"): 1000,
    ("clean", "delta"): 1000,
    ("churn", "full"): 200,
    ("churn", "delta"): 1000,
    ("mixed", "full"): 24,
    ("liars", "full"): 24,
    ("stallers", "full"): 24,
    ("joiner", "full"): 24,
}
"""The largest fleet of a scenario, 200 where none is named: the whole run ends in minutes."""
ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


class Payload:
    """The blobs of a version; a delta's patches make its one data chunk."""

    def __init__(self, name: str, size_bytes: float, chunk_bytes: int) -> None:
        count = -(-int(size_bytes) // chunk_bytes)
        self.size_bytes = count * chunk_bytes
        self.delta = name == "delta"
        kinds = [ChunkKind.FULL] * count
        if self.delta:
            kinds = [ChunkKind.FULL] + [ChunkKind.PATCH] * count
        self.refs = tuple(
            ChunkRef(kind=kind, digest=_digest(i), size_bytes=chunk_bytes)
            for i, kind in enumerate(kinds)
        )
        self.manifest = ChunkRef(
            kind=ChunkKind.MANIFEST, digest=_digest(len(kinds)), size_bytes=MANIFEST_BYTES
        )
        self.wanted = frozenset(range(1, len(kinds))) if self.delta else None
        self.indices = {ref.digest: i for i, ref in enumerate(self.refs)}
        self.indices[self.manifest.digest] = len(self.refs)


def _digest(number: int) -> Digest:
    return Digest(number.to_bytes(32, "big"))


class Node:
    """One host: its lines, its store, its machine."""

    def __init__(
        self, name: NodeId, up: float, down: float, blobs: int, machine: Fetch | None
    ) -> None:
        self.name = name
        self.up = up
        self.down = down
        self.down_free_s = 0.0
        self.sending: deque[tuple[Node, ChunkRef]] = deque()
        self.busy = False
        self.has = bytearray(blobs + 1)
        self.lacking = blobs
        self.waiting: dict[int, list[Node]] = {}
        self.flights: dict[Digest, Node] = {}
        self.machine = machine
        self.alarm_s = -1.0
        self.alive = True
        self.lies = False
        self.stalls = False
        self.sent_bytes = 0
        self.began_s = 0.0
        self.done_s: float | None = None


class World:
    """A fleet, its lines and its clock."""

    def __init__(
        self, payload: Payload, count: int, seed: int, uplinks: list[float] | None
    ) -> None:
        self.payload = payload
        self.rng = Random(seed)
        self.now_s = 0.0
        self.counts: Counter[str] = Counter()
        self._events: list[tuple[float, int, Any, tuple[Any, ...]]] = []
        self._number = 0
        blobs = len(payload.refs)
        self.learner = Node(self._name(), LEARNER_BYTES_PER_S, LEARNER_BYTES_PER_S, blobs, None)
        self.learner.has = bytearray(b"\x01") * (blobs + 1)
        self.nodes = {self.learner.name: self.learner}
        self.actors: list[Node] = []
        for number in range(count):
            self._new(uplinks[number] if uplinks else ACTOR_BYTES_PER_S)
        self.bound_s = lower_bound_s(
            payload.size_bytes,
            self.learner.up,
            [node.up for node in self.actors],
            [node.down for node in self.actors],
        )

    def _name(self) -> NodeId:
        return NodeId("12D3KooW" + "".join(self.rng.choices(ALPHABET, k=44)))

    def _new(self, uplink: float) -> Node:
        name = self._name()
        machine = Fetch(self.learner.name, Random(self.rng.random()), name)
        node = Node(name, uplink, ACTOR_BYTES_PER_S, len(self.payload.refs), machine)
        if self.payload.delta:
            node.lacking -= 1
        self.nodes[name] = node
        self.actors.append(node)
        return node

    def seats(self) -> tuple[Seat, ...]:
        """Who is alive, as heartbeats tell."""
        return tuple(
            Seat(node=node.name, uplink_bytes_per_s=node.up, downlink_bytes_per_s=node.down)
            for node in (self.learner, *self.actors)
            if node.alive
        )

    # --- the clock -----------------------------------------------------------------------------

    def at(self, when_s: float, call: Any, *arguments: Any) -> None:
        """Do it then."""
        self._number += 1
        heappush(self._events, (when_s, self._number, call, arguments))

    def run(self, limit_s: float) -> None:
        """Until every live actor has the version, or the limit."""
        events = self._events
        while events and self.now_s < limit_s and not self.finished():
            for _ in range(1000):
                if not events:
                    break
                self.now_s, _, call, arguments = heappop(events)
                call(*arguments)
                self.counts["events"] += 1

    def finished(self) -> bool:
        """Nobody who is alive lacks anything."""
        return all(
            node.done_s is not None for node in self.actors if node.alive and not node.stalls
        )

    def begin(self, node: Node, seats: tuple[Seat, ...]) -> None:
        """`node` takes part from now on and hears of the version."""
        node.began_s = self.now_s
        self.tell(node, say.Seated(seats=seats))
        self.tell(node, say.PeerUp(peer=self.learner.name))
        self.at(
            self.now_s + DELAY_S * self.rng.uniform(1, GOSSIP_HOPS_MAX),
            self.tell,
            node,
            say.Announced(
                incarnation_unix_ms=1, version=PolicyVersion(1), manifest=self.payload.manifest
            ),
        )

    def announce(self) -> None:
        """Everybody who is there hears of the version."""
        seats = self.seats()
        for node in self.actors:
            self.begin(node, seats)

    # --- a machine and its hands ---------------------------------------------------------------

    def tell(self, node: Node, event: Any) -> None:
        """An event for the machine of `node`; its effects follow."""
        if not node.alive:
            return
        assert node.machine is not None
        for effect in node.machine.handle(event, self.now_s):
            match effect:
                case say.Ask():
                    peer = self.nodes[effect.peer]
                    node.flights[effect.ref.digest] = peer
                    self.at(
                        self.now_s + DELAY_S, self._asked, node, peer, effect.ref, effect.wait_s
                    )
                case Arm(at_s=at_s):
                    node.alarm_s = at_s
                    self.at(at_s, self._wake, node, at_s)
                case say.Cancel(digest=digest):
                    node.flights.pop(digest, None)
                case say.Look():
                    self.at(self.now_s, self._look, node)
                case say.AskHoldings(peer=peer):
                    self.at(self.now_s + 2 * DELAY_S, self._hold, node, self.nodes[peer])
                case say.Blame(fault=fault):
                    self.counts[f"blamed {fault.value}"] += 1
                case say.Ready():
                    node.done_s = self.now_s

    def _wake(self, node: Node, at_s: float) -> None:
        if node.alarm_s == at_s and node.done_s is None:
            self.tell(node, Woke(key="fetch"))

    def _look(self, node: Node) -> None:
        payload = self.payload
        if not node.has[-1]:
            self.tell(node, say.ManifestAbsent(manifest=payload.manifest.digest))
            return
        for peer in self.rng.sample(self.actors, min(HINTS_MAX, len(self.actors))):
            if peer.done_s is not None and peer.alive:
                self._says(node, peer, None)
        held = frozenset(i for i in range(len(payload.refs)) if node.has[i])
        self.tell(
            node,
            say.ManifestHere(
                manifest=payload.manifest.digest,
                refs=payload.refs,
                held=held,
                wanted=payload.wanted,
                needed=1 if payload.delta else None,
            ),
        )

    def _says(self, node: Node, peer: Node, indices: frozenset[int] | None) -> None:
        manifest = self.payload.manifest.digest
        self.tell(node, say.PeerHas(peer=peer.name, manifest=manifest, indices=indices))

    def _hold(self, node: Node, peer: Node) -> None:
        if peer.alive:
            self._says(node, peer, frozenset(i for i in range(len(peer.has) - 1) if peer.has[i]))

    # --- the lines -----------------------------------------------------------------------------

    def _asked(self, node: Node, peer: Node, ref: ChunkRef, wait_s: float) -> None:
        """A question has come to `peer`."""
        if not peer.alive:
            self.at(self.now_s + DELAY_S, self._fail, node, peer, ref, say.Fault.BROKEN)
            return
        if peer.stalls:
            return
        index = self.payload.indices[ref.digest]
        if peer.has[index]:
            self._send(peer, node, ref)
            return
        expects = peer.machine is not None and peer.machine.target is not None
        wait_s = wait_s if expects else min(wait_s, UNEXPECTED_WAIT_S)
        peer.waiting.setdefault(index, []).append(node)
        self.at(self.now_s + wait_s, self._wait_over, node, peer, ref, index)

    def _wait_over(self, node: Node, peer: Node, ref: ChunkRef, index: int) -> None:
        waiting = peer.waiting.get(index)
        if waiting and node in waiting:
            waiting.remove(node)
            self.counts["waits over"] += 1
            self.at(self.now_s + DELAY_S, self._fail, node, peer, ref, say.Fault.MISSING)

    def _fail(self, node: Node, peer: Node, ref: ChunkRef, fault: say.Fault) -> None:
        if node.flights.get(ref.digest) is peer:
            del node.flights[ref.digest]
            self.tell(node, say.ChunkRefused(peer=peer.name, digest=ref.digest, fault=fault))

    def _send(self, peer: Node, node: Node, ref: ChunkRef) -> None:
        peer.sending.append((node, ref))
        if not peer.busy:
            self._next(peer)

    def _next(self, peer: Node) -> None:
        """The uplink of `peer` takes the next chunk that is still wanted."""
        peer.busy = False
        while peer.sending and peer.alive:
            node, ref = peer.sending.popleft()
            if not node.alive or node.flights.get(ref.digest) is not peer:
                continue
            peer.busy = True
            peer.sent_bytes += ref.size_bytes
            self.at(self.now_s + ref.size_bytes / peer.up, self._sent, peer, node, ref)
            return

    def _sent(self, peer: Node, node: Node, ref: ChunkRef) -> None:
        """The last byte has left `peer`; the first came to `node` while others may have come."""
        first_s = max(self.now_s - ref.size_bytes / peer.up, node.down_free_s)
        node.down_free_s = max(self.now_s, first_s + ref.size_bytes / node.down)
        verified_s = node.down_free_s + DELAY_S + ref.size_bytes / VERIFY_BYTES_PER_S
        self.at(verified_s, self._came, node, peer, ref)
        self._next(peer)

    def _came(self, node: Node, peer: Node, ref: ChunkRef) -> None:
        if not node.alive or node.flights.get(ref.digest) is not peer:
            self.counts["wasted chunks"] += 1
            return
        if not peer.alive or peer.lies:
            fault = say.Fault.LIED if peer.alive else say.Fault.BROKEN
            self._fail(node, peer, ref, fault)
            return
        del node.flights[ref.digest]
        self.counts["chunks"] += 1
        index = self.payload.indices[ref.digest]
        assert not node.has[index], "a chunk came twice"
        node.has[index] = 1
        for child in node.waiting.pop(index, ()):
            self._send(node, child, ref)
        self.tell(node, say.ChunkArrived(peer=peer.name, digest=ref.digest))
        if index < len(self.payload.refs):
            node.lacking -= 1
            if self.payload.delta and not node.lacking:
                made = frozenset({0})
                node.has[0] = 1
                self.tell(node, say.Made(manifest=self.payload.manifest.digest, indices=made))

    # --- trouble -------------------------------------------------------------------------------

    def kill(self, node: Node) -> None:
        """`node` is gone at once; whoever waits for it learns so."""
        node.alive = False
        for other in self.actors:
            for digest in [d for d, peer in other.flights.items() if peer is node]:
                ref = self._ref(digest)
                self.at(self.now_s + DELAY_S, self._fail, other, node, ref, say.Fault.BROKEN)

    def _ref(self, digest: Digest) -> ChunkRef:
        index = self.payload.indices[digest]
        return self.payload.refs[index] if index < len(self.payload.refs) else self.payload.manifest

    def churn(self, share_per_s: float, mean: float) -> None:
        """One actor leaves for good and another comes, again and again for as long as it takes."""
        if self.now_s > 1.5 * self.bound_s:
            return
        live = [node for node in self.actors if node.alive]
        self.kill(self.rng.choice(live))
        self.counts["left"] += 1
        self.begin(self._new(mean), self.seats())
        self.at(
            self.now_s + self.rng.expovariate(share_per_s * len(live)),
            self.churn,
            share_per_s,
            mean,
        )

    def reseat(self) -> None:
        """Heartbeats have told everybody who is there."""
        seats = self.seats()
        for node in list(self.actors):
            if node.alive and node.done_s is None:
                self.tell(node, say.Seated(seats=seats))
        self.at(self.now_s + SEATS_INTERVAL_S, self.reseat)


def simulate(scenario: str, name: str, count: int, seed: int) -> dict[str, Any]:
    """One scenario; its figures. A time that never came is None."""
    size_bytes, chunk_bytes = PAYLOADS[name]
    payload = Payload(name, size_bytes, chunk_bytes)
    rng = Random(seed)
    uplinks = None
    if scenario == "mixed":
        uplinks = [ACTOR_BYTES_PER_S * rng.choice((0.3, 1.0, 1.0, 1.0, 3.0)) for _ in range(count)]
    began = time.process_time()
    world = World(payload, count, seed, uplinks)
    forest = plan(world.seats(), world.learner.name)
    middle_s = payload.size_bytes / forest.rate / 2
    bad = rng.sample(world.actors, max(1, count // 24))
    for node in bad:
        node.lies = scenario == "liars"
    world.announce()
    if scenario == "stallers":
        for node in bad:
            world.at(middle_s, setattr, node, "stalls", True)
    if scenario == "churn":
        per_s = 0.01 / 60
        world.at(rng.expovariate(per_s * count), world.churn, per_s, ACTOR_BYTES_PER_S)
        world.at(SEATS_INTERVAL_S, world.reseat)
    world.run(20 * world.bound_s + 600)
    copies = world.learner.sent_bytes / payload.size_bytes
    judged = [node for node in world.actors if node.alive and not node.lies and not node.stalls]
    times_s = [node.done_s - node.began_s for node in judged if node.done_s is not None]
    unfinished = len(judged) - len(times_s)
    result = {
        "scenario": scenario,
        "payload": name,
        "nodes": count,
        "bound_s": world.bound_s,
        "planned_s": payload.size_bytes / forest.rate,
        "last_s": None if unfinished else max(times_s, default=None),
        "unfinished": unfinished,
        "learner_copies": copies,
        "depth": forest.depth,
    }
    if scenario == "joiner":
        before = world.learner.sent_bytes
        node = world._new(ACTOR_BYTES_PER_S)
        world.begin(node, world.seats())
        world.run(world.now_s + 20 * world.bound_s)
        result["joiner_s"] = None if node.done_s is None else node.done_s - node.began_s
        # The others are complete: its own line alone limits it.
        result["joiner_bound_s"] = payload.size_bytes / node.down
        result["joiner_copies"] = (world.learner.sent_bytes - before) / payload.size_bytes
    seconds = time.process_time() - began
    result["cpu_s"] = seconds
    result["us_per_chunk"] = seconds / max(1, world.counts["chunks"]) * 1e6
    result["counts"] = dict(sorted(world.counts.items()))
    return result


def bars_of(result: dict[str, Any], clean_s: float | None) -> list[Bar]:
    """The bars of one scenario; `clean_s` is the time of the same fleet in good health.

    In good health everybody has the version within 1.05 times the bound where sending it takes
    minutes; a delta takes seconds, of which waiting for announcement, manifest and first chunk is
    a large part (a further 0.5 s). The learner sends little more than one copy, and as good as
    nothing to one that comes when the others are complete. Hosts that come and go cost the
    learner half a copy and hinder nobody from finishing; unlike uplinks cost half as much time
    again; one liar or staller in 24 costs a quarter more time than good health takes. What never
    came, or has nothing to be compared with, meets no bar.
    """
    scenario = result["scenario"]
    name = f"{scenario}_{result['payload']}_{result['nodes']}"
    full = result["payload"] == "full"
    last_s, copies = result["last_s"], result["learner_copies"]
    of_bound = ratio(last_s, result["bound_s"])
    healthy = 1.05 if full else 1.3 + 0.5 / result["bound_s"]
    if scenario in ("clean", "joiner"):
        bars = [
            at_most(f"{name}_last_over_bound", of_bound, healthy, "ratio"),
            at_most(f"{name}_learner_egress", copies, 1.2, "copies"),
        ]
    elif scenario == "churn":
        bars = [
            at_most(f"{name}_unfinished", result["unfinished"], 0, "nodes"),
            at_most(f"{name}_learner_egress", copies, 1.5, "copies"),
        ]
    elif scenario == "mixed":
        bars = [at_most(f"{name}_last_over_bound", of_bound, 1.5 if full else 2.0, "ratio")]
    else:
        # Silence is noticed after one deadline, however short the whole transfer is.
        deadline = ratio(DEADLINE_S, clean_s) if scenario == "stallers" else 0.0
        most = None if deadline is None else 1.25 + deadline
        bars = [at_most(f"{name}_last_over_clean", ratio(last_s, clean_s), most, "ratio")]
    if scenario == "joiner":
        of_bound = ratio(result["joiner_s"], result["joiner_bound_s"])
        bars += [
            at_least(f"{name}_joiner_completed", result["joiner_s"] is not None, 1, "bool"),
            at_most(f"{name}_joiner_over_bound", of_bound, healthy, "ratio"),
            at_most(f"{name}_joiner_egress", result["joiner_copies"], 0.02, "copies"),
        ]
    return bars


def judge(
    scenarios: Sequence[str], payloads: Sequence[str], counts: Sequence[int], seed: int
) -> list[Bar]:
    """The bars of all these, each beside the same fleet in good health."""
    bars: list[Bar] = []
    clean: dict[tuple[str, int], dict[str, Any]] = {}

    def simulated(scenario: str, name: str, count: int) -> dict[str, Any]:
        result = simulate(scenario, name, count, seed)
        sys.stderr.write(json.dumps(finite(result), allow_nan=False) + "\n")
        return result

    for scenario in scenarios:
        for name in payloads:
            for count in counts:
                if count > MOST.get((scenario, name), 200):
                    continue
                if (name, count) not in clean:
                    clean[name, count] = simulated("clean", name, count)
                reference = clean[name, count]
                result = reference if scenario == "clean" else simulated(scenario, name, count)
                bars += bars_of(result, reference["last_s"])
    return bars


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--nodes", default="24,200,1000")
    parser.add_argument("--payloads", default=",".join(PAYLOADS))
    parser.add_argument("--scenarios", default=",".join(SCENARIOS))
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--quick", action="store_true", help="24 nodes only")
    options = parser.parse_args()
    scenarios, payloads = options.scenarios.split(","), options.payloads.split(",")
    if unknown := sorted({*scenarios} - {*SCENARIOS} | {*payloads} - {*PAYLOADS}):
        parser.error(f"no such scenario or payload: {', '.join(unknown)}")
    counts = [24] if options.quick else [int(count) for count in options.nodes.split(",")]
    emit("sim_forest", judge(scenarios, payloads, counts, options.seed))


if __name__ == "__main__":
    main()
