"""Lanes to peers: which way each is opened, what is remembered of it, and blobs over them.

A lane is had by the first way that works: we dial the peer, it dials us, or both at once through
their NATs; each is agreed in one signed question, with a token for one use and the hash of the
certificate to expect. A peer that no way leads to is left alone for a while, and its blobs go
over the control connection. Bytes are the bulk process's business (`net.bulk_process`).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
from collections.abc import Callable, Sequence

import trio

from echo2_mesh import limits
from echo2_mesh.bulk import words
from echo2_mesh.chunks import ChunkStore
from echo2_mesh.core.fetching import Fault
from echo2_mesh.errors import LocalError, PeerError, UsageError
from echo2_mesh.net.bulk_process import BulkProcess, Lost
from echo2_mesh.net.driver import Guard
from echo2_mesh.net.lane_places import Advertise, multiaddress, places_of, places_to_listen
from echo2_mesh.net.questions import Questions
from echo2_mesh.net.traffic import Traffic
from echo2_mesh.settings import BulkSettings
from echo2_mesh.wire.messages import ChunkRef, LaneAsk, LaneOffer, LaneWay
from echo2_mesh.wire.types import Digest, NodeId

log = logging.getLogger("echo2.net")

ASK_TIMEOUT_S = 5.0
REVERSE_TIMEOUT_S = limits.LANE_DIAL_TIMEOUT_S + limits.LANE_HANDSHAKE_TIMEOUT_S
LONG_PATH_S = 0.02
"""A round trip above which several connections carry more than one."""
ASKS_A_LANE = 3
WIDEN_INTERVAL_S = 1.0
SETTLE_S = 1.0
"""From the peer's word that it has dialled us until we see the lane."""
_FINAL = ("unreachable", "unknown_question")
"""Refusals of a `LaneAsk` that asking again soon will not change."""


class BlobFault(PeerError):
    """A peer did not deliver a blob; `fault` says how."""

    def __init__(self, what: str, fault: Fault) -> None:
        super().__init__(what, code=fault.value)
        self.fault = fault


class _Peer:
    """What is known of the ways to one peer."""

    def __init__(self) -> None:
        self.ways: list[str] = []
        self.trying: trio.Event | None = None
        self.best: LaneWay | None = None
        self.rtt_s = 0.0
        self.in_flight = 0
        self.more_at_s = 0.0
        self.rest_s = 0.0
        self.resting_until_s = 0.0

    @property
    def up(self) -> bool:
        return bool(self.ways)


