"""The actor: joins a run, keeps the newest policy installed, generates under leases.

Assembles mesh, weights, engine and rollouts, restarts a dead engine, reports, and leaves well:
on SIGTERM or Ctrl-C running generations finish or are handed back, and a goodbye is said. It
decides nothing itself. `echo2_node.cli` runs `run_actor`.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from functools import partial
from pathlib import Path
from random import Random

import structlog
import trio

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import LocalError
from echo2_mesh.identity import Identity
from echo2_mesh.mesh import Carrier, Mesh, MeshSettings, ReadyVersion, open_mesh
from echo2_mesh.versionlog import VERSIONS_FILE
from echo2_mesh.wire.messages import Goodbye
from echo2_mesh.wire.ticket import RunTicket, admission_proof
from echo2_mesh.wire.types import GOODBYE_RUN_ENDED, Digest, NodeId, Role
from echo2_node.actor.asking import RunEnded, cancel_on
from echo2_node.actor.rollouts import Rollouts
from echo2_node.actor.weights import (
    Weights,
    check_first_version,
    open_codec,
    write_model_files,
)
from echo2_node.config import ActorConfig, bulk_settings
from echo2_node.engines.port import EnginePort
from echo2_node.engines.process import open_engine
from echo2_node.errors import as_one_error, leaves
from echo2_node.status import Reporter
from echo2_node.tasks.registry import task_of
from echo2_node.telemetry import MetricsFile

log = structlog.get_logger()

ENGINE_RESTART_S = 2.0
ENGINE_RESTART_S_MAX = 60.0
ENGINE_HEALTHY_S = 120.0
"""An engine that lived this long does not count as failing at once."""
ENGINE_FAILURES_MAX = 5
REPORT_INTERVAL_S = 1.0
LEARNER_SILENT_S = 15.0
"""A person who waits this long for a first version is told what to look at."""

MakeEngine = Callable[[Path, Path], AbstractAsyncContextManager[EnginePort]]
"""(model folder, chunk folder) -> engine."""


async def run_actor(
    config: ActorConfig,
    ticket: RunTicket,
    *,
    state_dir: Path,
    carrier: Carrier | None = None,
    make_engine: MakeEngine | None = None,
    stop: trio.Event | None = None,
    rng: Random | None = None,
) -> str:
    """Take part in a run until told to stop or until it ends.

    Args:
        config: the actor's options.
        ticket: the invitation, already checked.
        state_dir: keys, chunks, logs; created if missing.
        carrier: a network other than libp2p, for simulations.
        make_engine: (model folder, chunk folder) -> engine, for simulations.
        stop: set to leave as on SIGTERM, for simulations (no signal handlers are installed).
        rng: the mesh's choices, for simulations.

    Returns:
        Why it left, as said in the goodbye.

    Errors:
        UsageError, LocalError: what cannot be mended by waiting.
    """
    identity = Identity.load_or_create(state_dir / "key")
    store = ChunkStore(state_dir / "chunks", config.store_quota_bytes)
    settings = MeshSettings(
        run_id=ticket.run_id,
        role=Role.ACTOR,
        learner=ticket.learner,
        name=config.name,
        listen=config.listen,
        announce=config.announce,
        bootstrap=tuple(
            address if "/p2p/" in address else f"{address}/p2p/{ticket.learner}"
            for address in ticket.addresses
        ),
        mdns=config.mdns,
        relay=config.relay,
        incarnation_unix_ms=int(time.time() * 1000),
        members_path=state_dir / "members.json",
        versions_path=state_dir / VERSIONS_FILE,
        versions_kept=config.versions_kept,
        bulk=bulk_settings(config),
    )
    proof = (
        admission_proof(ticket.secret, run_id=ticket.run_id, node=identity.node)
        if ticket.secret is not None
        else b""
    )
    with as_one_error():
        async with open_mesh(settings, identity, store, carrier=carrier, rng=rng) as mesh:
            actor = Actor(
                mesh,
                config=config,
                state_dir=state_dir,
                admission=proof,
                first_manifest=ticket.manifest,
            )
            if make_engine is not None:
                actor.make_engine = make_engine
            return await actor.run(stop)
    raise AssertionError("unreachable: the actor returns or raises")


class Actor:
    """One actor's assembled parts; lives as long as its mesh."""

    def __init__(
        self,
        mesh: Mesh,
        *,
        config: ActorConfig,
        state_dir: Path,
        admission: bytes,
        first_manifest: Digest | None = None,
    ) -> None:
        self._mesh = mesh
        self._config = config
        self._state_dir = state_dir
        self._admission = admission
        self._first_manifest = first_manifest
        self._metrics = MetricsFile(state_dir / "metrics.jsonl")
        self._reporter = Reporter(state_dir, role=Role.ACTOR.value, name=config.name)
        self._weights = Weights(mesh, self._metrics)
        self._rollouts: Rollouts | None = None
        self._engine: EnginePort | None = None
        self._engine_started = False
        self._state = "joining"
        self._last_error = ""
        self._why = "stopped"
        self._leaving = trio.Event()
        self.make_engine: MakeEngine = partial(_open_real_engine, config, state_dir)
        mesh.hear(Goodbye, self._hear_goodbye)

    async def run(self, stop: trio.Event | None) -> str:
        """Work until stopped, until the run ends, or until something cannot be mended."""
        with self._metrics:
            await self._run(stop)
        self._report()
        return self._why

    async def _run(self, stop: trio.Event | None) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait_stop, stop)
            nursery.start_soon(self._report_for_ever)
            await self._work_until_left()
            self._state = "leaving"
            if self._rollouts is not None and self._why != GOODBYE_RUN_ENDED:
                await self._rollouts.announce_the_rest()
            await self._mesh.say_goodbye(self._why)
            nursery.cancel_scope.cancel()

    async def _work_until_left(self) -> None:
        """Everything between joining and leaving; ends when `_leaving` is set."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._until_left, nursery.cancel_scope)
            self._state = "fetching"
            first = await self._wait_first()
            check_first_version(first, self._first_manifest)
            await self._weights.wait_whole(first)
            folder = self._state_dir / "model"
            await trio.to_thread.run_sync(
                write_model_files, first.manifest, self._mesh.store, folder
            )
            self._rollouts = Rollouts(
                self._mesh,
                self._weights,
                config=self._config,
                task=task_of(first.manifest.task),
                codec=open_codec(first.manifest, folder),
                admission=self._admission,
            )
            nursery.start_soon(self._rollouts.announce_for_ever)
            await self._keep_engine(folder, self._rollouts)
            nursery.cancel_scope.cancel()

    async def _wait_first(self) -> ReadyVersion:
        """The first version; whoever waits long for it is told why nothing happens."""
        log.info("joining", run=self._mesh.run_id, node=self._mesh.node)
        with trio.move_on_after(LEARNER_SILENT_S):
            return await self._weights.wait_first()
        log.warning(
            "nothing from the learner yet",
            run=self._mesh.run_id,
            hint="Is it running, and can this host reach the addresses in the ticket?",
        )
        return await self._weights.wait_first()

    async def _until_left(self, scope: trio.CancelScope) -> None:
        """Leaving before there is anything to hand back, or to anybody, needs no ceremony."""
        await self._leaving.wait()
        if self._rollouts is None or self._engine is None or self._why == GOODBYE_RUN_ENDED:
            scope.cancel()
        else:
            self._rollouts.stopping.set()

    async def _keep_engine(self, folder: Path, rollouts: Rollouts) -> None:
        """Run an engine, and another when it dies, with growing pauses and a bound."""
        failures = 0
        while not self._leaving.is_set():
            started_s = trio.current_time()
            try:
                await self._with_engine(folder, rollouts)
                return
            except* RunEnded:
                self._end_run()
            except* LocalError as group:
                error = leaves(group)[0]
                assert isinstance(error, LocalError)
                failures = 1 if trio.current_time() - started_s > ENGINE_HEALTHY_S else failures + 1
                self._last_error = error.what
                log.error("engine died", reason=str(error), count=failures)
                # An engine that never started will not start by waiting.
                if failures >= ENGINE_FAILURES_MAX or not self._engine_started:
                    raise error from None
            self._engine = None
            if not self._leaving.is_set():
                self._state = "restarting engine"
                pause_s = min(ENGINE_RESTART_S * 2 ** max(0, failures - 1), ENGINE_RESTART_S_MAX)
                with trio.move_on_after(pause_s):
                    await self._leaving.wait()

    async def _with_engine(self, folder: Path, rollouts: Rollouts) -> None:
        self._state = "loading engine"
        log.info("loading engine", engine=self._config.engine)
        async with self.make_engine(folder, self._mesh.store.folder) as engine:
            self._engine = engine
            self._engine_started = True
            self._mesh.set_state(cohort=engine.info.cohort)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._weights.follow, engine)
                self._state = "installing"
                with trio.CancelScope() as waiting:
                    nursery.start_soon(cancel_on, rollouts.stopping, waiting)
                    await self._weights.wait_installed()
                if not waiting.cancelled_caught:
                    self._state = "generating"
                    log.info("generating")
                    await rollouts.generate_for_ever(engine)
                nursery.cancel_scope.cancel()

    async def _hear_goodbye(self, sender: NodeId, goodbye: Goodbye) -> None:
        # Anybody can repeat the goodbye of an earlier life: the run may have been resumed since.
        lives = [
            member.heartbeat.incarnation_unix_ms
            for member in self._mesh.members()
            if member.node == self._mesh.learner
        ]
        of_now = bool(lives) and goodbye.incarnation_unix_ms >= max(lives)
        if sender == self._mesh.learner and goodbye.why == GOODBYE_RUN_ENDED and of_now:
            self._end_run()

    def _end_run(self) -> None:
        if self._why != GOODBYE_RUN_ENDED:
            log.info("run ended", run=self._mesh.run_id)
        self._why = GOODBYE_RUN_ENDED
        if self._rollouts is not None:
            self._rollouts.run_ended = True
        self._leaving.set()

    async def _wait_stop(self, stop: trio.Event | None) -> None:
        if stop is not None:
            await stop.wait()
        else:
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for number in signals:
                    log.info("leaving", reason=signal.Signals(number).name)
                    break
        self._leaving.set()

    async def _report_for_ever(self) -> None:
        while True:
            self._report()
            await trio.sleep(REPORT_INTERVAL_S)

    def _report(self) -> None:
        """Say in heartbeat and status document how this actor does."""
        rollouts, installed = self._rollouts, self._weights.installed
        tally = rollouts.tally if rollouts is not None else None
        state, last_error = self._shown_state(), self._shown_error()
        self._mesh.set_state(
            state=state,
            version=installed.version if installed is not None else None,
            tokens_per_s=self._engine.tokens_per_s if self._engine is not None else 0.0,
            accepted=tally.accepted if tally is not None else 0,
            refused=tally.refused if tally is not None else 0,
            commonest_refusal=tally.commonest_refusal if tally is not None else None,
            last_error=last_error[:512],
        )
        self._reporter.write(
            self._mesh,
            state=state,
            version=installed.version if installed is not None else None,
            refusals={r.value: n for r, n in tally.by_reason.items()} if tally is not None else {},
            installs=tuple(self._weights.installs),
            # Where the daemon has none to tell: why the mesh cannot fetch.
            last_error=self._mesh.heartbeat().last_error,
        )

    def _shown_state(self) -> str:
        """While an engine runs: what it is waiting for, if anything."""
        rollouts = self._rollouts
        if self._state != "generating" or rollouts is None or rollouts.stopping.is_set():
            return self._state
        if self._weights.installed is None:
            return "installing"
        if rollouts.leases_held:
            return "generating"
        return "learner away" if rollouts.learner_away else "waiting for leases"

    def _shown_error(self) -> str:
        held = self._rollouts.last_error if self._rollouts is not None else ""
        return self._weights.last_error or held or self._last_error


def _open_real_engine(
    config: ActorConfig, state_dir: Path, model_folder: Path, store_folder: Path
) -> AbstractAsyncContextManager[EnginePort]:
    return open_engine(
        model_folder, store_folder, config=config, log_path=state_dir / "logs" / "engine.log"
    )
