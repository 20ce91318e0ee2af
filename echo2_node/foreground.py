"""A daemon in a terminal: its lock, its log, its progress, and a clean end on Ctrl-C.

Starts `run_learner` or `run_actor` under trio and shows the status document that the daemon
writes. Decides nothing about the run. Called by the command line alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import trio
from rich.console import Console

from echo2_mesh.errors import Echo2Error, LocalError
from echo2_node import telemetry
from echo2_node.errors import as_one_error, leaves
from echo2_node.status import STATUS_FILE, Snapshot, read_snapshot, write_snapshot

if TYPE_CHECKING:
    from rich.progress import Progress

    from echo2_mesh.wire.ticket import RunTicket
    from echo2_node.config import ActorConfig, RunConfig

REDRAW_INTERVAL_S = 0.5
WIDE_COLUMNS = 120
"""From this width on there is room for the run's name and a bar."""


class Interrupted(Echo2Error):
    """The person pressed Ctrl-C before the daemon could say goodbye."""

    exit_code = 130


def learn_in_foreground(
    config: RunConfig, *, state_dir: Path, resume: bool, verbose: bool = False
) -> str:
    """Run a learner to its end; returns why it ended. Raises Echo2Error."""
    with _state_folder(state_dir):
        telemetry.configure(log_path=state_dir / "logs" / "daemon.log", verbose=verbose)
        from echo2_node.learner.daemon import run_learner

        work = partial(run_learner, config, state_dir=state_dir, resume=resume)
        return _run(work, state_dir)


def join_in_foreground(
    config: ActorConfig, ticket: RunTicket, *, state_dir: Path, verbose: bool = False
) -> str:
    """Run an actor until it leaves; returns why it left. Raises Echo2Error."""
    with _state_folder(state_dir):
        telemetry.configure(log_path=state_dir / "logs" / "daemon.log", verbose=verbose)
        from echo2_node.actor.daemon import run_actor

        return _run(partial(run_actor, config, ticket, state_dir=state_dir), state_dir)


@contextlib.contextmanager
def _state_folder(state_dir: Path) -> Iterator[None]:
    """The folder, held by this process alone: two daemons with one key would harm each other."""
    try:
        state_dir.mkdir(parents=True, exist_ok=True)
        lock = (state_dir / "lock").open("a+", encoding="ascii")
    except OSError as error:
        raise LocalError(
            f"The state folder {state_dir} cannot be used: {error}.",
            "Choose another with --state-dir.",
        ) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise LocalError(
                f"Another node is running in {state_dir}.",
                "Stop it first, or give this one another folder with --state-dir.",
            ) from error
        yield


def _run(work: Callable[[], Awaitable[str]], state_dir: Path) -> str:
    try:
        with as_one_error():
            return trio.run(_with_progress, work, state_dir / STATUS_FILE)
    except Echo2Error as error:
        _leave_word(state_dir / STATUS_FILE, error)
        raise
    except (KeyboardInterrupt, BaseExceptionGroup) as error:
        if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves(error)):
            raise Interrupted("Interrupted.") from None
        raise


def _leave_word(path: Path, error: Echo2Error) -> None:
    """The last status of a failed daemon says so, if it is this process's own."""
    with contextlib.suppress(LocalError):
        snapshot = read_snapshot(path)
        if snapshot is not None and snapshot.pid == os.getpid():
            write_snapshot(
                path, msgspec.structs.replace(snapshot, state="failed", last_error=str(error))
            )


async def _with_progress(work: Callable[[], Awaitable[str]], status_path: Path) -> str:
    console = Console(stderr=True)
    if not console.is_terminal:
        return await work()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(_show_progress, console, status_path)
        why = await work()
        nursery.cancel_scope.cancel()
    return why


async def _show_progress(console: Console, status_path: Path) -> None:
    """Redraw from the status document; log lines of the daemon scroll above."""
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn

    columns: tuple[ProgressColumn, ...] = (TextColumn("{task.fields[facts]}"),)
    if console.width >= WIDE_COLUMNS:
        columns = (TextColumn("[bold]{task.fields[run]}"), BarColumn(bar_width=20), *columns)
    with Progress(*columns, console=console, auto_refresh=False, transient=True) as progress:
        row = progress.add_task("", total=None, run="", facts="starting")
        while True:
            with contextlib.suppress(LocalError):
                snapshot = read_snapshot(status_path)
                if snapshot is not None and snapshot.pid == os.getpid():
                    _update(progress, row, snapshot)
            progress.refresh()
            await trio.sleep(REDRAW_INTERVAL_S)


def _update(progress: Progress, row: object, snapshot: Snapshot) -> None:
    facts, done, total = facts_of(snapshot)
    progress.update(
        row,  # type: ignore[arg-type]
        completed=done,
        total=total,
        run=snapshot.run_id,
        facts=f"{_far(snapshot, done, total)}{facts}",
    )


def _far(snapshot: Snapshot, done: int, total: int | None) -> str:
    """Steps of a learner, the percentage of an actor's fetch while it waits for that."""
    if snapshot.role == "learner":
        return f"step {done}/{total or '?'}, "
    return f"{done / total:.0%} fetched, " if total and snapshot.state == "fetching" else ""


def facts_of(snapshot: Snapshot) -> tuple[str, int, int | None]:
    """One line of facts, and how far: steps for a learner, fetched bytes for an actor."""
    others = [m for m in snapshot.members if m.node != snapshot.node and m.standing != "gone"]
    words = [snapshot.state]
    if snapshot.reward_last is not None:
        words.append(f"reward {snapshot.reward_last:.3f}")
    if snapshot.version is not None:
        words.append(f"version {snapshot.version}")
    if snapshot.role == "learner":
        actors = [m for m in others if m.role == "actor"]
        words.append(f"{len(actors)} actor{'' if len(actors) == 1 else 's'}")
        words.append(f"{sum(m.tokens_per_s for m in actors):,.0f} tokens/s")
        return ", ".join(words), snapshot.step, snapshot.steps or None
    own = next((m for m in snapshot.members if m.node == snapshot.node), None)
    if own is not None:
        words.append(f"{own.tokens_per_s:,.0f} tokens/s")
        words.append(f"{own.accepted} accepted, {own.refused} refused")
        if own.fetch_bytes:
            return ", ".join(words), own.fetched_bytes, own.fetch_bytes
    return ", ".join(words), 0, None
