"""Who is out there: a private Kademlia network for the wide area, mDNS for the local one.

It answers "which nodes said they belong to this key, and where are they", and says so of this
node; it connects to nobody and believes nothing: whoever it finds must still prove an identity.
A node that nobody can dial is a DHT client: it looks up and stores nothing. The carrier owns one
`Discovery` and calls it again and again; every call starts from the peers connected at the time,
so a network that was lost entirely is found again by the next call.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import blake3
import libp2p.kad_dht.common
import libp2p.kad_dht.kad_dht
import libp2p.kad_dht.peer_routing
import libp2p.kad_dht.provider_store
import libp2p.kad_dht.value_store
import trio
from libp2p.custom_types import TProtocol
from libp2p.discovery.mdns.broadcaster import PeerBroadcaster
from libp2p.discovery.mdns.listener import PeerListener
from libp2p.kad_dht.kad_dht import DHTMode, KadDHT
from libp2p.kad_dht.provider_store import ProviderStore
from libp2p.tools.anyio_service import background_trio_service
from zeroconf import Zeroconf

from echo2_mesh import limits
from echo2_mesh.net import guards
from echo2_mesh.wire.types import NodeId

log = logging.getLogger("echo2.net")

KAD_PROTOCOL = "/echo2/kad/1.0.0"
KEY_PREFIX = b"echo2:"
"""No hexadecimal digit: keys that parse as hex or as a CID are decoded by the library first."""
LOOKUP_TIMEOUT_S = 10.0
PROVIDERS_MAX = 64
PEERS_PER_SUBNET_MAX = 4
MDNS_STOP_TIMEOUT_S = 1.5
MDNS_TTL_S = 120
MDNS_FOUND_MAX = 256

_run_in_thread: Any = trio.to_thread.run_sync

Found = tuple[tuple[NodeId, tuple[str, ...]], ...]

# The library's `protocol_prefix` never reaches the wire: each module holds its own copy.
for _module in (
    libp2p.kad_dht.common,
    libp2p.kad_dht.kad_dht,
    libp2p.kad_dht.peer_routing,
    libp2p.kad_dht.provider_store,
    libp2p.kad_dht.value_store,
):
    _module.PROTOCOL_ID = TProtocol(KAD_PROTOCOL)


def key_of(name: str) -> bytes:
    """The DHT key of a name."""
    return KEY_PREFIX + blake3.blake3(name.encode()).digest()


class LocalFinds:
    """What mDNS found, written by its threads and read by the carrier's.

    Stands where the library would write to the host's peer store from a foreign thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._found: dict[NodeId, tuple[str, ...]] = {}

    def add_addrs(self, peer: Any, addresses: Sequence[Any], _ttl_s: int = 0) -> None:
        """A peer answered with these addresses."""
        with self._lock:
            if len(self._found) < MDNS_FOUND_MAX:
                texts = tuple(str(address) for address in addresses[: limits.ADDRESSES_MAX])
                self._found[NodeId(str(peer))] = texts

    def clear_addrs(self, peer: Any) -> None:
        """A peer said goodbye or fell silent."""
        with self._lock:
            self._found.pop(NodeId(str(peer)), None)

    def all(self) -> Found:
        """Everybody heard of and not gone."""
        with self._lock:
            return tuple(self._found.items())