class Lanes:
    """See the module.

    Args:
        observed: the address that others see this node at, or None.
    """

    def __init__(
        self,
        settings: BulkSettings,
        *,
        listen: tuple[str, ...],
        advertise: Advertise,
        observed: Callable[[], str | None],
        store: ChunkStore,
        questions: Questions,
        guard: Guard,
        nursery: trio.Nursery,
        traffic: Traffic,
    ) -> None:
        self.hidden: Callable[[NodeId], bool] = lambda node: False  # no side can be dialled
        self._settings = settings
        self._advertise = advertise
        self._observed = observed
        self._questions = questions
        self._guard = guard
        self._nursery = nursery
        self._traffic = traffic
        self._peers: dict[NodeId, _Peer] = {}
        self._changed = trio.Event()
        self._rates = (0.0, 0.0)
        places = places_to_listen(settings, listen)
        self._process = BulkProcess(
            store.folder,
            store.folder.parent / "logs" / "bulk.log",
            words.Listen(
                places=places,
                uplink_bytes_per_s=settings.uplink_bytes_per_s,
                downlink_bytes_per_s=settings.downlink_bytes_per_s,
            ),
            guard,
            hear=self._hear,
            lost=self._all_lost,
        )
        questions.answer(LaneAsk, self._answer)

    async def run(self) -> None:
        """Keep the bulk process until cancelled.

        Raises:
            LocalError: its port is taken.
        """
        await self._process.run()

    # --- blobs ---------------------------------------------------------------------------------

    async def fetch(
        self, peer: NodeId, ref: ChunkRef, *, timeout_s: float, wait_s: float = 0.0,
        make: bool = True,
    ) -> bool:  # fmt: skip
        """Have a blob in the store over a lane; False where there is none to this peer.

        Args:
            make: open a lane if there is none yet.

        Raises:
            BlobFault: the peer did not deliver it.
            LocalError: the store cannot take it.
        """
        until_s = trio.current_time() + timeout_s
        for _ in range(2):
            if not await self._have_lane(peer, timeout_s / 2, make=make):
                return False
            left_s = until_s - trio.current_time()
            known = self._peers[peer]
            known.in_flight += 1
            self._widen(peer, known)
            try:
                word = await self._process.get(peer, ref, timeout_s=left_s, wait_s=wait_s)
            except Lost:
                return False
            finally:
                known.in_flight -= 1
            if isinstance(word, words.Got):
                return True
            if not word.no_lane:
                name = f"Chunk {ref.digest.hex()[:8]} from {peer[-8:]}"
                if word.fault is None:
                    raise LocalError(f"{name} cannot be kept: {word.text}")
                raise BlobFault(f"{name}: {word.text}.", word.fault)
        return False

    def expect(self, digests: frozenset[Digest]) -> None:
        """These blobs, and no others, are on their way here: asks for them may wait."""
        self._process.expect(digests)

    def landed(self, digests: Sequence[Digest]) -> None:
        """Blobs came into the store past the lanes: asks for them need wait no longer."""
        self._process.say(words.Landed(digests=tuple(digests)))

    @property
    def last_error(self) -> str:
        """Why there is no bulk process now; empty while there is one."""
        return "" if self._process.up else self._process.last_error

    def hang_up(self, peer: NodeId) -> None:
        """Close every lane to `peer`."""
        self._process.say(words.HangUp(peer=peer))

    # --- what is shown -------------------------------------------------------------------------

    @property
    def pid(self) -> int | None:
        """Of the bulk process, when it is ready."""
        return self._process.pid if self._process.up else None

    def ways(self) -> dict[NodeId, str]:
        """Peers with a lane, and how it came about."""
        return {node: peer.ways[0] for node, peer in self._peers.items() if peer.ways}

    def rates(self) -> tuple[float, float]:
        """(uplink, downlink) in bytes per second: the caps, or what was measured; 0: unknown."""
        caps = (self._settings.uplink_bytes_per_s, self._settings.downlink_bytes_per_s)
        return caps[0] or self._rates[0], caps[1] or self._rates[1]

    def addresses(self) -> tuple[str, ...]:
        """Multiaddresses of the bulk port, most hopeful first."""
        known = self._process.address
        if known is None or not known.places:
            return ()
        announced = self._settings.announce
        own = self._advertise([multiaddress(place) for place in known.places])
        return tuple(dict.fromkeys((*announced, *own)))[: limits.LANE_PLACES_MAX]

    # --- making lanes --------------------------------------------------------------------------

    async def _have_lane(self, node: NodeId, patience_s: float, *, make: bool) -> bool:
        peer = self._peers.setdefault(node, _Peer())
        if peer.up:
            return True
        if not make or not self._process.up or trio.current_time() < peer.resting_until_s:
            return False
        if peer.trying is None:
            peer.trying = trio.Event()
            self._nursery.start_soon(self._try_all, node, peer)
        done = peer.trying
        with trio.move_on_after(min(patience_s, limits.LANE_PATIENCE_S)):
            while not (peer.up or done.is_set()):
                await self._changed.wait()
        return peer.up

    def _widen(self, node: NodeId, peer: _Peer) -> None:
        """One lane more to a far peer that has much to send: one window cannot fill the line."""
        now_s = trio.current_time()
        if (
            peer.best is None
            or peer.rtt_s < LONG_PATH_S
            or peer.in_flight < ASKS_A_LANE * len(peer.ways)
            or not 0 < len(peer.ways) < limits.LANES_PER_PEER_MAX
            or now_s < peer.more_at_s
        ):
            return
        peer.more_at_s = now_s + WIDEN_INTERVAL_S
        self._nursery.start_soon(self._try_once_more, node, peer, peer.best)

    async def _try_once_more(self, node: NodeId, peer: _Peer, way: LaneWay) -> None:
        try:
            refused = await self._try(way, node, peer)
        except (PeerError, UsageError, Lost) as error:
            refused = str(error)
        if refused:
            peer.best = None  # one lane must do

    async def _try_all(self, node: NodeId, peer: _Peer) -> None:
        first = peer.best or (LaneWay.PUNCH if self.hidden(node) else None)
        ways = sorted(LaneWay, key=lambda way: way is not first)  # stable: else their order
        reasons: list[str] = []
        transient = self._observed() is None or self.hidden(node)  # punches miss each other
        try:
            for way in ways:
                try:
                    with trio.fail_after(ASK_TIMEOUT_S + 2 * REVERSE_TIMEOUT_S):
                        why = await self._try(way, node, peer)
                except (PeerError, UsageError) as error:
                    why = error.what
                    transient |= getattr(error, "code", "") not in _FINAL
                except Lost:
                    why = "the bulk process ended"
                    transient = True
                except trio.TooSlowError:
                    why = "it took too long"
                if peer.up:
                    peer.best, peer.rest_s, peer.resting_until_s = way, 0.0, 0.0
                    return
                reasons.append(f"{way.value}: {why}")
            self._guard.counters["unreached_lanes"] += 1
            log.info("no lane to %s: %s", node[-8:], "; ".join(reasons)[:512])
            least_s = limits.LANE_RETRY_SOON_S if transient else limits.LANE_RETRY_S
            peer.rest_s = min(limits.LANE_RETRY_S_MAX, max(least_s, 2 * peer.rest_s))
            peer.resting_until_s = trio.current_time() + peer.rest_s
        finally:
            assert peer.trying is not None
            peer.trying.set()
            peer.trying = None
            self._notify()

    async def _try(self, way: LaneWay, node: NodeId, peer: _Peer) -> str:
        """One way; why it failed, or nothing."""
        if way is LaneWay.DIAL:
            mine: tuple[str, ...] = ()
        else:
            mine = self._meeting_places() if way is LaneWay.PUNCH else self.addresses()
        if way is not LaneWay.DIAL and not mine:
            return "this node has no address for it"
        ask = LaneAsk(
            way=way,
            places=mine,
            certificate=self._certificate(),
            token=self._admit(node, "reverse") if way is LaneWay.REVERSE else bytes(32),
        )
        timeout_s = ASK_TIMEOUT_S + (REVERSE_TIMEOUT_S if way is LaneWay.REVERSE else 0.0)
        offer = await self._questions.ask(node, ask, timeout_s=timeout_s)
        if not isinstance(offer, LaneOffer):
            return "it answered with something else"
        if way is LaneWay.REVERSE:
            with trio.move_on_after(SETTLE_S):
                while not peer.up:
                    await self._changed.wait()
            return "" if peer.up else "it says that it has come, and is not here"
        found = places_of(offer.places)
        if not found:
            return "it has no address for it"
        if way is LaneWay.PUNCH:
            return await self._process.punch(
                node, found, server=False, certificate=offer.certificate, token=offer.token
            )
        return await self._process.dial(node, found, offer.certificate, offer.token, way="dialled")

    async def _answer(self, node: NodeId, ask: LaneAsk) -> LaneOffer:
        if not self._process.up:
            raise PeerError("The bulk process is not up.", code="busy")
        places: tuple[str, ...] = ()
        token = bytes(32)
        if ask.way is LaneWay.DIAL:
            places = self.addresses()
            token = self._admit(node, "dialled") if places else token
        elif ask.way is LaneWay.REVERSE:
            theirs = places_of(ask.places)
            try:
                why = await self._process.dial(
                    node, theirs, ask.certificate, ask.token, way="reverse"
                )
            except Lost:
                why = "the bulk process ended"
            if why:
                raise PeerError(f"None of its addresses answers: {why}.", code="unreachable")
        else:
            places, theirs = self._meeting_places(), places_of(ask.places)
            if not places or not theirs:
                raise PeerError("Its public address is not known here.", code="busy")
            token = self._admit(node, "punched")
            self._nursery.start_soon(self._meet, node, theirs)
        return LaneOffer(places=places, certificate=self._certificate(), token=token)

    async def _meet(self, node: NodeId, places: tuple[words.Place, ...]) -> None:
        try:
            await self._process.punch(node, places, server=True)
        except Lost:
            self._guard.counters["lost_punches"] += 1

    def _meeting_places(self) -> tuple[str, ...]:
        """Where a NAT that keeps ports would show the bulk port."""
        known, ip = self._process.address, self._observed()
        if known is None or not ip:
            return ()
        return (multiaddress((ip, known.port)),)

    def _certificate(self) -> bytes:
        known = self._process.address
        return known.certificate if known is not None else bytes(32)

    def _admit(self, node: NodeId, way: str) -> bytes:
        token = secrets.token_bytes(limits.LANE_TOKEN_BYTES)
        self._process.say(
            words.Admit(token=token, peer=node, lifetime_s=limits.LANE_TICKET_LIFETIME_S, way=way)
        )
        return token

    # --- reports -------------------------------------------------------------------------------

    def _hear(self, word: words.Report) -> None:
        match word:
            case words.LaneUp(peer=node, way=way, rtt_s=rtt_s):
                peer = self._peers.setdefault(node, _Peer())
                peer.ways.append(way)
                peer.rtt_s = rtt_s
                peer.rest_s = peer.resting_until_s = 0.0
                self._guard.counters["lanes_opened"] += 1
                self._notify()
            case words.LaneDown(peer=node, way=way):
                peer = self._peers.setdefault(node, _Peer())
                with contextlib.suppress(ValueError):  # the process that it was of may be gone
                    peer.ways.remove(way)
                if not peer.ways and peer.trying is None and not peer.resting_until_s:
                    del self._peers[node]
            case words.Measures():
                self._rates = (word.uplink_bytes_per_s, word.downlink_bytes_per_s)
                for kind, (inward, outward) in word.kinds.items():
                    self._traffic.add_kind(kind, inward, outward)
                    self._guard.counters["bytes_in_blobs"] += inward
                    self._guard.counters["bytes_out_blobs"] += outward
                for node, (inward, outward) in word.peers.items():
                    self._traffic.add_peer(node, inward, outward)
                self._guard.counters.update(word.counters)
            case _:
                raise AssertionError(f"the bulk process says {type(word).__name__}")

    def _all_lost(self) -> None:
        self._peers = {node: peer for node, peer in self._peers.items() if peer.trying is not None}
        for peer in self._peers.values():
            peer.ways = []
        self._notify()

    def _notify(self) -> None:
        self._changed.set()
        self._changed = trio.Event()
