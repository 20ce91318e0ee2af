"""The learner: offers prompts, judges rollouts, trains, publishes.

Opens what a run needs (state folder, ledger, mesh, trainer, desk), hands it to `learner.loop`,
and closes it. `echo2_node.cli` runs `run_learner`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from random import Random

import structlog
import trio

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.identity import Identity
from echo2_mesh.mesh import Carrier, Mesh, MeshSettings, open_mesh
from echo2_mesh.wire.types import PolicyVersion, Role
from echo2_node.config import RunConfig, bulk_settings, dump
from echo2_node.errors import as_one_error
from echo2_node.learner.checkpoints import Checkpoints
from echo2_node.learner.desk import RolloutDesk
from echo2_node.learner.ledger import Ledger
from echo2_node.learner.loop import Learner
from echo2_node.learner.modelfolder import check_model_folder
from echo2_node.learner.place import Place
from echo2_node.learner.port import Trainer
from echo2_node.learner.publisher import Publisher
from echo2_node.learner.trainer_process import open_trainer
from echo2_node.tasks.registry import make_task
from echo2_node.tokens import TokenCodec

log = structlog.get_logger()

MakeTrainer = Callable[..., AbstractAsyncContextManager[Trainer]]


async def run_learner(
    config: RunConfig,
    *,
    state_dir: Path,
    resume: bool = False,
    carrier: Carrier | None = None,
    make_trainer: MakeTrainer = open_trainer,
    stop: trio.Event | None = None,
    rng: Random | None = None,
) -> str:
    """Run, or resume, a training run to its end.

    Args:
        config: the run file, resolved.
        state_dir: where the run lives; a run that is already there needs `resume`.
        carrier: a network other than libp2p, for simulations.
        make_trainer: opens the trainer, for simulations.
        stop: set to stop as on SIGTERM, for simulations (no signal handlers are installed).
        rng: lease ids, sampling seeds and the mesh's choices, for simulations.

    Returns:
        Why it ended: "all steps done", "nothing left to learn" or "stopped".

    Errors:
        UsageError, LocalError: what cannot be mended by waiting.
    """
    check_model_folder(Path(config.model.path))
    make_task(config.task.id, config.task.args)
    place = Place(state_dir, resume=resume, name=config.run.name)
    identity = Identity.load_or_create(place.key)
    store = ChunkStore(place.chunks, config.mesh.store_quota_bytes)
    checkpoints = Checkpoints(place.checkpoints, kept=config.learner.checkpoints_kept)
    with Ledger.open(place.ledger) as ledger:
        checkpoint = checkpoints.newest()
        step = checkpoint.step if checkpoint is not None else 0
        if resume:
            ledger.roll_back(step)
        place.write("run.toml", dump(config))
        settings = mesh_settings(config, place, identity)
        resume_from = checkpoint.folder if checkpoint is not None else None
        opening = make_trainer(
            config, state_dir=state_dir, store_dir=place.chunks, resume_from=resume_from
        )
        with place.forgotten_if_nothing_happened(ledger), as_one_error():
            async with (
                open_mesh(settings, identity, store, carrier=carrier, rng=rng) as mesh,
                opening as trainer,
            ):
                learner = assemble(config, mesh, trainer, ledger, place=place, step=step, rng=rng)
                return await learner.run(stop)
    raise AssertionError("unreachable: the run returns or raises")


def assemble(
    config: RunConfig,
    mesh: Mesh,
    trainer: Trainer,
    ledger: Ledger,
    *,
    place: Place,
    step: int,
    rng: Random | None,
) -> Learner:
    """The parts of a run over an open mesh, trainer and ledger, at training step `step`."""
    task = make_task(config.task.id, config.task.args)
    model_folder = Path(config.model.path)
    secret = None if config.mesh.open else place.secret()
    desk = RolloutDesk(
        config,
        mesh,
        ledger,
        task=task,
        codec=TokenCodec.load(model_folder),
        model_folder=model_folder,
        admission_secret=secret,
        rng=rng,
    )
    publisher = Publisher(
        mesh,
        trainer,
        place=place,
        task=task,
        config=config,
        secret=secret,
        record=desk.published,
    )
    return Learner(
        mesh,
        trainer,
        publisher,
        desk,
        config=config,
        place=place,
        checkpoints=Checkpoints(place.checkpoints, kept=config.learner.checkpoints_kept),
        step=step,
        version=first_version(ledger),
    )


def first_version(ledger: Ledger) -> PolicyVersion:
    """0 for a new run; after a resume one more than any version there was.

    The steps after the checkpoint are undone, but their versions are out in the mesh: a number
    names one set of weights for ever.
    """
    return PolicyVersion(ledger.version_max() + 1)


def mesh_settings(config: RunConfig, place: Place, identity: Identity) -> MeshSettings:
    """The learner's place in its own run."""
    return MeshSettings(
        run_id=place.run_id(identity),
        role=Role.LEARNER,
        learner=identity.node,
        name=config.run.name,
        listen=config.mesh.listen,
        announce=config.mesh.announce,
        bootstrap=config.mesh.bootstrap,
        mdns=config.mesh.mdns,
        relay=config.mesh.relay,
        incarnation_unix_ms=int(time.time() * 1000),
        members_path=place.members,
        versions_path=place.versions,
        versions_kept=config.weights.versions_kept,
        bulk=bulk_settings(config.mesh),
    )
