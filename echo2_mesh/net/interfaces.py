"""The addresses of this host's network interfaces."""

from __future__ import annotations

import socket

import psutil


def own_ips() -> frozenset[str]:
    """Every address of every interface, loopback included, without zones."""
    return frozenset(
        entry.address.split("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family in (socket.AF_INET, socket.AF_INET6)
    )
