"""The bulk port of this node and its way out: accepts, dials, and punches.

It bounds strangers in number, in all and per address, and looks up no name. What it opens is an
`Opening` until both sides have proved themselves. Called by `bulk.worker`, in the loop's thread.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from functools import partial

from echo2_mesh import limits
from echo2_mesh.bulk.loop import READ, Loop
from echo2_mesh.bulk.opening import Attempt, Opening
from echo2_mesh.bulk.tickets import Tickets
from echo2_mesh.bulk.tls import TlsSocket
from echo2_mesh.bulk.words import Place
from echo2_mesh.wire.types import NodeId

ACCEPTS_PER_TURN = 16
ACCEPT_PAUSE_S = 0.1
HANDSHAKE_READ_BYTES = 16 * 1024
PUNCH_INTERVAL_S = 0.2
PUNCH_CONNECT_TIMEOUT_S = 1.2
Enter = Callable[[TlsSocket, NodeId, str, str], bool]
"""(connection, peer, way, address): the hub takes it over, or says False."""


class Door:
    """The bulk port of this node, and its way out.

    Args:
        enter: the hub's.
    """

    def __init__(
        self,
        loop: Loop,
        contexts: tuple[ssl.SSLContext, ssl.SSLContext],
        tickets: Tickets,
        counters: Counter[str],
        enter: Enter,
    ) -> None:
        self.loop = loop
        self.server, self.client = contexts
        self.tickets = tickets
        self.counters = counters
        self.enter = enter
        self.scratch = memoryview(bytearray(HANDSHAKE_READ_BYTES))
        self.port = 0
        self._half_open: Counter[str] = Counter()
        self._accepted: dict[Place, Opening] = {}
        self._punching: dict[Place, Attempt] = {}
        self._kept: list[socket.socket] = []

    def listen(self, places: tuple[Place, ...]) -> tuple[Place, ...]:
        """Listen on every place, or, where none is given, hold a port to dial from.

        Raises:
            OSError: a place cannot be had; `filename` is it.
        """
        bound: list[Place] = []
        for ip, port in places or (("0.0.0.0", 0),):
            sock = socket.socket(_family(ip), socket.SOCK_STREAM)
            self._kept.append(sock)
            try:
                if sock.family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                if port:
                    _probe(ip, port)
                _share(sock)
                self._bind(sock, ip, port)
                sock.setblocking(False)
                self.port = self.port or sock.getsockname()[1]
                if places:
                    sock.listen(128)
                    self.loop.watch(sock, READ, partial(self._accept, sock))
                    bound.append((ip, sock.getsockname()[1]))
            except OSError as error:
                error.filename = (ip, port)
                raise
        return tuple(bound)

    def _bind(self, sock: socket.socket, ip: str, port: int) -> None:
        if not port and self.port:
            with contextlib.suppress(OSError):  # one port on all hosts is easier to let through
                sock.bind((ip, self.port))
                return
        sock.bind((ip, port))

    def _accept(self, listener: socket.socket, mask: int) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                sock, name = listener.accept()
            except BlockingIOError:
                return
            except OSError:
                # No descriptor is left: the listener stays readable, so look again later.
                self.loop.forget(listener)
                again = partial(self.loop.watch, listener, READ, partial(self._accept, listener))
                self.loop.after(ACCEPT_PAUSE_S, again)
                return
            address, port = str(name[0]), int(name[1])
            attempt = self._punching.get((address, port))
            if attempt is not None and not attempt.ended:
                Opening(self, sock, address, attempt, port).shake(server=attempt.server)
                continue
            if (
                self._half_open.total() >= limits.LANE_HALF_OPEN_MAX
                or self._half_open[address] >= limits.LANE_HALF_OPEN_PER_ADDRESS_MAX
            ):
                self.counters["refused_half_open"] += 1
                sock.close()
                continue
            self._half_open[address] += 1
            self._accepted[address, port] = Opening(self, sock, address, None, port)
            self._accepted[address, port].shake(server=True)

    def left(self, opening: Opening) -> None:
        """An opening has ended."""
        if opening.attempt is None:
            self._accepted.pop((opening.address, opening.port), None)
            self._half_open[opening.address] -= 1
            if self._half_open[opening.address] <= 0:
                del self._half_open[opening.address]

    def dial(self, attempt: Attempt, places: tuple[Place, ...]) -> None:
        """All places side by side; the first with the right certificate becomes the lane."""
        for place in places[: limits.LANE_PLACES_MAX]:
            if attempt.ended:
                return
            try:
                sock = socket.socket(_family(place[0]), socket.SOCK_STREAM)
                sock.setblocking(False)
            except (OSError, ValueError) as error:
                attempt.why = str(error)
                continue
            opening = Opening(self, sock, place[0], attempt, place[1])
            self.loop.after(0.0, partial(opening.connect, place, limits.LANE_DIAL_TIMEOUT_S))
        if not attempt.openings:
            attempt.end(attempt.why)

    def punch(self, attempt: Attempt, places: tuple[Place, ...], timeout_s: float) -> None:
        """Connect again and again from the bulk port until the peer's packets meet ours."""
        places = places[: limits.LANE_PLACES_MAX]
        for place in places:
            self._punching[place] = attempt
            if not attempt.server and (early := self._accepted.get(place)) is not None:
                early.turn(attempt)  # the peer came first, and waits for us to begin with TLS
        until_s = self.loop.now_s + timeout_s

        def again() -> None:
            if attempt.ended or self.loop.now_s >= until_s:
                for place in places:
                    if self._punching.get(place) is attempt:
                        del self._punching[place]
                attempt.end(attempt.why)
                return
            for place in places:
                self._punch_once(attempt, place)
            self.loop.after(PUNCH_INTERVAL_S, again)

        again()

    def _punch_once(self, attempt: Attempt, place: Place) -> None:
        if any((o.address, o.port) == place for o in attempt.openings) or attempt.ended:
            return
        try:
            sock = socket.socket(_family(place[0]), socket.SOCK_STREAM)
            sock.setblocking(False)
            _share(sock)
            sock.bind(("::" if sock.family == socket.AF_INET6 else "0.0.0.0", self.port))
        except (OSError, ValueError) as error:
            attempt.why = str(error)
            return
        Opening(self, sock, place[0], attempt, place[1]).connect(place, PUNCH_CONNECT_TIMEOUT_S)

    def close(self) -> None:
        for sock in self._kept:
            self.loop.forget(sock)
            sock.close()


def _family(ip: str) -> socket.AddressFamily:
    """Addresses are numbers here: no name is looked up.

    Raises:
        ValueError: it is no address.
    """
    return socket.AF_INET6 if ipaddress.ip_address(ip).version == 6 else socket.AF_INET


def _share(sock: socket.socket) -> None:
    """Let punched connections leave from the port that listens."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)


def _probe(ip: str, port: int) -> None:
    """A second node on the same port must fail, not share it."""
    with socket.socket(_family(ip), socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        probe.bind((ip, port))
