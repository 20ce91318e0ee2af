"""`echo2-node join`: ticket and options into a configuration. Called by the command line alone."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from echo2_mesh import limits
from echo2_mesh.errors import UsageError
from echo2_node import sightings
from echo2_node.config import ActorConfig, convert
from echo2_node.options import StateDir, Verbose

errors = Console(stderr=True)


Ticket = Annotated[
    str,
    typer.Argument(
        metavar="TICKET",
        envvar="ECHO2_TICKET",
        help="The word that `echo2-node ticket` prints on the learner's host, or a file that "
        "holds it.",
    ),
]
Name = Annotated[str, typer.Option(help="What others' tables call this node.")]
EngineName = Annotated[str, typer.Option(help="What generates: torch, vllm, ...")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
Dtype = Annotated[str, typer.Option(help="auto, float32 or bfloat16.")]
Threads = Annotated[int, typer.Option(help="CPU threads of the engine; 0 chooses.")]
SequencesMax = Annotated[int, typer.Option(help="Sequences decoded at once.")]
GroupsMax = Annotated[int, typer.Option(help="Prompt groups held at once.")]
Listen = Annotated[
    list[str] | None,
    typer.Option(help="Multiaddress to listen on; repeatable; '' to dial out only."),
]
Announce = Annotated[
    list[str] | None, typer.Option(help="Address to tell others instead; repeatable.")
]
Mdns = Annotated[bool, typer.Option(help="Find nodes on the local network.")]
Relay = Annotated[
    bool, typer.Option(help="Carry connections for nodes behind NATs, within limits.")
]
BulkListen = Annotated[
    list[str] | None,
    typer.Option(help="Multiaddress to serve weights on; else a free port beside --listen."),
]
BulkAnnounce = Annotated[
    list[str] | None, typer.Option(help="Weights' address to tell others instead.")
]
Uplink = Annotated[float, typer.Option(help="Cap of weights sent; 0 for none.")]
Downlink = Annotated[float, typer.Option(help="Cap of weights received; 0 for none.")]
Kept = Annotated[int, typer.Option(help="Whole versions of the weights that stay on disk.")]
Quota = Annotated[
    int | None, typer.Option(help="Disk for weights and rollouts.", show_default=False)
]
Drain = Annotated[float, typer.Option(help="Seconds to finish in when told to leave.")]


def join(
    ticket: Ticket,
    name: Name = "",
    engine: EngineName = "torch",
    device: Device = "auto",
    dtype: Dtype = "auto",
    threads: Threads = 0,
    sequences_max: SequencesMax = 64,
    groups_in_flight_max: GroupsMax = 8,
    listen: Listen = None,
    announce: Announce = None,
    mdns: Mdns = True,
    relay: Relay = True,
    bulk_listen: BulkListen = None,
    bulk_announce: BulkAnnounce = None,
    uplink_mbit_per_s: Uplink = 0.0,
    downlink_mbit_per_s: Downlink = 0.0,
    versions_kept: Kept = limits.KEPT_VERSIONS,
    store_quota_bytes: Quota = None,
    drain_s: Drain = 20.0,
    state_dir: StateDir = None,
    verbose: Verbose = False,
) -> None:
    """Join a run as an actor: fetch its policy, generate rollouts, leave whenever you like."""
    given: dict[str, Any] = {
        "name": name,
        "engine": engine,
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "sequences_max": sequences_max,
        "groups_in_flight_max": groups_in_flight_max,
        "announce": tuple(announce or ()),
        "mdns": mdns,
        "relay": relay,
        "bulk_listen": tuple(bulk_listen or ()),
        "bulk_announce": tuple(bulk_announce or ()),
        "uplink_mbit_per_s": uplink_mbit_per_s,
        "downlink_mbit_per_s": downlink_mbit_per_s,
        "versions_kept": versions_kept,
        "drain_s": drain_s,
    }
    if listen is not None:
        given["listen"] = tuple(address for address in listen if address)
    if store_quota_bytes is not None:
        given["store_quota_bytes"] = store_quota_bytes
    config: ActorConfig = convert(
        given,
        ActorConfig,
        where="the options of join",
        hint="`echo2-node join --help` lists every option.",
    )
    from echo2_mesh.wire.ticket import read_ticket
    from echo2_node.engines.registry import check_engine_name
    from echo2_node.foreground import join_in_foreground

    check_engine_name(config.engine)
    invitation = read_ticket(_ticket_text(ticket), now_unix_s=time.time())
    place = f"actor-{invitation.run_id}" + (f"-{_as_file_name(name)}" if name else "")
    folder = state_dir or sightings.state_base() / place
    why = join_in_foreground(config, invitation, state_dir=folder, verbose=verbose)
    errors.print(f"This node has left: {why}.", highlight=False)


def _as_file_name(name: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in name)


def _ticket_text(text: str) -> str:
    """The ticket itself, or the content of a file of that name."""
    if len(text) < 1024 and ("/" in text or text.endswith(".txt")):
        path = Path(text)
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(
                f"The ticket file {path} cannot be read: {getattr(error, 'strerror', error)}.",
                "Name the learner's ticket.txt, or paste the ticket itself.",
            ) from error
    return text
