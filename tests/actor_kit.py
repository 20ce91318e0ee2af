"""What actor tests share: a version in a store, a mesh of hands, and an engine without a model."""

from __future__ import annotations

from types import SimpleNamespace

import blake3
import numpy as np
import trio

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import PeerError
from echo2_mesh.identity import Identity
from echo2_mesh.mesh import ReadyVersion
from echo2_mesh.wire.codec import seal
from echo2_mesh.wire.messages import (
    Done,
    FileRef,
    Lease,
    LeaseGrant,
    LeaseRequest,
    LeaseReturn,
    Manifest,
    Probe,
    RolloutBatch,
    Sampling,
    TensorSpan,
    VerdictNote,
    Verdicts,
)
from echo2_mesh.wire.types import ChunkKind, Digest, PolicyVersion, Reason
from echo2_node.engines.fake import FakeEnginePort, FakeSettings
from echo2_node.engines.weights import read_manifest, stage
from echo2_node.tasks.registry import make_task, task_spec
from echo2_node.tokens import TokenCodec, build_character_tokenizer, template_digest
from echo2_node.tokens import tokenizer_digest as tokenizer_digest_of

RUN_ID = "test-run"
LEARNER = Identity(b"\x01" * 32)
TASK = make_task("sort_digits", {"digits": 3})
SEED = 5


class Mesh:
    """One actor's mesh by hand: the test is the learner, whose answers are in its lists."""

    def __init__(self, folder):
        self.identity = Identity(b"\x02" * 32)
        self.node, self.learner, self.run_id = self.identity.node, LEARNER.node, RUN_ID
        self.store = ChunkStore(folder / "chunks")
        self.send, self.receive = trio.open_memory_channel(1)
        self.handlers = {}
        self.gossiped, self.asked = [], []
        self.grants = []
        """Leases to give, a tuple per question; then nothing, after `hold_s`."""
        self.hold_s = 2.0
        self.verdict = Reason.ADMITTED
        self.away = False
        self.elsewhere = {}
        """Digest -> bytes that a fetch finds."""

    def versions(self):
        return self.receive

    def members(self):
        return ()

    def seal(self, message):
        return seal(message, run_id=RUN_ID, sender=self.node, sign=self.identity.sign)

    def answer(self, kind, handler):
        self.handlers[kind] = handler

    async def gossip(self, message):
        self.gossiped.append(message)
        await trio.lowlevel.checkpoint()

    async def ask(self, node, message, *, timeout_s=15.0):
        assert node == self.learner
        self.asked.append(message)
        await trio.lowlevel.checkpoint()
        if self.away:
            await trio.sleep(timeout_s)
            raise PeerError("Nobody there.", code="unreachable")
        match message:
            case LeaseRequest():
                return await self._grant(message)
            case RolloutBatch(headers=headers):
                return Verdicts(notes=self.notes(headers))
            case _:
                return Done()

    async def _grant(self, request):
        if not self.grants:
            await trio.sleep(self.hold_s)
        leases = self.grants.pop(0) if self.grants else ()
        return LeaseGrant(leases=leases, retry_after_s=0.5, run_seed=SEED)

    def notes(self, headers):
        return tuple(
            VerdictNote(lease_id=h.lease_id, index=h.index, verdict=self.verdict) for h in headers
        )

    async def fetch_blob(self, ref, holders, *, timeout_s=60.0):
        await trio.lowlevel.checkpoint()
        assert holders[0] == self.learner
        if ref.digest not in self.elsewhere:
            raise PeerError("Nobody has it.")
        self.store.put(ref, self.elsewhere[ref.digest])

    def returned(self):
        return [i for m in self.asked if isinstance(m, LeaseReturn) for i in m.lease_ids]

    def announced(self):
        """All headers, by gossip or directly."""
        told = [*self.gossiped, *(m for m in self.asked if isinstance(m, RolloutBatch))]
        return [header for batch in told for header in batch.headers]


