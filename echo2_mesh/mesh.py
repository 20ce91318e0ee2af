"""The one door to the network: `open_mesh(...) -> Mesh`.

One nursery, one carrier, two machines (membership and fetch) and the protocols between them.
Daemons ask, answer, gossip, hear, fetch and announce here and never touch `echo2_mesh.net`.
Passes one machine's effects on as another's events; decides nothing itself.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import trio

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore
from echo2_mesh.core.members import Member, Standing
from echo2_mesh.identity import Identity
from echo2_mesh.net.blobs import Blobs, Workers
from echo2_mesh.net.carrier import Carrier
from echo2_mesh.net.driver import Guard
from echo2_mesh.net.envelopes import Envelopes
from echo2_mesh.net.following import Following, ReadyVersion
from echo2_mesh.net.joining import Joining, split_address
from echo2_mesh.net.questions import Questions
from echo2_mesh.net.topics import Topics, topics_of
from echo2_mesh.wire.codec import Opened
from echo2_mesh.wire.messages import Announce, ChunkRef, Goodbye, Heartbeat, Message
from echo2_mesh.wire.types import NodeId, PolicyVersion, Role

__all__ = ["Carrier", "Member", "Mesh", "MeshSettings", "ReadyVersion", "Standing", "open_mesh"]

_OWN_STATE = frozenset(
    {"state", "version", "tokens_per_s", "cohort", "accepted", "refused", "commonest_refusal",
     "last_error"}
)  # fmt: skip
Spoken = TypeVar("Spoken", bound=msgspec.Struct)


class MeshSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Which run, as whom, and where to begin."""

    run_id: str
    role: Role
    learner: NodeId
    name: str = ""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    """Empty: dial out only."""
    announce: tuple[str, ...] = ()
    bootstrap: tuple[str, ...] = ()
    """Multiaddresses that end in /p2p/<node>."""
    mdns: bool = True
    incarnation_unix_ms: int
    members_path: Path | None = None


class Mesh:
    """One node's place in the run. Made by `open_mesh` alone."""

    def __init__(
        self,
        settings: MeshSettings,
        identity: Identity,
        store: ChunkStore,
        carrier: Carrier,
        nursery: trio.Nursery,
        rng: random.Random,
        workers: Workers,
    ) -> None:
        self.node = identity.node
        self.run_id = settings.run_id
        self.learner = settings.learner
        self.store = store
        self.counters = carrier.counters
        self._settings = settings
        self._carrier = carrier
        self._sequence = 0
        self._state: dict[str, Any] = {"state": "starting"}
        self._envelopes = Envelopes(identity, settings.run_id, self.counters)
        guard = Guard(nursery, self.counters)
        self._topics = Topics(carrier, self._envelopes, guard)
        self._questions = Questions(carrier, self._envelopes, guard, self._reach)
        self._blobs = Blobs(carrier, store, workers, guard, self._reach)
        self._following = Following(
            learner=settings.learner,
            envelopes=self._envelopes,
            questions=self._questions,
            topics=self._topics,
            blobs=self._blobs,
            store=store,
            workers=workers,
            guard=guard,
            nursery=nursery,
            rng=rng,
            who_has=self._who_has,
        )
        self._joining = Joining(
            carrier=carrier,
            learner=settings.learner,
            run_id=settings.run_id,
            bootstrap=settings.bootstrap,
            members_path=settings.members_path,
            questions=self._questions,
            topics=self._topics,
            workers=workers,
            guard=guard,
            nursery=nursery,
            rng=rng,
            beat=self._beat,
            seal=self._envelopes.seal,
            peer_up=self._following.peer_up,
            peer_gone=self._following.peer_gone,
            announce_raw=lambda: self._following.announce_raw,
        )
        self._topics.hear(Heartbeat, self._hear_heartbeat)

    async def start(self, nursery: trio.Nursery) -> None:
        """Join; called once, by `open_mesh`."""
        await self._topics.join(learner=self._settings.role is Role.LEARNER)
        nursery.start_soon(self._following.run)
        nursery.start_soon(self._joining.run)

    def addresses(self) -> tuple[str, ...]:
        """Where this node can be dialled, each with /p2p/<node>."""
        return tuple(f"{address}/p2p/{self.node}" for address in self._carrier.addresses())

    # --- messages ------------------------------------------------------------------------------

    def seal(self, message: Message) -> bytes:
        """`message` as a signed envelope of this node: a manifest, a trajectory."""
        return self._envelopes.seal(message)

    def unseal(self, raw: bytes, *, size_bytes_max: int = limits.CHUNK_SIZE_BYTES_MAX) -> Opened:
        """Verify an envelope of this run.

        Raises:
            PeerError: it is not one; counted.
        """
        return self._envelopes.unseal(raw, size_bytes_max=size_bytes_max)

    async def ask(
        self, node: NodeId, message: Message, *, timeout_s: float = limits.ASK_TIMEOUT_S
    ) -> Message:
        """Put one question to `node` and wait for its reply.

        Raises:
            PeerError: unreachable, late, illegal, or refused; its `code` tells programs which.
        """
        return await self._questions.ask(node, message, timeout_s=timeout_s)

    def answer(
        self, kind: type[Spoken], handler: Callable[[NodeId, Spoken], Awaitable[Message]]
    ) -> None:
        """Answer questions of `kind`; a PeerError of the handler travels back as a refusal."""
        self._questions.answer(kind, handler)

    async def gossip(self, message: Message) -> None:
        """Sign and publish on the topic of its kind. Delivery is not promised."""
        await self._topics.gossip(message)

    def hear(
        self, kind: type[Spoken], handler: Callable[[NodeId, Spoken], Awaitable[None]]
    ) -> None:
        """Call `handler(sender, message)` for each verified message of `kind`, repeats included."""
        self._topics.hear(kind, handler)

    # --- blobs and weights ---------------------------------------------------------------------

    async def fetch_blob(
        self,
        ref: ChunkRef,
        holders: Sequence[NodeId],
        *,
        timeout_s: float = limits.BLOB_TIMEOUT_S,
    ) -> None:
        """Have a blob in the store, from the first of `holders` that delivers it.

        Raises:
            PeerError: none did.
            LocalError: the store cannot take it.
        """
        await self._blobs.fetch(ref, tuple(holders), timeout_s=timeout_s)

    async def announce_version(
        self, manifest_ref: ChunkRef, version: PolicyVersion, size_bytes: int
    ) -> None:
        """Learner: version `version` exists; its blobs and sealed manifest are in the store.

        Said now, repeated every few seconds, and told to whoever catches up.
        """
        await self._following.announce(
            Announce(
                version=version,
                manifest=manifest_ref,
                size_bytes=size_bytes,
                incarnation_unix_ms=self._settings.incarnation_unix_ms,
            )
        )

    def versions(self) -> trio.MemoryReceiveChannel[ReadyVersion]:
        """Complete versions, the newest only: one that nobody took is replaced by the next."""
        return self._following.ready

    def fetch_progress_bytes(self) -> tuple[int, int]:
        """(here, wanted) of the version being fetched; equal when nothing is missing."""
        return self._following.progress_bytes()

    # --- membership ----------------------------------------------------------------------------

    def set_state(self, **fields: Any) -> None:
        """What the next heartbeats say; names of `Heartbeat` fields that the daemon knows."""
        unknown = fields.keys() - _OWN_STATE
        if unknown:
            raise TypeError(f"not a state of this node: {sorted(unknown)}")
        self._state.update(fields)

    def members(self) -> tuple[Member, ...]:
        """Everybody heard of, this node excepted."""
        return self._joining.members()

    async def say_goodbye(self, why: str) -> None:
        """Tell the others that this node leaves on purpose; waits a second at most."""
        await self._joining.say_goodbye(
            Goodbye(incarnation_unix_ms=self._settings.incarnation_unix_ms, why=why[:512])
        )

    def connected(self) -> frozenset[NodeId]:
        """Neighbours with a live connection."""
        return self._carrier.connected()

    async def _reach(self, node: NodeId) -> None:
        await self._joining.reach(node)

    def _who_has(self, version: PolicyVersion) -> Iterable[NodeId]:
        return [m.node for m in self._joining.members() if m.heartbeat.version == version]

    def _beat(self) -> Heartbeat:
        self._sequence += 1
        return self.heartbeat()

    def heartbeat(self) -> Heartbeat:
        """What this node would say of itself now; `members` has what the others said."""
        here, wanted = self._following.progress_bytes()
        fields = dict(self._state)
        error = str(fields.pop("last_error", "")) or self._following.last_error
        return Heartbeat(
            role=self._settings.role,
            incarnation_unix_ms=self._settings.incarnation_unix_ms,
            sequence=self._sequence,
            name=self._settings.name,
            addresses=self._carrier.addresses()[: limits.ADDRESSES_MAX],
            fetched_bytes=here,
            fetch_bytes=wanted,
            last_error=error[:512],
            **fields,
        )

    async def _hear_heartbeat(self, node: NodeId, heartbeat: Heartbeat) -> None:
        if heartbeat.version is not None:
            self._following.peer_installed(node, heartbeat.version)


