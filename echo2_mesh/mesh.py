"""The one door to the network: `open_mesh(...) -> Mesh`.

One nursery, one carrier, two machines (membership and fetch) and the protocols between them.
Daemons ask, answer, gossip, hear, fetch and announce here and never touch `echo2_mesh.net`.
Passes one machine's effects on as another's events; decides nothing itself.
"""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
import trio

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore
from echo2_mesh.core.forest import Seat
from echo2_mesh.core.members import Member, Standing
from echo2_mesh.core.seats import seats_of
from echo2_mesh.errors import sole
from echo2_mesh.identity import Identity
from echo2_mesh.net.blobs import Blobs, Workers
from echo2_mesh.net.carrier import Carrier
from echo2_mesh.net.driver import Guard
from echo2_mesh.net.envelopes import Envelopes
from echo2_mesh.net.following import Following
from echo2_mesh.net.joining import Joining, split_address
from echo2_mesh.net.lane_places import Advertise
from echo2_mesh.net.lanes import Lanes
from echo2_mesh.net.presence import Presence
from echo2_mesh.net.questions import Questions
from echo2_mesh.net.reach import reaching_of
from echo2_mesh.net.reading import ReadyVersion
from echo2_mesh.net.topics import Topics, topics_of
from echo2_mesh.net.traffic import Traffic, TrafficReport
from echo2_mesh.settings import BulkSettings, MeshSettings
from echo2_mesh.wire.codec import Opened
from echo2_mesh.wire.messages import Announce, ChunkRef, Goodbye, Heartbeat, Message
from echo2_mesh.wire.types import NodeId, PolicyVersion, Reach, Role

__all__ = [
    "BulkSettings", "Carrier", "Member", "Mesh", "MeshSettings", "ReadyVersion", "Standing",
    "TrafficReport", "open_mesh",
]  # fmt: skip

