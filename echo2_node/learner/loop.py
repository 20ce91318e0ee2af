"""The one loop of a run: a full batch, one optimizer step, record, publish, checkpoint.

Decides nothing about leases or admission (that is `learner.desk`) and touches no tensor (that is
the trainer's process). `learner.daemon` assembles the parts and runs it.
"""

from __future__ import annotations

import signal
import time
from typing import Any

import msgspec
import structlog
import trio

from echo2_mesh.errors import LocalError
from echo2_mesh.mesh import Mesh, Standing
from echo2_mesh.wire.types import GOODBYE_RUN_ENDED, PolicyVersion, Role
from echo2_node.config import RunConfig
from echo2_node.learner.checkpoints import Checkpoints
from echo2_node.learner.desk import Batch, NoSignal, RolloutDesk
from echo2_node.learner.dissemination import Dissemination
from echo2_node.learner.place import Place
from echo2_node.learner.port import Exported, StepReport, Trainer
from echo2_node.learner.publisher import Publisher
from echo2_node.status import Reporter, tally_of
from echo2_node.telemetry import MetricsFile

log = structlog.get_logger()

ALL_DONE = "all steps done"
NOTHING_TO_LEARN = "nothing left to learn"
STOPPED = "stopped"
REPORT_INTERVAL_S = 0.5


