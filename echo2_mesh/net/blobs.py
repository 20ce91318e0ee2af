"""Blobs by digest, served from the store and fetched into it, verified before anything else.

The request is the MessagePack of `BlobAsk`; the reply is one status byte and, after `HERE`, the
blob. Neither is signed: the digest is the proof. Who is asked for what is decided elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

import msgspec
import trio

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore
from echo2_mesh.core.fetching import Fault
from echo2_mesh.errors import LocalError, PeerError
from echo2_mesh.net.carrier import Carrier
from echo2_mesh.net.driver import Guard
from echo2_mesh.net.questions import Reach
from echo2_mesh.wire.messages import BlobAsk, ChunkRef
from echo2_mesh.wire.types import NodeId

BLOB_PROTOCOL = "/echo2/blob/1"
HERE, MISSING, BUSY, ILLEGAL = b"\x00", b"\x01", b"\x02", b"\x03"
REQUEST_BYTES_MAX = 256
WORKERS_MAX = 4
"""Threads that hash and touch the disk for the mesh at once."""

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
        self._inline = inline
        self._limiter = trio.CapacityLimiter(WORKERS_MAX)

    async def run(self, call: Callable[[*Arguments], Result], *arguments: *Arguments) -> Result:
        """The result of `call(*arguments)`, or what it raised."""
        if self._inline:
            await trio.lowlevel.checkpoint()
            return call(*arguments)
        return await trio.to_thread.run_sync(call, *arguments, limiter=self._limiter)


class BlobFault(PeerError):
    """A peer did not deliver a blob; `fault` says how."""

    def __init__(self, what: str, fault: Fault) -> None:
        super().__init__(what, code=fault.value)
        self.fault = fault


class Blobs:
    """The blob protocol of one node."""

    def __init__(
        self,
        carrier: Carrier,
        store: ChunkStore,
        workers: Workers,
        guard: Guard,
        reach: Reach,
    ) -> None:
        self._carrier = carrier
        self._store = store
        self._workers = workers
        self._guard = guard
        self._reach = reach
        self._serving = 0
        carrier.serve(BLOB_PROTOCOL, self._serve, request_bytes_max=REQUEST_BYTES_MAX)

    async def fetch_from(self, peer: NodeId, ref: ChunkRef, *, timeout_s: float) -> None:
        """Get one blob from one peer into the store.

        Raises:
            BlobFault: it does not have it, is busy, broke off, was late, or sent wrong bytes.
            LocalError: the store cannot take it.
        """
        request = msgspec.msgpack.encode(BlobAsk(digest=ref.digest, size_bytes=ref.size_bytes))
        reply: bytes | None = None
        with trio.move_on_after(timeout_s):
            try:
                await self._reach(peer)
                reply = await self._carrier.exchange(
                    peer,
                    BLOB_PROTOCOL,
                    request,
                    reply_bytes_max=ref.size_bytes + limits.BLOB_FRAME_OVERHEAD_BYTES,
                    timeout_s=timeout_s,
                )
            except PeerError as error:
                raise BlobFault(error.what, Fault.BROKEN) from error
        name = f"Chunk {ref.digest.hex()[:8]} from {peer[-8:]}"
        if reply is None:
            raise BlobFault(f"{name}: nothing in {timeout_s:g} s.", Fault.LATE)
        match reply[:1]:
            case b"\x00":
                pass
            case b"\x01":
                raise BlobFault(f"{name}: it is not there.", Fault.MISSING)
            case b"\x02":
                raise BlobFault(f"{name}: the peer is busy.", Fault.BUSY)
            case _:
                raise BlobFault(f"{name}: an illegal reply.", Fault.LIED)
        self._guard.counters["bytes_in_blobs"] += len(reply)
        try:
            await self._workers.run(self._store.put, ref, memoryview(reply)[1:])
        except PeerError as error:
            self._guard.counters["bad_chunks"] += 1
            raise BlobFault(f"{name}: {error.what}", Fault.LIED) from error

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
            return HERE + data
