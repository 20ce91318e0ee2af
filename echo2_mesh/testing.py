"""Fleets of nodes on a network in memory, for tests and simulations. Imported by tests alone.

`open_fleet` gives learners and actors by name on a `SimNetwork`, each a whole mesh with a real
store; `make_version` fills one with a small model. The wires are in `net.simulated`.
"""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import blake3
import trio

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore, digest_of
from echo2_mesh.delta.codec import Slice, encode_chunk
from echo2_mesh.delta.patches import write_patch
from echo2_mesh.identity import Identity
from echo2_mesh.mesh import Mesh, MeshSettings, open_mesh
from echo2_mesh.net.simulated import SimCarrier, SimNetwork, Spoil, open_network
from echo2_mesh.wire.messages import (
    ChunkRef,
    FileRef,
    Manifest,
    Patch,
    PatchChunk,
    Probe,
    TaskSpec,
    TensorSpan,
)
from echo2_mesh.wire.types import ChunkKind, Digest, NodeId, PolicyVersion, Role

__all__ = [
    "Fleet",
    "SimCarrier",
    "SimNetwork",
    "SimNode",
    "flip_bits",
    "identity_of",
    "make_patch",
    "make_version",
    "open_fleet",
    "open_network",
    "seeds",
]


def identity_of(name: str) -> Identity:
    """The same identity for the same name, in every run."""
    return Identity(blake3.blake3(b"echo2 test identity " + name.encode()).digest())


class SimNode:
    """A running node of a `Fleet`."""

    def __init__(self, name: str, mesh: Mesh, scope: trio.CancelScope) -> None:
        self.name = name
        self.mesh = mesh
        self.node = mesh.node
        self.store = mesh.store
        self._scope = scope

    def stop(self) -> None:
        """End the node's tasks; use `Fleet.crash`, which also cuts its wires."""
        self._scope.cancel()


class Fleet:
    """Nodes by name on one simulated network, each with a real store in its own folder."""

    def __init__(
        self, network: SimNetwork, folder: Path, nursery: trio.Nursery, *, run_id: str = "run-1"
    ) -> None:
        self.network = network
        self.run_id = run_id
        self.nodes: dict[str, SimNode] = {}
        self._folder = folder
        self._nursery = nursery
        self._born = 0
        self._version = PolicyVersion(0)
        self._pieces: list[bytes] = []
        self._patches: tuple[Patch, ...] = ()

    @property
    def learner(self) -> SimNode:
        """The node named "learner"."""
        return self.nodes["learner"]

    async def start(
        self,
        name: str,
        *,
        role: Role | None = None,
        dialable: bool = True,
        know: tuple[str, ...] = ("learner",),
        store_quota_bytes: int = limits.STORE_QUOTA_BYTES_DEFAULT,
    ) -> SimNode:
        """Start a node; one named "learner" is the learner. It begins by knowing `know`."""
        self._born += 1
        bootstrap = tuple(
            address
            for other in know
            if other != name and other in self.nodes
            for address in self.nodes[other].mesh.addresses()
        )
        settings = MeshSettings(
            run_id=self.run_id,
            role=role or (Role.LEARNER if name == "learner" else Role.ACTOR),
            learner=identity_of("learner").node,
            name=name,
            bootstrap=bootstrap,
            incarnation_unix_ms=1_000_000 + self._born,
            members_path=self._folder / name / "members.json",
            versions_path=self._folder / name / "versions.jsonl",
        )
        node: SimNode = await self._nursery.start(
            self._live, name, settings, dialable, store_quota_bytes
        )
        return node

    async def _live(
        self,
        name: str,
        settings: MeshSettings,
        dialable: bool,
        store_quota_bytes: int,
        task_status: Any = trio.TASK_STATUS_IGNORED,
    ) -> None:
        identity = identity_of(name)
        folder = self._folder / name
        folder.mkdir(exist_ok=True)
        store = ChunkStore(folder / "chunks", store_quota_bytes)
        with trio.CancelScope() as scope:
            carrier = self.network.carrier(identity, dialable=dialable)
            try:
                async with open_mesh(
                    settings,
                    identity,
                    store,
                    carrier=carrier,
                    rng=Random(self.network.rng.random()),
                    inline_work=True,
                ) as mesh:
                    node = self.nodes[name] = SimNode(name, mesh, scope)
                    task_status.started(node)
                    await trio.sleep_forever()
            finally:
                if carrier.alive:
                    self.network.crash(identity.node)

    async def crash(self, name: str) -> None:
        """Kill a node without a word; its folder stays for a restart under the same name."""
        node = self.nodes.pop(name)
        self.network.crash(node.node)
        node.stop()
        await trio.lowlevel.checkpoint()

    async def publish(self, version: int, *, chunks: int = 8, chunk_bytes: int = 4096) -> ChunkRef:
        """The learner makes and announces a version of random bytes."""
        pieces = [self.network.rng.randbytes(chunk_bytes) for _ in range(chunks)]
        return await self._announce(version, pieces, ())

    async def publish_step(
        self,
        version: int,
        *,
        changed: int = 20,
        steps: int = 8,
        bend: Callable[[bytes], bytes] | None = None,
    ) -> ChunkRef:
        """As `publish`, with `changed` bytes of every chunk of the last version altered.

        Args:
            steps: patches that the manifest lists, this one included.
            bend: what becomes of this step's patch before the learner signs it.
        """
        rng = self.network.rng
        old = self._pieces
        new = [bytearray(piece) for piece in old]
        for piece in new:
            for at in rng.sample(range(len(piece)), changed):
                piece[at] ^= 1 + rng.randrange(255)
        pieces = [bytes(piece) for piece in new]
        patch = make_patch(
            self.learner.store, (self._version, old), (PolicyVersion(version), pieces), bend=bend
        )
        patches = (patch, *self._patches)[:steps]
        return await self._announce(version, pieces, patches)

    async def _announce(
        self, version: int, pieces: list[bytes], patches: tuple[Patch, ...]
    ) -> ChunkRef:
        learner = self.learner
        self._version, self._pieces, self._patches = PolicyVersion(version), pieces, patches
        ref, size_bytes = make_version(
            learner.mesh, PolicyVersion(version), pieces, patches=patches
        )
        await learner.mesh.announce_version(ref, PolicyVersion(version), size_bytes)
        return ref


