"""Heartbeats as seats: what the forest is planned from, said so that everybody plans alike.

Pure. Two nodes hear one rate at different moments; steps of a quarter octave make them mostly
plan from the same number. Called by the mesh, whose membership table it reads.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log2

from echo2_mesh.core.forest import Seat
from echo2_mesh.wire.messages import Heartbeat
from echo2_mesh.wire.types import NodeId

STEPS_PER_OCTAVE = 4


def seats_of(heartbeats: Mapping[NodeId, Heartbeat]) -> tuple[Seat, ...]:
    """One seat a node, in the order of their ids."""
    return tuple(
        Seat(
            node=node,
            uplink_bytes_per_s=rounded(heartbeat.uplink_bytes_per_s),
            downlink_bytes_per_s=rounded(heartbeat.downlink_bytes_per_s),
            reach=heartbeat.reach,
        )
        for node, heartbeat in sorted(heartbeats.items())
    )


def rounded(rate_bytes_per_s: float) -> float:
    """The nearest step; 0 stays 0, which means that nobody knows."""
    if rate_bytes_per_s < 1.0:
        return 0.0
    step = round(log2(rate_bytes_per_s) * STEPS_PER_OCTAVE)
    return float(2.0 ** (step / STEPS_PER_OCTAVE))
