"""The demo itself: a starting model, one learner, some actors, a crash, a late arrival, a summary.

Everything it runs is what a person would run by hand; it reads only what any person could: status
documents, metrics and the ledger. Called by the command line.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NoReturn

import msgspec
from rich.console import Console

from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.identity import Identity
from echo2_node.config import RunConfig, dump, load_run
from echo2_node.demo.fleet import Fleet, Process, ending_like_ctrl_c, open_fleet
from echo2_node.demo.progress import Progress
from echo2_node.demo.summary import Part, Seconds, Summary, draw, reward_curve, reward_of
from echo2_node.demo.warmup import starting_model
from echo2_node.learner.lossnames import check_loss
from echo2_node.status import STATUS_FILE, Snapshot, read_snapshot
from echo2_node.telemetry import read_metrics

ACTORS_MAX = 64
START_TIMEOUT_S = 180.0
STEP_TIMEOUT_S = 120.0
"""Without a training step for this long the demo gives up."""
POLL_INTERVAL_S = 0.2
KILL_AT = 0.4
JOIN_LATE_AT = 0.2
TASK_FILES = {"sort_digits": "demo.toml"}
"""Which file of `runs/` shows a task; others have a file of their own name."""


class Wishes(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's options; None leaves what the run file says."""

    steps: int | None = None
    actors: int = 3
    task: str = "sort_digits"
    loss: str | None = None
    staleness: int | None = None
    seed: int = 0
    chaos: bool = True
    keep: bool = False
    plot: Path | None = None


def run_demo(wishes: Wishes, *, console: Console) -> Summary:
    """Run the demo to its end.

    Errors:
        UsageError: an option names something unknown.
        LocalError: a process failed; the message ends with the last lines of its log.
    """
    if not 1 <= wishes.actors <= ACTORS_MAX:
        raise UsageError(f"{wishes.actors} actors; the demo runs 1 to {ACTORS_MAX}.")
    template = _run_file(wishes.task)
    if wishes.loss is not None:
        check_loss(wishes.loss, ())
    with (
        ending_like_ctrl_c(),
        _folder(keep=wishes.keep) as folder,
        Progress(console) as progress,
    ):
        began_s = time.monotonic()
        model = starting_model(wishes.task, _task_args(template), tell=progress.tell)
        warm_up_s = time.monotonic() - began_s
        config = _configure(template, wishes, model)
        run_file = folder / "run.toml"
        run_file.write_text(dump(config), encoding="utf-8")
        with open_fleet(folder) as fleet:
            play = Play(fleet, config, wishes, progress)
            play.run(run_file)
        progress.tell("reading the ledger")
        summary = play.summary(warm_up_s=warm_up_s, kept=wishes.keep)
        if wishes.plot is not None:
            draw(
                wishes.plot,
                summary,
                read_metrics(play.learner.state_dir / "metrics.jsonl"),
                play.events,
            )
    return summary


@contextlib.contextmanager
def _folder(*, keep: bool) -> Iterator[Path]:
    """A new folder for all state; it stays where it is asked for or needed to see what failed."""
    folder = Path(tempfile.mkdtemp(prefix="echo2-demo-"))
    try:
        yield folder
    except LocalError as error:
        keep = True
        hint = f"{error.hint}\nThe state folders are kept in {folder}.".strip()
        raise type(error)(error.what, hint) from error
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _run_file(task: str) -> Path:
    from echo2_node.tasks.registry import make_task

    make_task(task, {})
    runs = Path(__file__).resolve().parents[2] / "runs"
    path = runs / TASK_FILES.get(task, f"{task}.toml")
    if not path.exists():
        raise UsageError(
            f"There is no demo of the task '{task}': {path} does not exist.",
            "Write that run file, or show another task with --task.",
        )
    return path


def _task_args(template: Path) -> dict[str, Any]:
    data = msgspec.toml.decode(template.read_bytes())
    args: dict[str, Any] = data.get("task", {}).get("args", {})
    return args


def _configure(template: Path, wishes: Wishes, model: Path) -> RunConfig:
    """The run file with the demo's options, on the loopback network alone."""
    overrides = [f'model.path="{model}"', f"run.seed={wishes.seed}", "mesh.mdns=false"]
    overrides.append('mesh.listen=["/ip4/127.0.0.1/tcp/0"]')
    if wishes.steps is not None:
        overrides.append(f"run.steps={wishes.steps}")
    if wishes.loss is not None:
        # Arguments of the file's own loss would be unknown to another.
        overrides += [f'learner.loss="{wishes.loss}"', "learner.loss_args={}"]
    if wishes.staleness is not None:
        overrides.append(f"staleness.limit_steps={wishes.staleness}")
    return load_run(template, tuple(overrides))


