"""Blobs by digest, served from the store and fetched into it, verified before anything else.

A blob goes over a lane where one can be had (`net.lanes`), else over the control connection: the
request is the MessagePack of `BlobAsk`, the reply one status byte and, after `HERE`, the blob.
Neither is signed: the digest is the proof. Who is asked for what is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar, TypeVarTuple

import msgspec
import trio

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore
from echo2_mesh.core.fetching import Fault
from echo2_mesh.errors import LocalError, PeerError
from echo2_mesh.net.carrier import Carrier
from echo2_mesh.net.driver import Guard
from echo2_mesh.net.lanes import BlobFault as BlobFault
from echo2_mesh.net.lanes import Lanes
from echo2_mesh.net.questions import Reach
from echo2_mesh.net.traffic import Traffic, TrafficReport
from echo2_mesh.wire.messages import BlobAsk, ChunkRef
from echo2_mesh.wire.types import Digest, NodeId

BLOB_PROTOCOL = "/echo2/blob/1"
HERE, MISSING, BUSY, ILLEGAL = b"\x00", b"\x01", b"\x02", b"\x03"
REQUEST_BYTES_MAX = 256
WORKERS_MAX = 4
"""Threads that hash and touch the disk for the mesh at once."""
WAITING_MAX = 256
"""Asks that wait for a blob which this node is about to have."""
WAIT_S_MAX = limits.BLOB_TIMEOUT_S / 2

Arguments = TypeVarTuple("Arguments")
Result = TypeVar("Result")
_decoder = msgspec.msgpack.Decoder(BlobAsk)


class Workers:
    """Runs blocking calls off the event loop, a few at a time.

    Args:
        inline: run them in place instead: for simulations on a virtual clock, which would jump
            ahead while a thread works.
    """

    def __init__(self, *, inline: bool = False) -> None:
        self.inline = inline
        self._limiter = trio.CapacityLimiter(WORKERS_MAX)

    async def run(self, call: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """The result of `call(*arguments)`, or what it raised."""
        if self.inline:
            await trio.lowlevel.checkpoint()
            return call(*arguments)
        return await trio.to_thread.run_sync(call, *arguments, limiter=self._limiter)


class Blobs:
    """The blob protocol of one node.

    Args:
        lanes: None in simulations, and where the bulk port is switched off.
    """

    def __init__(
        self,
        carrier: Carrier,
        store: ChunkStore,
        workers: Workers,
        guard: Guard,
        reach: Reach,
        *,
        lanes: Lanes | None = None,
        traffic: Traffic | None = None,
    ) -> None:
        self._carrier = carrier
        self._store = store
        self._workers = workers
        self._guard = guard
        self._reach = reach
        self._lanes = lanes
        self._traffic = traffic or Traffic()
        self._serving = 0
        self._waiting = 0
        self._expected: frozenset[Digest] = frozenset()
        self._awaited: dict[Digest, trio.Event] = {}
        carrier.serve(BLOB_PROTOCOL, self._serve, request_bytes_max=REQUEST_BYTES_MAX)

    def expect(self, digests: Iterable[Digest]) -> None:
        """These blobs, and no others, are on their way here: asks for them may wait."""
        self._expected = frozenset(digests)
        if self._lanes is not None:
            self._lanes.expect(self._expected)

    def hang_up(self, peer: NodeId) -> None:
        """`peer` sends wrong bytes: nothing that is on its way from it is worth having."""
        if self._lanes is not None:
            self._lanes.hang_up(peer)

    def landed(self, digests: Iterable[Digest]) -> None:
        """Blobs came into the store otherwise than by a fetch: whoever waits gets them."""
        found = tuple(digests)
        self._wake(found)
        if self._lanes is not None:
            self._lanes.landed(found)

    def traffic(self) -> TrafficReport:
        """Bytes in and out, by kind and by peer, lanes and measured rates."""
        lanes = self._lanes
        uplink, downlink = lanes.rates() if lanes is not None else (0.0, 0.0)
        return TrafficReport(
            kinds=self._traffic.kinds(),
            peers=self._traffic.peers(),
            lanes=lanes.ways() if lanes is not None else {},
            uplink_bytes_per_s=uplink,
            downlink_bytes_per_s=downlink,
        )

    async def fetch_from(
        self, peer: NodeId, ref: ChunkRef, *, timeout_s: float, wait_s: float = 0.0
    ) -> None:
        """Get one blob from one peer into the store.

        Args:
            wait_s: how long the peer may wait for a blob that it expects itself.

        Raises:
            BlobFault: it does not have it, is busy, broke off, was late, or sent wrong bytes.
            LocalError: the store cannot take it.
        """
        until_s = trio.current_time() + timeout_s
        if self._lanes is not None and await self._over_a_lane(
            self._lanes, peer, ref, timeout_s, wait_s
        ):
            return
        await self._over_the_carrier(peer, ref, until_s - trio.current_time(), wait_s)

    async def _over_a_lane(
        self, lanes: Lanes, peer: NodeId, ref: ChunkRef, timeout_s: float, wait_s: float
    ) -> bool:
        large = ref.size_bytes > limits.EXCHANGE_BLOB_BYTES_MAX
        if not await lanes.fetch(peer, ref, timeout_s=timeout_s, wait_s=wait_s, make=large):
            self._guard.counters["bulk_fallbacks"] += large
            return False
        self._wake((ref.digest,))
        await self._workers.run(self._store.landed, ref.size_bytes)
        return True

    async def _over_the_carrier(
        self, peer: NodeId, ref: ChunkRef, timeout_s: float, wait_s: float
    ) -> None:
        ask = BlobAsk(digest=ref.digest, size_bytes=ref.size_bytes, wait_s=min(wait_s, WAIT_S_MAX))
        request = msgspec.msgpack.encode(ask)
        reply: bytes | None = None
        with trio.move_on_after(max(0.0, timeout_s)):
            try:
                await self._reach(peer)
                reply = await self._carrier.exchange(
                    peer,
                    BLOB_PROTOCOL,
                    request,
                    reply_bytes_max=ref.size_bytes + limits.BLOB_FRAME_OVERHEAD_BYTES,
                    timeout_s=max(0.001, timeout_s),
                )
            except PeerError as error:
                raise BlobFault(error.what, Fault.BROKEN) from error
        name = f"Chunk {ref.digest.hex()[:8]} from {peer[-8:]}"
        if reply is None:
            raise BlobFault(f"{name}: nothing in {timeout_s:g} s.", Fault.LATE)
        match reply[:1]:
            case status if status == HERE:
                pass
            case status if status == MISSING:
                raise BlobFault(f"{name}: it is not there.", Fault.MISSING)
            case status if status == BUSY:
                raise BlobFault(f"{name}: the peer is busy.", Fault.BUSY)
            case _:
                raise BlobFault(f"{name}: an illegal reply.", Fault.LIED)
        self._guard.counters["bytes_in_blobs"] += len(reply)
        self._traffic.count(peer, ref.kind, in_bytes=len(reply) - 1)
        try:
            await self._workers.run(self._store.put, ref, memoryview(reply)[1:])
        except PeerError as error:
            self._guard.counters["bad_chunks"] += 1
            raise BlobFault(f"{name}: {error.what}", Fault.LIED) from error
        self.landed((ref.digest,))

    async def fetch(self, ref: ChunkRef, holders: tuple[NodeId, ...], *, timeout_s: float) -> None:
        """Get one blob from the first of `holders` that delivers it.

        Raises:
            PeerError: none did.
            LocalError: the store cannot take it.
        """
        if await self._workers.run(self._store.has, ref.digest):
            return
        last = "nobody was named"
        for holder in holders:
            try:
                await self.fetch_from(holder, ref, timeout_s=timeout_s)
            except BlobFault as error:
                last = error.what
            else:
                return
        raise PeerError(
            f"Nobody delivered {ref.kind.value} {ref.digest.hex()[:8]}: {last}", code="missing"
        )

    async def _serve(self, peer: NodeId, request: bytes) -> bytes:
        async with self._guard.serving():
            try:
                ask = _decoder.decode(request)
            except (msgspec.MsgspecError, ValueError):
                self._guard.counters["bad_blob_asks"] += 1
                return ILLEGAL
            if ask.wait_s > 0:
                await self._await_blob(ask.digest, min(ask.wait_s, WAIT_S_MAX))
            if self._serving >= limits.INBOUND_BLOBS_MAX:
                self._guard.counters["busy_blobs"] += 1
                return BUSY
            self._serving += 1
            try:
                data = await self._workers.run(self._store.read, ask.digest)
            except (KeyError, OSError, LocalError):
                return MISSING
            finally:
                self._serving -= 1
            if len(data) != ask.size_bytes:
                return MISSING
            self._guard.counters["bytes_out_blobs"] += len(data)
            self._traffic.count(peer, None, out_bytes=len(data))
            return HERE + data

    async def _await_blob(self, digest: Digest, wait_s: float) -> None:
        """Until it is here, `wait_s` at most; one second where it is not expected."""
        if self._waiting >= WAITING_MAX:
            return
        self._waiting += 1
        landed = self._awaited.setdefault(digest, trio.Event())  # before looking: no gap
        try:
            if await self._workers.run(self._store.has, digest):
                return
            with trio.move_on_after(min(wait_s, limits.LANE_UNEXPECTED_WAIT_S)):
                await landed.wait()
            with trio.move_on_after(max(0.0, wait_s - limits.LANE_UNEXPECTED_WAIT_S)):
                if not landed.is_set() and digest in self._expected:
                    await landed.wait()
        finally:
            self._waiting -= 1
            if not landed.statistics().tasks_waiting and self._awaited.get(digest) is landed:
                del self._awaited[digest]

    def _wake(self, digests: tuple[Digest, ...]) -> None:
        for digest in digests:
            if (landed := self._awaited.pop(digest, None)) is not None:
                landed.set()
