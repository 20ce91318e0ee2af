"""What this node says of itself: the state its daemon sets, and what the mesh measures.

Made into heartbeats for `net.joining`. Owned by `Mesh`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from echo2_mesh import limits
from echo2_mesh.net.traffic import TrafficReport
from echo2_mesh.settings import MeshSettings
from echo2_mesh.wire.messages import Heartbeat
from echo2_mesh.wire.types import Reach

OWN_STATE = frozenset(
    {"state", "version", "tokens_per_s", "cohort", "accepted", "refused", "commonest_refusal",
     "last_error"}
)  # fmt: skip


class Presence:
    """The heartbeat of one node, in parts.

    Args:
        addresses, traffic, reach, progress_bytes, last_error: asked anew for each heartbeat.
    """

    def __init__(
        self,
        settings: MeshSettings,
        *,
        addresses: Callable[[], tuple[str, ...]],
        traffic: Callable[[], TrafficReport],
        reach: Callable[[], tuple[Reach, str]],
        progress_bytes: Callable[[], tuple[int, int]],
        last_error: Callable[[], str],
    ) -> None:
        self._settings = settings
        self._addresses = addresses
        self._traffic = traffic
        self._reach = reach
        self._progress_bytes = progress_bytes
        self._last_error = last_error
        self._sequence = 0
        self._state: dict[str, Any] = {"state": "starting"}

    def set(self, **fields: Any) -> bool:
        """What the daemon says; True where it runs another version from now on.

        Raises:
            TypeError: a field that is not the daemon's to say.
        """
        unknown = fields.keys() - OWN_STATE
        if unknown:
            raise TypeError(f"not a state of this node: {sorted(unknown)}")
        news = fields.get("version") not in (None, self._state.get("version"))
        self._state.update(fields)
        return news

    def beat(self) -> Heartbeat:
        """The next heartbeat to send."""
        self._sequence += 1
        return self.heartbeat()

    def heartbeat(self) -> Heartbeat:
        """What would be said now."""
        here, wanted = self._progress_bytes()
        traffic = self._traffic()
        fields = dict(self._state)
        error = str(fields.pop("last_error", "")) or self._last_error()
        return Heartbeat(
            role=self._settings.role,
            incarnation_unix_ms=self._settings.incarnation_unix_ms,
            sequence=self._sequence,
            name=self._settings.name,
            reach=self._reach()[0],
            uplink_bytes_per_s=traffic.uplink_bytes_per_s,
            downlink_bytes_per_s=traffic.downlink_bytes_per_s,
            addresses=self._addresses()[: limits.ADDRESSES_MAX],
            fetched_bytes=here,
            fetch_bytes=wanted,
            last_error=error[:512],
            **fields,
        )
