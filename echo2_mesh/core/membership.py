"""Who is in the run, how sure we are of it, and whom to dial next.

Heartbeats order themselves by (incarnation, sequence), so gossip may repeat and reorder them; the
clocks of peers are never compared with ours. A silent member is first suspected, then gone, and
forgotten much later. The learner is always wanted as a neighbour, a handful of others beside it.
Decides only: `net.joining` dials, greets and remembers.
"""

from __future__ import annotations

from collections.abc import Iterable
from random import Random
from typing import assert_never

from echo2_mesh import limits
from echo2_mesh.core.machine import Arm, Woke, backoff_s
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
    MembershipEffect,
    MembershipEvent,
    Standing,
)
from echo2_mesh.wire.messages import Heartbeat
from echo2_mesh.wire.types import NodeId, Reach

NEIGHBOURS_WANTED = 8
"""Connections wanted beside the one to the learner, whoever opened them."""
HEARTBEATS_PER_S_MAX = 25.0
"""Above this the whole fleet beats more slowly: gossip carries some 30 to 60 messages a second."""
SWEEP_INTERVAL_S = 0.5
DIAL_FIRST_S = 0.5
DIAL_LONGEST_S = 30.0
DIAL_LEARNER_LONGEST_S = 5.0
FORGET_AFTER_S = 600.0
CONTACT_FAILURES_MAX = 6
"""Failed dials after which an address that no heartbeat ever confirmed is dropped."""
_SIGNED_ADDRESSES_KEPT = limits.ADDRESSES_MAX // 2
_SWEEP = "sweep"


class _Record:
    """All that is known of one node. Owned by the machine."""

    __slots__ = (
        "addresses",
        "connected",
        "dial_after_s",
        "dialling",
        "failures",
        "farewell_unix_ms",
        "heard_s",
        "heartbeat",
        "node",
        "raw",
        "standing",
    )  # fmt: skip

    def __init__(self, node: NodeId, now_s: float) -> None:
        self.node = node
        self.addresses: tuple[str, ...] = ()
        self.heartbeat: Heartbeat | None = None
        self.raw = b""
        self.heard_s = now_s
        self.standing = Standing.SUSPECT
        self.connected = False
        self.dialling = False
        self.failures = 0
        self.dial_after_s = now_s
        self.farewell_unix_ms = -1


def heartbeat_interval_s(members: int) -> float:
    """Seconds between a node's heartbeats in a fleet of `members`: slower in a large one."""
    return max(limits.HEARTBEAT_INTERVAL_S, members / HEARTBEATS_PER_S_MAX)


def _order(heartbeat: Heartbeat) -> tuple[int, int]:
    return heartbeat.incarnation_unix_ms, heartbeat.sequence


