"""How a ledger's summary looks on a terminal. Draws only; the ledger counts and judges.

Called by the command line.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from echo2_node.telemetry import short_id

if TYPE_CHECKING:
    from echo2_node.learner.audit import Summary

PROBLEMS_SHOWN_MAX = 50


def verdict_lines(summary: Summary, problems: tuple[str, ...]) -> Iterator[RenderableType]:
    """What `ledger verify` prints: the proof in numbers, or what is wrong."""
    if problems:
        yield Text(f"{summary.run_id}: {len(problems)} problems", style="bold red")
        yield from (Text(f"  {problem}", style="red") for problem in problems[:PROBLEMS_SHOWN_MAX])
        if len(problems) > PROBLEMS_SHOWN_MAX:
            yield Text(f"  and {len(problems) - PROBLEMS_SHOWN_MAX} more", style="red")
        return
    yield Text(f"{summary.run_id}: the books are right", style="bold green")
    yield Text(
        f"  {summary.consumed} trajectories consumed, each once, in {summary.steps} steps; "
        f"{summary.steps_undone} steps undone by {summary.resumes} resumes"
    )
    yield Text(f"  {summary.refused} rollouts refused, each with a reason{_in_brackets(summary)}")
    yield Text(
        f"  oldest consumed: {summary.staleness_steps_max} steps; "
        f"limit {summary.staleness_limit_steps}"
    )
    yield Text(f"  {summary.leases} leases, none ended twice")


def _in_brackets(summary: Summary) -> str:
    return f" ({_listed(summary.refusals)})" if summary.refusals else ""


def summary_table(summary: Summary) -> RenderableType:
    """What `ledger show` prints."""
    table = Table(box=None, pad_edge=False, show_header=False, title=summary.run_id)
    rows = {
        "steps": f"{summary.steps} ({summary.steps_skipped} skipped, {summary.steps_undone} "
        f"undone by {summary.resumes} resumes)",
        "versions published": f"{summary.versions_published}, newest {summary.version_newest}",
        "leases": f"{summary.leases} ({_listed(summary.lease_ends)})",
        "groups": f"{summary.groups}, {summary.groups_consumed} consumed; "
        f"dropped: {_listed(summary.groups_dropped)}",
        "rollouts admitted": f"{summary.accepted}, {summary.consumed} consumed; "
        f"not used: {_listed(summary.unused)}",
        "rollouts refused": f"{summary.refused}: {_listed(summary.refusals)}",
        "duplicates": str(summary.duplicates),
        "staleness in steps": f"{_listed(summary.staleness_histogram)} "
        f"(limit {summary.staleness_limit_steps})",
    }
    for title, value in rows.items():
        table.add_row(Text(title), Text(value))
    return table


def actors_table(summary: Summary) -> RenderableType:
    """What `ledger actors` prints: one row an actor, the most useful first."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("actor")
    for title in ("leases", "accepted", "consumed", "tokens", "refused", "duplicates"):
        table.add_column(title, justify="right")
    table.add_column("reasons")
    for row in sorted(summary.actors, key=lambda one: -one.consumed):
        counts = (
            row.leases,
            row.accepted,
            row.consumed,
            row.tokens,
            row.refused,
            row.duplicates,
        )
        reasons = _listed(row.reasons) if row.reasons else ""
        table.add_row(Text(short_id(row.actor)), *map(str, counts), Text(reasons))
    if not summary.actors:
        return Group(Text("No actor has taken a lease yet."))
    return table


def _listed(counts: Mapping[str, int] | Mapping[int, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items()) or "none"
