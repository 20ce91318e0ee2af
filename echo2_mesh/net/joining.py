"""Finds members, keeps connections to some of them, and tells everybody that this node lives.

The hands of `core.membership`: dials, greets a new neighbour by asking what it has heard, beats,
searches the DHT, and remembers addresses over a restart. Whom to dial is the machine's decision.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path
from random import Random
from typing import assert_never

import msgspec
import trio

from echo2_mesh import limits
from echo2_mesh.core.machine import Arm, Woke
from echo2_mesh.core.members import (
    AddressesKnown,
    Changed,
    Connected,
    Dial,
    DialFailed,
    Disconnected,
    Forget,
    GoodbyeHeard,
    Greet,
    HeartbeatHeard,
    Member,
    MembershipEvent,
    Standing,
)
from echo2_mesh.core.membership import Membership
from echo2_mesh.errors import PeerError, UsageError
from echo2_mesh.net.blobs import Workers
from echo2_mesh.net.carrier import Carrier
from echo2_mesh.net.driver import Driver, Guard
from echo2_mesh.net.questions import Questions
from echo2_mesh.net.topics import Topics
from echo2_mesh.wire.codec import Opened
from echo2_mesh.wire.messages import CatchUp, CaughtUp, Done, Goodbye, Heartbeat
from echo2_mesh.wire.types import NodeId

WATCH_INTERVAL_S = 0.2
CATCH_UP_INTERVAL_S = 4.0
CATCH_UP_CALM_S = 20.0
"""The same while everybody is heard of: what gossip lost is then at most this old."""
CATCH_UP_TIMEOUT_S = 5.0
DISCOVERY_FIRST_S = 1.0
DISCOVERY_TIMEOUT_S = 10.0
DISCOVERY_SETTLED_S = 120.0
"""Lookups become as rare as this while the learner is connected: each asks every server of a small
fleet."""
PROVIDE_INTERVAL_S = 120.0
REMEMBER_INTERVAL_S = 2.0
REMEMBERED_MAX = 256
GOODBYE_TIMEOUT_S = 1.0
GOODBYE_NEIGHBOURS_MAX = 16


def split_address(address: str) -> tuple[NodeId, str]:
    """A multiaddress that ends in /p2p/<node> as (node, the rest).

    Raises:
        UsageError: it does not.
    """
    place, separator, node = address.rpartition("/p2p/")
    if not (separator and place and node):
        raise UsageError(
            f"'{address}' does not say who is there.", "An address ends in /p2p/<node id>."
        )
    return NodeId(node), place


class Joining:
    """The membership plane of one node.

    Args:
        bootstrap: addresses with /p2p/<node>, dialled at the start and again whenever lost.
        members_path: remembers addresses over restarts; None remembers nothing.
        beat: makes this node's next heartbeat.
        peer_up, peer_gone: told of every connection.
        announce_raw: the newest announcement's envelope, passed on to whoever asks.
    """

    def __init__(
        self,
        *,
        carrier: Carrier,
        learner: NodeId,
        run_id: str,
        bootstrap: tuple[str, ...],
        members_path: Path | None,
        questions: Questions,
        topics: Topics,
        workers: Workers,
        guard: Guard,
        nursery: trio.Nursery,
        rng: Random,
        beat: Callable[[], Heartbeat],
        seal: Callable[[Heartbeat], bytes],
        peer_up: Callable[[NodeId], Awaitable[None]],
        peer_gone: Callable[[NodeId], Awaitable[None]],
        announce_raw: Callable[[], bytes | None],
    ) -> None:
        self._carrier = carrier
        self._learner = learner
        self._key = f"echo2/{run_id}"
        self._bootstrap = tuple(split_address(address) for address in bootstrap)
        self._members_path = members_path
        self._questions = questions
        self._topics = topics
        self._workers = workers
        self._guard = guard
        self._nursery = nursery
        self._rng = rng
        self._beat = beat
        self._seal = seal
        self._peer_up = peer_up
        self._peer_gone = peer_gone
        self._announce_raw = announce_raw
        self.table = Membership(carrier.node, learner, rng)
        self._driver: Driver[MembershipEvent] = Driver(self.table, self._perform)
        self._connected: frozenset[NodeId] = frozenset()
        self._dialling: dict[NodeId, trio.Event] = {}
        self._look_around = trio.Event()
        self._hurry = trio.Event()
        questions.answer(CatchUp, self._answer_catch_up)
        questions.answer(Goodbye, self._answer_goodbye)
        topics.hear_opened(Heartbeat, self._hear_heartbeat)
        topics.hear(Goodbye, self._hear_goodbye)

    def members(self) -> tuple[Member, ...]:
        """The table as values."""
        return self.table.members(trio.current_time())

    async def run(self) -> None:
        """Join and stay joined, until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._driver.run)
            await self._recall()
            self._driver.post_nowait(Woke(key="sweep"))
            for task in (self._watch, self._discover, self._breathe, self._mingle, self._remember):
                nursery.start_soon(task)

    # --- connections ---------------------------------------------------------------------------

    async def reach(self, node: NodeId) -> None:
        """Have a connection to `node`, dialling where its heartbeat said.

        Raises:
            PeerError: nobody there, or nobody knows where.
        """
        if node in self._carrier.connected():
            return
        addresses = self.table.addresses_of(node) or tuple(
            place for known, place in self._bootstrap if known == node
        )
        if not addresses and node not in self._dialling:
            raise PeerError(
                f"{node[-8:]} is not connected and its address is not known.", code="unreachable"
            )
        await self._dial(node, addresses)

    async def _dial(self, node: NodeId, addresses: tuple[str, ...]) -> None:
        pending = self._dialling.get(node)
        if pending is not None:
            await pending.wait()
            if node not in self._carrier.connected():
                raise PeerError(f"{node[-8:]} could not be reached.", code="unreachable")
            return
        done = self._dialling[node] = trio.Event()
        try:
            await self._carrier.connect(node, addresses)
        except PeerError as error:
            raise PeerError(error.what, error.hint, code="unreachable") from error
        finally:
            del self._dialling[node]
            done.set()
        await self._notice()

    async def _dial_task(self, node: NodeId, addresses: tuple[str, ...]) -> None:
        with contextlib.suppress(PeerError):
            await self._dial(node, addresses)
        if node in self._carrier.connected():
            await self._driver.post(Connected(node=node))
        else:
            self._guard.counters["failed_dials"] += 1
            await self._driver.post(DialFailed(node=node))

    async def _watch(self) -> None:
        while True:
            await self._notice()
            await trio.sleep(WATCH_INTERVAL_S)

    async def _notice(self) -> None:
        """Tell both machines of connections that came and went."""
        now = self._carrier.connected()
        came, went = now - self._connected, self._connected - now
        self._connected = now
        for node in sorted(went):
            await self._peer_gone(node)
            await self._driver.post(Disconnected(node=node))
        for node in sorted(came):
            await self._peer_up(node)
            await self._driver.post(Connected(node=node))
        if self._learner in went or (came and len(came) == len(now)):
            self._look_around.set()

    def _perform(self, effect: Dial | Greet | Changed | Forget | Arm) -> None:
        match effect:
            case Dial(node=node, addresses=addresses):
                self._nursery.start_soon(self._dial_task, node, addresses)
            case Greet(node=node):
                self._nursery.start_soon(self._greet, node)
            case Changed(standing=standing):
                self._guard.counters[f"members_{standing.value}"] += 1
            case Forget():
                self._guard.counters["members_forgotten"] += 1
            case Arm():
                raise AssertionError("the driver keeps alarms")
            case _:
                assert_never(effect)

    # --- catching up ---------------------------------------------------------------------------

    async def _greet(self, node: NodeId) -> None:
        for _ in range(3):
            if node not in self._carrier.connected() or await self._catch_up(node):
                return
            await trio.sleep(self._rng.uniform(0.5, 1.0))

    async def _catch_up(self, node: NodeId) -> bool:
        """Ask `node` for what we missed; False if it did not answer."""
        try:
            reply = await self._questions.ask(node, CatchUp(), timeout_s=CATCH_UP_TIMEOUT_S)
        except PeerError:
            self._guard.counters["failed_catch_ups"] += 1
            return False
        if not isinstance(reply, CaughtUp):
            self._guard.counters["failed_catch_ups"] += 1
            return False
        for raw in (reply.announce, *reply.heartbeats):
            if raw is not None:
                await self._guard.forgive("refused_gossip", self._topics.deliver(raw))
                await trio.lowlevel.checkpoint()
        return True

    async def _mingle(self) -> None:
        """Gossip loses messages: now and then ask one neighbour, a silent one first."""
        calm_s = trio.current_time()
        while True:
            await trio.sleep(CATCH_UP_INTERVAL_S * self._rng.uniform(0.75, 1.25))
            connected, now_s = self._carrier.connected(), trio.current_time()
            unwell = [m.node for m in self.members() if m.standing is Standing.SUSPECT]
            if not connected or (not unwell and now_s - calm_s < CATCH_UP_CALM_S):
                continue
            calm_s = now_s
            silent = [node for node in unwell if node in connected]
            node = self._rng.choice(silent or sorted(connected))
            if not await self._catch_up(node) and node in silent:
                # A connection that says nothing and answers nothing is a corpse.
                await self._carrier.disconnect(node)
                await self._notice()

    async def _answer_catch_up(self, peer: NodeId, ask: CatchUp) -> CaughtUp:
        own = self._seal(self._beat())
        return CaughtUp(
            announce=self._announce_raw(),
            heartbeats=(own, *self.table.raw_heartbeats(limits.CATCH_UP_HEARTBEATS_MAX - 1)),
        )

    # --- heartbeats ----------------------------------------------------------------------------

    async def _breathe(self) -> None:
        while True:
            await self._topics.gossip(self._beat())
            with trio.move_on_after(self.table.interval_s * self._rng.uniform(0.9, 1.1)):
                await self._hurry.wait()
            self._hurry = trio.Event()

    def beat_soon(self) -> None:
        """There is news in the next heartbeat; a large fleet waits for its turn all the same."""
        if self.table.interval_s <= limits.HEARTBEAT_INTERVAL_S:
            self._hurry.set()

    async def _hear_heartbeat(self, opened: Opened) -> None:
        message = opened.message
        assert isinstance(message, Heartbeat)
        if len(opened.raw) > limits.HEARTBEAT_SIZE_BYTES_MAX:
            raise PeerError(f"A heartbeat of {len(opened.raw)} bytes from {opened.sender[-8:]}.")
        await self._driver.post(
            HeartbeatHeard(node=opened.sender, heartbeat=message, raw=opened.raw)
        )

    async def _hear_goodbye(self, node: NodeId, message: Goodbye) -> None:
        await self._driver.post(
            GoodbyeHeard(node=node, incarnation_unix_ms=message.incarnation_unix_ms)
        )

    async def _answer_goodbye(self, peer: NodeId, message: Goodbye) -> Done:
        await self._topics.dispatch(Opened(sender=peer, message=message, raw=b""))
        return Done()

    async def say_goodbye(self, message: Goodbye) -> None:
        """Tell the fleet by gossip, and neighbours directly; waits a second at most."""
        await self._topics.gossip(message)
        neighbours = sorted(self._carrier.connected(), key=lambda n: (n != self._learner, n))
        with trio.move_on_after(GOODBYE_TIMEOUT_S):
            async with trio.open_nursery() as nursery:
                for node in neighbours[:GOODBYE_NEIGHBOURS_MAX]:
                    nursery.start_soon(self._tell, node, message)

    async def _tell(self, node: NodeId, message: Goodbye) -> None:
        with contextlib.suppress(PeerError):
            await self._questions.ask(node, message, timeout_s=GOODBYE_TIMEOUT_S)

    # --- discovery -----------------------------------------------------------------------------

    async def _discover(self) -> None:
        """Search often while the learner is lost, rarely otherwise."""
        pause_s = DISCOVERY_FIRST_S
        provided_s = float("-inf")
        while True:
            for node, place in self._bootstrap:
                await self._driver.post(AddressesKnown(node=node, addresses=(place,)))
            connected = self._carrier.connected()
            if connected and trio.current_time() - provided_s >= PROVIDE_INTERVAL_S:
                provided_s = trio.current_time()
                with trio.move_on_after(DISCOVERY_TIMEOUT_S):
                    await self._carrier.provide(self._key)
            with trio.move_on_after(DISCOVERY_TIMEOUT_S):
                for node, places in await self._carrier.find(self._key):
                    if places:
                        bounded = places[: limits.ADDRESSES_MAX]
                        await self._driver.post(AddressesKnown(node=node, addresses=bounded))
            at_home = self._learner in {self._carrier.node, *self._carrier.connected()}
            if at_home:
                pause_s = min(max(2 * pause_s, limits.DISCOVERY_INTERVAL_S), DISCOVERY_SETTLED_S)
            else:
                pause_s = min(1.5 * pause_s, limits.DISCOVERY_INTERVAL_S)
            with trio.move_on_after(pause_s * self._rng.uniform(0.8, 1.2)):
                await self._look_around.wait()
            lonely = self._look_around.is_set()
            self._look_around = trio.Event()
            if lonely:
                pause_s = DISCOVERY_FIRST_S
                provided_s = min(provided_s, trio.current_time() - PROVIDE_INTERVAL_S)

    # --- memory --------------------------------------------------------------------------------

    async def _recall(self) -> None:
        """Addresses of the last time. A damaged file is worth nothing and harms nothing."""
        if self._members_path is None:
            return
        try:
            data = await self._workers.run(self._members_path.read_bytes)
            known = msgspec.json.decode(data, type=dict[str, tuple[str, ...]])
        except (OSError, msgspec.MsgspecError, ValueError):
            return
        for node, places in list(known.items())[:REMEMBERED_MAX]:
            bounded = places[: limits.ADDRESSES_MAX]
            await self._driver.post(AddressesKnown(node=NodeId(node), addresses=bounded))

    async def _remember(self) -> None:
        last: dict[NodeId, tuple[str, ...]] = {}
        while self._members_path is not None:
            await trio.sleep(REMEMBER_INTERVAL_S)
            contacts = self.table.contacts(REMEMBERED_MAX)
            if contacts and contacts != last:
                try:
                    await self._workers.run(_rewrite, self._members_path, contacts)
                except OSError:
                    self._guard.counters["members_file_failures"] += 1
                else:
                    last = contacts


def _rewrite(path: Path, contacts: dict[NodeId, tuple[str, ...]]) -> None:
    """Replace the file in one step: a crash leaves the old or the new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        part.write_bytes(msgspec.json.encode(contacts))
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