class Play:
    """One performance: what has happened so far, and what happens at which step."""

    def __init__(self, fleet: Fleet, config: RunConfig, wishes: Wishes, progress: Progress) -> None:
        self._fleet = fleet
        self._config = config
        self._wishes = wishes
        self._progress = progress
        self._started_s = time.monotonic()
        self._ended_s = self._started_s
        self.learner: Process
        self.actors: list[Process] = []
        self._late: Process | None = None
        self.events: list[str] = []

    def run(self, run_file: Path) -> None:
        """From the first process to the learner's last step."""
        self._started_s = time.monotonic()
        self.learner = self._fleet.start("learner", ["learn", str(run_file)])
        self._progress.tell("starting the learner")
        ticket = self._wait_ticket()
        for number in range(1, self._wishes.actors + 1):
            self.actors.append(self._join(f"actor-{number}", ticket))
        self._progress.tell(f"starting {self._wishes.actors} actors")
        self._follow(ticket)
        self._ended_s = time.monotonic()
        for process in self._fleet.processes:
            process.poll()  # whoever crashed did so before the end was called
        self._fleet.leave()

    def _join(self, name: str, ticket: Path) -> Process:
        return self._fleet.start(
            name,
            [
                "join",
                str(ticket),
                "--name",
                name,
                "--threads",
                "1",
                "--no-mdns",
                "--listen",
                "/ip4/127.0.0.1/tcp/0",
            ],
        )

    def _wait_ticket(self) -> Path:
        ticket = self.learner.state_dir / "ticket.txt"
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not ticket.exists():
            self._check_learner()
            if time.monotonic() > deadline_s:
                raise LocalError(
                    f"The learner printed no ticket within {START_TIMEOUT_S:.0f} s.",
                    f"The end of its log:\n{self.learner.last_lines()}",
                )
            time.sleep(POLL_INTERVAL_S)
        return ticket

    def _follow(self, ticket: Path) -> None:
        """Until the learner ends: show progress, and do harm at the appointed steps."""
        steps = self._config.run.steps
        step, moved_s = 0, time.monotonic()
        while self.learner.poll() is None:
            snapshot = self._snapshot()
            if snapshot is not None:
                if snapshot.step > step:
                    step, moved_s = snapshot.step, time.monotonic()
                self._progress.show(snapshot)
            if self._wishes.chaos:
                self._harm(step, steps, ticket)
            ended = [actor.poll() is not None for actor in self.actors]
            if all(ended) and step < steps:
                self._give_up("Every actor has ended before the run did", self.actors[0])
            if time.monotonic() - moved_s > STEP_TIMEOUT_S:
                self._give_up(f"No training step for {STEP_TIMEOUT_S:.0f} s", self.learner)
            time.sleep(POLL_INTERVAL_S)
        self._check_learner()

    def _harm(self, step: int, steps: int, ticket: Path) -> None:
        if step >= KILL_AT * steps and not any(actor.killed for actor in self.actors):
            # A single actor is spared: nobody would be left.
            victim = self.actors[min(1, len(self.actors) - 1)]
            if len(self.actors) > 1 and victim.poll() is None:
                victim.kill()
                self._mark(step, f"{victim.name} killed")
        if step >= JOIN_LATE_AT * steps and self._late is None and step < steps:
            self._late = self._join(f"actor-{self._wishes.actors + 1}", ticket)
            self.actors.append(self._late)
            self._mark(step, f"{self._late.name} joins")

    def _mark(self, step: int, words: str) -> None:
        self.events.append(f"{max(1, step)}:{words}")
        self._progress.tell(f"step {step}: {words}")

    def _snapshot(self) -> Snapshot | None:
        with contextlib.suppress(LocalError):
            return read_snapshot(self.learner.state_dir / STATUS_FILE)
        return None

    def _check_learner(self) -> None:
        code = self.learner.poll()
        if code not in (None, 0):
            self._give_up(f"The learner has ended with exit code {code}", self.learner)

    def _give_up(self, what: str, process: Process) -> NoReturn:
        raise LocalError(
            f"{what}.", f"The end of the log of {process.name}:\n{process.last_lines()}"
        )

    def summary(self, *, warm_up_s: float, kept: bool) -> Summary:
        """What the ledger, the metrics and the processes say, once all have ended."""
        from echo2_node.demo.account import read_account

        account = read_account(self.learner.state_dir / "ledger.sqlite")
        curve = reward_curve(read_metrics(self.learner.state_dir / "metrics.jsonl"))
        return Summary(
            run_id=_run_id(self.learner),
            task=self._config.task.id,
            loss=self._config.learner.loss,
            seed=self._config.run.seed,
            steps=len(curve),
            reward=reward_of(curve),
            staleness_steps_max=max((int(age) for age in account.staleness), default=0),
            staleness_limit_steps=self._config.staleness.limit_steps,
            staleness_histogram=account.staleness,
            ledger_verified=not account.problems,
            ledger_problems=account.problems[:20],
            versions_published=account.versions_published,
            accepted=sum(accepted for accepted, _ in account.by_actor.values()),
            refusals=account.refusals,
            actors=tuple(self._part(actor, account.by_actor) for actor in self.actors),
            seconds=Seconds(
                setup=float(os.environ.get("ECHO2_SETUP_S", "0") or 0),
                warm_up=round(warm_up_s, 1),
                run=round(self._ended_s - self._started_s, 1),
            ),
            folder=str(self._fleet.folder) if kept else "",
        )

    def _part(self, actor: Process, by_actor: dict[str, tuple[int, int]]) -> Part:
        node = _node_of(actor)
        accepted, refused = by_actor.get(node, (0, 0))
        ended_s = actor.ended_s or self._ended_s
        crashed = not actor.killed and ended_s < self._ended_s and actor.poll() != 0
        how = "killed" if actor.killed else "crashed" if crashed else "stayed"
        if actor is self._late and how == "stayed":
            how = "late"
        return Part(
            id=node,
            name=actor.name,
            joined_s=round(actor.started_s - self._started_s, 1),
            left_s=round(min(ended_s, self._ended_s) - self._started_s, 1),
            how=how,
            accepted=accepted,
            refused=refused,
        )


def _node_of(process: Process) -> str:
    """The id of a node that may have died before it said anything; empty if it made no key."""
    try:
        return Identity.load(process.state_dir / "key").node
    except (UsageError, LocalError):
        return ""


def _run_id(learner: Process) -> str:
    snapshot = read_snapshot(learner.state_dir / STATUS_FILE)
    return snapshot.run_id if snapshot is not None else ""
