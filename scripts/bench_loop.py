#!/usr/bin/env python3
"""How much of its slower half does the whole loop reach?

Measures, one after the other in the same run and with the same model, task and batch: the engine
alone (one worker process, as many groups in flight as an actor takes), the trainer alone (step
and export, on samples that the engine has just made), and the whole loop (learner and actors as
real processes on the loopback mesh). Twice: with the demo's model, where a rollout is so cheap
that the daemons' work for each of them counts, and with one twenty times its size. Prints
progress on standard error and one JSON object as the last line of standard output; exits 0
whether or not a bar is met.

  scripts/bench_loop.py [--models tiny,small] [--steps 60] [--actors 1] [--seconds 8]
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("ECHO2_VENV") or ROOT / ".venv") / "bin" / "python"
if Path(sys.prefix) != PYTHON.parents[1] and PYTHON.exists():
    os.execv(PYTHON, [str(PYTHON), *sys.argv])

import psutil  # noqa: E402
import trio  # noqa: E402
from bars import Bar, at_least, at_most, emit, ratio  # noqa: E402

from echo2_mesh.chunks import ChunkStore  # noqa: E402
from echo2_mesh.identity import Identity  # noqa: E402
from echo2_mesh.wire.codec import seal  # noqa: E402
from echo2_mesh.wire.messages import Lease, Manifest, Sampling, Trajectory  # noqa: E402
from echo2_mesh.wire.types import ChunkKind, PolicyVersion  # noqa: E402
from echo2_node.actor.trajectories import make_trajectory  # noqa: E402
from echo2_node.actor.weights import write_model_files  # noqa: E402
from echo2_node.config import ActorConfig, RunConfig, dump, load_run  # noqa: E402
from echo2_node.demo.fleet import Process, open_fleet  # noqa: E402
from echo2_node.demo.warmup import starting_model  # noqa: E402
from echo2_node.engines.port import EnginePort  # noqa: E402
from echo2_node.engines.process import open_engine  # noqa: E402
from echo2_node.engines.protocol import GenerationRequest  # noqa: E402
from echo2_node.learner.port import Sample  # noqa: E402
from echo2_node.learner.trainer_process import open_trainer  # noqa: E402
from echo2_node.tasks.registry import make_task, task_spec  # noqa: E402
from echo2_node.telemetry import read_metrics  # noqa: E402
from echo2_node.tokens import TokenCodec  # noqa: E402

MODELS: dict[str, dict[str, Any] | None] = {
    "tiny": None,
    "small": {
        "hidden": 256,
        "layers": 6,
        "heads": 8,
        "kv_heads": 4,
        "intermediate": 768,
        "steps": 40,
    },
}
"""The demo's starting model (0.3 million parameters), and one of 5 million."""
WARM_UP_STEPS = 10
"""Steps of the loop that are not counted: processes are still arriving."""
STEP_TIMEOUT_S = 120.0
RUN_ID = "bench-loop"


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Halves:
    """Engine and trainer alone, on the same weights and samples."""

    def __init__(self, config: RunConfig, folder: Path, seconds: float) -> None:
        self.config = config
        self.actor = ActorConfig()
        self.folder = folder
        self.seconds = seconds
        self.store = ChunkStore(folder / "chunks")
        self.identity = Identity.generate()
        self.task = make_task(config.task.id, config.task.args)
        self.codec = TokenCodec.load(Path(config.model.path))
        self.trajectories: list[tuple[Trajectory, ...]] = []

    async def measure(self) -> tuple[dict[str, float], dict[str, float]]:
        """(engine, trainer): samples and tokens per second of each."""
        async with open_trainer(
            self.config, state_dir=self.folder, store_dir=self.store.folder, resume_from=None
        ) as trainer:
            exported = await trainer.export(PolicyVersion(0))
            manifest = Manifest(
                run_id=RUN_ID,
                version=PolicyVersion(0),
                chunks=exported.chunks,
                tensors=exported.tensors,
                tied=exported.tied,
                files=exported.files,
                state_digest=exported.state_digest,
                tokenizer_digest=exported.tokenizer_digest,
                template_digest=exported.template_digest,
                task=task_spec(self.task),
                probe=exported.probe,
            )
            sealed = seal(
                manifest, run_id=RUN_ID, sender=self.identity.node, sign=self.identity.sign
            )
            ref = self.store.add(ChunkKind.MANIFEST, sealed)
            write_model_files(manifest, self.store, self.folder / "model")
            async with open_engine(
                self.folder / "model",
                self.store.folder,
                config=self.actor,
                log_path=self.folder / "engine.log",
            ) as engine:
                await engine.install(ref.digest)
                engine_alone = await self._engine_alone(engine, manifest)
            batch = self._batch()
            await trainer.step(batch)
            began_s, steps = time.perf_counter(), 0
            step_s = []
            while time.perf_counter() - began_s < self.seconds:
                step_began_s = time.perf_counter()
                await trainer.step(batch)
                step_s.append(time.perf_counter() - step_began_s)
                steps += 1
                if steps % self.config.staleness.kappa_steps == 0:
                    await trainer.export(PolicyVersion(steps))
            took_s = time.perf_counter() - began_s
        tokens = sum(sum(sample.trajectory.loss_mask) for sample in batch)
        trainer_alone = {
            "samples_per_s": steps * len(batch) / took_s,
            "tokens_per_s": steps * tokens / took_s,
            "step_s": statistics.median(step_s),
        }
        return engine_alone, trainer_alone

    async def _engine_alone(self, engine: EnginePort, manifest: Manifest) -> dict[str, float]:
        done = {"samples": 0, "tokens": 0}
        deadline_s = time.perf_counter() + self.seconds

        async def keep_one_group_running(first_item: int) -> None:
            index = first_item
            while time.perf_counter() < deadline_s:
                group = await self._one_group(engine, manifest, index)
                index += self.actor.groups_in_flight_max
                done["samples"] += len(group)
                done["tokens"] += sum(sum(t.loss_mask) for t in group)
                self.trajectories.append(group)

        began_s = time.perf_counter()
        async with trio.open_nursery() as nursery:
            for number in range(self.actor.groups_in_flight_max):
                nursery.start_soon(keep_one_group_running, number)
        took_s = time.perf_counter() - began_s
        return {f"{name}_per_s": count / took_s for name, count in done.items()}

    async def _one_group(
        self, engine: EnginePort, manifest: Manifest, item_index: int
    ) -> tuple[Trajectory, ...]:
        rollout = self.config.rollout
        item = self.task.item(self.config.run.seed, item_index)
        lease = Lease(
            lease_id=f"{item_index:032x}",
            group_id=f"{item_index:032x}",
            item_index=item_index,
            prompt_ids=self.codec.encode_prompt(item.prompt),
            indices=tuple(range(rollout.group_size)),
            group_size=rollout.group_size,
            sampling=Sampling(
                temperature=rollout.temperature, tokens_max=rollout.tokens_max, seed=item_index
            ),
            version_min=PolicyVersion(0),
            ttl_s=rollout.lease_ttl_s,
        )
        generations = await engine.generate(
            GenerationRequest(
                request_id=lease.lease_id,
                prompt_ids=lease.prompt_ids,
                indices=lease.indices,
                sampling=lease.sampling,
            )
        )
        return tuple(
            make_trajectory(
                lease,
                generation,
                run_id=RUN_ID,
                reward=0.0,
                metrics={},
                cohort=engine.info.cohort,
                manifest=manifest,
            )
            for generation in generations
        )

    def _batch(self) -> tuple[Sample, ...]:
        rng = random.Random(0)
        groups = self.trajectories[: self.config.rollout.groups_per_step]
        return tuple(
            Sample(trajectory=trajectory, reward=0.0, advantage=rng.uniform(-0.5, 0.5))
            for group in groups
            for trajectory in group
        )


