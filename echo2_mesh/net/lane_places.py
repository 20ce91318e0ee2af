"""Where bulk ports are: addresses as the mesh, the bulk process and the wire write them.

Used by `net.lanes`.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Callable, Sequence

from echo2_mesh import limits
from echo2_mesh.bulk import words
from echo2_mesh.settings import BulkSettings

Advertise = Callable[[Sequence[str]], tuple[str, ...]]
"""Listening multiaddresses as others can dial them: wildcards become real addresses."""


def places_to_listen(settings: BulkSettings, listen: tuple[str, ...]) -> tuple[words.Place, ...]:
    """Where the bulk process shall listen, of a mesh that listens on `listen`."""
    if settings.listen is not None:
        return places_of(settings.listen)
    return tuple(dict.fromkeys((ip, 0) for ip, _ in places_of(listen)))


def places_of(addresses: Sequence[str]) -> tuple[words.Place, ...]:
    """(ip, port) of the multiaddresses that are plain TCP; names are not looked up."""
    found: list[words.Place] = []
    for address in addresses:
        parts = address.split("/")
        if len(parts) != 5 or parts[0] or parts[1] not in ("ip4", "ip6") or parts[3] != "tcp":
            continue
        try:
            ip, port = ipaddress.ip_address(parts[2]), int(parts[4])
        except ValueError:
            continue
        # A scope is an interface of the host that wrote it, and would be looked up here.
        scoped = getattr(ip, "scope_id", None) is not None
        if 0 <= port < 65536 and parts[1] == f"ip{ip.version}" and not scoped:
            found.append((str(ip), port))
    return tuple(found)[: limits.LANE_PLACES_MAX]


def multiaddress(place: words.Place) -> str:
    """The other way round."""
    return f"/ip{6 if ':' in place[0] else 4}/{place[0]}/tcp/{place[1]}"
