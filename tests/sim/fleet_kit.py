"""The real daemons on a simulated network: a world of one learner and its actors, and its laws.

Only the edges are simulated: wires (`echo2_mesh.testing`), the trainer, the engines, the host's
clock and threads. `World` starts, stops and kills daemons by name; `Laws` watches every event of
the learner's desk and every commit of its ledger, and fails the test where an invariant breaks.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from random import Random

import blake3
import msgspec
import numpy as np
import pytest
import trio

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import Echo2Error, LocalError
from echo2_mesh.testing import identity_of, open_network
from echo2_mesh.wire.messages import Probe
from echo2_mesh.wire.ticket import RunTicket
from echo2_node.actor.daemon import run_actor
from echo2_node.config import ActorConfig, RunConfig, convert
from echo2_node.engines.fake import FakeEnginePort, FakeSettings
from echo2_node.engines.weights import read_manifest, stage
from echo2_node.learner import checkpoints, export, tensorfile
from echo2_node.learner.daemon import run_learner
from echo2_node.learner.keeper import Keeper
from echo2_node.learner.ledger import Ledger
from echo2_node.learner.patching import Patcher
from echo2_node.learner.port import Exported, StepReport, TrainerInfo
from echo2_node.scheduler import admission, events, records
from echo2_node.scheduler.groups import Phase
from echo2_node.tasks.registry import make_task
from echo2_node.tokens import (
    build_character_tokenizer,
    template_digest,
    tokenizer_digest,
)

RUN_ID = "sim-0000abcd"
WALL_CLOCK_START_S = 1_700_000_000.0
TENSORS = 4
TENSOR_SIZE_BYTES = 4096
PROBE_LENGTH = 8


class Host:
    """Threads and wall clock of all simulated machines: both run on the virtual clock.

    A thread call happens in place, between two scheduling points, so whatever a daemon does to
    its disk is a moment at which it can be killed: `kill_at(n, kill)` kills at the n-th from now,
    after the call took effect and before the daemon can go on.
    """

    def __init__(self) -> None:
        self.calls = 0
        self.disk_s = 0.0
        """How long a thread call takes."""
        self._kill: tuple[int, object] | None = None

    def kill_at(self, calls, kill) -> None:
        self._kill = (self.calls + calls, kill)

    async def run_sync(self, call, *arguments, **_):
        await trio.sleep(self.disk_s)
        self.calls += 1
        try:
            return call(*arguments)
        finally:
            if self._kill is not None and self.calls >= self._kill[0]:
                (_, kill), self._kill = self._kill, None
                kill()
            await trio.lowlevel.checkpoint_if_cancelled()

    def install(self, monkeypatch) -> None:
        real_ns = time.time_ns

        def time_ns() -> int:
            if not trio.lowlevel.in_trio_run():
                return real_ns()
            return int((WALL_CLOCK_START_S + trio.current_time()) * 1e9)

        monkeypatch.setattr(trio.to_thread, "run_sync", self.run_sync)
        monkeypatch.setattr(time, "time", lambda: time_ns() / 1e9)
        monkeypatch.setattr(time, "time_ns", time_ns)


class SimTrainer:
    """A `learner.port.Trainer` that takes time, and whose weights are a hash of all it learned."""

    def __init__(self, world, config, *, store_dir, resume_from) -> None:
        self._world = world
        self._model = Path(config.model.path)
        self._store = ChunkStore(store_dir, None)
        self._patcher = Patcher(self._store, steps_max=config.weights.patch_steps_max)
        self._state = b"untrained"
        step = 0
        if resume_from is not None:
            self._state = (resume_from / "state").read_bytes()
            step = checkpoints.read_record(resume_from).step
        self.step_number = step
        world.lines = [line for line in world.lines if line[0] <= step]
        self.info = TrainerInfo(parameters=1, device="sim", dtype="bfloat16", step=step)

    async def step(self, samples):
        await trio.sleep(self._world.step_s)
        if self.step_number in self._world.trainer_dies_at:
            self._world.trainer_dies_at.remove(self.step_number)
            raise LocalError("The trainer process ended with SIGKILL.")
        self.step_number += 1
        ids = {(s.trajectory.group_id, s.trajectory.index) for s in samples}
        assert len(ids) == len(samples), "a trajectory twice in one batch"
        for step, trained in self._world.lines:
            assert not ids & trained, f"trained in step {step} already"
        self._world.lines.append((self.step_number, ids))
        assert abs(sum(sample.advantage for sample in samples)) < 1e-6
        hasher = blake3.blake3(self._state)
        for sample in samples:
            assert sample.reward == pytest.approx(sample.trajectory.reward)
            hasher.update(sample.trajectory.token_ids + sample.trajectory.logprobs)
        self._state = hasher.digest()
        return StepReport(skipped=False, metrics={}, seconds=self._world.step_s)

    async def export(self, version):
        await trio.sleep(self._world.export_s)
        chunk_size_bytes = 4096
        entries = (
            tensorfile.Entry(
                name=f"tensor.{index}",
                dtype="BF16",
                shape=(TENSOR_SIZE_BYTES // 2,),
                read=partial(self._tensor, index),
            )
            for index in range(TENSORS)
        )
        self._patcher.begin()
        section = export.write_chunks(entries, self._store, chunk_size_bytes, self._patcher.take)
        patches = self._patcher.finish(version, section.chunks, section.state_digest)
        files = export.travelling_files(self._model)
        return Exported(
            version=version,
            chunks=section.chunks,
            patches=patches,
            tensors=section.tensors,
            tied=(),
            files=export.write_files(files, self._store, chunk_size_bytes),
            state_digest=section.state_digest,
            tokenizer_digest=tokenizer_digest(self._model),
            template_digest=template_digest(self._model),
            probe=Probe(
                token_ids=np.arange(PROBE_LENGTH, dtype="<i4").tobytes(),
                logprobs=truth(section.state_digest),
            ),
            seconds=self._world.export_s,
        )

    def _tensor(self, index):
        """The first tensor never changes, as frozen ones do not; a step changes few weights."""
        whole = bytearray(blake3.blake3(bytes([index])).digest(length=TENSOR_SIZE_BYTES))
        if index:
            whole[:64] = blake3.blake3(self._state + bytes([index])).digest(length=64)
        return memoryview(whole)

    async def save(self, folder, *, step):
        await trio.sleep(self._world.save_s)
        assert step == self.step_number
        tensors = tensorfile.header_bytes([])
        names = (checkpoints.MODEL, checkpoints.MASTERS, checkpoints.OPTIMIZER)
        contents = {name: partial(_write, tensors) for name in names}
        contents["state"] = partial(_write, self._state)
        record = checkpoints.Record(step=step, updates=step, version=None, rng=b"")
        await trio.to_thread.run_sync(checkpoints.write_checkpoint, folder, record, contents)


def _write(data, file):
    file.write(data)


def truth(state_digest):
    """What a model with these weights says of the probe: log-probs that no other weights give."""
    noise = np.frombuffer(blake3.blake3(state_digest).digest(length=PROBE_LENGTH - 1), "u1")
    return (-1.0 - noise.astype("<f4") / 64).astype("<f4").tobytes()


class SimEngine(FakeEnginePort):
    """A fake engine that reads all the weights it is given, and is watched while it works."""

    def __init__(self, world, store_dir, settings) -> None:
        super().__init__(lambda digest: read_manifest(store_dir, digest), settings)
        self._world = world
        self._store_dir = store_dir
        self.running = 0
        self._since_s = 0.0
        self.started_s = trio.current_time()
        self.busy_s = 0.0
        self.installs = 0

    async def generate(self, request):
        if self.running == 0:
            self._since_s = trio.current_time()
        self.running += 1
        try:
            return await super().generate(request)
        finally:
            self.running -= 1
            if self.running == 0:
                self.busy_s += trio.current_time() - self._since_s

    async def install(self, manifest):
        report = await super().install(manifest)
        self.installs += 1
        content = stage(self._store_dir, manifest)
        data = b"".join(bytes(view) for _, view in content.tensors())
        state_digest = blake3.blake3(data).digest()
        if state_digest == content.manifest.state_digest:
            known = self._world.weights.setdefault(report.version, state_digest)
            assert known == state_digest, f"version {report.version} names two sets of weights"
        probe = np.frombuffer(truth(state_digest), dtype="<f4") + self._settings.probe_error
        return msgspec.structs.replace(report, probe_logprobs=probe.astype("<f4").tobytes())


class Daemon:
    """One daemon's life, from start to end, kill or crash."""

    def __init__(self, name, carrier) -> None:
        self.name = name
        self.node = identity_of(name).node
        self.carrier = carrier
        self.scope = trio.CancelScope()
        self.stop = trio.Event()
        self.ended = trio.Event()
        self.why = None
        self.error = None
        self.engines = []


