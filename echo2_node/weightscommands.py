"""`echo2-node weights`: the versions in a node's state folder. Called by the command line alone.

Works beside a running node and on a stopped one alike, and changes nothing there.
"""

from __future__ import annotations

import contextlib
import json
import sys
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from echo2_mesh.errors import UsageError
from echo2_node import sightings
from echo2_node.options import AsJson, StateDir

if TYPE_CHECKING:
    from echo2_mesh.versionlog import KnownVersion
    from echo2_node.shelf import Finding

out = Console()
weights_app = typer.Typer(
    no_args_is_help=True, help="The model versions of a node: list, check, write as a folder."
)
Run = Annotated[
    str | None,
    typer.Option(
        "--run",
        help="A run's name or id, or a state folder; may be left out if there is only one node.",
        show_default=False,
    ),
]


@weights_app.command("log")
def weights_log(run: Run = None, as_json: AsJson = False, state_dir: StateDir = None) -> None:
    """List every version this node has had: sizes, what the step to it weighs, is it here."""
    from echo2_node.shelf import is_whole, known_versions

    folder = _folder(run, state_dir)
    versions = known_versions(folder)
    whole = {known.version for known in versions if is_whole(folder / "chunks", known)}
    if as_json:
        rows = [_plain(known) | {"complete": known.version in whole} for known in versions]
        sys.stdout.write(json.dumps({"folder": str(folder), "versions": rows}) + "\n")
        return
    out.print(_table(versions, whole))


@weights_app.command("verify")
def weights_verify(
    version: Annotated[
        str | None,
        typer.Argument(
            help="Only this one: a number, or latest. Else all that are here.", show_default=False
        ),
    ] = None,
    run: Run = None,
    as_json: AsJson = False,
    state_dir: StateDir = None,
) -> None:
    """Hash every blob of the versions kept here; exit 1 if one is damaged, or missing."""
    from echo2_node.shelf import choose, known_versions, verify

    folder = _folder(run, state_dir)
    wanted = choose(known_versions(folder), version) if version is not None else None
    findings = verify(folder, wanted)
    wrong = any(finding.wrong for finding in findings)
    if as_json:
        rows = [_plain(finding) for finding in findings]
        document = {"ok": not wrong, "folder": str(folder), "versions": rows}
        sys.stdout.write(json.dumps(document) + "\n")
    else:
        for finding in findings:
            out.print(_sentence(finding), highlight=False, soft_wrap=True, markup=False)
    if wrong:
        raise typer.Exit(1)


@weights_app.command("export")
def weights_export(
    version: Annotated[str, typer.Argument(help="A number from the log, or latest.")],
    target: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to write.")],
    force: Annotated[
        bool, typer.Option("--force", help="Write into a folder that holds something already.")
    ] = False,
    run: Run = None,
    state_dir: StateDir = None,
) -> None:
    """Write a version as a Hugging Face folder, which `from_pretrained` loads."""
    from echo2_node.panel import size_words
    from echo2_node.shelf import choose, known_versions, open_version, write_folder

    folder = _folder(run, state_dir)
    known = choose(known_versions(folder), version)
    if target.exists() and not target.is_dir():
        raise UsageError(f"{target} is a file.", "Name a folder; it is made where there is none.")
    if target.is_dir() and any(target.iterdir()) and not force:
        raise UsageError(
            f"The folder {target} is not empty.",
            "Name another, or give --force: files of the same names are replaced, others stay.",
        )
    size_bytes = write_folder(open_version(folder, known), folder / "chunks", target)
    out.print(
        f"Version {known.version} is in {target}: {size_words(size_bytes)}.",
        highlight=False,
        soft_wrap=True,
        markup=False,
    )


def _folder(run: str | None, state_dir: Path | None) -> Path:
    return state_dir or sightings.find_folder(run)


def _plain(value: object) -> dict[str, Any]:
    import msgspec

    plain: dict[str, Any] = msgspec.to_builtins(value)
    return plain


def _table(versions: tuple[KnownVersion, ...], whole: set[int]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    from echo2_node.panel import size_words

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in ("version", "size", "patch", "ratio"):
        table.add_column(title, justify="right")
    for title in ("from", "manifest", "published", "here"):
        table.add_column(title)
    for known in versions:
        step = max(known.patches, key=lambda patch: patch.base, default=None)
        ratio = known.size_bytes / step.size_bytes if step and step.size_bytes else None
        table.add_row(
            str(known.version),
            size_words(known.size_bytes),
            size_words(step.size_bytes) if step else "-",
            f"{ratio:.0f}x" if ratio else "-",
            str(step.base) if step else "",
            known.manifest[:8],
            _moment(known.created_unix_ms),
            "complete" if known.version in whole else "",
        )
    return table


def _moment(unix_ms: int) -> str:
    """Empty where the learner's clock said something that is no date."""
    with contextlib.suppress(ValueError, OverflowError, OSError):
        return f"{datetime.fromtimestamp(unix_ms / 1000):%Y-%m-%d %H:%M:%S}" if unix_ms else ""
    return ""


def _sentence(finding: Finding) -> str:
    from echo2_node.panel import size_words

    words = f"version {finding.version}: {finding.state}, {finding.blobs} blobs"
    words += f", {size_words(finding.size_bytes)}"
    for title, digests in (("damaged", finding.damaged), ("missing", finding.missing)):
        if digests and finding.wrong:
            names = ", ".join(digest[:8] for digest in digests[:8])
            more = f" and {len(digests) - 8} more" if len(digests) > 8 else ""
            words += f"; {title}: {names}{more}"
    return words
