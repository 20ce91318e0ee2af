"""A node of the weight plane and nothing else: the real mesh and a store, no engine, no trainer.

Started by `forest_kit` as `python -m tests.e2e.forest_node SETTINGS` (one JSON object), usually
inside a namespace of `hosts`. Reads commands and writes events, a JSON object a line, and ends
when its standard input does. It can be told to serve badly (`fault`): that is an instrument of
tests, kept out of the product; what it fetches and checks itself stays honest.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import trio

from echo2_mesh.chunks import ChunkStore, digest_of
from echo2_mesh.mesh import Mesh, MeshSettings, open_mesh
from echo2_mesh.net.blobs import HERE, BlobFault, Blobs
from echo2_mesh.net.bulk_process import BulkProcess
from echo2_mesh.net.lanes import BulkSettings
from echo2_mesh.testing import identity_of, make_version
from echo2_mesh.wire.types import PolicyVersion, Role
from tests.e2e.rogue_bulk import CHUNK_BYTES_MIN, FAULT_FILE, LIES_FILE

LINE_BYTES_MAX = 1 << 20
POLL_S = 0.25


def say(event: str, **fields: Any) -> None:
    """One event on standard output, with the moment on the clock that all processes share."""
    line = {"event": event, "at_s": time.monotonic(), **fields}
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


class Fault:
    """How this node treats those who ask it for data: "" well, "lie" or "stall"."""

    def __init__(self, folder: Path) -> None:
        self.kind = ""
        self.counts: Counter[str] = Counter()
        self._folder = folder

    def turn(self, kind: str) -> None:
        """Be so from now on, in the daemon and in its bulk process."""
        self.kind = kind
        (self._folder / FAULT_FILE).write_text(kind)

    def served(self) -> dict[str, int]:
        """How often either process served badly."""
        counts = Counter(self.counts)
        with contextlib.suppress(OSError):
            counts.update(json.loads((self._folder / LIES_FILE).read_text()))
        return dict(counts)

    def install(self) -> None:
        """Come between the blob protocol and the network, and have a bulk process that obeys."""
        started = BulkProcess.__init__

        def start(process: BulkProcess, *args: Any, **options: Any) -> None:
            started(process, *args, **options)
            process._argv = tuple(
                "tests.e2e.rogue_bulk" if word == "echo2_mesh.bulk.worker" else word
                for word in process._argv
            )

        BulkProcess.__init__ = start  # type: ignore[method-assign]
        honest, fault = Blobs._serve, self

        async def serve(blobs: Blobs, peer: Any, request: bytes) -> bytes:
            while fault.kind == "stall":
                fault.counts["stalled"] += 1
                await fault.wait_cured()
            reply = await honest(blobs, peer, request)
            if fault.kind == "lie" and reply[:1] == HERE and len(reply) > CHUNK_BYTES_MIN:
                fault.counts["lies"] += 1
                fault.counts["lie_bytes"] += len(reply)
                return reply[:-1] + bytes([reply[-1] ^ 0x40])
            return reply

        Blobs._serve = serve  # type: ignore[method-assign]

    async def wait_cured(self) -> None:
        kind = self.kind
        while self.kind == kind:
            await trio.sleep(POLL_S)


class Notes:
    """What came from whom and what went wrong with whom, beside the product's own counters."""

    def __init__(self) -> None:
        self.bytes_from: Counter[str] = Counter()
        self.faults: Counter[tuple[str, str]] = Counter()

    def install(self) -> None:
        """Watch every fetch of a blob."""
        real, notes = Blobs.fetch_from, self

        async def fetch_from(blobs: Blobs, peer: Any, ref: Any, **options: Any) -> None:
            try:
                await real(blobs, peer, ref, **options)
            except BlobFault as error:
                notes.faults[peer, error.fault.value] += 1
                raise
            notes.bytes_from[peer] += ref.size_bytes

        Blobs.fetch_from = fetch_from  # type: ignore[method-assign]