class Discovery:
    """The DHT and the local finds of one host. Open it with `open_discovery`."""

    def __init__(self, host: Any, *, dialable: bool, counters: Counter[str]) -> None:
        self._host = host
        self._dialable = dialable
        self._counters = counters
        self._local = LocalFinds()
        self._provided: dict[str, frozenset[str]] = {}
        self.dht = KadDHT(
            host,
            DHTMode.SERVER if dialable else DHTMode.CLIENT,
            enable_random_walk=False,
            enable_providers=True,
            enable_values=True,  # the library's routing needs the store; we put nothing in it
            strict_validation=True,
            persist_dir=None,
            max_peers_per_subnet=PEERS_PER_SUBNET_MAX,
        )

    async def acquaint(self) -> frozenset[str]:
        """Put the connected DHT servers into the routing table; say who they are."""
        store = self._host.get_peerstore()
        servers = set()
        for peer in list(self._host.get_network().connections):
            with contextlib.suppress(Exception):
                if store.supports_protocols(peer, [KAD_PROTOCOL]):
                    await self.dht.add_peer(peer)
                    servers.add(str(peer))
        return frozenset(servers)

    async def provide(self, name: str) -> None:
        """Say that this node can be found under `name`; nothing if nobody can dial it."""
        if not self._dialable:
            return
        servers = await self.acquaint()
        self._provided[name] = servers
        with self._tolerant(), trio.move_on_after(LOOKUP_TIMEOUT_S):
            await self.dht.provider_store.provide(key_of(name))

    async def provide_again(self) -> None:
        """Repeat what was provided to other servers than those connected now."""
        servers = await self.acquaint()
        for name, told in list(self._provided.items()):
            if servers - told:
                await self.provide(name)

    async def find(self, name: str) -> Found:
        """Nodes under `name` in the DHT and all found on the local network, this one excluded."""
        await self.acquaint()
        key = key_of(name)
        found: dict[NodeId, dict[str, None]] = {}
        # The node's own store answers first and would hide the network: ask with an empty one.
        asking = ProviderStore(host=self._host, peer_routing=self.dht.peer_routing)
        remote: list[Any] = []
        with self._tolerant(), trio.move_on_after(LOOKUP_TIMEOUT_S):
            remote = await asking.find_providers(key, PROVIDERS_MAX)
        for provider in (*remote, *self.dht.provider_store.get_providers(key)):
            texts = found.setdefault(NodeId(str(provider.peer_id)), {})
            for address in provider.addrs[: limits.ADDRESSES_MAX]:
                texts[str(address).split("/p2p/")[0]] = None
        for node, addresses in self._local.all():
            found.setdefault(node, {}).update(dict.fromkeys(addresses))
        found.pop(NodeId(str(self._host.get_id())), None)
        return tuple((node, tuple(texts)[: limits.ADDRESSES_MAX]) for node, texts in found.items())

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        """A lookup that fails found nothing; the next one may."""
        try:
            yield
        except Exception as error:
            self._counters["lookups_failed"] += 1
            log.debug("lookup failed: %r", error)

    async def stay_local(self, addresses: Sequence[str], group: str) -> None:
        """Announce and listen by mDNS until cancelled; a host without multicast costs one counted
        failure. A task of its own: zeroconf takes more than a second to be sure of a name."""
        started: list[LocalAnnouncer] = []

        def start() -> None:
            started.append(LocalAnnouncer(str(self._host.get_id()), addresses, group, self._local))

        try:
            # Not abandoned: what a thread starts must be stopped.
            await _run_in_thread(start)
            await trio.sleep_forever()
        except Exception as error:  # zeroconf: OSError, NonUniqueNameException, its own timeouts
            self._counters["mdns_failed"] += 1
            log.debug("mdns not available: %r", error)
        finally:
            with trio.move_on_after(MDNS_STOP_TIMEOUT_S) as scope:
                scope.shield = True
                for announcer in started:
                    await _run_in_thread(announcer.stop, abandon_on_cancel=True)


class LocalAnnouncer:
    """py-libp2p's mDNS parts, run in worker threads: constructing and registering block.

    Args:
        group: nodes of one group see each other and no others.
    """

    def __init__(self, node: str, addresses: Sequence[str], group: str, finds: LocalFinds) -> None:
        # A service name has at most 15 characters between '_' and '.'.
        service = f"_p2p-{blake3.blake3(group.encode()).hexdigest()[:8]}._udp.local."
        name = f"{blake3.blake3(node.encode()).hexdigest()[:32]}.{service}"
        self._zeroconf = Zeroconf()
        self._broadcaster = None
        self._listener = None
        try:
            self._listener = PeerListener(
                peerstore=finds,
                zeroconf=self._zeroconf,
                service_type=service,
                service_name=name,
                ttl=MDNS_TTL_S,
                retry_attempts=2,
                retry_base_delay=0.5,
            )
            if addresses:
                self._broadcaster = PeerBroadcaster(
                    zeroconf=self._zeroconf,
                    service_type=service,
                    service_name=name,
                    peer_id=node,
                    port=int(addresses[0].split("/")[4]),
                    listen_addrs=list(addresses),
                    host=None,
                )
                self._broadcaster.register()
        except Exception:
            self._zeroconf.close()
            raise

    def stop(self) -> None:
        """Say goodbye and end the threads."""
        if self._broadcaster is not None:
            self._broadcaster.unregister()
        if self._listener is not None:
            self._listener.stop()
        self._zeroconf.close()


@contextlib.asynccontextmanager
async def open_discovery(
    host: Any, *, dialable: bool, counters: Counter[str]
) -> AsyncIterator[Discovery]:
    """Run the DHT of a running host for the length of the block."""
    discovery = Discovery(host, dialable=dialable, counters=counters)
    async with background_trio_service(discovery.dht):
        guards.guard_tasks(discovery.dht, counters)
        yield discovery
