"""The daemon's end of its bulk process: started, told, listened to, and started again.

`net.lanes` says which words; this keeps the child, matches replies to callers and notices its
death. While it is away `up` is false, and whoever waited for it is told that it is lost.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from echo2_mesh import limits
from echo2_mesh.bulk import words
from echo2_mesh.child import Child, open_child
from echo2_mesh.errors import LocalError
from echo2_mesh.net.driver import Guard
from echo2_mesh.wire.messages import ChunkRef
from echo2_mesh.wire.types import Digest, NodeId

START_TIMEOUT_S = 60.0
"""A machine whose processors are taken may need long to start a Python."""
OUTBOX_MAX = 4096
REPLY_SLACK_S = 5.0
"""Beyond its own deadline, before a word of the child is taken for lost."""


class Lost(Exception):
    """The bulk process ended, or never said how it went."""


class _Reply:
    def __init__(self) -> None:
        self.ready = trio.Event()
        self.word: words.Got | words.Failed | words.Reached | None = None

    def set(self, word: words.Got | words.Failed | words.Reached | None) -> None:
        self.word = word
        self.ready.set()


class BulkProcess:
    """See the module.

    Args:
        store_folder: of the node's chunk store.
        listen: said to every child that is started.
        hear: called with each report that is no reply.
        lost: called when a child has ended.
    """

    def __init__(
        self,
        store_folder: Path,
        log_path: Path,
        listen: words.Listen,
        guard: Guard,
        *,
        hear: Callable[[words.Report], None],
        lost: Callable[[], None],
    ) -> None:
        self.up = False
        self.address: words.Listening | None = None
        self.pid: int | None = None
        self.last_error = ""
        self._argv = (sys.executable, "-m", "echo2_mesh.bulk.worker", str(store_folder))
        self._log_path = log_path
        self._listen = listen
        self._guard = guard
        self._hear = hear
        self._lost = lost
        self._numbers = itertools.count(1)
        self._replies: dict[int, _Reply] = {}
        self._outbox, self._to_write = trio.open_memory_channel[words.Command](OUTBOX_MAX)
        self._expected = words.Expect(digests=())

    # --- verbs ---------------------------------------------------------------------------------

    async def get(
        self, peer: NodeId, ref: ChunkRef, *, timeout_s: float, wait_s: float
    ) -> words.Got | words.Failed:
        """Have the child fetch a blob over a lane it has.

        Raises:
            Lost: the child is gone.
        """
        number = next(self._numbers)
        word = words.Get(
            request=number,
            peer=peer,
            kind=ref.kind,
            digest=ref.digest,
            size_bytes=ref.size_bytes,
            wait_s=wait_s,
            timeout_s=timeout_s,
        )
        reply = await self._call(number, word, timeout_s, cancel=words.Cancel(request=number))
        assert isinstance(reply, words.Got | words.Failed)
        return reply

    async def dial(
        self, peer: NodeId, places: tuple[words.Place, ...], certificate: bytes, token: bytes,
        *, way: str,
    ) -> str:  # fmt: skip
        """Open a lane to one of these places; why not, or nothing.

        Raises:
            Lost: the child is gone.
        """
        number = next(self._numbers)
        word = words.Dial(
            attempt=number, peer=peer, places=places, certificate=certificate, token=token, way=way
        )
        timeout_s = limits.LANE_DIAL_TIMEOUT_S + limits.LANE_HANDSHAKE_TIMEOUT_S
        reply = await self._call(number, word, timeout_s)
        assert isinstance(reply, words.Reached)
        return reply.why

    async def punch(
        self, peer: NodeId, places: tuple[words.Place, ...], *, server: bool,
        certificate: bytes = b"", token: bytes = b"",
    ) -> str:  # fmt: skip
        """Open a lane from both sides at once; why not, or nothing.

        Raises:
            Lost: the child is gone.
        """
        number = next(self._numbers)
        word = words.Punch(
            attempt=number,
            peer=peer,
            places=places,
            server=server,
            certificate=certificate,
            token=token,
            timeout_s=limits.LANE_PUNCH_TIMEOUT_S,
        )
        timeout_s = limits.LANE_PUNCH_TIMEOUT_S + limits.LANE_HANDSHAKE_TIMEOUT_S
        reply = await self._call(number, word, timeout_s)
        assert isinstance(reply, words.Reached)
        return reply.why

    def say(self, word: words.Command) -> None:
        """Say something that has no reply; lost where the child is gone or drowned in words."""
        if isinstance(word, words.Expect):
            self._expected = word
        if not self.up:
            return
        try:
            self._outbox.send_nowait(word)
        except trio.WouldBlock:
            self._guard.counters["lost_bulk_words"] += 1

    async def _call(
        self,
        number: int,
        word: words.Command,
        timeout_s: float,
        cancel: words.Command | None = None,
    ) -> words.Got | words.Failed | words.Reached:
        if not self.up:
            raise Lost
        reply = self._replies[number] = _Reply()
        try:
            with trio.move_on_after(timeout_s + REPLY_SLACK_S):
                await self._outbox.send(word)
                await reply.ready.wait()
        finally:
            del self._replies[number]
            if not reply.ready.is_set() and cancel is not None:
                self.say(cancel)
        if reply.word is None:
            raise Lost
        return reply.word

    # --- the child's life ----------------------------------------------------------------------

    async def run(self) -> None:
        """Keep a child running until cancelled.

        Raises:
            LocalError: the very first one cannot have its port.
        """
        pause_s = limits.BULK_RESTART_S
        while True:
            began_s = trio.current_time()
            try:
                async with open_child(self._argv, log_path=self._log_path) as child:
                    await self._live(child)
            except LocalError as error:
                if isinstance(error, PortTaken) and self.address is None:
                    raise
                self._guard.counters["bulk_deaths"] += 1
                self.last_error = str(error)
            finally:
                self._down()
            if trio.current_time() - began_s > limits.BULK_RESTART_S_MAX:
                pause_s = limits.BULK_RESTART_S
            await trio.sleep(pause_s)
            pause_s = min(limits.BULK_RESTART_S_MAX, 2 * pause_s)

    async def _live(self, child: Child) -> None:
        self.pid = child.pid
        await child.send(words.encode(self._listen))
        frame: bytes | None = None
        with trio.move_on_after(START_TIMEOUT_S):
            frame = await child.receive()
        if frame is None:
            raise LocalError("The bulk process did not start in time.")
        first = words.decode_report(frame)
        if isinstance(first, words.Unable):
            raise PortTaken(
                f"The bulk port cannot be had at {first.place[0]}:{first.place[1]}: {first.why}.",
                "Stop the other program on that port, or choose port 0.",
            )
        assert isinstance(first, words.Listening)
        self.address = first
        self.up = True
        self.say(self._expected)
        ends: list[LocalError] = []

        async def until_it_ends(work: Callable[[], Awaitable[None]]) -> None:
            try:
                await work()
            except LocalError as error:
                ends.append(error)
                nursery.cancel_scope.cancel()

        async def write() -> None:
            while True:
                await child.send(words.encode(await self._to_write.receive()))

        async def read() -> None:
            while True:
                self._take(words.decode_report(await child.receive()))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(until_it_ends, write)
            nursery.start_soon(until_it_ends, read)
        if ends:
            raise ends[0]

    def _take(self, word: words.Report) -> None:
        match word:
            case words.Got(request=number) | words.Failed(request=number):
                if (reply := self._replies.get(number)) is not None:
                    reply.set(word)
            case words.Reached(attempt=number):
                if (reply := self._replies.get(number)) is not None:
                    reply.set(word)
            case _:
                self._hear(word)

    def _down(self) -> None:
        was_up, self.up, self.pid = self.up, False, None
        while True:  # words for the dead are not for its successor
            try:
                self._to_write.receive_nowait()
            except trio.WouldBlock:
                break
        for reply in tuple(self._replies.values()):
            reply.set(None)
        if was_up:
            self._lost()

    def expect(self, digests: frozenset[Digest]) -> None:
        """These blobs, and no others, are on their way to this node."""
        self.say(words.Expect(digests=tuple(digests)[: limits.EXPECTED_DIGESTS_MAX]))


class PortTaken(LocalError):
    """Somebody else has the bulk port."""