class Watch:
    """CPU seconds and peak memory of processes and their children, by what they are."""

    def __init__(self) -> None:
        self.cpu_s: dict[str, float] = {}
        self.memory_mib: dict[str, float] = {}

    def look(self, name: str, pid: int) -> None:
        try:
            daemon = psutil.Process(pid)
            self._note(f"{name} daemon", daemon)
            for child in daemon.children(recursive=True):
                self._note(f"{name} child", child)
        except psutil.Error:
            return

    def _note(self, name: str, process: psutil.Process) -> None:
        times = process.cpu_times()
        self.cpu_s[name] = times.user + times.system
        self.memory_mib[name] = max(
            self.memory_mib.get(name, 0.0), process.memory_info().rss / 2**20
        )


def run_loop(config: RunConfig, folder: Path, actors: int) -> dict[str, Any]:
    """The whole loop as real processes; rates over the steps after the warm-up."""
    run_file = folder / "run.toml"
    run_file.write_text(dump(config), encoding="utf-8")
    watch, began = Watch(), {"cpu": {}, "step": 0}
    with open_fleet(folder / "fleet") as fleet:
        learner = fleet.start("learner", ["learn", str(run_file)])
        ticket = _wait_file(learner, learner.state_dir / "ticket.txt")
        for number in range(actors):
            fleet.start(
                f"actor-{number}", ["join", ticket, "--listen", "/ip4/127.0.0.1/tcp/0", "--no-mdns"]
            )
        steps: list[dict[str, Any]] = []
        heard_s = time.monotonic()
        while learner.poll() is None:
            time.sleep(0.25)
            for process in fleet.processes:
                watch.look(process.name, process.pid)
            before = len(steps)
            steps = _steps(learner)
            if len(steps) > before:
                heard_s = time.monotonic()
            if not began["step"] and len(steps) >= WARM_UP_STEPS:
                began = {"cpu": dict(watch.cpu_s), "step": len(steps)}
            if time.monotonic() - heard_s > STEP_TIMEOUT_S:
                raise SystemExit(f"no step for {STEP_TIMEOUT_S} s:\n{learner.last_lines()}")
        if learner.poll() != 0:
            raise SystemExit(f"the learner failed:\n{learner.last_lines()}")
        steps = _steps(learner)
        fleet.leave()
        delays = {
            process.name: _install_delays_s(steps, process) for process in fleet.processes[1:]
        }
    first, last = steps[began["step"] - 1], steps[-1]
    seconds = (last["unix_ms"] - first["unix_ms"]) / 1000
    counted = steps[began["step"] :]
    return {
        "seconds": seconds,
        "steps_per_s": len(counted) / seconds,
        "samples_per_s": sum(step["samples"] for step in counted) / seconds,
        "tokens_per_s": sum(step.get("tokens", 0) for step in counted) / seconds,
        "learner_idle_share": sum(step["wait_s"] for step in counted) / seconds,
        "reward_last": last["reward_mean"],
        "cpu_share": {
            name: (cpu_s - began["cpu"].get(name, 0.0)) / seconds
            for name, cpu_s in watch.cpu_s.items()
        },
        "memory_mib": watch.memory_mib,
        "step_to_generating_s": {
            name: {"median": statistics.median(values), "max": max(values)}
            for name, values in delays.items()
            if values
        },
    }


