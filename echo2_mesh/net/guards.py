"""What keeps py-libp2p 0.8.1 alive in front of strangers: each guard closes one hole, by name.

Nothing here decides what peers say; it bounds how many of them may say it, and makes sure that
what a peer sends ends at worst that peer's stream. `net.host` puts the guards on before anything
else is registered. The holes, all of them found by running the library (see ARCHITECTURE.md):

- `guard_streams`   an exception in any stream handler, the built-in ones included, cancels the
                    host's nursery and ends the process;
- `guard_tasks`     a well-formed message that fails deeper (a signed one with a damaged key) raises
                    inside a service task, with the same end;
- `guard_identify`  identify runs as a trio system task, where any exception is fatal;
- `guard_inbound`   one place in the inbound limit is taken for each accepted connection and
                    returned only when the host ends, so a host that has seen some 300 peers come
                    and go is deaf; and silent connections keep honest ones out;
- `guard_window`    a stream's window grows with its round trip, and that with what waits in the
                    window; a connection inside such a stream waits above 5 s for window updates of
                    its own, which the library takes for death;
- `DialledSockets`  a host that closes while a connection is already ending cancels the task that
                    would have closed its socket;
- `guard_gossip`    peers in PRUNE back-off are offered no messages, so a leaf that nobody keeps in
                    its mesh is never heard (the spec's back-off is about GRAFT alone); and a peer
                    that joins misses what was sent in the second before.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import random
import weakref
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import trio
from libp2p.network.connection.raw_connection import RawConnection

from echo2_mesh import limits

log = logging.getLogger("echo2.net")

INBOUND_PER_IP_MAX = 128
"""Established inbound connections from one address: several homes may share one behind a NAT, and
no address may take all of `CONNECTIONS_MAX`."""
HANDSHAKES_MAX = 64
HANDSHAKES_PER_IP_MAX = 16
HANDSHAKE_TIMEOUT_S = 5.0
STREAMS_PER_PEER_MAX = 64
"""Inbound streams of one peer handled at once; more are reset."""
STREAMS_MAX = 1024
RESET_TIMEOUT_S = 2.0
PORTS_KEPT = 1024
GOSSIP_PEERS_MIN = 2
GOSSIP_TURNS = 4
"""Recent messages are offered to everybody outside the mesh in so many heartbeats, within the
window of `net.gossip`."""
NEVER_TOLD: tuple[int, frozenset[Any]] = (-1, frozenset())
MESH_YOUTH_HEARTBEATS = 4

assert INBOUND_PER_IP_MAX < limits.CONNECTIONS_MAX - limits.CONNECTIONS_MIN
assert limits.INBOUND_ASKS_PER_PEER_MAX < STREAMS_PER_PEER_MAX


def guard_streams(network: Any, counters: Counter[str]) -> None:
    """Bound the inbound streams, and end a failing handler's stream instead of the host."""
    inner: Callable[[Any], Awaitable[None]] = network.common_stream_handler
    open_of: Counter[str] = Counter()

    async def handle(stream: Any) -> None:
        peer = str(stream.muxed_conn.peer_id)
        if open_of[peer] >= STREAMS_PER_PEER_MAX or open_of.total() >= STREAMS_MAX:
            counters["streams_refused"] += 1
            await reset_quietly(stream)
            return
        open_of[peer] += 1
        try:
            await inner(stream)
        except Exception as error:
            counters["streams_failed"] += 1
            log.debug("stream handler failed: %s %r", stream.get_protocol(), error)
            await reset_quietly(stream)
        finally:
            open_of[peer] -= 1
            if not open_of[peer]:
                del open_of[peer]

    network.set_stream_handler(handle)


def guard_window(stream: Any) -> None:
    """Keep the window of a stream that carries a connection as small as it began (256 KiB)."""
    stream.muxed_stream._apply_autotune_epoch = lambda buffered: 0


async def reset_quietly(stream: Any) -> None:
    """Reset a stream whose connection may be gone; never raises, never waits long."""
    with trio.move_on_after(RESET_TIMEOUT_S) as scope, contextlib.suppress(Exception):
        scope.shield = True
        await stream.reset()


def guard_tasks(service: Any, counters: Counter[str]) -> None:
    """Make a failing task of a running service end alone.

    Daemon tasks (the service's own loops) stay fatal: without them the service is a corpse.
    """
    manager = service.manager
    inner = manager.run_task

    def run_task(async_fn: Any, *args: Any, daemon: bool = False, **options: Any) -> None:
        if daemon:
            inner(async_fn, *args, daemon=True, **options)
            return

        async def alone(*inner_args: Any) -> None:
            try:
                await async_fn(*inner_args)
            except Exception as error:
                counters["tasks_failed"] += 1
                log.debug("task failed: %s %r", getattr(async_fn, "__name__", "?"), error)

        inner(alone, *args, **options)

    manager.run_task = run_task


def guard_identify(host: Any, counters: Counter[str]) -> None:
    """Keep a hostile identify answer from reaching trio's system nursery."""
    inner = host._identify_task_entry

    async def entry(*args: Any, **options: Any) -> None:
        try:
            await inner(*args, **options)
        except Exception as error:
            counters["tasks_failed"] += 1
            log.debug("identify failed: %r", error)

    host._identify_task_entry = entry


