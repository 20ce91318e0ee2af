"""The demo's live line: a bar on a terminal, a plain line now and then elsewhere.

Called by `demo.show` alone; draws what it is told.
"""

from __future__ import annotations

import time
from types import TracebackType

from rich import progress as bars
from rich.console import Console

from echo2_node.foreground import WIDE_COLUMNS, facts_of
from echo2_node.status import Snapshot

PLAIN_INTERVAL_S = 5.0


class Progress:
    """Say what is being done (`tell`) and how far the run is (`show`)."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._began_s = time.monotonic()
        self._said_s = 0.0
        self._bar: bars.Progress | None = None
        self._row: bars.TaskID | None = None

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            columns: tuple[bars.ProgressColumn, ...] = (
                bars.TextColumn("{task.description} {task.completed}/{task.total}"),
                bars.TextColumn("{task.fields[facts]}"),
            )
            if self._console.width >= WIDE_COLUMNS:
                columns = (bars.BarColumn(bar_width=24), bars.TimeElapsedColumn(), *columns)
            self._bar = bars.Progress(
                *columns,
                console=self._console,
                auto_refresh=False,
                transient=True,
            )
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def tell(self, words: str) -> None:
        """One line that stays."""
        seconds = time.monotonic() - self._began_s
        line = f"[{seconds:5.1f} s] {words}"
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)

    def show(self, snapshot: Snapshot) -> None:
        """The bar, or every few seconds a line."""
        facts, done, total = facts_of(snapshot)
        if self._bar is not None:
            if self._row is None:
                self._row = self._bar.add_task("step", total=total, facts=facts)
            self._bar.update(self._row, completed=done, total=total, facts=facts, refresh=True)
        elif time.monotonic() - self._said_s >= PLAIN_INTERVAL_S:
            self._said_s = time.monotonic()
            self.tell(f"step {done}/{total or '?'}: {facts}")