class Membership:
    """The member table of one node.

    Args:
        node: this node, never in its own table.
        learner: the one neighbour that is always wanted.
        rng: breaks ties among neighbours and spreads retries.
    """

    def __init__(
        self, node: NodeId, learner: NodeId, rng: Random, *, members_max: int = limits.MEMBERS_MAX
    ) -> None:
        self._node = node
        self._learner = learner
        self._rng = rng
        self._members_max = members_max
        self._records: dict[NodeId, _Record] = {}
        self._beating = 0
        self.replays = 0
        """Heartbeats and goodbyes older than what was known already."""

    # --- questions -----------------------------------------------------------------------------

    def members(self, now_s: float) -> tuple[Member, ...]:
        """Everybody a heartbeat was heard from and who is not forgotten."""
        return tuple(
            Member(
                node=record.node,
                heartbeat=record.heartbeat,
                standing=record.standing,
                connected=record.connected,
                seen_s_ago=max(0.0, now_s - record.heard_s),
            )
            for record in self._records.values()
            if record.heartbeat is not None
        )

    def addresses_of(self, node: NodeId) -> tuple[str, ...]:
        """Where `node` may be dialled; empty if unknown or dial-only."""
        record = self._records.get(node)
        return record.addresses if record else ()

    def heard(self, node: NodeId) -> bool:
        """True for a node that has sent a heartbeat and is not forgotten."""
        record = self._records.get(node)
        return record is not None and record.heartbeat is not None

    def knows(self, node: NodeId, raw: bytes) -> bool:
        """True if `raw` is the very envelope that was last accepted of `node`."""
        record = self._records.get(node)
        return record is not None and record.raw == raw

    def raw_heartbeats(self, count_max: int) -> tuple[bytes, ...]:
        """Envelopes of members that are up: the learner's, then the most recently heard ones.

        They fit a reply, however long some are.
        """
        live = [r for r in self._records.values() if r.standing is Standing.UP and r.raw]
        live.sort(key=lambda r: (r.node != self._learner, -r.heard_s))
        chosen: list[bytes] = []
        size_bytes = 0
        for record in live[:count_max]:
            size_bytes += len(record.raw)
            if size_bytes > limits.CAUGHT_UP_SIZE_BYTES_MAX:
                break
            chosen.append(record.raw)
        return tuple(chosen)

    def contacts(self, count_max: int) -> dict[NodeId, tuple[str, ...]]:
        """Dialable members worth remembering over a restart, the liveliest first."""
        ranked = sorted(
            (r for r in self._records.values() if r.addresses and r.heartbeat is not None),
            key=lambda r: (r.node != self._learner, r.standing is Standing.GONE, -r.heard_s),
        )
        return {r.node: r.addresses for r in ranked[:count_max]}

    @property
    def interval_s(self) -> float:
        """Seconds between this node's own heartbeats."""
        return heartbeat_interval_s(self._beating)

    # --- the machine ---------------------------------------------------------------------------

    def handle(self, event: MembershipEvent, now_s: float) -> tuple[MembershipEffect, ...]:
        """Take one event; return what to do, in order."""
        effects: list[MembershipEffect] = []
        match event:
            case HeartbeatHeard():
                self._heartbeat(event, now_s, effects)
            case GoodbyeHeard():
                self._goodbye(event, effects)
            case AddressesKnown():
                self._addresses(event, now_s)
            case Connected(node=node):
                self._connected(node, now_s, effects)
            case Disconnected(node=node):
                if (record := self._records.get(node)) is not None:
                    record.connected = False
                    record.dial_after_s = now_s + self._rng.uniform(0.0, DIAL_FIRST_S)
            case DialFailed(node=node):
                self._dial_failed(node, now_s)
            case Woke():
                self._sweep(now_s, effects)
                effects.append(Arm(key=_SWEEP, at_s=now_s + SWEEP_INTERVAL_S))
            case _:
                assert_never(event)
        effects.extend(self._dials(now_s))
        self._check(effects)
        return tuple(effects)

    def _record(self, node: NodeId, now_s: float, *, here: bool = False) -> _Record | None:
        """The record of `node`, made if there is room; None for ourselves or in a full table.

        Args:
            here: there is a connection to it. Those are few, heartbeats cost nothing to invent.
        """
        if node == self._node:
            return None
        record = self._records.get(node)
        if record is not None:
            return record
        if len(self._records) >= self._members_max and not self._make_room(node, here):
            return None
        record = self._records[node] = _Record(node, now_s)
        return record

    def _make_room(self, node: NodeId, here: bool) -> bool:
        """Drop the longest silent of those that are lost.

        For the learner, and for who is `here`: of all that are idle.
        """
        idle = [
            record
            for record in self._records.values()
            if not (record.connected or record.dialling or record.node == self._learner)
        ]
        lost = [r for r in idle if r.standing is Standing.GONE or r.heartbeat is None]
        if here or node == self._learner:
            lost = lost or idle
        if lost:
            self._drop(min(lost, key=lambda record: record.heard_s))
        return bool(lost)

    def _drop(self, record: _Record) -> None:
        del self._records[record.node]
        self._beating -= record.heartbeat is not None

    def _heartbeat(
        self, event: HeartbeatHeard, now_s: float, effects: list[MembershipEffect]
    ) -> None:
        record = self._record(event.node, now_s)
        if record is None:
            return
        new, old = event.heartbeat, record.heartbeat
        if new.incarnation_unix_ms <= record.farewell_unix_ms or (
            old is not None and _order(new) <= _order(old)
        ):
            self.replays += 1
            return
        reborn = old is None or new.incarnation_unix_ms > old.incarnation_unix_ms
        if reborn or (old is not None and new.addresses != old.addresses):
            record.addresses = new.addresses
            record.failures = 0
            record.dial_after_s = now_s
        self._beating += old is None
        record.heartbeat, record.raw, record.heard_s = new, event.raw, now_s
        self._stand(record, Standing.UP, effects, always=old is None)

    def _goodbye(self, event: GoodbyeHeard, effects: list[MembershipEffect]) -> None:
        record = self._records.get(event.node)
        if record is None or record.heartbeat is None:
            return
        if event.incarnation_unix_ms < record.heartbeat.incarnation_unix_ms:
            self.replays += 1
            return
        record.farewell_unix_ms = event.incarnation_unix_ms
        record.raw = b""
        self._stand(record, Standing.GONE, effects)

    def _addresses(self, event: AddressesKnown, now_s: float) -> None:
        record = self._record(event.node, now_s)
        if record is None:
            return
        fresh = tuple(a for a in event.addresses if a not in record.addresses)
        if fresh:
            # New places first: after a restart on another port the old ones lead nowhere. But what
            # the node signed itself is never crowded out by what somebody says of it.
            beat = record.heartbeat
            signed = beat.addresses[:_SIGNED_ADDRESSES_KEPT] if beat is not None else ()
            hearsay = tuple(a for a in fresh + record.addresses if a not in signed)
            record.addresses = (hearsay[:1] + signed + hearsay[1:])[: limits.ADDRESSES_MAX]
            record.failures = 0
            record.dial_after_s = now_s

    def _connected(self, node: NodeId, now_s: float, effects: list[MembershipEffect]) -> None:
        record = self._record(node, now_s, here=True)
        if record is None:
            return
        record.dialling = False
        record.failures = 0
        if not record.connected:
            record.connected = True
            effects.append(Greet(node=node))

    def _dial_failed(self, node: NodeId, now_s: float) -> None:
        record = self._records.get(node)
        if record is None:
            return
        longest_s = DIAL_LEARNER_LONGEST_S if node == self._learner else DIAL_LONGEST_S
        pause_s = backoff_s(record.failures, first_s=DIAL_FIRST_S, longest_s=longest_s)
        record.dialling = False
        record.failures += 1
        record.dial_after_s = now_s + pause_s * self._rng.uniform(0.5, 1.5)

    def _stand(
        self,
        record: _Record,
        standing: Standing,
        effects: list[MembershipEffect],
        *,
        always: bool = False,
    ) -> None:
        if always or record.standing is not standing:
            record.standing = standing
            effects.append(Changed(node=record.node, standing=standing))

    def _sweep(self, now_s: float, effects: list[MembershipEffect]) -> None:
        stretch = self.interval_s / limits.HEARTBEAT_INTERVAL_S
        for record in tuple(self._records.values()):
            silent_s = now_s - record.heard_s
            wanted = record.connected or record.dialling or record.node == self._learner
            if record.heartbeat is None:
                lost = record.failures >= CONTACT_FAILURES_MAX or silent_s > FORGET_AFTER_S
                if lost and not wanted:
                    self._drop(record)
                    effects.append(Forget(node=record.node))
            elif silent_s > FORGET_AFTER_S and not wanted:
                self._drop(record)
                effects.append(Forget(node=record.node))
            elif silent_s > limits.GONE_AFTER_S * stretch:
                self._stand(record, Standing.GONE, effects)
            elif silent_s > limits.SUSPECT_AFTER_S * stretch and record.standing is Standing.UP:
                self._stand(record, Standing.SUSPECT, effects)

    def _dials(self, now_s: float) -> Iterable[Dial]:
        """The learner whenever it is not connected; others up to the wanted number."""
        busy = 0
        ready: list[_Record] = []
        for record in self._records.values():
            if record.node != self._learner and (record.connected or record.dialling):
                busy += 1
            elif (
                record.addresses
                and not (record.connected or record.dialling)
                and now_s >= record.dial_after_s
            ):
                ready.append(record)
        if not ready:
            return
        self._rng.shuffle(ready)
        ready.sort(key=lambda r: (r.node != self._learner, _rank(r), _hidden(r), r.failures))
        for record in ready:
            if record.node != self._learner:
                if busy >= NEIGHBOURS_WANTED:
                    return
                busy += 1
            record.dialling = True
            yield Dial(node=record.node, addresses=record.addresses)

    def _check(self, effects: list[MembershipEffect]) -> None:
        assert self._node not in self._records
        assert len(self._records) <= self._members_max
        dialled = [e.node for e in effects if isinstance(e, Dial)]
        assert len(dialled) == len(set(dialled))
        assert not any(self._records[node].connected for node in dialled)


def _hidden(record: _Record) -> bool:
    """True for a member that only a relay leads to: a neighbour in need of a third one."""
    beat = record.heartbeat
    return beat is not None and beat.reach in (Reach.PUNCHED, Reach.RELAYED)


def _rank(record: _Record) -> int:
    """Lower is dialled sooner: live members, unproven contacts, then the silent ones."""
    if record.heartbeat is None:
        return 1
    return {Standing.UP: 0, Standing.SUSPECT: 2, Standing.GONE: 3}[record.standing]