class Learner:
    """One run's assembled parts and its loop."""

    def __init__(
        self,
        mesh: Mesh,
        trainer: Trainer,
        publisher: Publisher,
        desk: RolloutDesk,
        *,
        config: RunConfig,
        place: Place,
        checkpoints: Checkpoints,
        step: int,
        version: PolicyVersion,
    ) -> None:
        self._mesh = mesh
        self._trainer = trainer
        self._publisher = publisher
        self._desk = desk
        self._config = config
        self._checkpoints = checkpoints
        self._metrics = MetricsFile(place.metrics)
        self._reporter = Reporter(
            place.folder,
            role=Role.LEARNER.value,
            name=config.run.name,
            steps=config.run.steps,
            staleness_limit_steps=config.staleness.limit_steps,
        )
        self._step = step
        self._saved_step = step
        self._version = version
        self._state = "starting"
        self._reward: float | None = None
        self._stopping = False
        self._waiting: trio.CancelScope | None = None
        self._announced = trio.Event()
        self._announced.set()
        self._dissemination = Dissemination()

    async def run(self, stop: trio.Event | None) -> str:
        """Train to the end, say goodbye, and say why it ended."""
        with self._metrics:
            why = await self._run(stop)
        self._report()
        log.info("run over", reason=why, version=self._version)
        return why

    async def _run(self, stop: trio.Event | None) -> str:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._wait_stop, stop)
            nursery.start_soon(self._report_for_ever)
            await nursery.start(self._desk.run)
            why = await self._train(nursery)
            self._state = "ended" if why != STOPPED else "stopped"
            self._report()
            await self._desk.close(ended=why != STOPPED)
            await self._mesh.say_goodbye(GOODBYE_RUN_ENDED if why != STOPPED else "learner stopped")
            nursery.cancel_scope.cancel()
        return why

    async def _train(self, nursery: trio.Nursery) -> str:
        await self._publish(nursery)
        skipped_in_a_row = 0
        why = ALL_DONE
        while self._step < self._config.run.steps:
            started_s = trio.current_time()
            self._state = "waiting for rollouts"
            try:
                batch = await self._next_batch()
            except NoSignal as signal_lost:
                log.warning("nothing left to learn", reason=str(signal_lost))
                why = NOTHING_TO_LEARN
                break
            if batch is None:
                why = STOPPED
                break
            waited_s = trio.current_time() - started_s
            self._state = "training"
            report = await self._trainer.step(batch.samples)
            done_unix_ms = int(time.time() * 1000)
            skipped_in_a_row = skipped_in_a_row + 1 if report.skipped else 0
            before = self._version
            self._step += 1
            # Written while the trainer exports; no later batch or checkpoint overtakes it.
            self._desk.trained_nowait(
                batch, step=self._step, version_before=before, skipped=report.skipped
            )
            if not report.skipped:
                self._version = PolicyVersion(before + 1)
            published_s = await self._publish_if_due(nursery, report)
            await self._save_if_due()
            self._write_metrics(
                batch,
                report,
                before=before,
                waited_s=waited_s,
                published_s=published_s,
                done_unix_ms=done_unix_ms,
            )
            if skipped_in_a_row >= self._config.learner.skipped_steps_max:
                raise LocalError(
                    f"{skipped_in_a_row} training steps in a row were not finite: "
                    f"{report.why_skipped}.",
                    "Lower learner.lr or raise learner.lr_warmup_steps, then continue with "
                    "--resume.",
                )
        await self._save()
        await self._announced.wait()
        return why

    async def _next_batch(self) -> Batch | None:
        """The next batch, or None when the run is being stopped."""
        with trio.CancelScope() as scope:
            self._waiting = scope
            if self._stopping:
                return None
            return await self._desk.next_batch(self._version)
        return None

    async def _publish_if_due(self, nursery: trio.Nursery, report: StepReport) -> float:
        if report.skipped or self._version % self._config.staleness.kappa_steps != 0:
            return 0.0
        return await self._publish(nursery)

    async def _publish(self, nursery: trio.Nursery) -> float:
        """Publish the current version; how long the trainer was busy with it, in seconds.

        Signing and announcing need no trainer and go on beside the next step; at most one
        announcement is under way, so versions are announced in order.
        """
        self._state = "publishing"
        started_s = trio.current_time()
        await self._announced.wait()
        exported = await self._publisher.export(self._version)
        self._announced = trio.Event()
        nursery.start_soon(self._announce, exported)
        return trio.current_time() - started_s

    async def _announce(self, exported: Exported) -> None:
        step = next((p for p in exported.patches if p.version == exported.version), None)
        self._dissemination.announced(
            exported.version,
            trio.current_time(),
            actors=self._actors(),
            full_bytes=sum(chunk.size_bytes for chunk in exported.chunks),
            patch_bytes=sum(chunk.ref.size_bytes for chunk in step.chunks) if step else 0,
        )
        await self._publisher.announce(exported)
        self._announced.set()
        self._report()

    async def _save_if_due(self) -> None:
        if self._step % self._config.learner.checkpoint_every_steps == 0:
            await self._save()

    async def _save(self) -> None:
        """Checkpoint this step unless it is saved already."""
        if self._step == self._saved_step:
            return
        self._state = "saving"
        # A checkpoint of a step whose consumption is not recorded would train it again.
        await self._desk.wait_recorded()
        folder = self._checkpoints.folder_of(self._step)
        await self._publisher.patience.run(lambda: self._trainer.save(folder, step=self._step))
        await trio.to_thread.run_sync(self._checkpoints.retire)
        # A damaged newest checkpoint sends a resume to the oldest one kept, so payloads that
        # only the steps after that one consumed must stay.
        kept = await trio.to_thread.run_sync(self._checkpoints.complete)
        await self._desk.checkpointed(kept[0].step if kept else self._step)
        self._saved_step = self._step

    def _write_metrics(
        self,
        batch: Batch,
        report: StepReport,
        *,
        before: PolicyVersion,
        waited_s: float,
        published_s: float,
        done_unix_ms: int,
    ) -> None:
        rewards = [sample.reward for sample in batch.samples]
        mean = sum(rewards) / len(rewards)
        self._reward = mean
        histogram: dict[str, int] = {}
        for staleness in batch.staleness_steps:
            histogram[str(staleness)] = histogram.get(str(staleness), 0) + 1
        record: dict[str, Any] = {
            "step": self._step,
            "version": before,
            "unix_ms": int(time.time() * 1000),
            "step_done_unix_ms": done_unix_ms,
            "reward_mean": mean,
            "reward_admitted_mean": self._desk.take_reward_mean(),
            "reward_std": (sum((r - mean) ** 2 for r in rewards) / len(rewards)) ** 0.5,
            "samples": len(rewards),
            "staleness_steps": histogram,
            "wait_s": round(waited_s, 4),
            "train_s": round(report.seconds, 4),
            "publish_s": round(published_s, 4),
            "skipped": report.skipped,
            "groups_alive": self._desk.groups_alive,
            "zero_variance_groups": self._desk.zero_variance_groups,
            **report.metrics,
        }
        self._metrics.write(record)
        log.debug(
            "step",
            version=before,
            step=self._step,
            reward=round(mean, 4),
            staleness_steps_max=max(batch.staleness_steps),
            seconds=round(waited_s + report.seconds + published_s, 2),
        )

    async def _wait_stop(self, stop: trio.Event | None) -> None:
        if stop is not None:
            await stop.wait()
        else:
            with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
                async for number in signals:
                    log.info("stopping after this step", reason=signal.Signals(number).name)
                    break
        self._stopping = True
        self._publisher.patience.stop()
        if self._waiting is not None:
            self._waiting.cancel()

    def _actors(self) -> dict[str, int | None]:
        """The actors that are there, and which version each runs."""
        return {
            member.node: member.heartbeat.version
            for member in self._mesh.members()
            if member.heartbeat.role is Role.ACTOR and member.standing is Standing.UP
        }

    def _watch_spread(self) -> None:
        for spread in self._dissemination.seen(self._actors(), trio.current_time()):
            record = {"event": "disseminated", "unix_ms": int(time.time() * 1000)}
            self._metrics.write(record | msgspec.to_builtins(spread))

    async def _report_for_ever(self) -> None:
        while True:
            self._watch_spread()
            self._report()
            await trio.sleep(REPORT_INTERVAL_S)

    def _report(self) -> None:
        verdicts = self._desk.verdicts_by_actor
        last_error = self._publisher.patience.last_error or self._desk.last_error
        self._mesh.set_state(
            state=self._state,
            version=self._version,
            accepted=self._desk.accepted,
            refused=self._desk.refused,
            commonest_refusal=self._desk.commonest_refusal,
            last_error=last_error[:512],
        )
        self._reporter.write(
            self._mesh,
            state=self._state,
            step=self._step,
            version=self._version,
            reward_last=self._reward,
            tallies={node: tally_of(counts) for node, counts in verdicts.items()},
            last_error=last_error,
            refusals=self._desk.refusals,
            staleness_histogram=self._desk.staleness_histogram,
            groups_alive=self._desk.groups_alive,
            groups_alive_max=self._desk.groups_alive_max,
            dissemination=tuple(self._dissemination.recent),
        )