class Node:
    """One process's node and its commands."""

    def __init__(self, settings: dict[str, Any], fault: Fault, notes: Notes) -> None:
        self._name = str(settings["name"])
        self._folder = Path(settings["folder"])
        self._settings = settings
        self._fault = fault
        self._notes = notes

    async def live(self) -> None:
        """Join, obey until the commands end, leave."""
        settings, name = self._settings, self._name
        identity = identity_of(name)
        mesh_settings = MeshSettings(
            run_id="run-forest",
            role=Role.LEARNER if name == "learner" else Role.ACTOR,
            learner=identity_of("learner").node,
            name=name,
            listen=tuple(settings["listen"]),
            bootstrap=tuple(settings["know"]),
            mdns=False,
            incarnation_unix_ms=int(time.time() * 1000),
            members_path=self._folder / "members.json",
            bulk=BulkSettings(**settings["bulk"]),
        )
        store = ChunkStore(self._folder / "chunks")
        async with (
            open_mesh(mesh_settings, identity, store) as mesh,
            trio.open_nursery() as nursery,
        ):
            say("up", node=mesh.node, addresses=list(mesh.addresses()))
            mesh.set_state(state="generating")
            nursery.start_soon(self._tell_ready, mesh)
            nursery.start_soon(self._tell_progress, mesh)
            async for command in _commands():
                await self._obey(mesh, command)
            nursery.cancel_scope.cancel()

    async def _obey(self, mesh: Mesh, command: dict[str, Any]) -> None:
        match command["do"]:
            case "publish":
                await self._publish(mesh, command)
            case "fault":
                self._fault.turn(command["kind"])
            case "report":
                say("report", number=command["number"], **self._report(mesh))
            case "verify":
                bad, good = await trio.to_thread.run_sync(self._verify, mesh.store)
                say("verified", number=command["number"], bad=bad, good=good)

    async def _publish(self, mesh: Mesh, command: dict[str, Any]) -> None:
        """A version of random bytes: every chunk differs from every earlier one."""
        version = PolicyVersion(command["version"])
        pieces = [os.urandom(command["chunk_bytes"]) for _ in range(command["chunks"])]
        ref, size_bytes = await trio.to_thread.run_sync(make_version, mesh, version, pieces)
        say("publishing", version=version, size_bytes=size_bytes)
        await mesh.announce_version(ref, version, size_bytes)
        mesh.set_state(version=version)

    async def _tell_ready(self, mesh: Mesh) -> None:
        async for ready in mesh.versions():
            say("ready", version=ready.version)
            mesh.set_state(version=ready.version)

    async def _tell_progress(self, mesh: Mesh) -> None:
        """An event for each tenth of a version; (0, n) to (n, n) is one version."""
        last = 0
        while True:
            here, wanted = mesh.fetch_progress_bytes()
            tenth = 10 * here // wanted if wanted else 0
            if tenth != last:
                last = tenth
                say("progress", tenth=tenth, here_bytes=here)
            await trio.sleep(POLL_S)

    def _report(self, mesh: Mesh) -> dict[str, Any]:
        names = {member.node: member.heartbeat.name for member in mesh.members()}
        return {
            "counters": dict(mesh.counters),
            "bytes_from": {names.get(n, n): count for n, count in self._notes.bytes_from.items()},
            "faults": [
                [names.get(node, node), fault, count]
                for (node, fault), count in self._notes.faults.items()
            ],
            "served": self._fault.served(),
            "members": sorted(names.values()),
        }

    def _verify(self, store: ChunkStore) -> tuple[int, int]:
        """(damaged, sound) blobs in the store, each hashed anew past the store's own code."""
        bad = good = 0
        for path in store.folder.iterdir():
            if len(path.name) == 64:
                sound = digest_of(path.read_bytes()).hex() == path.name
                bad, good = bad + (not sound), good + sound
        return bad, good


async def _commands() -> AsyncIterator[dict[str, Any]]:
    stream = trio.lowlevel.FdStream(os.dup(0))
    rest = b""
    while chunk := await stream.receive_some():
        *lines, rest = (rest + chunk).split(b"\n")
        assert len(rest) <= LINE_BYTES_MAX
        for line in lines:
            yield json.loads(line)


def main() -> None:
    settings = json.loads(sys.argv[1])
    random.seed(settings["name"])
    fault, notes = Fault(Path(settings["folder"])), Notes()
    fault.install()
    notes.install()
    trio.run(Node(settings, fault, notes).live)


if __name__ == "__main__":
    main()