@asynccontextmanager
async def open_fleet(
    folder: Path, *, seed: int = 0, run_id: str = "run-1", **network: Any
) -> AsyncIterator[Fleet]:
    """A fleet on a network of its own; `network` as in `open_network`."""
    async with open_network(Random(seed), **network) as net, trio.open_nursery() as nursery:
        yield Fleet(net, folder, nursery, run_id=run_id)
        nursery.cancel_scope.cancel()


def make_version(
    mesh: Mesh,
    version: PolicyVersion,
    pieces: list[bytes],
    *,
    file: bytes = b"{}",
    patches: tuple[Patch, ...] = (),
) -> tuple[ChunkRef, int]:
    """Put a small version into the store of `mesh`; returns its sealed manifest and its size."""
    refs = tuple(mesh.store.add(ChunkKind.FULL, piece) for piece in pieces)
    data = b"".join(pieces)
    span = TensorSpan(
        name="weight", dtype="U8", shape=(len(data),), offset_bytes=0, size_bytes=len(data)
    )
    manifest = Manifest(
        run_id=mesh.run_id,
        version=version,
        chunks=refs,
        patches=patches,
        tensors=(span,),
        files=(FileRef(name="config.json", chunks=(mesh.store.add(ChunkKind.FILE, file),)),),
        state_digest=digest_of(data),
        tokenizer_digest=Digest(bytes(32)),
        template_digest=Digest(bytes(32)),
        task=TaskSpec(task_id="sort", args_json="{}", digest=Digest(bytes(32))),
        probe=Probe(token_ids=bytes(8), logprobs=bytes(4)),
    )
    ref = mesh.store.add(ChunkKind.MANIFEST, mesh.seal(manifest))
    return ref, len(data) + len(file)


def make_patch(
    store: ChunkStore,
    old: tuple[PolicyVersion, list[bytes]],
    new: tuple[PolicyVersion, list[bytes]],
    *,
    span: int = 2,
    bend: Callable[[bytes], bytes] | None = None,
) -> Patch:
    """The patch between two versions of pieces, its blobs in `store`, each for `span` chunks."""
    (base, before), (version, after) = old, new
    chunks = []
    for first in range(0, len(before), span):
        pairs = zip(before[first : first + span], after[first : first + span], strict=True)
        encoded = [encode_chunk(a, b, (Slice(size_bytes=len(a), item_bytes=1),)) for a, b in pairs]
        if any(encoded):
            blob = write_patch(encoded)
            chunks.append(
                PatchChunk(
                    ref=store.add(ChunkKind.PATCH, bend(blob) if bend else blob),
                    first=first,
                    count=len(encoded),
                )
            )
    return Patch(
        base=base,
        base_digest=digest_of(b"".join(before)),
        version=version,
        state_digest=digest_of(b"".join(after)),
        chunks=tuple(chunks),
    )


def flip_bits(protocol: str) -> Spoil:
    """A liar: the last byte of every reply on `protocol` is wrong."""

    def spoil(_: NodeId, spoken: str, reply: bytes) -> bytes:
        if spoken != protocol or len(reply) < 2:
            return reply
        return reply[:-1] + bytes([reply[-1] ^ 0x40])

    return spoil


def seeds() -> list[int]:
    """Seeds to simulate: a few, or the one named by ECHO2_SEED."""
    chosen = os.environ.get("ECHO2_SEED")
    return [int(chosen)] if chosen else [1, 2]
