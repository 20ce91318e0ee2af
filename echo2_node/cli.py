"""The command `echo2-node`: reads what a person typed, starts what was asked, says what went wrong.

Decides nothing about a run. Daemons, torch and libp2p are imported by the one command that needs
them, so help and `status` answer at once. Deliberate errors end as one paragraph and the exit code
of their class: 2 the person's, 3 this host's, 4 a peer's.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from echo2_mesh.errors import Echo2Error, UsageError
from echo2_node import sightings
from echo2_node.config import dump, load_run
from echo2_node.joincommand import join
from echo2_node.keycommands import keys_app
from echo2_node.ledgercommands import ledger_app
from echo2_node.options import AsJson, RunName, StateDir, Verbose
from echo2_node.weightscommands import weights_app

if TYPE_CHECKING:
    from echo2_node.config import RunConfig

WATCH_INTERVAL_S = 1.0
STOPPED = "stopped"
"""Why a daemon ended that was told to; anything else ends the run."""

app = typer.Typer(
    name="echo2-node",
    help="Train language models by reinforcement learning on whatever machines join.",
    epilog="Try `echo2-node demo` first. Every command explains itself with --help.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.add_typer(keys_app, name="keys")
app.add_typer(ledger_app, name="ledger")
app.add_typer(weights_app, name="weights")

out = Console()
errors = Console(stderr=True)


def main() -> None:
    """Run the command and turn deliberate errors into a paragraph and an exit code."""
    try:
        app(prog_name="echo2-node")
    except Echo2Error as error:
        show_error(error)
        sys.exit(error.exit_code)


def show_error(error: Echo2Error) -> None:
    """What happened, and apart from it what to do now."""
    errors.print(f"[red]error:[/red] {_escape(error.what)}", highlight=False, soft_wrap=True)
    if error.hint:
        errors.print(_escape(error.hint), highlight=False, soft_wrap=True)


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape("".join(c if c.isprintable() or c == "\n" else "?" for c in text))


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        from echo2_mesh import limits

        out.print(
            f"echo2-node {version('echo2')} (network version {limits.NETWORK_VERSION}, "
            f"Python {sys.version.split()[0]})",
            highlight=False,
        )
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Versions, then exit."),
    ] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def learn(
    run_file: Annotated[Path, typer.Argument(metavar="RUN.toml", help="The run file.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[SECTION.KEY=VALUE]...",
            help="Settings that win over the file, e.g. run.steps=50 learner.lr=1e-5.",
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the newest complete checkpoint.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, print every setting, start nothing."),
    ] = False,
    state_dir: StateDir = None,
    verbose: Verbose = False,
) -> None:
    """Run a learner: it offers prompts, judges rollouts, trains, and publishes versions."""
    config = load_run(run_file, tuple(overrides or ()))
    _check_names(config, dry_run=dry_run)
    if dry_run:
        out.print(dump(config), highlight=False, markup=False, soft_wrap=True, end="")
        return
    from echo2_node.foreground import learn_in_foreground

    folder = state_dir or sightings.state_base() / config.run.name
    why = learn_in_foreground(config, state_dir=folder, resume=resume, verbose=verbose)
    ended = (
        "The learner has stopped; --resume goes on"
        if why == STOPPED
        else f"The run has ended: {why}"
    )
    errors.print(f"{ended}. Its folder: {folder}", highlight=False, soft_wrap=True)


def _check_names(config: RunConfig, *, dry_run: bool) -> None:
    """Unknown names and a missing model are told before anything heavy loads."""
    from echo2_node.learner.lossnames import check_loss
    from echo2_node.learner.modelfolder import check_model_folder
    from echo2_node.tasks.registry import make_task
    from echo2_node.tokens import TokenCodec

    task = make_task(config.task.id, config.task.args)
    check_loss(config.learner.loss, config.learner.loss_args)
    check_model_folder(Path(config.model.path))
    TokenCodec.load(Path(config.model.path)).encode_prompt(task.item(config.run.seed, 0).prompt)
    if dry_run:
        # Bounds of its arguments are tensor code: a real run asks in the trainer, which has torch.
        from echo2_node.learner.losses import make_loss

        make_loss(config.learner.loss, config.learner.loss_args)


app.command()(join)


@app.command()
def ticket(run: RunName = None, state_dir: StateDir = None) -> None:
    """Print the ticket of a learner on this host: whoever has it can join."""
    folder = state_dir or sightings.find_folder(run, role="learner")
    path = folder / "ticket.txt"
    try:
        text = path.read_text(encoding="ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"There is no ticket in {folder}.",
            "A learner writes it once it listens; is one running there?",
        ) from error
    out.print(text, soft_wrap=True, highlight=False, markup=False)


@app.command()
def status(
    run: Annotated[
        str | None, typer.Argument(help="Only this run (name or id).", show_default=False)
    ] = None,
    watch: Annotated[bool, typer.Option("--watch", "-w", help="Keep showing it.")] = False,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Show every node of this user on this host, and the mesh as each of them sees it."""
    if as_json:
        _print_status_json(run, state_dir)
    elif watch and out.is_terminal:
        _watch(run, state_dir)
    else:
        out.print(_status_view(run, state_dir))
        while watch:
            time.sleep(WATCH_INTERVAL_S)
            out.print(_status_view(run, state_dir))


