"""Relays, punches and dial-backs over loopback: honest use, and what strangers may try."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
import trio
from libp2p.relay.circuit_v2.pb import circuit_pb2 as pb
from libp2p.utils.varint import encode_varint_prefixed

from echo2_mesh import limits
from echo2_mesh.core.reaching import Way
from echo2_mesh.core.relay_book import RelayBook, RelayLimits
from echo2_mesh.errors import PeerError
from echo2_mesh.identity import Identity
from echo2_mesh.net import streams
from echo2_mesh.net.circuits import HOP, STOP, split_circuit
from echo2_mesh.net.connections import peer_of
from echo2_mesh.net.libp2p_carrier import Libp2pCarrier, open_libp2p_carrier
from echo2_mesh.net.punching import DCUTR

pytestmark = pytest.mark.e2e

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ECHO = "/echo2/test/1"
Open = Callable[..., Awaitable[Libp2pCarrier]]


async def echo(node: str, request: bytes) -> bytes:
    return b"re:" + request


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    """Opens carriers that answer ECHO, each in a task of its own; closes them all at the end."""
    async with trio.open_nursery() as nursery:

        async def live(
            options: dict[str, Any],
            task_status: trio.TaskStatus[Libp2pCarrier] = trio.TASK_STATUS_IGNORED,
        ) -> None:
            async with open_libp2p_carrier(Identity.generate(), topics=("t",), **options) as made:
                made.serve(ECHO, echo, request_bytes_max=2 * limits.MIB)
                task_status.started(made)
                await trio.sleep_forever()

        async def open_one(*, listen: tuple[str, ...] = (), **options: Any) -> Libp2pCarrier:
            carrier: Libp2pCarrier = await nursery.start(live, {"listen": listen, **options})
            carrier.outreach.attend(lambda: "127.0.0.1", lambda node: True)
            return carrier

        yield open_one
        nursery.cancel_scope.cancel()


async def open_relay(opened: Open, **given: Any) -> Libp2pCarrier:
    relay = await opened(listen=LOOPBACK)
    relay.outreach.serve(True)
    relay._reached.relays.book = RelayBook(RelayLimits(**given))
    return relay


async def place_at(node: Libp2pCarrier, *relays: Libp2pCarrier) -> None:
    """A direct connection and a reservation at each."""
    for relay in relays:
        await node.connect(relay.node, relay.addresses())
        assert await node.outreach.reserve(relay.node) > 0
    node.outreach.announce((), {relay.node: relay.addresses() for relay in relays})


async def ask(source: Libp2pCarrier, target: Libp2pCarrier, request: bytes = b"x") -> bytes:
    return await source.exchange(
        target.node, ECHO, request, reply_bytes_max=4 * limits.MIB, timeout_s=10
    )


def ways(source: Libp2pCarrier, target: Libp2pCarrier) -> list[Way]:
    return [link.way for link in source.outreach.links() if link.node == target.node]


async def wait_until(true: Callable[[], bool], timeout_s: float = 15) -> None:
    with trio.fail_after(timeout_s):
        while not true():
            await trio.sleep(0.02)


async def test_a_relayed_connection_is_an_ordinary_one(opened: Open) -> None:
    relay, giver, asker = await open_relay(opened), await opened(), await opened()
    await place_at(giver, relay)
    (address,) = giver.addresses()
    assert split_circuit(address) == (relay.node, relay.addresses()[0])
    heard: list[bytes] = []

    async def hear(data: bytes) -> None:
        heard.append(data)

    await giver.subscribe("t", hear)
    await asker.connect(giver.node, giver.addresses())
    assert ways(asker, giver) == ways(giver, asker) == [Way.RELAYED]
    assert await ask(asker, giver) == b"re:x"
    assert await ask(giver, asker, b"back") == b"re:back"
    big = random.Random(1).randbytes(limits.MIB)
    assert await ask(asker, giver, big) == b"re:" + big
    assert relay.counters["relay_bytes"] > 2 * limits.MIB
    with trio.fail_after(20):
        while not heard:  # gossip meshes form in their own time
            await asker.publish("t", b"gossip")
            await trio.sleep(0.2)
    await asker.disconnect(giver.node)
    await wait_until(lambda: relay._reached.relays.book.circuits == 0)


async def test_a_dead_relay_ends_its_circuits_and_another_one_serves(opened: Open) -> None:
    one, two = await open_relay(opened), await open_relay(opened)
    giver, asker = await opened(), await opened()
    await place_at(giver, one, two)
    await asker.connect(giver.node, giver.addresses())
    carrying = one if one.counters["relay_circuits"] else two
    other = two if carrying is one else one
    carrying.outreach.serve(False)
    for node in (giver, asker):
        await carrying.disconnect(node.node)
    await wait_until(lambda: giver.node not in asker.connected())
    await asker.connect(giver.node, giver.addresses())
    assert await ask(asker, giver) == b"re:x"
    assert other.counters["relay_circuits"] == 1


async def test_opening_from_both_sides_replaces_the_relayed_connection(opened: Open) -> None:
    relay, giver, asker = await open_relay(opened), await opened(), await opened()
    await place_at(giver, relay)
    await asker.connect(relay.node, relay.addresses())
    await asker.connect(giver.node, giver.addresses())
    await giver.outreach.punch(asker.node)
    await wait_until(lambda: ways(asker, giver) == ways(giver, asker) == [Way.PUNCHED, Way.RELAYED])
    await giver.outreach.retire(asker.node)
    await wait_until(lambda: ways(asker, giver) == ways(giver, asker) == [Way.PUNCHED])
    before = relay.counters["relay_bytes"]
    assert await ask(asker, giver, bytes(100_000)) == b"re:" + bytes(100_000)
    assert relay.counters["relay_bytes"] - before < 50_000


async def test_a_relay_gives_no_more_than_it_promised(opened: Open) -> None:
    relay = await open_relay(
        opened, reservations=2, reservations_per_ip=1, circuits=1, circuit_bytes=500_000
    )
    giver, second, asker, late = [await opened() for _ in range(4)]
    await place_at(giver, relay)
    await second.connect(relay.node, relay.addresses())
    with pytest.raises(PeerError, match="resource limit exceeded"):
        await second.outreach.reserve(relay.node)
    await asker.connect(giver.node, giver.addresses())
    with pytest.raises(PeerError, match="resource limit exceeded"):
        await late.connect(giver.node, giver.addresses())
    with pytest.raises(PeerError):
        await ask(asker, giver, bytes(limits.MIB))
    await wait_until(lambda: relay.counters["relay_circuits_used_up"] == 1)
    await wait_until(lambda: giver.node not in asker.connected())
    await late.connect(giver.node, giver.addresses())
    assert await ask(late, giver) == b"re:x"


async def test_a_relay_serves_nobody_it_does_not_want_to(opened: Open) -> None:
    relay, node = await open_relay(opened), await opened()
    await node.connect(relay.node, relay.addresses())
    relay.outreach.attend(lambda: None, lambda _: False)
    with pytest.raises(PeerError, match="reservation refused"):
        await node.outreach.reserve(relay.node)
    relay.outreach.attend(lambda: None, lambda _: True)
    relay.outreach.serve(False)
    with pytest.raises(PeerError, match="reservation refused"):
        await node.outreach.reserve(relay.node)
    unwilling = await opened(listen=LOOPBACK, relay=False)
    unwilling.outreach.serve(True)
    await node.connect(unwilling.node, unwilling.addresses())
    with pytest.raises(PeerError, match="reservation refused"):
        await node.outreach.reserve(unwilling.node)
    # Without a place nobody is reached, and who has none says so at once.
    other = await opened()
    with pytest.raises(PeerError, match="refuse"):
        await other.connect(node.node, (f"{relay.addresses()[0]}/p2p/{relay.node}/p2p-circuit",))
    assert other._connections.dial_circuit is not None
    with pytest.raises(PeerError, match="third node"):
        await other._connections.dial_circuit(
            f"{relay.addresses()[0]}/p2p/{relay.node}/p2p-circuit", relay.node
        )


async def test_a_dial_back_proves_the_identity_and_leaves_nothing_behind(opened: Open) -> None:
    asker, other = await opened(listen=LOOPBACK), await opened(listen=LOOPBACK)
    helper = await opened()
    (place,) = asker.addresses()
    assert await helper.outreach.dial_back(asker.node, place)
    assert not await helper.outreach.dial_back(other.node, place)
    assert not await helper.outreach.dial_back(asker.node, "/ip4/127.0.0.1/tcp/9")
    assert helper.connected() == asker.connected() == frozenset()


async def knock(source: Libp2pCarrier, target: Libp2pCarrier, protocol: str, data: bytes) -> bytes:
    """Send `data` on a fresh stream of `protocol`; what comes back, if anything does."""
    (connection, *_) = source._connections.live(peer_of(target.node))
    answer = b""
    with trio.move_on_after(3), contextlib.suppress(Exception):  # it may be reset at any point
        stream = await streams.open_stream(connection, protocol)
        await streams.wait_agreed(stream, protocol)
        await streams.write(stream, data)
        await stream.close()
        answer = await stream.read(1024)
    return answer


async def test_nonsense_on_the_protocols_of_reach_harms_nobody(opened: Open) -> None:
    victim, stranger = await open_relay(opened), await opened()
    await stranger.connect(victim.node, victim.addresses())
    generator = random.Random(7)
    payloads = [
        b"",
        b"\x00",
        b"\xff" * 40,
        b"\x80\x80\x80\x80\x01",
        encode_varint_prefixed(generator.randbytes(200)),
        encode_varint_prefixed(pb.HopMessage(type=pb.HopMessage.CONNECT).SerializeToString()),
        encode_varint_prefixed(
            pb.HopMessage(
                type=pb.HopMessage.CONNECT, peer=pb.PeerId(id=b"\x01" * 33)
            ).SerializeToString()
        ),
        encode_varint_prefixed(
            pb.HopMessage(
                type=pb.HopMessage.CONNECT,
                peer=pb.PeerId(id=peer_of(victim.node).to_bytes()),
            ).SerializeToString()
        ),
    ]
    async with trio.open_nursery() as nursery:
        for protocol in (HOP, STOP, DCUTR):
            for payload in payloads:
                nursery.start_soon(knock, stranger, victim, protocol, payload)
    # Who holds no place at a relay accepts nobody from it.
    asked = pb.StopMessage(
        type=pb.StopMessage.CONNECT, peer=pb.PeerId(id=peer_of(stranger.node).to_bytes())
    )
    answer = await knock(stranger, victim, STOP, encode_varint_prefixed(asked.SerializeToString()))
    said = pb.StopMessage()
    said.ParseFromString(answer[1:])
    assert said.status == pb.Status.PERMISSION_DENIED
    assert await ask(stranger, victim) == b"re:x"
    assert victim._reached.relays.book.circuits == 0
    assert victim.counters["circuits_refused"] >= 1
    assert victim.counters["punches_refused"] == len(payloads)


async def test_a_lying_relay_cannot_pass_one_node_off_as_another(opened: Open) -> None:
    relay, giver, asker, third = await open_relay(opened), *[await opened() for _ in range(3)]
    await place_at(giver, relay)
    await place_at(third, relay)
    knocked = relay._reached.relays._knock

    async def astray(source: Any, target: Any) -> Any:
        return await knocked(source, third.node)

    relay._reached.relays._knock = astray  # type: ignore[method-assign]
    with pytest.raises(PeerError, match="does not answer through"):
        await asker.connect(giver.node, giver.addresses())
    assert giver.node not in asker.connected()
