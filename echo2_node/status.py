"""The one status document: what a node says of itself and of its mesh, free of secrets.

Daemons write a `Snapshot` into their state folder every second or so through a `Reporter`; the
`status` command, the demo's progress and any page read it (`sightings` finds it, `panel` draws
it). Nothing here decides anything or talks to a peer.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
from msgspec import Meta

from echo2_mesh.errors import LocalError
from echo2_mesh.wire.types import Reason
from echo2_node.telemetry import FULL_DISK

if TYPE_CHECKING:
    from echo2_mesh.mesh import Mesh
    from echo2_mesh.wire.messages import Heartbeat
    from echo2_mesh.wire.types import NodeId

FORMAT = 1
STATUS_FILE = "status.json"
STATUS_SIZE_BYTES_MAX = 16 * 1024 * 1024
MEMBERS_SHOWN_MAX = 512
"""Of a larger mesh: those that work for this node and its neighbours first."""


class MemberRow(msgspec.Struct, frozen=True, kw_only=True):
    """One node as this node sees it. `lag` counts versions behind the newest known one."""

    node: str
    name: str = ""
    role: str
    state: str
    standing: str = "up"
    """up, suspect or gone."""
    version: int | None = None
    lag: int | None = None
    tokens_per_s: float = 0.0
    accepted: int = 0
    refused: int = 0
    commonest_refusal: str | None = None
    fetched_bytes: int = 0
    fetch_bytes: int = 0
    """Size of the version being fetched; 0 where nothing is."""
    uplink_bytes_per_s: float = 0.0
    downlink_bytes_per_s: float = 0.0
    """What its bulk sockets can carry, measured or configured; 0 where nobody knows."""
    reach: str = "unknown"
    """direct, punched or relayed."""
    way: str = ""
    """How this node's own weights connection to it came about, where there is one."""
    seen_s_ago: float = 0.0
    last_error: str = ""
    joined_unix_ms: int = 0


class FlowRow(msgspec.Struct, frozen=True, kw_only=True):
    """Payload bytes of blobs since the node started."""

    in_bytes: int = 0
    out_bytes: int = 0


class InstallRow(msgspec.Struct, frozen=True, kw_only=True):
    """One version's way into this node's engine.

    `fetch_s` until it was whole here and `since_announced_s` until it was proved count from
    hearing of it. `changed`: elements written where only what differs was.
    """

    version: int
    fetched_full_bytes: int
    fetched_patch_bytes: int
    fetch_s: float
    since_announced_s: float
    install_s: float
    pause_s: float
    changed: int | None = None


class Spread(msgspec.Struct, frozen=True, kw_only=True):
    """One version's way to the actors that were there when it was announced.

    `first_s` and `all_s`: until the first and the last of `actors` ran it or a newer one.
    `patch_bytes` is the step from the version before, 0 where there was none.
    """

    version: int
    actors: int
    first_s: float
    all_s: float
    full_bytes: int
    patch_bytes: int


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A node at one moment. Fields are only ever added; readers ignore what they do not know."""

    format: Annotated[int, Meta(ge=1)] = FORMAT
    role: str
    node: str
    name: str = ""
    run_id: str
    state: str
    """A word: starting, fetching, waiting, generating, training, publishing, ended, failed, ..."""
    step: int = 0
    steps: int = 0
    """0 where the node does not know how long the run is."""
    version: int | None = None
    pid: int
    updated_unix_ms: int
    started_unix_ms: int
    staleness_limit_steps: int | None = None
    reward_last: float | None = None
    members: tuple[MemberRow, ...] = ()
    refusals: dict[str, int] = {}
    staleness_histogram: dict[str, int] = {}
    """Staleness in steps -> consumed trajectories."""
    groups_alive: int = 0
    groups_alive_max: int = 0
    dissemination: tuple[Spread, ...] = ()
    """Learner: how long its last versions took to every actor, oldest first."""
    installs: tuple[InstallRow, ...] = ()
    """Actor: its last versions, oldest first."""
    traffic: dict[str, FlowRow] = {}
    """By kind of blob: full, patch, file, manifest, trajectory."""
    traffic_by_peer: dict[str, FlowRow] = {}
    reach: str = ""
    """Of this node, with the reason; empty where nobody has looked yet."""
    counters: dict[str, int] = {}
    last_error: str = ""
    log_folder: str = ""


class Tally(msgspec.Struct, frozen=True, kw_only=True):
    """What the writing node itself counted of another; it wins over that node's own claim."""

    accepted: int
    refused: int
    commonest_refusal: str | None = None


def tally_of(verdicts: Mapping[str, int]) -> Tally:
    """Counts of verdicts by reason, "admitted" among them, as accepted and refused."""
    refused = {reason: count for reason, count in verdicts.items() if reason != "admitted"}
    return Tally(
        accepted=verdicts.get("admitted", 0),
        refused=sum(refused.values()),
        commonest_refusal=max(refused, key=refused.__getitem__, default=None),
    )


