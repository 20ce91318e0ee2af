"""How a status document looks on a terminal. Draws only; `status` holds what is drawn.

Called by the command line and by the demo.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import msgspec
from rich.box import SIMPLE_HEAD
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from echo2_node.sightings import Sighting
from echo2_node.status import MemberRow, Snapshot
from echo2_node.telemetry import short_id

CELL_CHARACTERS_MAX = 48
ERROR_CHARACTERS_MAX = 400
WIDTH_COLUMNS_MAX = 1000
"""Wider than any table: what it would take if it could."""


def render(sighting: Sighting) -> RenderableType:
    """A headline, the mesh table and what went wrong, as `status` prints them."""
    snapshot = sighting.snapshot
    parts: list[RenderableType] = [_headline(sighting)]
    if snapshot.members:
        parts.append(_MeshTable(_shown_members(sighting)))
    if snapshot.refusals:
        refusals = sorted(snapshot.refusals.items(), key=lambda pair: -pair[1])
        words = ", ".join(f"{reason} {count}" for reason, count in refusals)
        parts.append(Text(f"refused: {words}"))
    if snapshot.staleness_histogram:
        histogram = sorted(snapshot.staleness_histogram.items(), key=lambda pair: int(pair[0]))
        words = ", ".join(f"{age}: {count}" for age, count in histogram)
        limit = snapshot.staleness_limit_steps
        parts.append(Text(f"staleness in steps: {words} (limit {limit})"))
    parts += _weights(snapshot)
    if snapshot.last_error:
        parts.append(
            _plain(f"last error: {snapshot.last_error}", characters_max=ERROR_CHARACTERS_MAX)
        )
    if snapshot.log_folder:
        parts.append(Text(f"logs: {snapshot.log_folder}", style="dim", overflow="fold"))
    return Group(*parts)


def _weights(snapshot: Snapshot) -> list[RenderableType]:
    """What versions cost: bytes by kind, the last install, the last way to everybody."""
    lines = []
    flows = {kind: flow for kind, flow in snapshot.traffic.items() if kind in ("full", "patch")}
    if any(flow.in_bytes or flow.out_bytes for flow in flows.values()):
        words = "; ".join(
            f"{kind} {size_words(flow.in_bytes)} in, {size_words(flow.out_bytes)} out"
            for kind, flow in sorted(flows.items())
        )
        peers = len(snapshot.traffic_by_peer)
        lines.append(f"weights: {words}; {peers} {'peer' if peers == 1 else 'peers'}")
    if snapshot.installs:
        last = snapshot.installs[-1]
        fetched = size_words(last.fetched_full_bytes + last.fetched_patch_bytes)
        lines.append(
            f"version {last.version}: {fetched} fetched, installed {last.since_announced_s:.2f} s "
            f"after its announcement, pause {1000 * last.pause_s:.0f} ms"
        )
    if snapshot.dissemination:
        spread = snapshot.dissemination[-1]
        lines.append(
            f"version {spread.version}: {spread.first_s:.2f} s to the first, "
            f"{spread.all_s:.2f} s to the last of {spread.actors} actors"
        )
    if snapshot.reach:
        lines.append(f"reach: {snapshot.reach}")
    return [_plain(line, characters_max=ERROR_CHARACTERS_MAX) for line in lines]


def _headline(sighting: Sighting) -> Text:
    snapshot = sighting.snapshot
    colour = {"running": "green", "silent": "yellow", "stopped": "red"}[sighting.process]
    line = Text(snapshot.run_id, style="bold")
    line.append(f"  {snapshot.role} {snapshot.name or short_id(snapshot.node)}", style="not bold")
    line.append(f"  {sighting.state}", style=f"not bold {colour}")
    words = []
    if snapshot.steps:
        words.append(f"step {snapshot.step}/{snapshot.steps}")
    if snapshot.version is not None:
        words.append(f"version {snapshot.version}")
    if snapshot.reward_last is not None:
        words.append(f"reward {snapshot.reward_last:.3f}")
    if snapshot.groups_alive_max:
        words.append(f"groups {snapshot.groups_alive}/{snapshot.groups_alive_max}")
    if sighting.process != "running":
        written = datetime.fromtimestamp(snapshot.updated_unix_ms / 1000)
        words.append(f"as of {written:%Y-%m-%d %H:%M:%S}")
    line.append("".join(f"  {word}" for word in words), style="not bold")
    return line


def _shown_members(sighting: Sighting) -> Sequence[MemberRow]:
    """Of a process that is gone the last state of its own row is no news."""
    own = sighting.snapshot.node
    return [
        msgspec.structs.replace(row, state=sighting.state) if row.node == own else row
        for row in sighting.snapshot.members
    ]


class _MeshTable:
    """The table with every column where it fits on the terminal, a narrower one elsewhere."""

    def __init__(self, members: Sequence[MemberRow]) -> None:
        self._members = sorted(members, key=_order)

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Measurement.get(console, options, _wide_table(self._members))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        wide = _wide_table(self._members)
        unbounded = options.update_width(WIDTH_COLUMNS_MAX)
        fits = Measurement.get(console, unbounded, wide).maximum <= options.max_width
        yield wide if fits else _narrow_table(self._members)


def _narrow_table(members: Sequence[MemberRow]) -> Table:
    """For 80 columns: the learner is the first row, reasons stand below, a fetch in the state."""
    table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for title in ("node", "state"):
        table.add_column(title, no_wrap=True)
    for title in ("version", "lag", "tok/s", "accepted", "refused", "seen"):
        table.add_column(title, justify="right", no_wrap=True)
    for member in members:
        state = _state(member).partition(" for ")[0]
        if state == "fetching" and member.fetch_bytes:
            state += f" {member.fetched_bytes / member.fetch_bytes:.0%}"
        cells = (
            member.name or short_id(member.node),
            state,
            _or_dash(member.version),
            _or_dash(member.lag),
            f"{member.tokens_per_s:,.0f}",
            str(member.accepted),
            str(member.refused),
            f"{member.seen_s_ago:.0f} s",
        )
        table.add_row(*(_plain(cell) for cell in cells), style=_style(member))
    return table


def _wide_table(members: Sequence[MemberRow]) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("node", "role", "state"):
        table.add_column(title)
    for title in ("version", "lag", "tokens/s", "accepted", "refused"):
        table.add_column(title, justify="right")
    for title in ("commonest reason", "weights", "reach"):
        table.add_column(title)
    table.add_column("seen", justify="right")
    for member in members:
        cells = (
            member.name or short_id(member.node),
            member.role,
            _state(member),
            _or_dash(member.version),
            _or_dash(member.lag),
            f"{member.tokens_per_s:,.0f}",
            str(member.accepted),
            str(member.refused),
            member.commonest_refusal or "",
            _progress(member),
            "" if member.reach == "unknown" else member.reach,
            f"{member.seen_s_ago:.0f} s",
        )
        table.add_row(*(_plain(cell) for cell in cells), style=_style(member))
    return table


def _state(member: MemberRow) -> str:
    return member.state if member.standing == "up" else member.standing


def _style(member: MemberRow) -> str:
    return {"suspect": "yellow", "gone": "dim"}.get(member.standing, "")


def _order(member: MemberRow) -> tuple[bool, int, str]:
    """The learner, then those that are there, by name."""
    standings = ("up", "suspect", "gone")
    standing = standings.index(member.standing) if member.standing in standings else 3
    return (member.role != "learner", standing, member.name or member.node)


def _progress(member: MemberRow) -> str:
    if member.fetch_bytes == 0 or member.role == "learner":
        return ""
    if member.fetched_bytes >= member.fetch_bytes:
        return "complete"
    return f"{member.fetched_bytes / member.fetch_bytes:.0%} of {size_words(member.fetch_bytes)}"


def size_words(size_bytes: float) -> str:
    """Bytes as people say them: `41.2 MB`."""
    size = float(size_bytes)
    for unit in ("B", "kB", "MB"):
        if size < 1000:
            return f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} GB"


def _plain(text: str, *, characters_max: int = CELL_CHARACTERS_MAX) -> Text:
    """Peers choose their names: no markup and no control characters of theirs reach a terminal."""
    return Text("".join(c if c.isprintable() else "?" for c in text)[:characters_max])


def _or_dash(value: int | None) -> str:
    return "-" if value is None else str(value)