async def run_sync_inline(call, *arguments, **_):
    """In place of `trio.to_thread.run_sync`: a virtual clock would run ahead of a thread."""
    await trio.lowlevel.checkpoint()
    return call(*arguments)


class Metrics:
    """Keeps what a metrics file would."""

    def __init__(self):
        self.lines = []

    def write(self, values):
        self.lines.append(values)


def tokenizer_files():
    return build_character_tokenizer(TASK.alphabet())


def open_tokenizer(folder):
    folder.mkdir(exist_ok=True)
    for name, data in tokenizer_files().items():
        (folder / name).write_bytes(data)
    return TokenCodec.load(folder)


def publish(mesh, folder, version, *, weights=b"weights"):
    """A complete version in the store of `mesh`."""
    open_tokenizer(folder / "published")
    chunk = mesh.store.add(ChunkKind.FULL, weights + bytes([version]))
    files = tuple(
        FileRef(name=name, chunks=(mesh.store.add(ChunkKind.FILE, data),))
        for name, data in tokenizer_files().items()
    )
    span = TensorSpan(
        name="weight", dtype="BF16", shape=(4,), offset_bytes=0, size_bytes=chunk.size_bytes
    )
    assert chunk.size_bytes == 8
    manifest = Manifest(
        run_id=RUN_ID,
        version=PolicyVersion(version),
        chunks=(chunk,),
        tensors=(span,),
        files=files,
        state_digest=Digest(blake3.blake3(weights + bytes([version])).digest()),
        tokenizer_digest=tokenizer_digest_of(folder / "published"),
        template_digest=template_digest(folder / "published"),
        task=task_spec(TASK),
        probe=Probe(token_ids=bytes(16), logprobs=np.full(3, -1.0, "<f4").tobytes()),
    )
    sealed = seal(manifest, run_id=RUN_ID, sender=LEARNER.node, sign=LEARNER.sign)
    ref = mesh.store.add(ChunkKind.MANIFEST, sealed)
    return ReadyVersion(version=PolicyVersion(version), manifest=manifest, manifest_ref=ref)


class Engine(FakeEnginePort):
    """A fake whose probe is right only if the weights on the disk are. `endless`: never stops."""

    def __init__(self, store, *, endless=False, **settings):
        if endless:
            settings |= {"skill_start": 1.0, "skill_max": 1.0}
        super().__init__(
            lambda digest: read_manifest(store.folder, digest),
            FakeSettings(**{"step_s": 0.1, **settings}),
            rule=(lambda _: (5,) * 4000) if endless else None,
        )
        self._store = store
        self.installed = []
        self.refusal = None
        """Raised instead of an install that leaves everything as it was."""

    async def install(self, manifest):
        if self.refusal is not None:
            raise self.refusal
        report = await super().install(manifest)
        staged = stage(self._store.folder, manifest)
        data = b"".join(bytes(view) for _, view in staged.tensors())
        self.installed.append(report.version)
        if blake3.blake3(data).digest() == staged.manifest.state_digest:
            return report
        wrong = SimpleNamespace(**{f: getattr(report, f) for f in report.__struct_fields__})
        wrong.probe_logprobs = np.full(3, -9.0, "<f4").tobytes()
        return wrong


def lease(number, codec, *, indices=(0, 1), ttl_s=100.0, tokens_max=6, prompt=None):
    """Lease `number` on item `number`."""
    text = TASK.item(SEED, number).prompt if prompt is None else prompt
    return Lease(
        lease_id=f"{number:032x}",
        group_id=f"{1000 + number:032x}",
        item_index=number,
        prompt_ids=codec.encode_prompt(text),
        indices=indices,
        group_size=len(indices),
        sampling=Sampling(tokens_max=tokens_max, seed=number),
        version_min=PolicyVersion(0),
        ttl_s=ttl_s,
    )