class World:
    """A learner and actors by name. All settings may be changed while it runs."""

    def __init__(self, network, folder, nursery, host, laws, **settings) -> None:
        self.network = network
        self.host = host
        self.laws = laws
        self.folder = folder
        self.daemons = {}
        self.step_s = settings.pop("step_s", 1.0)
        self.export_s = settings.pop("export_s", 0.1)
        self.save_s = settings.pop("save_s", 0.1)
        self.trainer_dies_at = []
        self.lines = []
        """(step, ids) of the surviving line, as the trainer sees it."""
        self.weights = {}
        """Version -> state digest, as seen by any engine."""
        self.task = make_task("sort_digits", {"digits": 3})
        self.model = folder / "model"
        write_model(self.model, self.task.alphabet())
        self.config = make_config(self.model, **settings)
        self._nursery = nursery
        self._ports = {}
        self.run_id = RUN_ID

    # --- daemons --------------------------------------------------------------------------------

    @property
    def learner(self):
        return self.daemons["learner"]

    def start_learner(self, *, resume=False):
        """A learner daemon; its port stays the same over restarts, as a configured one does."""
        state = self._state_dir("learner")
        if not resume:
            (state / "run_id").write_text(self.run_id + "\n")
        daemon = self._new("learner")
        main = partial(
            run_learner,
            self.config,
            state_dir=state,
            resume=resume,
            carrier=daemon.carrier,
            make_trainer=self._open_trainer,
            stop=daemon.stop,
            rng=Random(self.network.rng.random()),
        )
        self._nursery.start_soon(self._live, daemon, main)
        return daemon

    def start_actor(self, name, *, dies_every_s=None, engine=None, **options):
        """An actor daemon with a fake engine of `FakeSettings` fields `engine`."""
        daemon = self._new(name)
        settings = FakeSettings(**{"step_s": 0.05, "install_s": 0.1, **(engine or {})})
        learner = identity_of("learner").node
        main = partial(
            run_actor,
            ActorConfig(**{"name": name, "groups_in_flight_max": 4, "drain_s": 5.0, **options}),
            RunTicket(
                run_id=self.run_id,
                learner=learner,
                addresses=(f"/ip4/10.0.0.1/tcp/{self._ports['learner']}",),
            ),
            state_dir=self._state_dir(name),
            carrier=daemon.carrier,
            make_engine=partial(self._open_engine, daemon, settings, dies_every_s),
            stop=daemon.stop,
            rng=Random(self.network.rng.random()),
        )
        self._nursery.start_soon(self._live, daemon, main)
        return daemon

    def kill_nowait(self, name):
        """As SIGKILL: the wires are cut and nothing more is done."""
        daemon = self.daemons[name]
        if daemon.carrier.alive:
            self.network.crash(daemon.node)
        daemon.scope.cancel()

    async def kill(self, name):
        self.kill_nowait(name)
        await self.daemons[name].ended.wait()
        await trio.sleep(0.01)

    async def wait_end(self, name="learner", *, within_s=600.0):
        """The daemon has ended; why. Fails if that takes longer than `within_s` of virtual time."""
        daemon = self.daemons[name]
        with trio.move_on_after(within_s) as scope:
            await daemon.ended.wait()
        assert not scope.cancelled_caught, f"{name} still runs: {self.describe()}"
        if daemon.error is not None:
            raise daemon.error
        return daemon.why

    async def wait_step(self, step, *, within_s=600.0):
        """The learner's ledger has `step`."""
        await self.wait(lambda: self.laws.step >= step, within_s=within_s)

    async def wait(self, true, *, within_s=600.0):
        with trio.move_on_after(within_s) as scope:
            while not true():
                await trio.sleep(0.1)
        assert not scope.cancelled_caught, f"it never happened: {self.describe()}"

    def describe(self):
        """Where everybody stands, for a failed test."""
        states = {name: self.status(name) for name in self.daemons}
        return f"step {self.laws.step} of {self.config.run.steps}; " + "; ".join(
            f"{name}: {s.get('state')} v{s.get('version')} {s.get('last_error', '')}"
            for name, s in states.items()
        )

    def status(self, name):
        """The status document of a daemon."""
        path = self._state_dir(name) / "status.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def metrics(self, name="learner"):
        """Whole lines of an actor's file; a learner's steps, without its events."""
        lines = (self._state_dir(name) / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        return [line for line in found if "step" in line] if name == "learner" else found

    def spreads(self):
        """How long the learner says its versions took to every actor."""
        lines = (self._state_dir("learner") / "metrics.jsonl").read_text().splitlines()
        found = [json.loads(line) for line in lines]
        return [line for line in found if line.get("event") == "disseminated"]

    @asynccontextmanager
    async def ledger(self):
        """The books, read as the command line does while the learner may be writing."""
        with Ledger.open(self._state_dir("learner") / "ledger.sqlite") as ledger:
            yield ledger
        await trio.lowlevel.checkpoint()

    def _new(self, name):
        identity = identity_of(name)
        old = self.daemons.get(name)
        assert old is None or old.ended.is_set(), f"{name} is running"
        key = self._state_dir(name) / "key"
        if not key.exists():
            identity.save(key)
        carrier = self.network.carrier(identity)
        carrier.port = self._ports.setdefault(name, carrier.port)
        daemon = self.daemons[name] = Daemon(name, carrier)
        return daemon

    def _state_dir(self, name):
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return folder

    async def _live(self, daemon, main):
        with daemon.scope:
            try:
                daemon.why = await main()
            except Echo2Error as error:
                daemon.error = error
        if daemon.carrier.alive:
            self.network.crash(daemon.node)
        daemon.ended.set()

    @asynccontextmanager
    async def _open_trainer(self, config, *, state_dir, store_dir, resume_from):
        await trio.sleep(0.5)
        yield SimTrainer(self, config, store_dir=store_dir, resume_from=resume_from)

    @asynccontextmanager
    async def _open_engine(self, daemon, settings, dies_every_s, model_folder, store_dir):
        await trio.sleep(0.5)
        if dies_every_s == 0:
            daemon.engines.append(None)
            raise LocalError("The engine found no GPU.")
        assert (model_folder / "tokenizer.json").is_file()
        engine = SimEngine(self, store_dir, settings)
        daemon.engines.append(engine)
        async with trio.open_nursery() as nursery:
            if dies_every_s is not None:
                nursery.start_soon(_kill_later, engine, self.network.rng, dies_every_s)
            yield engine
            nursery.cancel_scope.cancel()


async def _kill_later(engine, rng, dies_every_s):
    await trio.sleep(dies_every_s * rng.uniform(0.5, 1.5))
    engine.die()


class Laws:
    """What must hold after every event of the desk and after every commit of the ledger."""

    def __init__(self) -> None:
        self.step = 0
        """The last step committed."""
        self.commits = []
        """Every transaction's facts as text: the trace of a run."""
        self.alive_max = 0
        self.counts = Counter()
        self._published = {}

    def install(self, monkeypatch) -> None:
        real_feed, real_apply = Keeper.feed, Ledger.apply

        def feed(keeper, event, envelope=None):
            before = keeper.clerk.shelf.alive
            self._before(keeper, event)
            effects = real_feed(keeper, event, envelope)
            self._after(keeper, before)
            return effects

        def apply(ledger, facts, payloads, **options):
            real_apply(ledger, facts, payloads, **options)
            self._committed(ledger, facts)

        monkeypatch.setattr(Keeper, "feed", feed)
        monkeypatch.setattr(Ledger, "apply", apply)

    def _before(self, keeper, event):
        if isinstance(event, events.Trained):
            limit = keeper.clerk.rules.staleness_limit_steps
            for group_id in event.group_ids:
                group = keeper.clerk.shelf.get(group_id)
                assert group.phase is Phase.TRAINING
                assert 0 <= event.version_before - group.oldest <= limit

    def _after(self, keeper, alive_before):
        clerk = keeper.clerk
        bound = admission.alive_max(clerk.rules)
        assert clerk.shelf.alive <= max(bound, alive_before)
        self.alive_max = max(self.alive_max, clerk.shelf.alive)
        alive = [group for group in clerk.shelf if group.phase is not Phase.WAITING]
        assert len(alive) == clerk.shelf.alive
        leased = [group.lease_id for group in clerk.shelf if group.lease_id is not None]
        assert len(leased) == len(set(leased)) == len(clerk.book.live)
        self.counts["events"] += 1

    def _committed(self, ledger, facts):
        self.commits.append([str(fact) for fact in facts])
        for fact in facts:
            match fact:
                case records.VersionPublished(version=version, manifest=manifest):
                    known = self._published.setdefault(version, manifest)
                    assert known == manifest, f"version {version} was published twice"
                case records.StepTaken(step=step):
                    self.step = step
                    assert ledger.verify() == []
                case records.LeaseEnded(how=how):
                    self.counts[f"leases {how.value}"] += 1
                case _:
                    pass

    async def check_end(self, world):
        """After a run: the books are right, complete, and inside the bounds."""
        async with world.ledger() as ledger:
            assert ledger.verify() == []
            summary = ledger.summary()
        config = world.config
        assert summary.steps == config.run.steps == world.lines[-1][0]
        assert [step for step, _ in world.lines] == list(range(1, config.run.steps + 1))
        per_step = config.rollout.groups_per_step * config.rollout.group_size
        assert summary.consumed == per_step * summary.steps
        assert summary.staleness_steps_max <= config.staleness.limit_steps
        assert sum(summary.lease_ends.values()) == summary.leases, "every lease has ended"
        assert not world.network.counters["handler_failures"]
        return summary


def make_config(model, **changes):
    """A small run; keyword arguments are settings of any section."""
    sections = {
        "run": {"name": "sim", "steps": 8, "seed": 3},
        "model": {"path": str(model)},
        "task": {"id": "sort_digits", "args": {"digits": 3}},
        "rollout": {
            "groups_per_step": 2,
            "group_size": 4,
            "tokens_max": 6,
            "lease_ttl_s": 20.0,
            "refills_per_group_max": 8,
        },
        "staleness": {"limit_steps": 2},
        "learner": {"checkpoint_every_steps": 2},
        "weights": {},
    }
    for name, value in changes.items():
        section = next(s for s, keys in _SETTINGS.items() if name in keys)
        sections[section][name] = value
    return convert(sections, RunConfig, where="simulation")


_SETTINGS = {
    "run": {"steps", "seed"},
    "rollout": {"groups_per_step", "group_size", "tokens_max", "lease_ttl_s"},
    "staleness": {"limit_steps", "publish_every_steps", "policy"},
    "learner": {"checkpoint_every_steps"},
    "weights": {"patch_steps_max", "versions_kept", "full_disk_wait_s"},
}


def write_model(folder, alphabet):
    """A model folder as far as a learner without torch looks into it."""
    folder.mkdir()
    for name, data in build_character_tokenizer(alphabet).items():
        (folder / name).write_bytes(data)
    config = {"architectures": ["SimForCausalLM"], "vocab_size": 13, "model_type": "sim"}
    (folder / "config.json").write_text(json.dumps(config))
    tensor = tensorfile.header_bytes([("tensor.0", "BF16", (2,), 4)]) + bytes(4)
    (folder / "model.safetensors").write_bytes(tensor)


@asynccontextmanager
async def open_world(folder, monkeypatch, *, seed=0, network=None, **settings):
    """A world on a network of its own; `network` as in `open_network`, the rest as in `World`."""
    host, laws = Host(), Laws()
    host.install(monkeypatch)
    laws.install(monkeypatch)
    async with open_network(Random(seed), **(network or {})) as net, trio.open_nursery() as nursery:
        yield World(net, folder, nursery, host, laws, **settings)
        nursery.cancel_scope.cancel()
