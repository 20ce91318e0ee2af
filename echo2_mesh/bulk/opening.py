"""A connection that is no lane yet: accepted, dialled or punched, and bounded in time.

It becomes a lane when TLS is agreed, the client has found the certificate that it was told, and
the server the token that it gave out. Until then it costs little: a stranger gets a handshake and
five seconds. Made by `bulk.door`, in the loop's thread.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from echo2_mesh import limits
from echo2_mesh.bulk.frames import HELLO
from echo2_mesh.bulk.loop import READ, WRITE, Timer
from echo2_mesh.bulk.tls import TlsSocket, tune
from echo2_mesh.bulk.words import Place
from echo2_mesh.wire.types import NodeId

_GREETING_BYTES = len(HELLO) + limits.LANE_TOKEN_BYTES
_UNDER_WAY = (0, errno.EINPROGRESS, errno.EWOULDBLOCK)

if TYPE_CHECKING:
    from echo2_mesh.bulk.door import Door


class Attempt:
    """One `Dial` or `Punch`: several places, one lane at most."""

    def __init__(
        self,
        *,
        peer: NodeId,
        way: str,
        certificate: bytes,
        token: bytes,
        server: bool,
        done: Callable[[str], None],
    ) -> None:
        self.peer = peer
        self.way = way
        self.certificate = certificate
        self.token = token
        self.server = server
        self.openings: list[Opening] = []
        self.greeting: Opening | None = None
        self.ended = False
        self.why = "no address was given"
        self._done = done

    def end(self, why: str) -> None:
        if self.ended:
            return
        self.ended = True
        for opening in tuple(self.openings):
            opening.close("another was quicker")
        self._done(why)


class Opening:
    """One connection on its way to become a lane."""

    def __init__(
        self, door: Door, sock: socket.socket, address: str, attempt: Attempt | None, port: int
    ) -> None:
        self.address = address
        self.port = port
        self.attempt = attempt
        self.closed = False
        self._door = door
        self._sock = sock
        self._tls: TlsSocket | None = None
        self._shaken = False
        self._greeting = bytearray()
        self._timer: Timer | None = None
        if attempt is not None:
            attempt.openings.append(self)

    def connect(self, place: Place, timeout_s: float) -> None:
        """Begin to connect."""
        if self.closed:
            return
        self._timer = self._door.loop.after(timeout_s, lambda: self.close("no answer"))
        try:
            code = self._sock.connect_ex(place)
        except (OSError, ValueError, TypeError) as error:  # no address after all
            self.close(str(error))
            return
        if code not in _UNDER_WAY:
            self.close(_words(code))
            return
        self._door.loop.watch(self._sock, WRITE, self._on_connect)

    def _on_connect(self, mask: int) -> None:
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self.close(_words(code))
            return
        assert self.attempt is not None
        self.shake(server=self.attempt.server)

    def shake(self, *, server: bool) -> None:
        """The TCP connection stands: begin with TLS."""
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._door.loop.after(
            limits.LANE_HANDSHAKE_TIMEOUT_S, lambda: self.close("no handshake in time", late=True)
        )
        context = self._door.server if server else self._door.client
        try:
            tune(self._sock)
            self._tls = TlsSocket(self._sock, context, server=server)
        except OSError as error:
            self.close(str(error))
            return
        self._is_server = server
        self._on_event(0)

    def turn(self, attempt: Attempt) -> None:
        """An accepted connection turns out to be the peer that we are about to punch to."""
        self._door.left(self)
        self.attempt = attempt
        attempt.openings.append(self)
        self._door.loop.forget(self._sock)
        # Whoever began as a stranger proves itself anew: certificate, greeting and all.
        self._shaken = False
        self._greeting.clear()
        self.shake(server=attempt.server)

    def _on_event(self, mask: int) -> None:
        tls = self._tls
        assert tls is not None
        try:
            if mask & READ and not tls.receive(self._door.scratch):
                return
            if not self._shaken:
                self._shaken = tls.shake()
                if self._shaken and not self._is_server and not self._greet(tls):
                    return
            if self._shaken and self._read_greeting(tls):
                return
            mask = READ | (0 if tls.flush() else WRITE)
            self._door.loop.watch(self._sock, mask, self._on_event)
        except EOFError:
            self.close("it hung up")
        except (OSError, ValueError) as error:
            self.close(getattr(error, "reason", None) or str(error), broken=True)

    def _greet(self, tls: TlsSocket) -> bool:
        """Client: is it the host that we were told of? Then show the token; one host alone."""
        attempt = self.attempt
        assert attempt is not None
        if tls.fingerprint() != attempt.certificate:
            self._door.counters["wrong_certificates"] += 1
            self.close("another host answers there (its certificate is not the one agreed)")
            return False
        if attempt.greeting is not None:
            self.close("another was quicker")
            return False
        attempt.greeting = self
        tls.write(HELLO + attempt.token)
        return True

    def _read_greeting(self, tls: TlsSocket) -> bool:
        """True when this opening has ended, one way or the other."""
        wanted = _GREETING_BYTES if self._is_server else len(HELLO)
        space = bytearray(wanted)
        while len(self._greeting) < wanted:
            count = tls.read_into(memoryview(space)[: wanted - len(self._greeting)])
            if not count:
                return False
            self._greeting += space[:count]
        if self._greeting[: len(HELLO)] != HELLO:
            self.close("it greets with something else", broken=True)
            return True
        if self._is_server:
            ticket = self._door.tickets.redeem(
                bytes(self._greeting[len(HELLO) :]), self._door.loop.now_s
            )
            if ticket is None:
                self._door.counters["unknown_lane_tokens"] += 1
                self.close("its token is unknown")
                return True
            tls.write(HELLO)
            tls.flush()
            self._enter(tls, ticket.peer, ticket.way)
        else:
            assert self.attempt is not None
            self._enter(tls, self.attempt.peer, self.attempt.way)
        return True

    def _enter(self, tls: TlsSocket, peer: NodeId, way: str) -> None:
        self._leave()
        self._door.loop.forget(self._sock)
        attempt = self.attempt
        entered = self._door.enter(tls, peer, way, self.address)
        if not entered:
            tls.close()
        if attempt is not None:
            attempt.end("" if entered else "there are lanes enough")

    def close(self, why: str, *, late: bool = False, broken: bool = False) -> None:
        """Give up."""
        if self.closed:
            return
        if self.attempt is None:
            self._door.counters["late_lane_handshakes"] += late
            self._door.counters["broken_lane_handshakes"] += broken
        self._leave()
        self._door.loop.forget(self._sock)
        self._sock.close()
        if (attempt := self.attempt) is not None:
            attempt.why = why
            greeted = attempt.greeting is self
            if greeted or (not attempt.openings and attempt.way != "punched"):
                attempt.end(why)

    def _leave(self) -> None:
        self.closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self.attempt is not None:
            self.attempt.openings.remove(self)
        self._door.left(self)


def _words(code: int) -> str:
    return errno.errorcode.get(code, str(code)).lower()