REBUILD_LOG = "logs/rebuild.log"
Spoken = TypeVar("Spoken", bound=msgspec.Struct)


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
        advertise: Advertise | None = None,
    ) -> None:
        self.node = identity.node
        self.run_id = settings.run_id
        self.learner = settings.learner
        self.store = store
        self.counters = carrier.counters
        self._settings = settings
        self._carrier = carrier
        self._envelopes = Envelopes(identity, settings.run_id, self.counters)
        guard = Guard(nursery, self.counters)
        self._topics = Topics(carrier, self._envelopes, guard)
        self._questions = Questions(carrier, self._envelopes, guard, self._reach)
        traffic = Traffic()
        self._lanes = self._make_lanes(advertise, guard, nursery, traffic)
        self._blobs = Blobs(
            carrier, store, workers, guard, self._reach, lanes=self._lanes, traffic=traffic
        )
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
            seats=self._seats,
            versions_kept=settings.versions_kept,
            versions_path=settings.versions_path,
            # A simulation's clock would run on while a child starts: there it works in place.
            rebuild_log_path=store.folder.parent / REBUILD_LOG if advertise else None,
        )
        self._presence = Presence(
            settings,
            addresses=carrier.addresses,
            traffic=self.traffic,
            reach=self.reach,
            progress_bytes=self._following.progress_bytes,
            last_error=lambda: self._following.last_error or self._bulk_error(),
        )
        self._joining = self._make_joining(workers, guard, nursery, rng)
        self._reaching = reaching_of(
            carrier, settings.learner, self._questions, guard, nursery, rng, self._joining
        )
        if self._lanes is not None and self._reaching is not None:
            self._lanes.hidden = self._reaching.hidden
        self._topics.hear(Heartbeat, self._hear_heartbeat)

    def _make_lanes(
        self, advertise: Advertise | None, guard: Guard, nursery: trio.Nursery, traffic: Traffic
    ) -> Lanes | None:
        if advertise is None or not self._settings.bulk.enabled:
            return None
        return Lanes(
            self._settings.bulk,
            listen=self._settings.listen,
            advertise=advertise,
            observed=self.observed_ip,
            store=self.store,
            questions=self._questions,
            guard=guard,
            nursery=nursery,
            traffic=traffic,
        )

    def _make_joining(
        self, workers: Workers, guard: Guard, nursery: trio.Nursery, rng: random.Random
    ) -> Joining:
        return Joining(
            carrier=self._carrier,
            learner=self._settings.learner,
            run_id=self._settings.run_id,
            bootstrap=self._settings.bootstrap,
            members_path=self._settings.members_path,
            questions=self._questions,
            topics=self._topics,
            workers=workers,
            guard=guard,
            nursery=nursery,
            rng=rng,
            beat=self._presence.beat,
            seal=self._envelopes.seal,
            peer_up=self._following.peer_up,
            peer_gone=self._following.peer_gone,
            announce_raw=lambda: self._following.announce_raw,
        )

    async def start(self, nursery: trio.Nursery) -> None:
        """Join; called once, by `open_mesh`."""
        await self._topics.join(learner=self._settings.role is Role.LEARNER)
        nursery.start_soon(self._following.run)
        nursery.start_soon(self._joining.run)
        if self._reaching is not None:
            nursery.start_soon(self._reaching.run)
        if self._lanes is not None:
            nursery.start_soon(self._lanes.run)

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

    def traffic(self) -> TrafficReport:
        """Bytes of blobs by kind and by peer, lanes and how they came about, measured rates."""
        return self._blobs.traffic()

    def _bulk_error(self) -> str:
        return self._lanes.last_error if self._lanes is not None else ""

    @property
    def bulk_pid(self) -> int | None:
        """The process that carries weights; None while there is none."""
        return self._lanes.pid if self._lanes is not None else None

    # --- membership ----------------------------------------------------------------------------

    def set_state(self, **fields: Any) -> None:
        """What the next heartbeats say; names of `Heartbeat` fields that the daemon knows."""
        if self._presence.set(**fields):
            self._joining.beat_soon()

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

    def reach(self) -> tuple[Reach, str]:
        """How others come to this node, and why, in one line for people."""
        if self._reaching is None:
            return Reach.UNKNOWN, ""
        return self._reaching.reach, self._reaching.reason

    def ways(self) -> dict[NodeId, str]:
        """How each neighbour is connected: direct, punched or relayed."""
        if self._reaching is None:
            return {}
        return {node: way.value for node, way in self._reaching.ways().items()}

    def observed_ip(self) -> str | None:
        """This node's address as neighbours see it; None while nobody has said."""
        return self._reaching.observed_ip() if self._reaching is not None else None

    async def _reach(self, node: NodeId) -> None:
        await self._joining.reach(node)

    def _who_has(self, version: PolicyVersion) -> Iterable[NodeId]:
        return [m.node for m in self._joining.members() if m.heartbeat.version == version]

    def _seats(self) -> tuple[Seat, ...]:
        """Who takes part in spreading weights now, this node included."""
        others = {
            member.node: member.heartbeat
            for member in self._joining.members()
            if member.standing is not Standing.GONE
        }
        return seats_of({**others, self.node: self.heartbeat()})

    def heartbeat(self) -> Heartbeat:
        """What this node would say of itself now; `members` has what the others said."""
        return self._presence.heartbeat()

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
    # Heavy: only when they are used.
    from echo2_mesh.net.host import advertised
    from echo2_mesh.net.libp2p_carrier import open_libp2p_carrier

    async with (
        open_libp2p_carrier(
            identity,
            listen=settings.listen,
            announce=settings.announce,
            bootstrap=settings.bootstrap,
            mdns=settings.mdns,
            relay=settings.relay,
            # What peers may join as well: an actor publishes rollouts and hears none.
            topics=topics_of(settings.run_id, learner=True),
        ) as real,
        _joined(
            settings, identity, store, real, rng, workers, lambda own: advertised(own, ())
        ) as mesh,
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
    advertise: Advertise | None = None,
) -> AsyncIterator[Mesh]:
    try:
        async with trio.open_nursery() as nursery:
            mesh = Mesh(settings, identity, store, carrier, nursery, rng, workers, advertise)
            await mesh.start(nursery)
            yield mesh
            nursery.cancel_scope.cancel()
    except BaseExceptionGroup as group:
        # The caller's own exception should look to it as it was raised, not wrapped by us.
        leaf = sole(group)
        if leaf is None:
            raise
        raise leaf from None