def _watch(run: str | None, state_dir: Path | None) -> None:
    """Redraw in place until Ctrl-C."""
    from rich.live import Live

    first = _status_view(run, state_dir)
    with Live(first, console=out, screen=True, auto_refresh=False) as live:
        while True:
            time.sleep(WATCH_INTERVAL_S)
            live.update(_status_view(run, state_dir), refresh=True)


def _seen(run: str | None, state_dir: Path | None) -> tuple[sightings.Sighting, ...]:
    found = sightings.find_sightings(state_dir)
    return tuple(one for one in found if run in (None, one.snapshot.run_id, Path(one.folder).name))


def _status_view(run: str | None, state_dir: Path | None) -> Any:
    from rich.console import Group

    from echo2_node.panel import render

    found = _seen(run, state_dir)
    if not found:
        return (
            f"No node{'' if run is None else f' of {run}'} is known under "
            f"{state_dir or sightings.state_base()}. Start a learner with `echo2-node learn "
            "RUN.toml` or join one with `echo2-node join TICKET`."
        )
    alive = [one for one in found if one.process != "stopped"]
    parts: list[Any] = [render(one) for one in (alive or found)]
    if alive and len(alive) < len(found):
        parts.append(f"[dim]and {len(found) - len(alive)} stopped[/dim]")
    return Group(*parts)


def _print_status_json(run: str | None, state_dir: Path | None) -> None:
    import msgspec

    found = _seen(run, state_dir)
    nodes = [
        {"process": one.process, "folder": one.folder, **msgspec.to_builtins(one.snapshot)}
        for one in found
    ]
    sys.stdout.write(json.dumps({"format": 1, "nodes": nodes}, indent=2) + "\n")


@app.command()
def demo(
    steps: Annotated[
        int | None, typer.Option(min=5, help="Training steps.", show_default="the task's")
    ] = None,
    actors: Annotated[
        int, typer.Option(min=1, max=64, help="Actors at the start; one more joins late.")
    ] = 3,
    task: Annotated[str, typer.Option(help="sort_digits or countdown.")] = "sort_digits",
    loss: Annotated[
        str | None, typer.Option(help="grpo, dapo or dppo.", show_default="the task's")
    ] = None,
    staleness: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="S: the most steps old that a trained rollout may be.",
            show_default="the task's",
        ),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="Decides the prompts and the sampling.")] = 0,
    chaos: Annotated[
        bool, typer.Option("--chaos/--no-chaos", help="Kill one actor; let another join late.")
    ] = True,
    json_file: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write the summary there.", show_default=False),
    ] = None,
    plot: Annotated[Path, typer.Option(metavar="FILE", help="The reward plot.")] = Path(
        "echo2-demo.png"
    ),
    keep: Annotated[bool, typer.Option("--keep", help="Keep the state folders.")] = False,
) -> None:
    """Show the whole loop on this machine: a tiny model learns while actors come and go."""
    from echo2_node.demo.show import Wishes, run_demo
    from echo2_node.demo.summary import lines_of, write_json

    wishes = Wishes(
        steps=steps,
        actors=actors,
        task=task,
        loss=loss,
        staleness=staleness,
        seed=seed,
        chaos=chaos,
        keep=keep,
        plot=plot,
    )
    summary = run_demo(wishes, console=out)
    if json_file is not None:
        write_json(json_file, summary)
    for line in lines_of(summary, plot=plot):
        out.print(line, highlight=False, soft_wrap=True)
    if not summary.ledger_verified:
        raise typer.Exit(1)


if __name__ == "__main__":
    main()
