"""A node of the mesh and nothing else, told what to do on its standard input; for NAT trials.

Started by `nat_kit` as `python -m tests.e2e.nat_node SETTINGS` (one JSON object) inside a namespace
of `nat_hosts`. Reads commands and writes one answer each, a JSON object a line, and ends when its
standard input does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import trio

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import PeerError
from echo2_mesh.mesh import Mesh, MeshSettings, open_mesh
from echo2_mesh.testing import identity_of
from echo2_mesh.wire.messages import CatchUp, ChunkRef
from echo2_mesh.wire.types import ChunkKind, Digest, NodeId, Role

LINE_BYTES_MAX = 1 << 20
AT_ONCE = 4


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


async def obey(mesh: Mesh, command: dict[str, Any]) -> dict[str, Any]:
    """The answer to one command; what a peer does wrong is an answer too."""
    match command["do"]:
        case "state":
            names = {member.node: member.heartbeat.name for member in mesh.members()}
            reach, reason = mesh.reach()
            return {
                "reach": reach.value,
                "reason": reason,
                "observed_ip": mesh.observed_ip(),
                "ways": {names.get(node, node): way for node, way in mesh.ways().items()},
                "reaches": {m.heartbeat.name: m.heartbeat.reach.value for m in mesh.members()},
                "lanes": {names.get(node, node): way for node, way in mesh.traffic().lanes.items()},
                "addresses": list(mesh.addresses()),
                "counters": dict(mesh.counters),
            }
        case "make":
            made = []
            for _ in range(command.get("count", 1)):
                data = os.urandom(command["size_bytes"])
                ref = await trio.to_thread.run_sync(mesh.store.add, ChunkKind.FULL, data)
                made.append(ref.digest.hex())
            return {"digests": made, "size_bytes": command["size_bytes"]}
        case "fetch":
            return {"seconds": await fetch(mesh, command)}
        case "ask":
            begun_s = time.monotonic()
            await mesh.ask(NodeId(command["node"]), CatchUp(), timeout_s=command["timeout_s"])
            return {"seconds": time.monotonic() - begun_s}
    raise ValueError(f"unknown command {command}")


async def fetch(mesh: Mesh, command: dict[str, Any]) -> float:
    """Get blobs of one size from one node, a few at a time; the seconds it took."""
    begun_s = time.monotonic()
    refs = [
        ChunkRef(
            kind=ChunkKind.FULL,
            digest=Digest(bytes.fromhex(digest)),
            size_bytes=command["size_bytes"],
        )
        for digest in command["digests"]
    ]
    limiter = trio.CapacityLimiter(AT_ONCE)
    failures: list[PeerError] = []

    async def one(ref: ChunkRef) -> None:
        async with limiter:
            holder = NodeId(command["node"])
            try:
                await mesh.fetch_blob(ref, [holder], timeout_s=command["timeout_s"])
            except PeerError as error:
                failures.append(error)

    async with trio.open_nursery() as nursery:
        for ref in refs:
            nursery.start_soon(one, ref)
    if failures:
        raise failures[0]
    return time.monotonic() - begun_s


async def live(settings: dict[str, Any]) -> None:
    name, folder = settings["name"], Path(settings["folder"])
    mesh_settings = MeshSettings(
        run_id="run-nat",
        role=Role.LEARNER if name == "learner" else Role.ACTOR,
        learner=identity_of("learner").node,
        name=name,
        listen=tuple(settings["listen"]),
        bootstrap=tuple(settings["know"]),
        mdns=False,
        incarnation_unix_ms=int(time.time() * 1000),
        **settings.get("mesh", {}),
    )
    store = ChunkStore(folder / "chunks")
    async with open_mesh(mesh_settings, identity_of(name), store) as mesh:
        say(node=mesh.node, addresses=list(mesh.addresses()))
        mesh.set_state(state="generating")
        stream = trio.lowlevel.FdStream(os.dup(0))
        rest = b""
        while chunk := await stream.receive_some():
            *lines, rest = (rest + chunk).split(b"\n")
            assert len(rest) <= LINE_BYTES_MAX
            for line in lines:
                try:
                    say(**await obey(mesh, json.loads(line)))
                except PeerError as error:
                    say(refused=str(error))


if __name__ == "__main__":
    trio.run(live, json.loads(sys.argv[1]))
