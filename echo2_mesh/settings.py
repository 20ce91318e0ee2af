"""What a daemon says to join a mesh: which run, as whom, where its ports are. Values only."""

from __future__ import annotations

from pathlib import Path

import msgspec

from echo2_mesh import limits
from echo2_mesh.wire.types import NodeId, Role


class BulkSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The bulk port of a node."""

    enabled: bool = True
    listen: tuple[str, ...] | None = None
    """None: where the mesh listens, on a port of the system's choice. Empty: dial out only."""
    announce: tuple[str, ...] = ()
    uplink_bytes_per_s: float = 0.0
    """Cap of what lanes send; 0 for none."""
    downlink_bytes_per_s: float = 0.0


class MeshSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which run, as whom, and where to begin."""

    run_id: str
    role: Role
    learner: NodeId
    name: str = ""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Empty: dial out only."""
    announce: tuple[str, ...] = ()
    bootstrap: tuple[str, ...] = ()
    """Multiaddresses that end in /p2p/<node>."""
    mdns: bool = True
    relay: bool = True
    """Carry connections for nodes that cannot be dialled, once others could dial this one."""
    incarnation_unix_ms: int
    members_path: Path | None = None
    bulk: BulkSettings = BulkSettings()
    """The port that weights go over; not in simulations."""
    versions_path: Path | None = None
    """The list of versions that were complete here; None keeps none."""
    versions_kept: int = limits.KEPT_VERSIONS
