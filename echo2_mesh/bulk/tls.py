"""TLS over a socket that never blocks: bytes in, bytes out, and what the socket has not taken.

OpenSSL works on memory here, a quarter of a MiB at a time: cheaper than a call to the kernel for
each record of 16 KiB. One thread alone may touch a `TlsSocket`; `bulk.opening` and `bulk.lane` do.
"""

from __future__ import annotations

import contextlib
import hashlib
import socket
import ssl
import struct
import sys

_UNSENT_LOW_WATER_BYTES = 256 * 1024
_DEAD_AFTER_MS = 20_000
"""Bytes that the other side's kernel has not acknowledged for this long end the connection."""
_CONGESTION = b"cubic"
"""Where the kernel has it: a dozen neighbours send to one slow line at once, and BBR, which takes
the losses there for no news, sent a third of a learner's bytes twice."""
_RTT_OFFSET = 68
"""`tcpi_rtt`, microseconds, in Linux's `struct tcp_info`."""


def tune(sock: socket.socket) -> None:
    """Options of every lane's socket: no blocking, no delay, and a dead peer is noticed."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", 15),
        ("TCP_KEEPINTVL", 5),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", _DEAD_AFTER_MS),
        # Little lies in the kernel: cancelled answers cost little, and rates can be measured.
        ("TCP_NOTSENT_LOWAT", _UNSENT_LOW_WATER_BYTES),
    ):
        if (option := getattr(socket, name, None)) is not None:
            with contextlib.suppress(OSError):
                sock.setsockopt(socket.IPPROTO_TCP, option, value)
    if (option := getattr(socket, "TCP_CONGESTION", None)) is not None:
        with contextlib.suppress(OSError):
            sock.setsockopt(socket.IPPROTO_TCP, option, _CONGESTION)


class TlsSocket:
    """A TLS connection in one thread. Any failure is an `OSError` or `EOFError`."""

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, *, server: bool) -> None:
        self.sock = sock
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._unsent = memoryview(b"")

    def shake(self) -> bool:
        """Go on with the handshake; True when it is done."""
        try:
            self._tls.do_handshake()
        except ssl.SSLWantReadError:
            self.flush()
            return False
        self.flush()
        return True

    def fingerprint(self) -> bytes:
        """SHA-256 of the other side's certificate; empty where it showed none."""
        der = self._tls.getpeercert(binary_form=True)
        return hashlib.sha256(der).digest() if der else b""

    def receive(self, scratch: memoryview) -> int:
        """Take bytes from the kernel, as many as `scratch` holds at most; 0: none are there.

        Call it only after `read_into` has found nothing: what was received waits in memory.
        """
        try:
            count = self.sock.recv_into(scratch)
        except (BlockingIOError, InterruptedError):
            return 0
        if not count:
            raise EOFError
        self._incoming.write(scratch[:count])
        return count

    def read_into(self, view: memoryview) -> int:
        """Decrypt what was received, until `view` is full; 0: more must be received first."""
        read, at, size = self._tls.read, 0, len(view)
        try:
            while at < size:
                count = int(read(size - at, view[at:]))  # a record of 16 KiB at most
                if not count:
                    raise EOFError
                at += count
        except ssl.SSLWantReadError:
            return at
        except ssl.SSLZeroReturnError:
            if not at:
                raise EOFError from None
        return at

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Encrypt; `flush` sends."""
        self._tls.write(data)

    def flush(self) -> bool:
        """Hand encrypted bytes to the kernel; True when it has taken all."""
        if not self._unsent and self._outgoing.pending:
            self._unsent = memoryview(self._outgoing.read())
        while self._unsent:
            try:
                sent = self.sock.send(self._unsent)
            except (BlockingIOError, InterruptedError):
                return False
            self._unsent = self._unsent[sent:]
            if not self._unsent and self._outgoing.pending:
                self._unsent = memoryview(self._outgoing.read())
        return True

    def rtt_s(self) -> float:
        """The kernel's estimate of a round trip; 0 where it does not tell."""
        option = getattr(socket, "TCP_INFO", None)
        if option is None or not sys.platform.startswith("linux"):
            return 0.0
        with contextlib.suppress(OSError, struct.error):
            info = self.sock.getsockopt(socket.IPPROTO_TCP, option, 104)
            return float(struct.unpack_from("=I", info, _RTT_OFFSET)[0]) / 1e6
        return 0.0

    @property
    def unsent(self) -> bool:
        return bool(self._unsent) or self._outgoing.pending > 0

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self.sock.close()