class Reporter:
    """Makes snapshots of a mesh and writes them into a state folder.

    Args:
        state_dir: gets `status.json`; its `logs` folder is named in the document.
        role: learner or actor.
        name: what people call this node; may be empty.
        fixed: fields that never change: `steps`, `staleness_limit_steps`.
    """

    def __init__(self, state_dir: Path, *, role: str, name: str = "", **fixed: Any) -> None:
        self._path = state_dir / STATUS_FILE
        self._own = {"role": role, "name": name, "log_folder": str(state_dir / "logs"), **fixed}
        self._started_unix_ms = _now_unix_ms()
        self._joined_unix_ms: dict[str, int] = {}

    def write(
        self, mesh: Mesh, *, state: str, tallies: Mapping[str, Tally] | None = None, **fields: Any
    ) -> Snapshot:
        """Write the current snapshot and return it.

        Args:
            state: what this node is doing, one word.
            tallies: what this node counted of others, by node id.
            fields: any other field of `Snapshot` that changes.

        Errors:
            LocalError: the state folder cannot be written (a full disk is no error).
        """
        now_unix_ms = _now_unix_ms()
        tallies = tallies or {}
        ranked = sorted(
            mesh.members(),
            key=lambda m: (m.node not in tallies, not m.connected, m.standing.value != "up"),
        )[:MEMBERS_SHOWN_MAX]
        heard = [(m.node, m.heartbeat, m.standing.value, m.seen_s_ago) for m in ranked]
        heard.insert(0, (mesh.node, mesh.heartbeat(), "up", 0.0))
        newest = max(beat.version or 0 for _, beat, _, _ in heard)
        for name in ("refusals", "staleness_histogram"):
            if name in fields:
                counts = {str(getattr(k, "value", k)): n for k, n in fields[name].items()}
                fields[name] = {k: n for k, n in counts.items() if k != Reason.ADMITTED.value}
        traffic = mesh.traffic()
        reach, why = mesh.reach()
        snapshot = Snapshot(
            **self._own,
            node=mesh.node,
            run_id=mesh.run_id,
            state=state,
            pid=os.getpid(),
            updated_unix_ms=now_unix_ms,
            started_unix_ms=self._started_unix_ms,
            counters=dict(mesh.counters),
            traffic={kind.value: _flow(flow) for kind, flow in traffic.kinds.items()},
            traffic_by_peer={node: _flow(flow) for node, flow in traffic.peers.items()},
            reach=f"{reach.value}: {why}" if why else "",
            members=tuple(
                _row(
                    node,
                    beat,
                    tallies.get(node),
                    standing=standing,
                    newest=newest,
                    seen_s_ago=seen_s_ago,
                    way=traffic.lanes.get(node, ""),
                    # By this host's clock: peers' clocks are never compared.
                    joined_unix_ms=self._joined_unix_ms.setdefault(node, now_unix_ms),
                )
                for node, beat, standing, seen_s_ago in heard
            ),
            **fields,
        )
        shown = {node for node, _, _, _ in heard}
        for node in self._joined_unix_ms.keys() - shown:
            del self._joined_unix_ms[node]
        write_snapshot(self._path, snapshot)
        return snapshot


def _row(
    node: NodeId,
    beat: Heartbeat,
    tally: Tally | None,
    *,
    standing: str,
    newest: int,
    seen_s_ago: float,
    way: str,
    joined_unix_ms: int,
) -> MemberRow:
    """A node as it describes itself, but for what was counted here."""
    if tally is None:
        reason = beat.commonest_refusal
        tally = Tally(
            accepted=beat.accepted,
            refused=beat.refused,
            commonest_refusal=reason.value if reason is not None else None,
        )
    return MemberRow(
        node=node,
        name=beat.name,
        role=beat.role.value,
        state=beat.state,
        standing=standing,
        version=beat.version,
        lag=None if beat.version is None else newest - beat.version,
        tokens_per_s=beat.tokens_per_s,
        accepted=tally.accepted,
        refused=tally.refused,
        commonest_refusal=tally.commonest_refusal,
        fetched_bytes=beat.fetched_bytes,
        fetch_bytes=beat.fetch_bytes,
        uplink_bytes_per_s=beat.uplink_bytes_per_s,
        downlink_bytes_per_s=beat.downlink_bytes_per_s,
        reach=beat.reach.value,
        way=way,
        seen_s_ago=seen_s_ago,
        last_error=beat.last_error,
        joined_unix_ms=joined_unix_ms,
    )


def _flow(flow: Any) -> FlowRow:
    return FlowRow(in_bytes=flow.in_bytes, out_bytes=flow.out_bytes)


def _now_unix_ms() -> int:
    return time.time_ns() // 1_000_000


def write_snapshot(path: Path, snapshot: Snapshot) -> bool:
    """Replace the status document whole; False where the disk is full.

    Errors:
        LocalError: the folder cannot be written for another reason.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(msgspec.json.encode(snapshot))
        part.replace(path)
    except OSError as error:
        part.unlink(missing_ok=True)
        if error.errno in FULL_DISK:
            return False
        raise LocalError(f"The status file {path} cannot be written: {error}.") from error
    return True


def read_snapshot(path: Path) -> Snapshot | None:
    """The status document at `path`, None if there is none.

    Errors:
        LocalError: the file is unreadable, damaged, or of a later format.
    """
    try:
        with path.open("rb") as file:
            data = file.read(STATUS_SIZE_BYTES_MAX + 1)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise LocalError(f"The status file {path} cannot be read: {error}.") from error
    try:
        snapshot = msgspec.json.decode(data[:STATUS_SIZE_BYTES_MAX], type=Snapshot)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise LocalError(
            f"The status file {path} is damaged: {error}.",
            "A running daemon replaces it within seconds; remove it if none runs.",
        ) from error
    if snapshot.format > FORMAT:
        raise LocalError(
            f"The status file {path} has format {snapshot.format}; this program reads {FORMAT}.",
            "Update this program.",
        )
    return snapshot
