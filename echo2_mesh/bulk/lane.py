"""One lane: a TLS connection to an authenticated peer, on which both sides ask and both answer.

It moves frames and pieces of blobs, and nothing that it received goes further than its buffer:
`bulk.hub` verifies, keeps, finds and waits. An illegal frame ends the lane.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from echo2_mesh import limits
from echo2_mesh.bulk import frames
from echo2_mesh.bulk.asks import Owed, Sending, Wanted
from echo2_mesh.bulk.frames import HEADER_BYTES, Frame, Kind, Status
from echo2_mesh.bulk.loop import READ, WRITE
from echo2_mesh.bulk.tls import TlsSocket
from echo2_mesh.core.fetching import Fault
from echo2_mesh.wire.types import Digest, NodeId

if TYPE_CHECKING:
    from echo2_mesh.bulk.hub import Hub

CONTROL_BYTES_MAX = 64 * 1024
"""Replies not yet sent, above which nothing more is read: a peer that asks must also listen."""
TURNS = 4
"""Pieces moved before other lanes have their turn."""
_FAULTS: dict[int, Fault] = {Status.MISSING: Fault.MISSING, Status.BUSY: Fault.BUSY}


class IllegalFrame(Exception):
    """The peer does not speak the protocol."""


class Lane:
    """See the module. All in the loop's thread."""

    def __init__(self, hub: Hub, tls: TlsSocket, peer: NodeId, way: str) -> None:
        self.peer = peer
        self.way = way
        self.closed = False
        self.used_s = hub.loop.now_s
        self.asked: dict[int, Wanted] = {}
        self.blocked = False
        """Bytes wait for the kernel to take them."""
        self._hub = hub
        self._tls = tls
        self._next = 1
        self._owed: dict[int, Owed] = {}
        self._called_off: set[int] = set()
        """Cancelled while the hub still seeks the blob: work that counts until it has ended."""
        self._answers: deque[tuple[int, memoryview]] = deque()
        self._sending: Sending | None = None
        self._control = bytearray()
        self._header = bytearray(HEADER_BYTES)
        self._header_view = memoryview(self._header)
        self._have = 0
        self._into: Wanted | None = None
        self._left = 0
        self._stray_bytes = 0
        self._starved: Frame | None = None
        self._rests = {READ: False, WRITE: False}
        self._wakes = {READ: partial(self._wake, READ), WRITE: partial(self._wake, WRITE)}

    @property
    def idle(self) -> bool:
        """Nobody waits for anything on it."""
        return not (self.asked or self._owed)

    def start(self) -> None:
        """Read what came with the greeting, and go on."""
        self._guarded(self._parse)

    # --- what the hub wants --------------------------------------------------------------------

    def ask(self, wanted: Wanted) -> None:
        """Send an ask; its end is told to the hub."""
        wanted.lane, wanted.number = self, self._next
        self._next = self._next % 0xFFFFFFFF + 1
        self.asked[wanted.number] = wanted
        kind = frames.BLOB_KINDS.index(wanted.ref.kind)
        self._say(
            frames.ask(wanted.number, wanted.ref.digest, wanted.ref.size_bytes, wanted.wait_s, kind)
        )

    def drop(self, wanted: Wanted) -> None:
        """Nobody waits for this any more."""
        if self.asked.pop(wanted.number, None) is None:
            return
        if self._into is wanted:
            self._into = None  # the rest of the piece is read and thrown away
        if self._starved is not None and self._starved.request == wanted.number:
            self._starved = None
            self._hub.loop.after(0.0, lambda: self._guarded(self._parse))
        self._say(frames.cancel(wanted.number))

    def supply(self, number: int, view: memoryview) -> None:
        """Answer an ask with a blob."""
        if number in self._owed:
            self._answers.append((number, view))
            self._settle()
        self._called_off.discard(number)

    def deny(self, number: int, status: Status) -> None:
        """Answer an ask without one."""
        if self._owed.pop(number, None) is not None:
            self._say(frames.answer(number, status))
        self._called_off.discard(number)

    def waits(self, number: int) -> bool:
        """The peer still waits for this answer."""
        return number in self._owed

    def resume(self) -> None:
        """There is room for a blob again."""
        if self._starved is not None and not self.closed:
            self._guarded(self._parse)

    def close(self) -> None:
        """Free the socket; the hub has been told, or tells itself."""
        self.closed = True
        if self.blocked:
            self._hub.note_blocked(-1)
        for direction, wake in self._wakes.items():
            self._hub.turns[direction].leave(wake)
        self._hub.loop.forget(self._tls.sock)
        self._tls.close()
        self._answers.clear()
        self._owed.clear()
        self._sending = None

    def _say(self, frame: bytes) -> None:
        self._control += frame
        self._settle()

    # --- the loop's turns ----------------------------------------------------------------------

    def on_event(self, mask: int) -> None:
        if mask & WRITE:
            self._guarded(self._pump)
        if mask & READ and not self.closed:
            self._guarded(self._take)

    def _guarded(self, step: Callable[[], None]) -> None:
        if self.closed:
            return
        try:
            step()
        except IllegalFrame as error:
            self._hub.lane_lost(self, str(error), illegal=True)
        except EOFError:
            self._hub.lane_lost(self, "it hung up")
        except OSError as error:
            self._hub.lane_lost(self, error.strerror or str(error))
        else:
            self._settle()

    def _settle(self) -> None:
        """Tell the loop what this lane waits for."""
        if self.closed:
            return
        mask = 0
        full = len(self._control) > CONTROL_BYTES_MAX
        if not (self._rests[READ] or self._starved is not None or full):
            mask |= READ
        outward = self._tls.unsent or self._control or self._sending or self._answers
        if outward and not self._rests[WRITE]:
            mask |= WRITE
        blocked = bool(self._tls.unsent)
        if blocked != self.blocked:
            self.blocked = blocked
            self._hub.note_blocked(1 if blocked else -1)
        self._hub.loop.watch(self._tls.sock, mask, self.on_event)

    def _rest(self, direction: int) -> None:
        """A cap is reached: go on when it is this lane's turn."""
        if self._rests[direction]:
            return
        self._rests[direction] = True
        self._hub.turns[direction].wait(self._wakes[direction])

    def _wake(self, direction: int) -> None:
        self._rests[direction] = False
        self._guarded(self._pump if direction == WRITE else self._take)

    # --- outward -------------------------------------------------------------------------------

    def _pump(self) -> None:
        for _ in range(TURNS):
            if not self._tls.flush() or self._rests[WRITE]:
                return
            sending = self._sending or self._next_answer()
            if sending is None:
                if not self._control:
                    return
                self._flush_control()
                continue
            want = min(limits.LANE_PIECE_BYTES_MAX, len(sending.view) - sending.sent_bytes)
            count = self._hub.uplink.take(want, self._hub.loop.now_s)
            if want and not count:
                if self._control:
                    self._flush_control()
                    self._tls.flush()
                self._rest(WRITE)
                return
            if count:
                self._control += frames.data(sending.number, count)
            self._flush_control()
            if count:
                start = sending.sent_bytes
                self._tls.write(sending.view[start : start + count])
                sending.sent_bytes += count
                self.used_s = self._hub.loop.now_s
                self._hub.count_out(self.peer, sending.blob_kind, count)
            if sending.sent_bytes == len(sending.view):
                self._owed.pop(sending.number, None)
                self._sending = None
        self._tls.flush()

    def _flush_control(self) -> None:
        if self._control:
            self._tls.write(self._control)
            self._control = bytearray()

    def _next_answer(self) -> Sending | None:
        while self._answers:
            number, view = self._answers.popleft()
            owed = self._owed.get(number)
            if owed is not None:  # else cancelled meanwhile
                self._sending = Sending(number, view, owed.blob_kind)
                self._control += frames.answer(number, Status.HERE, len(view))
                return self._sending
        return None

    # --- inward --------------------------------------------------------------------------------

    def _take(self) -> None:
        hub = self._hub
        for _ in range(TURNS):
            if self._starved is not None or self.closed:
                return
            want = hub.downlink.take(len(hub.scratch), hub.loop.now_s)
            if not want:
                self._rest(READ)
                return
            count = 0
            try:
                count = self._tls.receive(hub.scratch[:want])
            finally:
                hub.downlink.give_back(want - count)
            if not count:
                return
            hub.down_meter.moved(count)
            self._parse()
            if count < want:
                return

    def _parse(self) -> None:
        if self._starved is not None:
            starved, self._starved = self._starved, None
            self._on_answer(starved)
        while self._starved is None and not self.closed:
            if self._left:
                if not self._read_body():
                    return
                continue
            count = self._tls.read_into(self._header_view[self._have :])
            if not count:
                return
            self._have += count
            if self._have == HEADER_BYTES:
                self._have = 0
                self._on_frame(frames.unpack(self._header))

    def _read_body(self) -> bool:
        wanted = self._into
        if wanted is None or wanted.buffer is None:
            count = self._tls.read_into(self._hub.rubbish[: self._left])
            self._stray_bytes += count
            if self._stray_bytes > limits.LANE_STRAY_BYTES_MAX:
                raise IllegalFrame("it sends what nobody asked for")
        else:
            at = wanted.got_bytes
            count = self._tls.read_into(wanted.buffer[at : at + self._left])
            wanted.got_bytes += count
        self._left -= count
        if not self._left and wanted is not None:
            self._into = None
            if wanted.got_bytes == wanted.ref.size_bytes:
                self._finish(wanted)
        return count > 0

    def _finish(self, wanted: Wanted) -> None:
        self._stray_bytes = 0
        self.used_s = self._hub.loop.now_s
        del self.asked[wanted.number]
        self._hub.received(wanted)

    def _on_frame(self, frame: Frame) -> None:
        match frame.kind:
            case Kind.ASK:
                self._on_ask(frame)
            case Kind.ANSWER:
                self._on_answer(frame)
            case Kind.DATA:
                self._on_data(frame)
            case Kind.CANCEL:
                self._on_cancel(frame.request)
            case _:
                raise IllegalFrame(f"a frame of kind {frame.kind}")

    def _on_ask(self, frame: Frame) -> None:
        self.used_s = self._hub.loop.now_s
        number = frame.request
        if number in self._owed or number in self._called_off:
            raise IllegalFrame("a request number that is in use")
        if frame.size_bytes > limits.CHUNK_SIZE_BYTES_MAX or (
            frame.blob_kind >= len(frames.BLOB_KINDS)
        ):
            self._control += frames.answer(number, Status.ILLEGAL)
        elif len(self._owed) + len(self._called_off) >= limits.LANE_ASKS_MAX:
            self._hub.counters["busy_blobs"] += 1
            self._control += frames.answer(number, Status.BUSY)
        else:
            self._owed[number] = Owed(Digest(frame.digest), frame.size_bytes, frame.blob_kind)
            wait_s = min(frame.wait_ms / 1000, limits.BLOB_TIMEOUT_S)
            self._hub.seek(self, number, self._owed[number], wait_s)

    def _on_cancel(self, number: int) -> None:
        if self._owed.pop(number, None) is None:
            return
        if self._sending is not None and self._sending.number == number:
            self._sending = None
        elif any(answer[0] == number for answer in self._answers):
            self._answers = deque(answer for answer in self._answers if answer[0] != number)
        else:
            self._called_off.add(number)

    def _on_answer(self, frame: Frame) -> None:
        wanted = self._asked_for(frame.request)
        if wanted is None:
            return
        size = wanted.ref.size_bytes
        if frame.status != Status.HERE:
            del self.asked[frame.request]
            fault = _FAULTS.get(frame.status, Fault.BROKEN)
            self._hub.failed(wanted, fault, f"the answer is {fault.value}")
        elif frame.size_bytes != size or wanted.buffer is not None:
            self._hub.failed(wanted, Fault.LIED, f"{frame.size_bytes} bytes, {size} promised")
        elif size == 0:
            wanted.buffer = memoryview(b"")
            self._finish(wanted)
        else:
            wanted.buffer = self._hub.buffer(size)
            if wanted.buffer is None:
                self._starved = frame
                self._hub.starved.append(self)

    def _on_data(self, frame: Frame) -> None:
        if not 0 < frame.size_bytes <= limits.LANE_PIECE_BYTES_MAX:
            raise IllegalFrame(f"a piece of {frame.size_bytes} bytes")
        wanted = self._asked_for(frame.request)
        if wanted is not None and (
            wanted.buffer is None or wanted.got_bytes + frame.size_bytes > wanted.ref.size_bytes
        ):
            self._hub.failed(wanted, Fault.LIED, "more bytes than it announced")
            wanted = None
        self._into = wanted
        self._left = frame.size_bytes

    def _asked_for(self, number: int) -> Wanted | None:
        """Who waits for this answer; None: nobody any more."""
        wanted = self.asked.get(number)
        if wanted is None and not 0 < number < self._next:
            raise IllegalFrame("an answer that nobody asked for")
        return wanted
