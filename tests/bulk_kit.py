"""Bulk workers in this process, each in a thread, and a client that speaks frames by hand."""

import contextlib
import queue
import secrets
import socket
import ssl
import threading
import time
from functools import partial

from echo2_mesh.bulk import frames, words
from echo2_mesh.bulk.loop import Loop
from echo2_mesh.bulk.worker import Worker
from echo2_mesh.chunks import ChunkStore
from echo2_mesh.testing import identity_of
from echo2_mesh.wire.types import ChunkKind

WAIT_S = 10.0
LOOPBACK = (("127.0.0.1", 0),)


class _Pipe:
    """The pipe to a daemon that is not there."""

    def __init__(self):
        self.frames = queue.Queue()

    def write(self, frame):
        self.frames.put(frame)


class BulkNode:
    """One bulk worker and its store."""

    def __init__(self, name, folder, *, listen=LOOPBACK, **caps):
        self.node = identity_of(name).node
        self.store = ChunkStore(folder / name, quota_bytes=None)
        self.loop = Loop()
        self.pipe = _Pipe()
        self.counters = {}
        self.kept = []
        self.number = 0
        first = words.Listen(places=listen, **caps)
        self.worker = Worker(self.loop, folder / name, self.pipe, first)
        assert self.worker.listen(first)
        self.address = self.hear(words.Listening)
        self.thread = threading.Thread(target=self.loop.run, daemon=True)
        self.thread.start()

    @property
    def hub(self):
        return self.worker._hub

    def say(self, word):
        self.loop.post(partial(self.worker.handle, word))

    def hear(self, *kinds, timeout_s=WAIT_S):
        """The next report of one of these kinds; others are kept aside."""
        for word in self.kept:
            if isinstance(word, kinds):
                self.kept.remove(word)
                return word
        until_s = time.monotonic() + timeout_s
        while True:
            frame = self.pipe.frames.get(timeout=max(0.001, until_s - time.monotonic()))
            word = words.decode_report(frame)
            if isinstance(word, words.Measures):
                for name, count in word.counters.items():
                    self.counters[name] = self.counters.get(name, 0) + count
            if isinstance(word, kinds):
                return word
            if not isinstance(word, words.Measures):
                self.kept.append(word)

    def count(self, name):
        """A counter once it is not 0, reported or not yet."""
        until_s = time.monotonic() + WAIT_S
        while time.monotonic() < until_s:
            with contextlib.suppress(queue.Empty):
                self.hear(words.Measures, timeout_s=0.02)
            if found := self.counters.get(name, 0) + self.hub.counters[name]:
                return found
        return 0

    def admit(self, peer, *, lifetime_s=WAIT_S, way="dialled"):
        """A token for `peer`."""
        token = secrets.token_bytes(32)
        self.say(words.Admit(token=token, peer=peer.node, lifetime_s=lifetime_s, way=way))
        return token

    def dial(self, peer, token, *, certificate=None, places=None):
        """Why there is no lane, or nothing."""
        self.number += 1
        self.say(
            words.Dial(
                attempt=self.number,
                peer=peer.node,
                places=places or peer.address.places,
                certificate=certificate or peer.address.certificate,
                token=token,
                way="dialled",
            )
        )
        return self.hear(words.Reached).why

    def link(self, peer):
        assert self.dial(peer, peer.admit(self)) == ""
        return self

    def get(self, peer, ref, *, wait_s=0.0, timeout_s=WAIT_S):
        """Begin to fetch; its number."""
        self.number += 1
        self.say(
            words.Get(
                request=self.number,
                peer=peer.node,
                kind=ref.kind,
                digest=ref.digest,
                size_bytes=ref.size_bytes,
                wait_s=wait_s,
                timeout_s=timeout_s,
            )
        )
        return self.number

    def fetch(self, peer, ref, **options):
        """Got or Failed."""
        number = self.get(peer, ref, **options)
        word = self.hear(words.Got, words.Failed)
        assert word.request == number
        return word

    def add(self, data, kind=ChunkKind.FULL):
        return self.store.add(kind, data)

    def close(self):
        self.loop.post(self.loop.end)
        self.thread.join(5)
        for lane in [lane for lanes in self.hub._lanes.values() for lane in lanes]:
            lane.close()
        self.worker._door.close()
        self.loop.close()


class RawClient:
    """A TLS client of a bulk port that says what it likes."""

    def __init__(self, node, *, token=None):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        raw = socket.create_connection(node.address.places[0], timeout=WAIT_S)
        self.sock = context.wrap_socket(raw)
        if token is not None:
            self.send(frames.HELLO + token)

    def send(self, data):
        self.sock.sendall(data)

    def receive(self, count):
        """So many bytes, or fewer where the other side closes."""
        data = b""
        with contextlib.suppress(OSError):
            while len(data) < count and (more := self.sock.recv(count - len(data))):
                data += more
        return data

    def frame(self):
        return frames.unpack(self.receive(frames.HEADER_BYTES))

    def is_cut(self):
        """The other side closes."""
        return self.receive(1) == b""

    def close(self):
        self.sock.close()