def _wait_file(learner: Process, path: Path) -> str:
    deadline_s = time.monotonic() + STEP_TIMEOUT_S
    while not path.exists():
        if learner.poll() is not None or time.monotonic() > deadline_s:
            raise SystemExit(f"the learner did not start:\n{learner.last_lines()}")
        time.sleep(0.1)
    return path.read_text().strip()


def _steps(learner: Process) -> list[dict[str, Any]]:
    return [r for r in read_metrics(learner.state_dir / "metrics.jsonl") if "step" in r]


def _install_delays_s(steps: list[dict[str, Any]], actor: Process) -> list[float]:
    """From the optimizer's step to that version generating, for each version installed."""
    done_ms = {step["version"] + 1: step["step_done_unix_ms"] for step in steps}
    return [
        (record["unix_ms"] - done_ms[record["version"]]) / 1000
        for record in read_metrics(actor.state_dir / "metrics.jsonl")
        if record.get("event") == "installed" and record["version"] in done_ms
    ]


def measure(size: str, options: argparse.Namespace) -> tuple[list[Bar], dict[str, Any]]:
    """Bars and figures of one model."""
    template = ROOT / "runs" / "demo.toml"
    args = load_run(template, ("model.path=unused",)).task.args
    settings = MODELS[size]
    name = "" if settings is None else f"sort_digits-{size}"
    model = starting_model("sort_digits", args, tell=say, name=name, settings=settings)
    config = load_run(
        template,
        (
            f'model.path="{model}"',
            f"run.steps={options.steps}",
            "mesh.mdns=false",
            'mesh.listen=["/ip4/127.0.0.1/tcp/0"]',
        ),
    )
    with tempfile.TemporaryDirectory(prefix="echo2-bench-") as folder_name:
        folder = Path(folder_name)
        say(f"{size}: engine alone, then trainer alone")
        engine, trainer = trio.run(Halves(config, folder, options.seconds).measure)
        say(f"{size}: the whole loop, {options.steps} steps with {options.actors} actors")
        loop = run_loop(config, folder, options.actors)
    slower = min(engine["samples_per_s"] * options.actors, trainer["samples_per_s"])
    daemons = sum(share for part, share in loop["cpu_share"].items() if "daemon" in part)
    delay_s = max((d["median"] for d in loop["step_to_generating_s"].values()), default=None)
    reached = ratio(loop["samples_per_s"], slower)
    bars = [
        at_least(f"{size}_loop_of_slower_half", reached, 0.9, "ratio"),
        at_most(f"{size}_daemons_cpu", daemons, 0.5, "cores"),
        # Clocks of one host: a version generates after its step, so a delay below zero is none.
        at_most(
            f"{size}_step_to_generating_median",
            delay_s if delay_s is not None and delay_s >= 0 else None,
            2.0,
            "s",
        ),
    ]
    return bars, {"engine_alone": engine, "trainer_alone": trainer, "loop": loop}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", default="tiny,small")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--actors", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=8.0, help="for each half alone")
    options = parser.parse_args()
    bars: list[Bar] = []
    figures: dict[str, Any] = {}
    for size in options.models.split(","):
        if size not in MODELS:
            parser.error(f"there is no model '{size}'; known: {', '.join(MODELS)}")
        found, figures[size] = measure(size, options)
        bars += found
    emit("loop", bars, **figures, cores=os.cpu_count(), actors=options.actors)


if __name__ == "__main__":
    main()
