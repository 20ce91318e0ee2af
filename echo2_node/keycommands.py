"""`echo2-node keys`: node identities. Never prints a secret. Called by the command line alone."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from echo2_mesh.errors import UsageError
from echo2_node import sightings
from echo2_node.options import StateDir

out = Console()
keys_app = typer.Typer(no_args_is_help=True, help="Node identities: one Ed25519 key file each.")

KeyFile = Annotated[
    Path | None, typer.Option("--key", help="The key file itself.", show_default=False)
]


@keys_app.command("show")
def keys_show(key: KeyFile = None, state_dir: StateDir = None) -> None:
    """Print node ids: of one key file, or of every node of this user. Never prints a key."""
    from echo2_mesh.identity import Identity

    if key is not None or state_dir is not None:
        paths = [key or Path(str(state_dir)) / "key"]
    else:
        base = sightings.state_base()
        paths = sorted((*base.glob("key"), *base.glob("*/key")))
        if not paths:
            raise UsageError(
                f"There is no key under {base}.",
                "A node makes its own when it first starts; `echo2-node keys new` makes one now.",
            )
    for path in paths:
        out.print(f"{Identity.load(path).node}  {path}", highlight=False, soft_wrap=True)


@keys_app.command("new")
def keys_new(key: KeyFile = None, state_dir: StateDir = None) -> None:
    """Make a key file (mode 0600). A key that is there is never overwritten."""
    from echo2_mesh.identity import Identity

    path = key or (state_dir or sightings.state_base()) / "key"
    identity = Identity.generate()
    identity.save(path)
    out.print(f"{identity.node}  {path}", highlight=False, soft_wrap=True)
