"""The py-libp2p host: TCP, Noise and yamux alone, every option written down, guards on.

It decides what the host may speak and where it can be reached; it never sends a message itself.
`net.libp2p_carrier` builds one host per process. Defaults of the library that would hurt us are
turned off here by name: plaintext security, automatic dialling and pruning, the resource manager
(its circuit breaker lets a stranger's failures close the door on everybody), address observation.
"""

from __future__ import annotations

import importlib.metadata
import ipaddress
import logging
import socket
from collections import Counter
from collections.abc import Sequence
from typing import Any

import libp2p.network.swarm
import libp2p.pubsub.gossipsub
import libp2p.transport.tcp.tcp
import psutil
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.crypto.x25519 import create_new_key_pair as create_noise_key_pair
from libp2p.custom_types import TProtocol
from libp2p.network.config import ConnectionConfig, RetryConfig
from libp2p.peer.peerstore import PeerStore
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE_ID
from libp2p.security.noise.transport import Transport as NoiseTransport
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX_ID
from libp2p.stream_muxer.yamux.yamux import Yamux, YamuxStream
from libp2p.transport.tcp.tcp import TCP
from multiaddr import Multiaddr
from multiaddr.exceptions import Error as MultiaddrError

from echo2_mesh import limits
from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.identity import Identity
from echo2_mesh.net import guards, thrift

LIBP2P_VERSION = "0.8.1"
PROTOCOL_NEGOTIATION_TIMEOUT_S = 5
CONNECTION_CLOSE_TIMEOUT_S = 1.0
CONNECTIONS_PER_PEER_MAX = 3
"""Two peers that dial each other at the same moment keep both connections."""


def check_installation() -> None:
    """Refuse to start on another py-libp2p than the one the guards were written for.

    Raises:
        LocalError: wrong version, or an internal name that a guard replaces is gone.
    """
    found = importlib.metadata.version("libp2p")
    missing = [
        name
        for owner, name in (
            (libp2p.network.swarm.Swarm, "_handle_inbound_connection"),
            (libp2p.network.swarm.Swarm, "upgrade_inbound_raw_conn"),
            (libp2p.network.swarm, "_HAPPY_EYEBALLS_DELAY"),
            (libp2p.transport.tcp.tcp, "_set_reuse_flags"),
            (libp2p.pubsub.gossipsub, "maybe_consume_signed_record"),
            (YamuxStream, "_auto_tune_and_send_window_update"),
            (YamuxStream, "_apply_autotune_epoch"),
            (YamuxStream, "_grow_threshold"),
        )
        if not hasattr(owner, name)
    ]
    if found != LIBP2P_VERSION or missing:
        raise LocalError(
            f"libp2p {found} is installed; Echo-2 guards exactly {LIBP2P_VERSION}"
            + (f" ({', '.join(missing)} not found)." if missing else "."),
            f"Install it with `uv pip install libp2p=={LIBP2P_VERSION}` and the project's "
            "fastecdsa override.",
        )


def quiet_loggers() -> None:
    """Give every logger of the library an explicit level: peers' noise is counted, not printed."""
    names = [name for name in logging.root.manager.loggerDict if name.startswith("libp2p")]
    for name in ("libp2p", "zeroconf", "multiaddr", *names):
        logging.getLogger(name).setLevel(logging.CRITICAL)