@asynccontextmanager
async def open_mesh(
    settings: MeshSettings,
    identity: Identity,
    store: ChunkStore,
    *,
    carrier: Carrier | None = None,
    rng: random.Random | None = None,
    inline_work: bool = False,
) -> AsyncIterator[Mesh]:
    """Join a run; leave it at the end of the block.

    Args:
        carrier: a network of the caller's, who also closes it; None opens py-libp2p.
        rng: spreads retries and breaks ties; pass a seeded one to reproduce a run.
        inline_work: hash and write on the event loop: for virtual clocks.

    Raises:
        UsageError: a bootstrap address without a node id.
        LocalError: the port is taken, or the store cannot be used.
    """
    for address in settings.bootstrap:
        split_address(address)
    rng = rng or random.Random()
    workers = Workers(inline=inline_work)
    if carrier is not None:
        async with _joined(settings, identity, store, carrier, rng, workers) as mesh:
            yield mesh
        return
    from echo2_mesh.net.libp2p_carrier import open_libp2p_carrier  # heavy: only when it is used

    async with (
        open_libp2p_carrier(
            identity,
            listen=settings.listen,
            announce=settings.announce,
            bootstrap=settings.bootstrap,
            mdns=settings.mdns,
            # What peers may join as well: an actor publishes rollouts and hears none.
            topics=topics_of(settings.run_id, learner=True),
        ) as real,
        _joined(settings, identity, store, real, rng, workers) as mesh,
    ):
        yield mesh


@asynccontextmanager
async def _joined(
    settings: MeshSettings,
    identity: Identity,
    store: ChunkStore,
    carrier: Carrier,
    rng: random.Random,
    workers: Workers,
) -> AsyncIterator[Mesh]:
    try:
        async with trio.open_nursery() as nursery:
            mesh = Mesh(settings, identity, store, carrier, nursery, rng, workers)
            await mesh.start(nursery)
            yield mesh
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        # The caller's own exception should look to it as it was raised, not wrapped by us.
        leaf = _sole(group)
        if leaf is None:
            raise
        raise leaf from None


def _sole(error: BaseException) -> BaseException | None:
    """The one exception inside nested groups, or None where there are several."""
    while isinstance(error, BaseExceptionGroup):
        if len(error.exceptions) != 1:
            return None
        error = error.exceptions[0]
    return error
