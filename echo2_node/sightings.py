"""Which nodes this user has on this host: finds state folders and asks whether anybody is home.

A process that is gone shows as stopped, one that no longer writes as silent. Nothing here talks to
a daemon. Called by the command line and by the demo.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec
import platformdirs

from echo2_mesh.errors import LocalError, UsageError
from echo2_node.status import STATUS_FILE, Snapshot, read_snapshot

SILENT_AFTER_S = 20.0
FOLDERS_MAX = 256
ENDED_STATES = ("ended", "failed", "stopped")


class Sighting(msgspec.Struct, frozen=True, kw_only=True):
    """A snapshot, where it lies, and whether its process still runs: running, silent, stopped."""

    folder: str
    process: str
    snapshot: Snapshot

    @property
    def state(self) -> str:
        """The node's own word while it runs; what became of the process otherwise."""
        if self.process == "running" or self.snapshot.state in ENDED_STATES:
            return self.snapshot.state
        return self.process


def state_base() -> Path:
    """The folder of all state folders: ECHO2_STATE_BASE, or the platform's place for state."""
    named = os.environ.get("ECHO2_STATE_BASE")
    return Path(named) if named else platformdirs.user_state_path("echo2")


def process_state(snapshot: Snapshot, *, now_unix_ms: int) -> str:
    """running, silent (the process lives but has not written lately) or stopped."""
    import psutil

    try:
        process = psutil.Process(snapshot.pid)
        # A process id is used again after a while: the daemon began before it said so.
        alive = (
            process.status() != psutil.STATUS_ZOMBIE
            and process.create_time() * 1000 <= snapshot.updated_unix_ms + 1000
        )
    except psutil.NoSuchProcess:
        return "stopped"
    except psutil.AccessDenied:
        alive = True
    if not alive:
        return "stopped"
    silent = now_unix_ms - snapshot.updated_unix_ms > SILENT_AFTER_S * 1000
    return "silent" if silent else "running"


def find_sightings(state_dir: Path | None = None) -> tuple[Sighting, ...]:
    """The node in `state_dir`, or every node under the base, the longest running first.

    A state folder below `state_dir` counts too, so that a demo's folder shows all its nodes.

    Errors:
        UsageError: `state_dir` holds no status document.
        LocalError: the only document asked for is damaged.
    """
    base = state_dir or state_base()
    paths = [base / STATUS_FILE] if (base / STATUS_FILE).exists() else []
    paths += sorted(base.glob(f"*/{STATUS_FILE}"))[:FOLDERS_MAX]
    found = []
    for path in paths:
        try:
            snapshot = read_snapshot(path)
        except LocalError:
            if len(paths) == 1:
                raise
            continue
        if snapshot is not None:
            now_unix_ms = time.time_ns() // 1_000_000
            process = process_state(snapshot, now_unix_ms=now_unix_ms)
            found.append(Sighting(folder=str(path.parent), process=process, snapshot=snapshot))
    if not found and state_dir is not None:
        raise UsageError(
            f"No node has ever run with the state folder {state_dir}: it has no {STATUS_FILE}.",
            "`echo2-node status` without --state-dir lists every node of this user.",
        )
    order = {"running": 0, "silent": 1, "stopped": 2}
    found.sort(
        key=lambda one: (
            order[one.process],
            one.snapshot.role != "learner",
            one.snapshot.started_unix_ms,
        )
    )
    return tuple(found)


def find_folder(run: str | None, *, role: str | None = None) -> Path:
    """The state folder that a person means: a folder, a run's name or id, or the only one.

    Errors:
        UsageError: nothing, or more than one thing, fits.
    """
    if run is not None and (Path(run) / STATUS_FILE).exists():
        return Path(run)
    if run is not None and (Path(run) / "ledger.sqlite").exists():
        return Path(run)
    base = state_base()
    if run is not None and "/" not in run and (base / run).is_dir():
        return base / run
    sightings = [s for s in find_sightings() if role in (None, s.snapshot.role)]
    if run is not None:
        fits = [s for s in sightings if run == s.snapshot.run_id]
    else:
        fits = [s for s in sightings if s.process != "stopped"] or sightings
    if len(fits) == 1:
        return Path(fits[0].folder)
    kind = role or "node"
    names = ", ".join(sorted(Path(s.folder).name for s in sightings)[:8])
    known = f"Known under {base}: {names}." if names else f"Nothing has run yet under {base}."
    if run is None and len(fits) > 1:
        raise UsageError(f"There is more than one {kind} on this host.", f"Name one. {known}")
    if run is None:
        raise UsageError(f"There is no {kind} on this host.", known)
    raise UsageError(f"There is no run '{run}' here and no state folder of that name.", known)
