"""Bytes of blobs in and out of this node, by kind and by peer, for status and metrics."""

from __future__ import annotations

from collections import OrderedDict

import msgspec

from echo2_mesh import limits
from echo2_mesh.wire.types import ChunkKind, NodeId


class Flow(msgspec.Struct, frozen=True, kw_only=True):
    """Payload bytes since this node started."""

    in_bytes: int = 0
    out_bytes: int = 0


class TrafficReport(msgspec.Struct, frozen=True, kw_only=True):
    """One moment's sums. What was asked of us is counted by the kind that the asker named."""

    kinds: dict[ChunkKind, Flow]
    peers: dict[NodeId, Flow]
    lanes: dict[NodeId, str]
    """Peers with a lane, and how it came about: dialled, reverse or punched."""
    uplink_bytes_per_s: float
    downlink_bytes_per_s: float


class Traffic:
    """The sums. Peers are forgotten after `TRAFFIC_PEERS_MAX` others."""

    def __init__(self) -> None:
        self._kinds: dict[ChunkKind, Flow] = {}
        self._peers: OrderedDict[NodeId, Flow] = OrderedDict()

    def count(
        self, peer: NodeId, kind: ChunkKind | None, *, in_bytes: int = 0, out_bytes: int = 0
    ) -> None:
        """Blobs moved by the control connection."""
        if kind is not None:
            self.add_kind(kind, in_bytes, out_bytes)
        self.add_peer(peer, in_bytes, out_bytes)

    def add_kind(self, kind: ChunkKind, in_bytes: int, out_bytes: int) -> None:
        self._kinds[kind] = _sum(self._kinds.get(kind), in_bytes, out_bytes)

    def add_peer(self, peer: NodeId, in_bytes: int, out_bytes: int) -> None:
        self._peers[peer] = _sum(self._peers.pop(peer, None), in_bytes, out_bytes)
        while len(self._peers) > limits.TRAFFIC_PEERS_MAX:
            self._peers.popitem(last=False)

    def kinds(self) -> dict[ChunkKind, Flow]:
        return dict(self._kinds)

    def peers(self) -> dict[NodeId, Flow]:
        return dict(self._peers)


def _sum(old: Flow | None, in_bytes: int, out_bytes: int) -> Flow:
    known = old or Flow()
    return Flow(in_bytes=known.in_bytes + in_bytes, out_bytes=known.out_bytes + out_bytes)