def _reuse_address_only(sock: Any) -> None:
    """No SO_REUSEPORT: a second daemon on the same port must fail, not share its peers."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)


def make_host(
    identity: Identity, *, listen: Sequence[str], announce: Sequence[str], counters: Counter[str]
) -> Any:
    """Build the host; it neither listens nor dials yet.

    Raises:
        UsageError: an address cannot be read.
        LocalError: py-libp2p is not the one we know.
    """
    for text in announce:
        parse_address(text)
    check_installation()
    quiet_loggers()
    libp2p.network.swarm._HAPPY_EYEBALLS_DELAY = 0.0  # else every dial waits 250 ms
    libp2p.transport.tcp.tcp._set_reuse_flags = _reuse_address_only
    keys = create_new_key_pair(identity.seed)
    transport = TCP(dns_resolution_timeout=5.0, dns_max_retries=1)
    noise = NoiseTransport(keys, noise_privkey=create_noise_key_pair().private_key)

    def advertise(candidates: list[Multiaddr]) -> list[Multiaddr]:
        return [Multiaddr(text) for text in advertised(candidates, announce)]

    host = new_host(
        key_pair=keys,
        sec_opt={NOISE_ID: noise},
        muxer_opt={TProtocol(YAMUX_ID): Yamux},
        transports=[transport],
        peerstore_opt=PeerStore(max_records=2000, max_peers=limits.MEMBERS_MAX),
        listen_addrs=[parse_address(text) for text in listen],
        addrs_factory=advertise,
        disable_identify_address_discovery=True,
        enable_mDNS=False,
        enable_upnp=False,
        enable_autotls=False,
        enable_metrics=False,
        enable_quic=False,
        enable_websocket=False,
        bootstrap=None,
        negotiate_timeout=PROTOCOL_NEGOTIATION_TIMEOUT_S,
        connection_config=ConnectionConfig(
            max_connections=limits.CONNECTIONS_MAX,
            high_watermark=limits.CONNECTIONS_MAX,
            low_watermark=limits.CONNECTIONS_LOW_WATERMARK,
            min_connections=limits.CONNECTIONS_MIN,
            max_connections_per_peer=CONNECTIONS_PER_PEER_MAX,
            dial_timeout=limits.CONNECT_TIMEOUT_S,
            connection_close_timeout=CONNECTION_CLOSE_TIMEOUT_S,
            inbound_upgrade_timeout=guards.HANDSHAKE_TIMEOUT_S,
            outbound_upgrade_timeout=guards.HANDSHAKE_TIMEOUT_S,
            outbound_stream_protocol_negotiation_timeout=PROTOCOL_NEGOTIATION_TIMEOUT_S,
            inbound_stream_protocol_negotiation_timeout=PROTOCOL_NEGOTIATION_TIMEOUT_S,
            load_balancing_strategy="best",
            enable_health_monitoring=False,  # the carrier probes connections itself
        ),
    )
    network = host.get_network()
    network.set_resource_manager(None)
    network.retry_config = RetryConfig(max_retries=0)
    network.auto_connector.maybe_connect = _do_nothing
    network.connection_pruner.maybe_prune_connections = _do_nothing
    network._handle_inbound_connection = guards.InboundDoor(network, counters).handle
    network.dialled_sockets = guards.DialledSockets(transport)
    guards.guard_streams(network, counters)
    guards.guard_identify(host, counters)
    thrift.be_thrifty()
    return host


async def _do_nothing() -> None:
    """Dialling and pruning belong to the membership above, not to the library."""
    await trio.lowlevel.checkpoint()


def parse_address(text: str) -> Multiaddr:
    """A multiaddress we can listen on or dial: /ip4|ip6|dns*/.../tcp/<port>.

    Raises:
        UsageError: it is not one.
    """
    try:
        address = Multiaddr(text)
        names = [protocol.name for protocol in address.protocols()]
    except (MultiaddrError, ValueError) as error:
        raise UsageError(
            f"'{text[:200]}' is not a multiaddress: {error}.",
            "Write it like /ip4/0.0.0.0/tcp/4001.",
        ) from error
    if len(names) < 2 or names[0] not in ("ip4", "ip6", "dns", "dns4", "dns6") or names[1] != "tcp":
        raise UsageError(
            f"'{text[:200]}' is not a TCP multiaddress.", "Write it like /ip4/0.0.0.0/tcp/4001."
        )
    return address


async def listen_on(host: Any, listen: Sequence[str]) -> None:
    """Listen on every address, or on none.

    Raises:
        LocalError: one of them cannot be had; says which and what to do.
    """
    network = host.get_network()
    for text in listen:
        address = parse_address(text)
        if await network.listen(address):
            continue
        ip, port = str(address).split("/")[2], int(str(address).split("/")[4])
        raise LocalError(
            f"Cannot listen on {text}: {_why_not(ip, port)}.",
            "Stop the other program on that port, choose another with --listen "
            "(port 0 takes any free one), or join without listening.",
        )


def _why_not(ip: str, port: int) -> str:
    family = socket.AF_INET6 if ":" in ip else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            _reuse_address_only(probe)
            probe.bind((ip, port))
            probe.listen(1)
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return "the listener did not start"


def advertised(candidates: Sequence[Multiaddr], announce: Sequence[str]) -> tuple[str, ...]:
    """Where this node says it can be dialled, without /p2p.

    What the person announces wins. Otherwise the listening addresses, with 0.0.0.0 replaced by the
    addresses of the real interfaces; loopback is advertised by a node that listens only there, or
    has nothing else.
    """
    if announce:
        return tuple(announce)[: limits.ADDRESSES_MAX]
    found: list[str] = []
    for candidate in candidates:
        parts = str(candidate).split("/p2p/")[0].split("/")
        wildcard = parts[2] in ("0.0.0.0", "::")
        for ip in _interface_ips(":" in parts[2]) if wildcard else (parts[2],):
            text = "/".join([*parts[:2], ip, *parts[3:]])
            if text not in found:
                found.append(text)
    return tuple(found)[: limits.ADDRESSES_MAX]


def _interface_ips(version6: bool) -> tuple[str, ...]:
    family = socket.AF_INET6 if version6 else socket.AF_INET
    addresses = [
        entry.address.split("%")[0]
        for entries in psutil.net_if_addrs().values()
        for entry in entries
        if entry.family == family
    ]
    usable = [ip for ip in addresses if _is_reachable(ip)]
    return tuple(usable) or (("::1",) if version6 else ("127.0.0.1",))


def _is_reachable(ip: str) -> bool:
    address = ipaddress.ip_address(ip)
    return not (address.is_loopback or address.is_link_local or address.is_unspecified)


async def close_host(host: Any) -> None:
    """Close listeners, connections and sockets; twice is no error.

    Leaving the services is not enough: listeners are system tasks and would keep the port.
    """
    with trio.move_on_after(limits.CLOSE_TIMEOUT_S) as scope:
        scope.shield = True
        await host.close()
    host.get_network().dialled_sockets.close()
