"""What desk tests share: a mesh of handlers, an actor that signs, and a run in a folder.

`HandMesh` is a mesh without a network: tests call the desk's handlers through it, as messages
that a real mesh has already verified. Actors seal real trajectories with real keys.
"""

from __future__ import annotations

import contextlib
import random
from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import trio

from echo2_mesh.chunks import ChunkStore, digest_of
from echo2_mesh.errors import PeerError
from echo2_mesh.identity import Identity
from echo2_mesh.wire.codec import seal
from echo2_mesh.wire.messages import (
    ChunkRef,
    Cohort,
    Done,
    LeaseRequest,
    RolloutBatch,
    Trajectory,
    TrajectoryHeader,
    Verdicts,
    VersionSpan,
)
from echo2_mesh.wire.types import ChunkKind, Digest, PolicyVersion, StopReason
from echo2_node.config import RunConfig, convert
from echo2_node.learner.desk import RolloutDesk
from echo2_node.learner.ledger import Ledger
from echo2_node.tasks.registry import make_task, task_digest
from echo2_node.tokens import (
    TokenCodec,
    build_character_tokenizer,
    template_digest,
    tokenizer_digest,
)

RUN_ID = "test-run"
MANIFEST = Digest(b"\x07" * 32)
COHORT = Cohort(engine="fake", dtype="float32", device="cpu")


class HandMesh:
    """Keeps the desk's handlers; replies of actors are Done."""

    def __init__(self, folder: Path) -> None:
        self.run_id = RUN_ID
        self.store = ChunkStore(folder / "chunks")
        self.handlers: dict[type, object] = {}
        self.hearers: dict[type, object] = {}
        self.told: list[tuple[str, Verdicts]] = []
        self.blobs: dict[Digest, bytes] = {}
        self.present: tuple[SimpleNamespace, ...] = ()

    def answer(self, kind, handler):
        self.handlers[kind] = handler

    def hear(self, kind, handler):
        self.hearers[kind] = handler

    async def ask(self, node, message, *, timeout_s=1.0):
        self.told.append((node, message))
        return Done()

    async def fetch_blob(self, ref, holders, *, timeout_s):
        if ref.digest not in self.blobs:
            raise PeerError("Nobody has it.")
        self.store.put(ref, self.blobs[ref.digest])

    def members(self):
        return self.present


class Run:
    """A run's folder; `open_desk` starts a learner's desk in it, again and again."""

    def __init__(self, folder: Path, **rollout) -> None:
        self.folder = folder
        self.run_id = rollout.pop("run_id", RUN_ID)
        self.task = make_task("sort_digits", {"digits": 4})
        self.model = folder / "model"
        self.model.mkdir(exist_ok=True)
        for name, data in build_character_tokenizer(self.task.alphabet()).items():
            (self.model / name).write_bytes(data)
        self.codec = TokenCodec.load(self.model)
        staleness = {"limit_steps": rollout.pop("limit_steps", 1)}
        self.config = convert(
            {
                "run": {"seed": 5},
                "model": {"path": str(self.model)},
                "task": {"id": "sort_digits"},
                "rollout": {
                    "groups_per_step": 2,
                    "group_size": 2,
                    "tokens_max": 8,
                    "lease_ttl_s": 30.0,
                    **rollout,
                },
                "staleness": staleness,
            },
            RunConfig,
            where="test",
        )

    @contextlib.asynccontextmanager
    async def open_desk(self, *, secret: bytes | None = None, seed: int = 0, version: int = 0):
        mesh = HandMesh(self.folder)
        with Ledger.open(self.folder / "ledger.sqlite") as ledger:
            desk = RolloutDesk(
                self.config,
                mesh,
                ledger,
                task=self.task,
                codec=self.codec,
                model_folder=self.model,
                admission_secret=secret,
                rng=random.Random(seed),
                inline_work=True,
            )
            async with trio.open_nursery() as nursery:
                await nursery.start(desk.run)
                await desk.published(PolicyVersion(version), MANIFEST)
                yield Office(desk, mesh, ledger, self)
                nursery.cancel_scope.cancel()


class Office:
    """A running desk with its mesh and ledger."""

    def __init__(self, desk, mesh, ledger, run) -> None:
        self.desk, self.mesh, self.ledger, self.run = desk, mesh, ledger, run


