#!/usr/bin/env python3
"""How fast do full blocks of weights go from one node to one, and to four?

Always inside a network namespace with a loopback and nothing else. Real mesh nodes (libp2p control
plane, bulk processes, TLS 1.3 lanes agreed by signed questions) with stores in memory: a source
with random blocks of 4 MiB, and receivers. One receiver asks the source for everything; several
ask the source for a share each and one another for the rest, waiting for blocks under way, as the
planned forest has it in a small fleet. Every block is hashed before it is kept. In the same run:
libtorrent and lattica on blocks of the same size and number, one TCP stream (the physical bound)
and one TLS 1.3 stream; and the latency of signed questions from a receiver to the source while
lanes between these two are at full load. Of us and of each peer the best of --repeats counts.

`cpu_s_per_GB` is of all processes of all nodes together, per GB that arrived; `wire_per_payload`
counts every byte on the loopback, the control plane included. The peers come from an environment
given by --peers-python, or are installed into a temporary one; where neither works they are
skipped, and `skipped` says why. A peer that is there and fails each time leaves a bar that is not
met, and its error in `failed`. Prints progress on standard error and one JSON object as the last
line of standard output; exits 0 whether or not a bar is met.

  scripts/bench_transfer.py [--receivers 1,4] [--megabytes 512] [--repeats 2] [--no-peers]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("ECHO2_VENV") or ROOT / ".venv") / "bin" / "python"
if Path(sys.prefix) != PYTHON.parents[1] and PYTHON.exists():
    os.execv(PYTHON, [str(PYTHON), *sys.argv])
sys.path.insert(0, str(ROOT))

import psutil  # noqa: E402
from bars import Bar, at_least, at_most, emit  # noqa: E402

PEERS = ("libtorrent==2.1.1", "lattica==1.0.21")
PEERS_PREFIX = "echo2-peers-"
INSTALL_TIMEOUT_S = 180.0
BLOCK_BYTES = 4 << 20
WINDOW = 12
"""Blocks that a receiver has asked for and not yet got, from all together."""
ATTEMPTS = 5
FETCH_TIMEOUT_S = 120.0
CONTROL_SECONDS = 8.0
REPLY_TIMEOUT_S = 300.0
"""A node that is silent for so long is ended."""
RUN_ID = "bench-transfer"
CONTROL_P99_MS_MAX = 100.0
CPU_S_PER_GB_MAX = 2.5
WIRE_PER_PAYLOAD_MAX = 1.03
PEER_PORT = 47300


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


# --- one mesh node: started by the bench, JSON lines on its pipes --------------------------------


def node_main(name: str, folder: str, boot: Sequence[str]) -> None:
    """`--node NAME`: a mesh node that does what it is told."""
    import trio

    from echo2_mesh.chunks import ChunkStore
    from echo2_mesh.errors import PeerError
    from echo2_mesh.identity import Identity
    from echo2_mesh.mesh import MeshSettings, open_mesh
    from echo2_mesh.wire.messages import CatchUp, ChunkRef
    from echo2_mesh.wire.types import ChunkKind, Digest, NodeId, Role

    seed = bytes([ord(name[0])]) * 31
    learner = Identity(b"s" * 31 + b"0")
    identity = Identity(seed + name[1:2].encode())
    store = ChunkStore(Path(folder) / "chunks")

    def reply(document: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()

    def refs_of(ask: dict[str, Any]) -> list[ChunkRef]:
        return [
            ChunkRef(
                kind=ChunkKind.FULL, digest=Digest(bytes.fromhex(text)), size_bytes=ask["size"]
            )
            for text in ask["blocks"]
        ]

    async def main() -> None:
        settings = MeshSettings(
            run_id=RUN_ID,
            role=Role.LEARNER if name == "s0" else Role.ACTOR,
            learner=learner.node,
            name=name,
            listen=("/ip4/127.0.0.1/tcp/0",),
            bootstrap=tuple(boot),
            mdns=False,
            incarnation_unix_ms=int(time.time() * 1000),
        )
        async with open_mesh(settings, identity, store) as mesh:
            blobs = mesh._blobs  # the fetch machine's own hands, without its decisions

            async def get(ask: dict[str, Any]) -> dict[str, Any]:
                """Blocks, each from the holder given for it."""
                refs = refs_of(ask)
                blobs.expect([ref.digest for ref in refs])
                room = trio.Semaphore(ask["window"])

                async def one(ref: ChunkRef, holder: str) -> None:
                    try:
                        for attempt in range(1, ATTEMPTS + 1):
                            try:
                                await blobs.fetch_from(
                                    NodeId(holder),
                                    ref,
                                    timeout_s=FETCH_TIMEOUT_S,
                                    wait_s=FETCH_TIMEOUT_S / 4,
                                )
                                return
                            except PeerError:
                                if attempt == ATTEMPTS:
                                    raise
                    finally:
                        room.release()

                async with trio.open_nursery() as nursery:
                    for ref, holder in zip(refs, ask["holders"], strict=True):
                        # In one order everywhere: windows full of waits for one another would
                        # never end.
                        await room.acquire()
                        nursery.start_soon(one, ref, holder)
                report = mesh.traffic()
                return {
                    "lanes": sorted(report.lanes.values()),
                    "fallbacks": mesh.counters["bulk_fallbacks"],
                }

            async def latencies(ask: dict[str, Any]) -> dict[str, Any]:
                """Milliseconds of signed questions over the control connection, one by one."""
                found = []
                until_s = trio.current_time() + ask["seconds"]
                while trio.current_time() < until_s:
                    began_s = time.perf_counter()
                    await mesh.ask(NodeId(ask["peer"]), CatchUp())
                    found.append(1e3 * (time.perf_counter() - began_s))
                    await trio.sleep(0.02)
                return {"ms": found}

            async def loaded(ask: dict[str, Any]) -> dict[str, Any]:
                """As `latencies`, while the blocks come again and again from the same peer."""
                found, moved = {}, 0

                async def question() -> None:
                    found.update(await latencies(ask))
                    transfer.cancel()

                async with trio.open_nursery() as nursery:
                    transfer = trio.CancelScope()
                    nursery.start_soon(question)
                    with transfer:
                        while True:
                            await get(ask)
                            moved += len(ask["blocks"]) * ask["size"]
                            for ref in refs_of(ask):
                                store.remove(ref.digest)
                return {**found, "moved_bytes": moved}

            async def handle(ask: dict[str, Any]) -> dict[str, Any]:
                match ask["do"]:
                    case "make":
                        refs = [
                            store.add(ChunkKind.FULL, os.urandom(ask["size"]))
                            for _ in range(ask["count"])
                        ]
                        return {"blocks": [ref.digest.hex() for ref in refs]}
                    case "get":
                        return await get(ask)
                    case "forget":
                        for ref in refs_of(ask):
                            store.remove(ref.digest)
                        return {}
                    case "ask":
                        return await latencies(ask)
                    case "ask_loaded":
                        return await loaded(ask)
                    case "ready":
                        peers = set(ask["peers"])
                        while mesh.bulk_pid is None or not peers <= mesh.connected():  # noqa: ASYNC110
                            await trio.sleep(0.05)
                        return {}
                raise ValueError(ask["do"])

            reply({"node": mesh.node, "addresses": mesh.addresses()})
            lines = trio.wrap_file(sys.stdin)
            async for line in lines:
                reply(await handle(json.loads(line)))

    trio.run(main)


class Process:
    """A node, ours or a peer's, that answers JSON lines."""

    def __init__(self, command: Sequence[str], log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            self.process = subprocess.Popen(
                list(command), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=file, text=True
            )
        self.log = log
        self.hello = self.reply()

    def tell(self, **ask: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(ask) + "\n")
        self.process.stdin.flush()

    def reply(self) -> dict[str, Any]:
        """Its next document.

        Raises:
            RuntimeError: it says that it failed, has ended, or was silent and is ended now.
        """
        assert self.process.stdout is not None
        silence = threading.Timer(REPLY_TIMEOUT_S, self.process.kill)
        silence.daemon = True
        silence.start()
        try:
            while line := self.process.stdout.readline():
                if line.startswith("{"):
                    document: dict[str, Any] = json.loads(line)
                    if "error" in document:
                        raise RuntimeError(document["error"])
                    return document
        finally:
            silence.cancel()
        raise RuntimeError(f"a node ended:\n{self.log.read_text()[-1500:]}")

    def ask(self, **ask: Any) -> dict[str, Any]:
        self.tell(**ask)
        return self.reply()

    def cpu_s(self) -> float:
        """Of the process and of those that it started."""
        total = 0.0
        root = psutil.Process(self.process.pid)
        for process in (root, *root.children(recursive=True)):
            with contextlib.suppress(psutil.Error):
                times = process.cpu_times()
                total += times.user + times.system
        return total

    def close(self) -> None:
        with contextlib.suppress(psutil.Error):
            family = [psutil.Process(self.process.pid)]
            family += family[0].children(recursive=True)
            for process in family:
                with contextlib.suppress(psutil.Error):
                    process.kill()
        self.process.wait(5)


# --- measuring -----------------------------------------------------------------------------------


def wire_bytes() -> int:
    """Received on the loopback, which is what was sent on it."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        name, _, rest = line.partition(":")
        if name.strip() == "lo":
            return int(rest.split()[0])
    raise RuntimeError("there is no loopback")


def measured(nodes: list[Process], payload: int, work: Any) -> dict[str, float]:
    """Rate per receiver, CPU and wire of `work`, which brings `payload` bytes to each of n - 1."""
    receivers = len(nodes) - 1
    cpu_s, wire, began_s = sum(n.cpu_s() for n in nodes), wire_bytes(), time.perf_counter()
    work()
    seconds = time.perf_counter() - began_s
    arrived = payload * receivers
    return {
        "seconds": round(seconds, 3),
        "MB_per_s_each": round(payload / seconds / 1e6, 1),
        "cpu_s_per_GB": round((sum(n.cpu_s() for n in nodes) - cpu_s) / (arrived / 1e9), 3),
        "wire_per_payload": round((wire_bytes() - wire) / arrived, 4),
    }


@contextlib.contextmanager
def fleet(folder: Path, receivers: int) -> Iterator[list[Process]]:
    """A source and receivers, all connected and with their bulk processes up."""
    nodes: list[Process] = []
    try:
        for number in range(receivers + 1):
            name = "s0" if number == 0 else f"r{number}"
            boot = [address for node in nodes for address in node.hello["addresses"]]
            command = [sys.executable, __file__, "--node", name, "--folder", str(folder / name)]
            nodes.append(Process([*command, *boot], folder / f"{name}.log"))
        names = [node.hello["node"] for node in nodes]
        for node in nodes:
            node.ask(do="ready", peers=[name for name in names if name != node.hello["node"]])
        yield nodes
    finally:
        for node in nodes:
            node.close()


def plan(names: list[str], receiver: int, count: int) -> list[str]:
    """Whom receiver `receiver` (from 1) asks for each block: the source, or the block's home."""
    receivers = len(names) - 1
    homes = [1 + index % receivers for index in range(count)]
    return [names[0] if home == receiver else names[home] for home in homes]


def our_run(folder: Path, receivers: int, count: int, repeats: int) -> dict[str, float]:
    """The best of `repeats` transfers; blocks and lanes are new in each but the lanes' first."""
    results = []
    with fleet(folder, receivers) as nodes:
        names = [node.hello["node"] for node in nodes]

        def spread(blocks: list[str]) -> None:
            for number, node in enumerate(nodes[1:], 1):
                holders = plan(names, number, len(blocks))
                node.tell(do="get", blocks=blocks, holders=holders, size=BLOCK_BYTES, window=WINDOW)
            for node in nodes[1:]:
                done = node.reply()
                if done["fallbacks"]:
                    say(f"  {done['fallbacks']} blocks came over the control connection")

        spread(nodes[0].ask(do="make", count=2 * receivers, size=BLOCK_BYTES)["blocks"])  # lanes
        for _ in range(repeats):
            blocks = nodes[0].ask(do="make", count=count, size=BLOCK_BYTES)["blocks"]
            time.sleep(0.5)
            results.append(measured(nodes, count * BLOCK_BYTES, lambda: spread(blocks)))  # noqa: B023
            say(f"  {results[-1]}")
            for node in nodes:
                node.ask(do="forget", blocks=blocks, size=BLOCK_BYTES)
    best = max(results, key=lambda each: each["MB_per_s_each"])
    cheapest = min(each["cpu_s_per_GB"] for each in results)
    return {**best, "cpu_s_per_GB_min": cheapest}


def control_latency(folder: Path, count: int) -> dict[str, float]:
    """Signed questions from a receiver to its source, idle, and while it fetches from there."""
    with fleet(folder, 1) as (source, receiver):
        blocks = source.ask(do="make", count=count, size=BLOCK_BYTES)["blocks"]
        peer = source.hello["node"]
        idle = receiver.ask(do="ask", peer=peer, seconds=2.0)["ms"]
        found = receiver.ask(
            do="ask_loaded",
            peer=peer,
            seconds=CONTROL_SECONDS,
            blocks=blocks,
            holders=[peer] * len(blocks),
            size=BLOCK_BYTES,
            window=WINDOW,
        )
    loaded = found["ms"]
    return {
        "idle_p50_ms": round(statistics.median(idle), 1),
        "p50_ms": round(statistics.median(loaded), 1),
        "p99_ms": round(sorted(loaded)[int(0.99 * (len(loaded) - 1))], 1),
        "asks": len(loaded),
        "bulk_MB_per_s": round(found["moved_bytes"] / CONTROL_SECONDS / 1e6, 1),
    }


def peer_runs(
    python: str, library: str, folder: Path, receivers: int, count: int, repeats: int
) -> tuple[dict[str, float] | None, str]:
    """(the best of `repeats` transfers by a peer, None where all failed; the last error)."""
    results, failed = [], ""
    for turn in range(repeats):
        try:
            # Ports of its own: those of the last turn may not be free yet.
            port = PEER_PORT + turn * (receivers + 1)
            results.append(peer_run(python, library, folder / str(turn), port, receivers, count))
            say(f"  {results[-1]}")
        except (RuntimeError, OSError) as error:
            failed = str(error) or type(error).__name__
            say(f"  failed: {failed}")
    return max(results, key=lambda each: each["MB_per_s_each"], default=None), failed


def peer_run(
    python: str, library: str, folder: Path, port: int, receivers: int, count: int
) -> dict[str, float]:
    """The same transfer by a peer, whose nodes listen at `port` and the following ones."""
    folder.mkdir(parents=True)
    script = str(ROOT / "scripts" / "transfer_peers.py")
    nodes: list[Process] = []
    try:
        for number in range(receivers + 1):
            command = [python, script, library, str(folder / str(number))]
            command += ["--port", str(port + number)]
            if number and library == "lattica":
                command += ["--boot", nodes[0].hello["peer"]]
            nodes.append(Process(command, folder / f"{number}.log"))
        if library == "lattica":
            time.sleep(3 + receivers / 2)  # its nodes find one another
        what = nodes[0].ask(do="make", count=count, size=BLOCK_BYTES)
        for number, node in enumerate(nodes[1:], 1):
            peers = [n.hello["peer"] for i, n in enumerate(nodes) if i != number]
            node.ask(do="join", what=what, peers=peers)

        def spread() -> None:
            for node in nodes[1:]:
                node.tell(do="get")
            for node in nodes[1:]:
                if (got := node.reply()["bytes"]) != count * BLOCK_BYTES:
                    raise RuntimeError(f"{got} bytes came in place of {count * BLOCK_BYTES}")

        return measured(nodes, count * BLOCK_BYTES, spread)
    finally:
        for node in nodes:
            node.close()
        shutil.rmtree(folder, ignore_errors=True)


def raw_stream(*, tls: bool, count: int) -> float:
    """MB/s of one blocking connection between two processes, nothing hashed and nothing kept.

    Raises:
        OSError: it ended before everything had come.
    """
    from echo2_mesh.bulk.certificate import make_contexts

    server, client, _ = make_contexts()
    listener = socket.create_server(("127.0.0.1", 0))
    child = os.fork()
    if child == 0:
        try:
            sock: Any = listener.accept()[0]
            sock = server.wrap_socket(sock, server_side=True) if tls else sock
            block = memoryview(os.urandom(BLOCK_BYTES))
            for _ in range(count):
                sock.sendall(block)
            sock.recv(1)
        finally:
            os._exit(0)
    sock = socket.create_connection(listener.getsockname())
    sock = client.wrap_socket(sock) if tls else sock
    buffer = memoryview(bytearray(BLOCK_BYTES))
    left, began_s = count * BLOCK_BYTES, time.perf_counter()
    try:
        while left:
            arrived = sock.recv_into(buffer)
            if not arrived:
                raise OSError(f"the stream ended {left} bytes early")
            left -= arrived
        seconds = time.perf_counter() - began_s
    finally:
        sock.close()
        os.waitpid(child, 0)
    return round(count * BLOCK_BYTES / seconds / 1e6, 1)


# --- the command ---------------------------------------------------------------------------------


def peers_python(options: argparse.Namespace) -> tuple[str, str]:
    """(a Python that has the peers, ""), or ("", why there is none)."""
    if options.no_peers:
        return "", "not asked for"
    candidate = options.peers_python
    if not candidate:
        # Removed at the end of the run, by the process inside the namespace.
        folder = Path(tempfile.mkdtemp(prefix=PEERS_PREFIX))
        candidate = str(folder / "bin" / "python")
        say("installing libtorrent and lattica into a temporary environment")
        try:
            for command in (
                [sys.executable, "-m", "venv", str(folder)],
                [candidate, "-m", "pip", "install", "-q", "--only-binary", ":all:", *PEERS],
            ):
                subprocess.run(command, check=True, timeout=INSTALL_TIMEOUT_S, capture_output=True)
        except (subprocess.SubprocessError, OSError) as error:
            shutil.rmtree(folder, ignore_errors=True)
            return "", f"the peers cannot be installed ({type(error).__name__})"
    check = subprocess.run(
        [candidate, "-c", "import libtorrent, lattica"], capture_output=True, text=True
    )
    if check.returncode:
        words = check.stderr.strip().splitlines()[-1:]
        return "", f"the peers are not installed ({' '.join(words)})"
    return str(candidate), ""


def enter_namespace(python: str, why_no_peers: str) -> None:
    """Start again where there is a loopback and nothing else; says why where that cannot be."""
    unshare = ["unshare", "--net"] if os.geteuid() == 0 else ["unshare", "--net", "--map-root-user"]
    inside = 'ip link set lo up && exec "$@"'
    probe = subprocess.run(
        [*unshare, "ip", "link", "set", "lo", "up"], capture_output=True, text=True
    )
    if probe.returncode:
        say(f"skipped: no network namespace can be made here ({probe.stderr.strip()})")
        emit("transfer", [], skipped="no namespace")
        sys.exit(0)
    arguments = [sys.executable, *sys.argv, "--inside", "--peers-python", python]
    arguments += ["--why-no-peers", why_no_peers]
    os.execvp(unshare[0], [*unshare, "sh", "-c", inside, "sh", *arguments])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--receivers", default="1,4")
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=2, help="the best of these counts, for all")
    parser.add_argument("--no-peers", action="store_true")
    parser.add_argument("--peers-python", default="", help="a Python with both peers installed")
    parser.add_argument("--why-no-peers", default="", help=argparse.SUPPRESS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--node", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    parser.add_argument("boot", nargs="*", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.node:
        node_main(options.node, options.folder, options.boot)
        return
    if options.repeats < 1:
        parser.error("--repeats is 1 or more")
    if not options.inside:
        enter_namespace(*peers_python(options))
    run(options)


def run(options: argparse.Namespace) -> None:
    """Everything, inside the namespace."""
    python = options.peers_python
    memory = Path("/dev/shm") if Path("/dev/shm").is_dir() else None
    folder = Path(tempfile.mkdtemp(prefix="echo2-transfer-", dir=memory))
    count = max(4, (options.megabytes << 20) // BLOCK_BYTES)
    bars: list[Bar] = []
    result: dict[str, Any] = {"failed": {}}
    if not python:
        say(f"peers skipped: {options.why_no_peers}")
        result["skipped"] = {"peers": options.why_no_peers}
    try:
        result["tcp_MB_per_s"] = raw_stream(tls=False, count=count)
        result["tls_MB_per_s"] = raw_stream(tls=True, count=count)
        say(f"one stream: TCP {result['tcp_MB_per_s']} MB/s, TLS {result['tls_MB_per_s']} MB/s")
        for receivers in [int(text) for text in options.receivers.split(",")]:
            say(f"1 -> {receivers}: echo2")
            ours = our_run(folder / f"ours{receivers}", receivers, count, options.repeats)
            key, rate = f"to_{receivers}", ours["MB_per_s_each"]
            result[key] = {"echo2": ours}
            wire = ours["wire_per_payload"]
            bars += [
                at_most(f"{key}_cpu_s_per_GB", ours["cpu_s_per_GB"], CPU_S_PER_GB_MAX, "s/GB"),
                at_most(f"{key}_wire_per_payload", wire, WIRE_PER_PAYLOAD_MAX, "ratio"),
            ]
            for library in ("libtorrent", "lattica") if python else ():
                say(f"1 -> {receivers}: {library}")
                theirs, failed = peer_runs(
                    python, library, folder / f"{library}{receivers}", receivers, count,
                    options.repeats,
                )  # fmt: skip
                if failed:
                    result["failed"][f"{key}_{library}"] = failed
                result[key][library] = theirs
                best = None if theirs is None else theirs["MB_per_s_each"]
                bars.append(at_least(f"{key}_faster_than_{library}", rate, best, "MB/s"))
        say("latency of control questions under full load")
        result["control"] = control_latency(folder / "control", count // 2)
        say(f"  {result['control']}")
        p99_ms = result["control"]["p99_ms"]
        bars.append(at_most("control_p99_ms", p99_ms, CONTROL_P99_MS_MAX, "ms"))
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if Path(python).parent.parent.name.startswith(PEERS_PREFIX):
            shutil.rmtree(Path(python).parent.parent, ignore_errors=True)
    emit("transfer", bars, **result, cores=os.cpu_count())


if __name__ == "__main__":
    main()
