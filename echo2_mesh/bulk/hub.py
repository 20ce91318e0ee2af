"""What is behind the lanes: who is asked, what is verified and kept, and asks that wait.

One `Hub` a bulk process, in the loop's thread. It does what the daemon says and never decides
which blob is wanted from whom. A blob is hashed before it is written; from that moment asks for
it that wait, on any lane, are answered.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable

from echo2_mesh import limits
from echo2_mesh.bulk import frames, words
from echo2_mesh.bulk.asks import Owed, Wanted
from echo2_mesh.bulk.frames import Status
from echo2_mesh.bulk.lane import Lane
from echo2_mesh.bulk.loop import READ, WRITE, Loop
from echo2_mesh.bulk.rates import Bucket, Meter, Turnstile
from echo2_mesh.bulk.shelf import Shelf
from echo2_mesh.bulk.tls import TlsSocket
from echo2_mesh.core.fetching import Fault
from echo2_mesh.errors import LocalError, PeerError
from echo2_mesh.wire.messages import ChunkRef
from echo2_mesh.wire.types import ChunkKind, Digest, NodeId

SCRATCH_BYTES = 256 * 1024
FREE_BUFFERS_BYTES_MAX = 64 * 1024 * 1024
MEASURE_INTERVAL_S = 1.0
SWEEP_INTERVAL_S = 5.0


class _Waiter:
    """An ask for a blob that is not here yet."""

    __slots__ = ("lane", "number", "owed", "until_s")

    def __init__(self, lane: Lane, number: int, owed: Owed, until_s: float) -> None:
        self.lane = lane
        self.number = number
        self.owed = owed
        self.until_s = until_s


class Hub:
    """See the module.

    Args:
        report: tells the daemon.
    """

    def __init__(
        self,
        loop: Loop,
        shelf: Shelf,
        report: Callable[[words.Report], None],
        listen: words.Listen,
    ) -> None:
        self.loop = loop
        self.shelf = shelf
        self.counters: Counter[str] = Counter()
        self.uplink = Bucket(listen.uplink_bytes_per_s, loop.now_s)
        self.downlink = Bucket(listen.downlink_bytes_per_s, loop.now_s)
        self.turns = {
            WRITE: Turnstile(self.uplink, lambda: loop.now_s, loop.after),
            READ: Turnstile(self.downlink, lambda: loop.now_s, loop.after),
        }
        self.up_meter = Meter(loop.now_s)
        self.down_meter = Meter(loop.now_s)
        self.scratch = memoryview(bytearray(SCRATCH_BYTES))
        self.rubbish = memoryview(bytearray(SCRATCH_BYTES))
        self.starved: list[Lane] = []
        self._report = report
        self._lanes: dict[NodeId, list[Lane]] = {}
        self._wanted: dict[int, Wanted] = {}
        self._waiters: dict[Digest, list[_Waiter]] = {}
        self._expected: frozenset[Digest] = frozenset()
        self._free: list[memoryview] = []
        self._free_bytes = 0
        self._used_bytes = 0
        self._blocked = 0
        self._kinds: defaultdict[ChunkKind, list[int]] = defaultdict(lambda: [0, 0])
        self._peers: defaultdict[NodeId, list[int]] = defaultdict(lambda: [0, 0])
        loop.after(MEASURE_INTERVAL_S, self._measure)
        loop.after(SWEEP_INTERVAL_S, self._sweep)

    # --- lanes ---------------------------------------------------------------------------------

    def add(self, tls: TlsSocket, peer: NodeId, way: str, address: str) -> bool:
        """Take over a connection whose peer is known; False where there are enough."""
        mine = self._lanes.setdefault(peer, [])
        if len(mine) >= limits.LANES_PER_PEER_MAX or not self._room():
            self.counters["refused_lanes"] += 1
            if not mine:
                del self._lanes[peer]
            return False
        lane = Lane(self, tls, peer, way)
        mine.append(lane)
        self._report(words.LaneUp(peer=peer, way=way, address=address, rtt_s=tls.rtt_s()))
        lane.start()
        return True

    def _room(self) -> bool:
        """Room for one lane more; the idle one that was used longest ago may have to go."""
        lanes = [lane for lanes in self._lanes.values() for lane in lanes]
        if len(lanes) < limits.LANES_MAX:
            return True
        idle = min((lane for lane in lanes if lane.idle), key=lambda x: x.used_s, default=None)
        if idle is not None:
            self.lane_lost(idle, "another needs its place")
        return idle is not None

    def lane_lost(self, lane: Lane, why: str, *, illegal: bool = False) -> None:
        """A lane has ended; what was asked on it has failed."""
        if lane.closed:
            return
        lane.close()
        self.counters["illegal_lanes"] += illegal
        mine = self._lanes[lane.peer]
        mine.remove(lane)
        if not mine:
            del self._lanes[lane.peer]
        self._report(words.LaneDown(peer=lane.peer, way=lane.way, why=why))
        for wanted in tuple(lane.asked.values()):
            # Nothing had come: the lane may have been idle too long, which is nobody's fault.
            self.failed(wanted, Fault.BROKEN, why, no_lane=wanted.got_bytes == 0 and not illegal)
        lane.asked.clear()

    def hang_up(self, peer: NodeId) -> None:
        for lane in tuple(self._lanes.get(peer, ())):
            self.lane_lost(lane, "hung up")

    def _sweep(self) -> None:
        self.loop.after(SWEEP_INTERVAL_S, self._sweep)
        for lane in [lane for lanes in self._lanes.values() for lane in lanes]:
            if lane.idle and self.loop.now_s - lane.used_s > limits.LANE_IDLE_S:
                self.lane_lost(lane, "idle")

    # --- asking --------------------------------------------------------------------------------

    def get(self, word: words.Get) -> None:
        """Ask the peer on the lane that has least to do."""
        ref = ChunkRef(kind=word.kind, digest=word.digest, size_bytes=word.size_bytes)
        wanted = Wanted(word.request, ref, word.wait_s)
        lanes = self._lanes.get(word.peer)
        self._wanted[word.request] = wanted
        if not lanes:
            self.failed(wanted, Fault.BROKEN, "no lane", no_lane=True)
            return
        lane = min(lanes, key=lambda each: len(each.asked))
        if len(lane.asked) >= limits.LANE_ASKS_MAX:
            self.failed(wanted, Fault.BUSY, "too many asks on its lanes")
            return
        wanted.timer = self.loop.after(word.timeout_s, lambda: self._late(wanted, word.timeout_s))
        lane.ask(wanted)

    def cancel(self, request: int) -> None:
        wanted = self._wanted.get(request)
        if wanted is not None:
            self._forget(wanted)

    def _late(self, wanted: Wanted, timeout_s: float) -> None:
        if wanted.request in self._wanted:
            self.failed(wanted, Fault.LATE, f"nothing whole in {timeout_s:g} s")

    def received(self, wanted: Wanted) -> None:
        """Every byte is there: verify and write in a worker, then tell."""
        assert wanted.buffer is not None
        if wanted.timer is not None:
            wanted.timer.cancel()
        wanted.whole = True
        buffer, ref, lane = wanted.buffer, wanted.ref, wanted.lane

        def done(result: Exception | None) -> None:
            self._release(buffer)
            wanted.buffer = None
            if isinstance(result, PeerError):
                self.counters["bad_chunks"] += 1
                self.failed(wanted, Fault.LIED, result.what)
            elif isinstance(result, LocalError):
                self.failed(wanted, None, str(result))
            elif isinstance(result, Exception):
                raise result
            else:
                assert lane is not None
                self._kinds[ref.kind][0] += ref.size_bytes
                self._peers[lane.peer][0] += ref.size_bytes
                if self._wanted.pop(wanted.request, None) is not None:
                    self._report(words.Got(request=wanted.request))
                self.landed(ref.digest)

        self.loop.job(lambda: self.shelf.keep(ref, buffer), done)

    def failed(
        self, wanted: Wanted, fault: Fault | None, text: str, *, no_lane: bool = False
    ) -> None:
        """A blob does not come; the daemon is told, unless it has given up itself."""
        known = wanted.request in self._wanted
        self._forget(wanted)
        if known:
            self._report(
                words.Failed(request=wanted.request, fault=fault, text=text, no_lane=no_lane)
            )

    def _forget(self, wanted: Wanted) -> None:
        self._wanted.pop(wanted.request, None)
        if wanted.timer is not None:
            wanted.timer.cancel()
        lane = wanted.lane
        if lane is not None and wanted.number in lane.asked:
            if lane.closed:
                del lane.asked[wanted.number]
            else:
                lane.drop(wanted)
        if wanted.buffer is not None and not wanted.whole:
            self._release(wanted.buffer)
            wanted.buffer = None

    # --- answering -----------------------------------------------------------------------------

    def seek(self, lane: Lane, number: int, owed: Owed, wait_s: float) -> None:
        """Answer an ask of the peer: now, after hashing a file, or when the blob has come."""
        view = self.shelf.known(owed.digest, owed.size_bytes)
        if view is not None:
            lane.supply(number, view)
        elif self.shelf.exists(owed.digest):

            def done(result: memoryview | Exception | None) -> None:
                if isinstance(result, memoryview):
                    lane.supply(number, result)
                else:
                    self.counters["missing_blobs"] += 1
                    lane.deny(number, Status.MISSING)

            self.loop.job(lambda: self.shelf.vouch(owed.digest, owed.size_bytes), done)
        elif wait_s > 0:
            waiter = _Waiter(lane, number, owed, self.loop.now_s + wait_s)
            self._waiters.setdefault(owed.digest, []).append(waiter)
            self._look_later(waiter)
        else:
            self.counters["missing_blobs"] += 1
            lane.deny(number, Status.MISSING)

    def _look_later(self, waiter: _Waiter) -> None:
        left_s = waiter.until_s - self.loop.now_s
        wait_s = min(left_s, limits.LANE_UNEXPECTED_WAIT_S)
        self.loop.after(max(0.0, wait_s), lambda: self._look_again(waiter))

    def _look_again(self, waiter: _Waiter) -> None:
        """Every second: is it still expected, and does anybody wait?"""
        digest = waiter.owed.digest
        waiting = self._waiters.get(digest)
        if waiting is None or waiter not in waiting:
            return
        alive = not waiter.lane.closed and waiter.lane.waits(waiter.number)
        left_s = waiter.until_s - self.loop.now_s
        if alive and left_s > 0 and digest in self._expected:
            self._look_later(waiter)
            return
        waiting.remove(waiter)
        if not waiting:
            del self._waiters[digest]
        if alive:
            self.seek(waiter.lane, waiter.number, waiter.owed, 0.0)
        else:
            waiter.lane.deny(waiter.number, Status.MISSING)

    def expect(self, digests: frozenset[Digest]) -> None:
        self._expected = digests

    def landed(self, digest: Digest) -> None:
        """It is in the store now: whoever waited gets it."""
        for waiter in self._waiters.pop(digest, ()):
            self.seek(waiter.lane, waiter.number, waiter.owed, 0.0)

    # --- memory and measures -------------------------------------------------------------------

    def buffer(self, size_bytes: int) -> memoryview | None:
        """Room for one blob; None: a lane must wait until another blob is done."""
        if self._used_bytes + size_bytes > limits.LANE_BUFFERS_BYTES_MAX:
            return None
        self._used_bytes += size_bytes
        self.down_meter.busy(True, self.loop.now_s)
        for index in reversed(range(len(self._free))):  # the last one is warm in the cache
            if len(self._free[index]) == size_bytes:
                self._free_bytes -= size_bytes
                return self._free.pop(index)
        return memoryview(bytearray(size_bytes))

    def _release(self, buffer: memoryview) -> None:
        if not len(buffer):
            return
        self._used_bytes -= len(buffer)
        self.down_meter.busy(self._used_bytes > 0, self.loop.now_s)
        self._free.append(buffer)
        self._free_bytes += len(buffer)
        while self._free_bytes > FREE_BUFFERS_BYTES_MAX:
            self._free_bytes -= len(self._free.pop(0))
        starved, self.starved = self.starved, []
        for lane in starved:
            lane.resume()

    def count_out(self, peer: NodeId, blob_kind: int, count: int) -> None:
        self.up_meter.moved(count)
        self._kinds[frames.BLOB_KINDS[blob_kind]][1] += count
        self._peers[peer][1] += count

    def note_blocked(self, change: int) -> None:
        """A lane more, or less, has bytes that the kernel does not take yet."""
        self._blocked += change
        self.up_meter.busy(self._blocked > 0, self.loop.now_s)

    def _measure(self) -> None:
        self.loop.after(MEASURE_INTERVAL_S, self._measure)
        now_s = self.loop.now_s
        up, down = self.up_meter.bytes_per_s(now_s), self.down_meter.bytes_per_s(now_s)
        if not (self._kinds or self._peers or self.counters):
            return
        self._report(
            words.Measures(
                uplink_bytes_per_s=up,
                downlink_bytes_per_s=down,
                kinds={kind: (pair[0], pair[1]) for kind, pair in self._kinds.items()},
                peers={peer: (pair[0], pair[1]) for peer, pair in self._peers.items()},
                counters=dict(self.counters),
            )
        )
        self._kinds.clear()
        self._peers.clear()
        self.counters.clear()