class Actor:
    """An honest actor. `seal` makes a member of a lease; keyword arguments make it dishonest."""

    def __init__(self, office: Office, seed: int = 1) -> None:
        self.office = office
        self.run = office.run
        self.identity = Identity(bytes([seed]) * 32)
        self.node = self.identity.node

    async def lease(self, groups_max: int = 1, version: int = 0, **changes):
        """Ask for leases; the reply."""
        request = lease_request(self.run, version=version, groups_max=groups_max)
        request = msgspec.structs.replace(request, **changes)
        return await self.office.mesh.handlers[LeaseRequest](self.node, request)

    def trajectory(self, lease, index, *, right: bool | None = None, version=None, **changes):
        """Member `index`: sorted digits if `right` (default: for index 0), else the prompt's."""
        made = make_trajectory(self.run, lease, index, right=right, version=version)
        return msgspec.structs.replace(made, **changes)

    def header(self, trajectory, *, inline: bool = True, raw: bytes | None = None):
        """The announcement of a sealed trajectory; `raw` replaces the sealed bytes."""
        sealed = raw or seal(trajectory, run_id=RUN_ID, sender=self.node, sign=self.identity.sign)
        ref = ChunkRef(kind=ChunkKind.TRAJECTORY, digest=digest_of(sealed), size_bytes=len(sealed))
        if not inline:
            self.office.mesh.blobs[ref.digest] = sealed
        return TrajectoryHeader(
            lease_id=trajectory.lease_id,
            group_id=trajectory.group_id,
            index=trajectory.index,
            version_min=trajectory.segments[0].version,
            version_max=trajectory.segments[-1].version,
            tokens=len(trajectory.loss_mask),
            reward=trajectory.reward,
            payload=ref,
            inline=sealed if inline else None,
        )

    async def hand_in(self, *headers):
        """Announce directly; the verdicts by (lease, index)."""
        answer = self.office.mesh.handlers[RolloutBatch]
        reply = await answer(self.node, RolloutBatch(headers=headers))
        return {(note.lease_id, note.index): note.verdict for note in reply.notes}

    async def finish(self, lease, **changes):
        """All members of a lease, honestly, half of them right."""
        headers = [self.header(self.trajectory(lease, i, **changes)) for i in lease.indices]
        return await self.hand_in(*headers)


def lease_request(run: Run, *, version: int, groups_max: int) -> LeaseRequest:
    """What an actor with the run's model asks."""
    return LeaseRequest(
        version=PolicyVersion(version),
        groups_max=groups_max,
        cohort=COHORT,
        tokenizer_digest=tokenizer_digest(run.model),
        template_digest=template_digest(run.model),
        task_digest=task_digest(run.task),
    )


def make_trajectory(run: Run, lease, index: int, *, right: bool | None = None, version=None):
    """A sound member of a lease whose answer is right or, but for the length, wrong."""
    item = run.task.item(run.config.run.seed, lease.item_index)
    right = index == 0 if right is None else right
    digits = item.prompt[:-1]
    answer = "".join(sorted(digits)) if right else "".join(sorted(digits, reverse=True))
    eos = next(iter(run.codec.eos_ids))
    completion = run.codec.encode_prompt(answer) + np.array([eos], "<i4").tobytes()
    prompt, count = len(lease.prompt_ids) // 4, len(completion) // 4
    used = lease.version_min if version is None else version
    return Trajectory(
        run_id=run.run_id,
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        index=index,
        item_index=lease.item_index,
        token_ids=lease.prompt_ids + completion,
        prompt_length=prompt,
        loss_mask=bytes(prompt) + b"\x01" * count,
        logprobs=np.array([0.0] * prompt + [-0.5] * count, "<f4").tobytes(),
        segments=(VersionSpan(version=used, start=prompt, end=prompt + count),),
        reward=run.task.score(item, answer, finished=True).reward,
        stop_reason=StopReason.STOP,
        sampling=lease.sampling,
        cohort=COHORT,
        tokenizer_digest=tokenizer_digest(run.model),
        template_digest=template_digest(run.model),
        task_digest=task_digest(run.task),
    )
