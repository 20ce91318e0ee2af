"""What a demo came to: one object from the ledger, the metrics and the fleet, and its plot.

Pure arithmetic except `draw`, which loads matplotlib. Called by `demo.show`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from echo2_mesh.errors import LocalError
from echo2_node.telemetry import short_id


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One actor's part in the run. Seconds count from the learner's start."""

    id: str
    name: str
    joined_s: float
    left_s: float
    how: str
    """stayed, late (started during the run, stayed), killed (SIGKILL, on purpose), crashed."""
    accepted: int
    refused: int


class Reward(msgspec.Struct, frozen=True, kw_only=True):
    """Mean reward of sampled rollouts over the first and the last fifth of the steps."""

    first_fifth: float
    last_fifth: float
    gain: float


class Seconds(msgspec.Struct, frozen=True, kw_only=True):
    """Set-up of the environment, making the starting model, and the run itself."""

    setup: float
    warm_up: float
    run: float


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """The demo's result; `--json` writes exactly this."""

    format: int = 1
    run_id: str
    task: str
    loss: str
    seed: int
    steps: int
    reward: Reward
    staleness_steps_max: int
    staleness_limit_steps: int
    staleness_histogram: dict[str, int]
    ledger_verified: bool
    ledger_problems: tuple[str, ...]
    versions_published: int
    accepted: int
    refusals: dict[str, int]
    actors: tuple[Part, ...]
    seconds: Seconds
    folder: str = ""
    """Where the state was kept; empty where it was removed."""


def reward_curve(metrics: Sequence[Mapping[str, Any]]) -> list[float]:
    """Mean reward per step; a step that was done again after a crash counts as it ended."""
    by_step = {
        int(line["step"]): float(line["reward_mean"])
        for line in metrics
        if "step" in line and line.get("reward_mean") is not None
    }
    return [by_step[step] for step in sorted(by_step)]


def reward_of(curve: Sequence[float]) -> Reward:
    """First against last fifth; at least one step each."""
    if not curve:
        return Reward(first_fifth=0.0, last_fifth=0.0, gain=0.0)
    fifth = max(1, len(curve) // 5)
    first = sum(curve[:fifth]) / fifth
    last = sum(curve[-fifth:]) / fifth
    return Reward(first_fifth=first, last_fifth=last, gain=last - first)


def write_json(path: Path, summary: Summary) -> None:
    """The summary as one JSON object.

    Errors:
        LocalError: the file cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n")
    except OSError as error:
        raise LocalError(f"The summary {path} cannot be written: {error}.") from error


def lines_of(summary: Summary, *, plot: Path | None) -> Iterator[RenderableType]:
    """The summary as a person reads it: headline, actors, refusals, where things are."""
    reward, seconds = summary.reward, summary.seconds
    yield Text(
        f"reward {reward.first_fifth:.3f} -> {reward.last_fifth:.3f} (gain {reward.gain:+.3f}) "
        f"over {summary.steps} steps of {summary.task}, loss {summary.loss}, seed {summary.seed}",
        style="bold",
    )
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("actor", "id", "how"):
        table.add_column(title)
    for title in ("joined", "left", "accepted", "refused"):
        table.add_column(title, justify="right")
    for part in summary.actors:
        table.add_row(
            part.name,
            short_id(part.id),
            part.how,
            f"{part.joined_s:.1f} s",
            f"{part.left_s:.1f} s",
            str(part.accepted),
            str(part.refused),
            style="yellow" if part.how in ("killed", "crashed") else "",
        )
    yield table
    ages = ", ".join(f"{age}: {count}" for age, count in summary.staleness_histogram.items())
    yield Text(
        f"staleness in steps  {ages or '-'} (oldest {summary.staleness_steps_max}, "
        f"limit {summary.staleness_limit_steps})"
    )
    yield Text(f"versions published  {summary.versions_published}")
    refusals = ", ".join(f"{reason} {count}" for reason, count in summary.refusals.items())
    yield Text(f"rollouts            {summary.accepted} admitted, refused: {refusals or 'none'}")
    if summary.ledger_verified:
        yield Text("ledger              verified: consumed once, every refusal has a reason")
    else:
        yield Text("ledger              NOT verified", style="red")
        yield from (Text(f"  {problem}", style="red") for problem in summary.ledger_problems)
    yield Text(
        f"seconds             set-up {seconds.setup:.0f}, warm-up {seconds.warm_up:.0f}, "
        f"run {seconds.run:.0f}"
    )
    if plot is not None:
        yield Text(f"plot                {plot}")
    if summary.folder:
        yield Text(f"kept                {summary.folder}")


def draw(
    path: Path, summary: Summary, metrics: Sequence[Mapping[str, Any]], events: Sequence[str]
) -> None:
    """The reward plot as a PNG.

    Args:
        metrics: the learner's lines, one a step.
        events: "step:words" to mark in the plot, e.g. "20:actor-2 killed".

    Errors:
        LocalError: the file cannot be written.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curve = reward_curve(metrics)
    figure, (left, right) = pyplot.subplots(
        1, 2, figsize=(11, 4.8), gridspec_kw={"width_ratios": [3, 1]}, layout="constrained"
    )
    steps = range(1, len(curve) + 1)
    left.plot(steps, curve, color="0.7", linewidth=1, label="each step")
    left.plot(steps, _smooth(curve), color="C0", linewidth=2, label="moving mean")
    for event in events:
        step, _, words = event.partition(":")
        left.axvline(int(step), color="C3", linewidth=1, linestyle=":")
        left.text(
            int(step),
            0.02,
            f" {words}",
            rotation=90,
            fontsize=8,
            color="C3",
            transform=left.get_xaxis_transform(),
        )
    left.set_xlabel("training step")
    left.set_ylabel("mean reward of sampled rollouts")
    left.set_ylim(0.0, max(1.0, *curve) if curve else 1.0)
    left.set_title(
        f"{summary.task}, {summary.loss}, seed {summary.seed}: "
        f"{summary.reward.first_fifth:.2f} to {summary.reward.last_fifth:.2f}"
    )
    left.legend(loc="upper left", frameon=False)
    ages = sorted(summary.staleness_histogram, key=int)
    right.bar(ages, [summary.staleness_histogram[age] for age in ages], color="C0")
    right.set_xlabel(f"staleness in steps (limit {summary.staleness_limit_steps})")
    right.set_ylabel("consumed trajectories")
    refusals = ", ".join(f"{reason} {count}" for reason, count in summary.refusals.items())
    figure.suptitle(
        f"{summary.versions_published} versions published, {summary.accepted} rollouts admitted, "
        f"refused: {refusals or 'none'}; ledger "
        f"{'verified' if summary.ledger_verified else 'NOT verified'}",
        fontsize=9,
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise LocalError(f"The plot {path} cannot be written: {error}.") from error
    finally:
        pyplot.close(figure)


def _smooth(curve: Sequence[float], *, half_width: int = 4) -> list[float]:
    windows = (curve[max(0, i - half_width) : i + half_width + 1] for i in range(len(curve)))
    return [sum(window) / len(window) for window in windows]
