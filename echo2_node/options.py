"""Options that several commands share. Called by the command line alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

StateDir = Annotated[
    Path | None,
    typer.Option(
        "--state-dir",
        envvar="ECHO2_STATE_DIR",
        help="The node's own folder: key, chunks, status, logs. Default: this user's state folder.",
        show_default=False,
    ),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Developers' log events too.")]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on standard output.")]
RunName = Annotated[
    str | None,
    typer.Argument(
        help="A run's name or id, or a learner's state folder; may be left out if there "
        "is only one."
    ),
]