class InboundDoor:
    """Who may come in: bounds per address and in total, and newest-first for handshakes.

    When the places for unfinished handshakes are taken, the one that has been silent longest is
    dropped: an honest handshake takes milliseconds, so silence is what loses. Replaces
    `Swarm._handle_inbound_connection`; QUIC and WebSocket, which we do not speak, are not served.
    """

    def __init__(self, swarm: Any, counters: Counter[str]) -> None:
        self._swarm = swarm
        self._counters = counters
        self._established: Counter[str] = Counter()
        self._handshakes: dict[int, tuple[str, trio.CancelScope]] = {}
        self._serial = itertools.count()

    async def handle(self, stream: Any, listener: Any) -> None:
        """Carry one accepted socket from handshake to its end; returning closes it."""
        remote = stream.get_remote_address()
        address = remote[0] if remote else ""
        if not self._may_enter(address):
            self._counters["connections_refused"] += 1
            return
        try:
            muxed = None
            with self._handshake(address):
                muxed = await self._swarm.upgrade_inbound_raw_conn(
                    RawConnection(stream, False), listener
                )
            if muxed is not None:
                await self._stay(address, muxed)
        except Exception as error:
            self._counters["handshakes_failed"] += 1
            log.debug("inbound connection failed: %r", error)

    def _may_enter(self, address: str) -> bool:
        return (
            self._established[address] < INBOUND_PER_IP_MAX
            and self._established.total() < limits.CONNECTIONS_MAX - limits.CONNECTIONS_MIN
        )

    @contextlib.contextmanager
    def _handshake(self, address: str) -> Iterator[None]:
        from_here = [key for key, (other, _) in self._handshakes.items() if other == address]
        if len(from_here) >= HANDSHAKES_PER_IP_MAX:
            self._drop(from_here[0])
        elif len(self._handshakes) >= HANDSHAKES_MAX:
            self._drop(next(iter(self._handshakes)))
        key = next(self._serial)
        with trio.CancelScope() as scope:
            self._handshakes[key] = (address, scope)
            try:
                yield
            finally:
                self._handshakes.pop(key, None)

    def _drop(self, key: int) -> None:
        self._counters["handshakes_dropped"] += 1
        self._handshakes.pop(key)[1].cancel()

    async def _stay(self, address: str, muxed: Any) -> None:
        """Past the handshake: keep the socket open for as long as the connection lives."""
        self._established[address] += 1
        try:
            for connection in self._swarm.get_connections(muxed.peer_id):
                if connection.muxed_conn is muxed:
                    await connection.event_closed.wait()
        finally:
            self._established[address] -= 1
            if not self._established[address]:
                del self._established[address]


class DialledSockets:
    """Every socket this host dialled, so that closing the host closes them all."""

    def __init__(self, transport: Any) -> None:
        self._open: weakref.WeakSet[trio.SocketStream] = weakref.WeakSet()
        self._ports: OrderedDict[tuple[str, int], int] = OrderedDict()
        self._dial = transport.dial
        transport.dial = self.dial

    async def dial(self, address: Any) -> Any:
        """Dial as the transport does, and remember the socket for as long as it is in use."""
        raw = await self._dial(address)
        self.remember(raw.stream.stream)
        return raw

    def remember(self, stream: trio.SocketStream) -> None:
        """Close this one with the others, and know its own port by its far end."""
        self._open.add(stream)
        with contextlib.suppress(OSError):
            place = stream.socket.getpeername()
            self._ports[(place[0], place[1])] = stream.socket.getsockname()[1]
            if len(self._ports) > PORTS_KEPT:
                self._ports.popitem(last=False)

    def port_towards(self, ip: str, port: int) -> int | None:
        """The local port of the newest dial to that place; None if it is not remembered."""
        return self._ports.get((ip, port))

    def close(self) -> None:
        """Close what is still open, without ceremony; again is no error."""
        for stream in list(self._open):
            stream.socket.close()


def guard_gossip(router: Any) -> None:
    """Offer (IHAVE) recent messages to every peer of a topic that may have missed them.

    Those are the peers outside the mesh, in back-off or not, and those that entered it only a few
    heartbeats ago: what was sent just before is in nobody's plan for them. They take turns, so that
    each is offered everything within the window, and nothing twice: offered anew at each heartbeat
    to each, that was a third of an idle fleet's bytes.
    """
    spoken = set(router.protocols)
    ages: dict[tuple[str, Any], int] = {}
    told: dict[tuple[str, Any], tuple[int, frozenset[Any]]] = {}
    turns = itertools.count()

    def gossip_heartbeat() -> dict[Any, dict[str, list[Any]]]:
        offers: dict[Any, dict[str, list[Any]]] = defaultdict(dict)
        turn = next(turns)
        present = {(topic, peer) for topic, peers in router.mesh.items() for peer in peers}
        for key in [key for key in ages if key not in present]:
            del ages[key]
        for key in present:
            ages[key] = ages.get(key, 0) + 1
        for topic, peer in list(told):
            if peer not in router.pubsub.peer_topics.get(topic, ()):
                del told[topic, peer]
        for topic in {*router.mesh, *router.fanout}:
            known = frozenset(router.mcache.window(topic))
            inside = {
                peer
                for peer in router.mesh.get(topic) or router.fanout.get(topic) or ()
                if ages.get((topic, peer), MESH_YOUTH_HEARTBEATS) >= MESH_YOUTH_HEARTBEATS
            }
            others = [
                peer
                for peer in router.pubsub.peer_topics.get(topic, ())
                if peer not in inside and router.peer_protocol.get(peer) in spoken
            ]
            if known and others:
                random.shuffle(others)
                others.sort(key=lambda peer: told.get((topic, peer), NEVER_TOLD)[0])
                for peer in others[: max(GOSSIP_PEERS_MIN, -(-len(others) // GOSSIP_TURNS))]:
                    if news := known - told.get((topic, peer), NEVER_TOLD)[1]:
                        offers[peer][topic] = list(news)
                    told[topic, peer] = (turn, known)
        return offers

    router.gossip_heartbeat = gossip_heartbeat
