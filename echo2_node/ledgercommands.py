"""`echo2-node ledger`: reads a run's books, changes nothing. Called by the command line alone."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from echo2_mesh.errors import UsageError
from echo2_node import sightings
from echo2_node.options import AsJson, RunName

if TYPE_CHECKING:
    from echo2_node.learner.ledger import Ledger

out = Console()
ledger_app = typer.Typer(
    no_args_is_help=True, help="What became of every lease and rollout of a run."
)


@ledger_app.command("verify")
def ledger_verify(run: RunName = None, as_json: AsJson = False) -> None:
    """Prove that all consumed was consumed once and all refused has a reason; exit 1 if not."""
    with _open_ledger(run) as ledger:
        problems = ledger.verify()
        summary = ledger.summary()
    if as_json:
        document = {"ok": not problems, "problems": list(problems), **_plain_dict(summary)}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        from echo2_node.ledgerview import verdict_lines

        for line in verdict_lines(summary, tuple(problems)):
            out.print(line, highlight=False, soft_wrap=True)
    if problems:
        raise typer.Exit(1)


@ledger_app.command("show")
def ledger_show(run: RunName = None, as_json: AsJson = False) -> None:
    """Counts of a run: steps, versions, verdicts, staleness."""
    with _open_ledger(run) as ledger:
        summary = ledger.summary()
    if as_json:
        sys.stdout.write(json.dumps(_plain_dict(summary)) + "\n")
        return
    from echo2_node.ledgerview import summary_table

    out.print(summary_table(summary))


@ledger_app.command("actors")
def ledger_actors(run: RunName = None, as_json: AsJson = False) -> None:
    """Accepted and refused rollouts of each actor, with the reasons."""
    with _open_ledger(run) as ledger:
        summary = ledger.summary()
    if as_json:
        sys.stdout.write(json.dumps(_plain_dict(summary).get("actors", [])) + "\n")
        return
    from echo2_node.ledgerview import actors_table

    out.print(actors_table(summary))


def _open_ledger(run: str | None) -> Ledger:
    from echo2_node.learner.ledger import Ledger

    folder = sightings.find_folder(run, role="learner")
    path = folder / "ledger.sqlite"
    if not path.exists():
        raise UsageError(
            f"There is no ledger in {folder}.", "Name a learner's state folder or its run."
        )
    return Ledger.open(path)


def _plain_dict(summary: object) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(summary, str_keys=True)
    return plain
