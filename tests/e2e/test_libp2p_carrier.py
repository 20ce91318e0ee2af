"""The real carrier over loopback: honest traffic, and what strangers may throw at it."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

import pytest
import trio
from libp2p.custom_types import TProtocol
from libp2p.pubsub.pb import rpc_pb2
from libp2p.pubsub.pubsub import PUBSUB_SIGNING_PREFIX

from echo2_mesh import limits
from echo2_mesh.errors import LocalError, PeerError, UsageError
from echo2_mesh.identity import Identity
from echo2_mesh.net import gossip, guards, streams
from echo2_mesh.net.connections import peer_of
from echo2_mesh.net.libp2p_carrier import Libp2pCarrier, open_libp2p_carrier

pytestmark = pytest.mark.e2e

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ECHO = "/echo2/test/1"
MESHSUB = TProtocol("/meshsub/1.1.0")
Open = Callable[..., Awaitable[Libp2pCarrier]]


async def echo(node: str, request: bytes) -> bytes:
    return b"re:" + request


@pytest.fixture
async def opened() -> AsyncIterator[Open]:
    """Opens carriers that answer ECHO, each in a task of its own; closes them all at the end."""
    async with trio.open_nursery() as nursery:

        async def live(
            identity: Identity,
            options: dict[str, Any],
            task_status: trio.TaskStatus[Libp2pCarrier] = trio.TASK_STATUS_IGNORED,
        ) -> None:
            async with open_libp2p_carrier(identity, topics=("t", "u"), **options) as carrier:
                carrier.serve(ECHO, echo, request_bytes_max=limits.MIB)
                task_status.started(carrier)
                await trio.sleep_forever()

        async def open_one(
            *, listen: tuple[str, ...] = LOOPBACK, identity: Identity | None = None, **options: Any
        ) -> Libp2pCarrier:
            options["listen"] = listen
            carrier: Libp2pCarrier = await nursery.start(
                live, identity or Identity.generate(), options
            )
            return carrier

        yield open_one
        nursery.cancel_scope.cancel()


async def ask(source: Libp2pCarrier, target: Libp2pCarrier, request: bytes = b"x") -> bytes:
    return await source.exchange(
        target.node, ECHO, request, reply_bytes_max=2 * limits.MIB, timeout_s=5
    )


async def join(source: Libp2pCarrier, target: Libp2pCarrier) -> None:
    await source.connect(target.node, target.addresses())


def full(carrier: Libp2pCarrier) -> str:
    return f"{carrier.addresses()[0]}/p2p/{carrier.node}"


def port_of(carrier: Libp2pCarrier) -> int:
    return int(carrier.addresses()[0].split("/")[4])


async def wait_until(true: Callable[[], bool], timeout_s: float = 10) -> None:
    with trio.fail_after(timeout_s):
        while not true():
            await trio.sleep(0.02)


async def test_a_node_that_only_dials_asks_and_is_asked_over_the_same_connection(
    opened: Open,
) -> None:
    hub, leaf = await opened(), await opened(listen=())
    assert leaf.addresses() == ()
    await join(leaf, hub)
    await wait_until(lambda: leaf.node in hub.connected())
    assert await ask(leaf, hub, b"up") == b"re:up"
    assert await ask(hub, leaf, b"down") == b"re:down"
    assert await ask(hub, leaf, bytes(limits.MIB)) == b"re:" + bytes(limits.MIB)


async def test_the_handler_is_told_who_asks(opened: Open) -> None:
    hub, leaf = await opened(), await opened(listen=())

    async def who(node: str, request: bytes) -> bytes:
        return node.encode()

    hub.serve("/echo2/who/1", who, request_bytes_max=10)
    await join(leaf, hub)
    said = await leaf.exchange(hub.node, "/echo2/who/1", b"", reply_bytes_max=100, timeout_s=5)
    assert said.decode() == leaf.node


async def test_a_request_above_the_limit_is_refused_before_it_is_read(opened: Open) -> None:
    hub, leaf = await opened(), await opened(listen=())
    await join(leaf, hub)
    connection = leaf._connections.live(peer_of(hub.node))[0]
    header = (limits.MIB + 1).to_bytes(4, "big")
    stream = await streams.open_stream(connection, ECHO, header)  # and never a byte of the body
    with trio.fail_after(3):
        await streams.wait_agreed(stream, ECHO)
        with pytest.raises(PeerError, match="size"):
            await streams.receive_length(stream)
    assert hub.counters["exchanges_refused_large"] == 1


async def test_a_reply_above_the_askers_limit_is_refused(opened: Open) -> None:
    hub, leaf = await opened(), await opened(listen=())
    await join(leaf, hub)
    with pytest.raises(PeerError, match="13 bytes"):
        await leaf.exchange(hub.node, ECHO, b"0123456789", reply_bytes_max=12, timeout_s=5)


async def test_a_protocol_that_nobody_serves_is_a_peer_error(opened: Open) -> None:
    hub, leaf = await opened(), await opened(listen=())
    await join(leaf, hub)
    with pytest.raises(PeerError, match="does not speak"):
        await leaf.exchange(hub.node, "/echo2/none/1", b"", reply_bytes_max=1, timeout_s=5)
    assert await ask(leaf, hub)


async def test_a_handler_that_raises_ends_its_stream_and_not_the_host(opened: Open) -> None:
    hub, leaf = await opened(), await opened(listen=())

    async def fail(node: str, request: bytes) -> bytes:
        raise RuntimeError("a bug")

    hub.serve("/echo2/bug/1", fail, request_bytes_max=10)
    await join(leaf, hub)
    with pytest.raises(PeerError, match="failed"):
        await leaf.exchange(hub.node, "/echo2/bug/1", b"", reply_bytes_max=1, timeout_s=5)
    assert await ask(leaf, hub)


async def test_a_handler_that_takes_too_long_costs_the_asker_its_own_timeout(opened: Open) -> None:
    hub, leaf = await opened(), await opened(listen=())

    async def sleep(node: str, request: bytes) -> bytes:
        await trio.sleep_forever()
        raise AssertionError

    hub.serve("/echo2/slow/1", sleep, request_bytes_max=10)
    await join(leaf, hub)
    with pytest.raises(PeerError, match=r"no reply in 0\.2 s"):
        await leaf.exchange(hub.node, "/echo2/slow/1", b"", reply_bytes_max=1, timeout_s=0.2)
    await trio.sleep(0.1)
    assert await ask(leaf, hub), "the connection survives a slow answer"


async def test_one_peer_cannot_have_more_requests_served_at_once_than_its_share(
    opened: Open,
) -> None:
    hub, leaf = await opened(), await opened(listen=())
    go = trio.Event()

    async def wait(node: str, request: bytes) -> bytes:
        await go.wait()
        return b""

    hub.serve("/echo2/wait/1", wait, request_bytes_max=10)
    await join(leaf, hub)
    outcomes: list[str] = []

    async def one() -> None:
        try:
            await leaf.exchange(hub.node, "/echo2/wait/1", b"", reply_bytes_max=1, timeout_s=10)
            outcomes.append("served")
        except PeerError as error:
            outcomes.append("busy" if "busy" in error.what else error.what)

    async with trio.open_nursery() as nursery:
        for _ in range(limits.INBOUND_ASKS_PER_PEER_MAX + 5):
            nursery.start_soon(one)
        await wait_until(lambda: outcomes.count("busy") == 5)
        go.set()
    assert outcomes.count("served") == limits.INBOUND_ASKS_PER_PEER_MAX


async def test_a_few_peers_that_ask_for_all_there_is_leave_a_place_for_everybody_else(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "INBOUND_ASKS_MAX", limits.INBOUND_ASKS_PER_PEER_MAX)
    hub, greedy, late = await opened(), await opened(listen=()), await opened(listen=())
    go, waiting = trio.Event(), 0

    async def wait(node: str, request: bytes) -> bytes:
        nonlocal waiting
        waiting += 1
        if node == greedy.node:
            await go.wait()
        return b"yours"

    hub.serve("/echo2/wait/1", wait, request_bytes_max=10)
    await join(greedy, hub)
    await join(late, hub)

    async def one(leaf: Libp2pCarrier) -> bytes:
        return await leaf.exchange(hub.node, "/echo2/wait/1", b"", reply_bytes_max=9, timeout_s=10)

    async with trio.open_nursery() as nursery:
        for _ in range(limits.INBOUND_ASKS_PER_PEER_MAX):
            nursery.start_soon(one, greedy)
        await wait_until(lambda: waiting == limits.INBOUND_ASKS_PER_PEER_MAX)
        assert await one(late) == b"yours"
        go.set()


async def test_nobody_at_an_address_is_a_peer_error_in_time(opened: Open) -> None:
    leaf = await opened(listen=())
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        port = silent.getsockname()[1]
        with trio.fail_after(5), pytest.raises(PeerError, match="does not answer"):
            await leaf.connect(Identity.generate().node, (f"/ip4/127.0.0.1/tcp/{port}",))
    with pytest.raises(PeerError, match="No address"):
        await leaf.connect(Identity.generate().node, ("/ip4/127.0.0.1/udp/1/quic-v1", "rubbish"))


async def test_another_identity_at_the_address_is_not_accepted(opened: Open) -> None:
    hub, leaf = await opened(), await opened(listen=())
    wanted = Identity.generate().node
    with pytest.raises(PeerError):
        await leaf.connect(wanted, hub.addresses())
    assert wanted not in leaf.connected()
    await join(leaf, hub)
    assert await ask(leaf, hub)


async def test_a_working_address_among_dead_ones_is_found(opened: Open) -> None:
    hub, leaf = await opened(), await opened(listen=())
    await leaf.connect(hub.node, ("/ip4/127.0.0.1/tcp/1", "/ip4/127.0.0.1/tcp/2", *hub.addresses()))
    assert await ask(leaf, hub)


async def test_disconnect_ends_the_connection_on_both_sides(opened: Open) -> None:
    hub, leaf = await opened(), await opened(listen=())
    await join(leaf, hub)
    await wait_until(lambda: bool(hub.connected()))
    await leaf.disconnect(hub.node)
    await wait_until(lambda: not hub.connected() and not leaf.connected())
    with pytest.raises(PeerError, match="no connection"):
        await ask(leaf, hub)
    await join(leaf, hub)
    assert await ask(leaf, hub)


async def test_connecting_is_quick_and_a_round_trip_is_quicker(opened: Open) -> None:
    hub, leaf = await opened(), await opened(listen=())
    start = time.perf_counter()
    await join(leaf, hub)
    connected = time.perf_counter()
    for _ in range(20):
        await ask(leaf, hub)
    mean_s = (time.perf_counter() - connected) / 20
    assert connected - start < 0.25, "the library's 250 ms head start is off"
    assert mean_s < 0.1


async def test_a_port_in_use_is_named_with_advice(opened: Open) -> None:
    first = await opened()
    address = first.addresses()[0]
    with pytest.raises(LocalError) as caught:
        async with open_libp2p_carrier(Identity.generate(), listen=(address,)):
            pass
    assert address in caught.value.what
    assert "in use" in caught.value.what
    assert "--listen" in caught.value.hint


async def test_the_port_is_free_after_closing_and_closing_is_quick() -> None:
    async with open_libp2p_carrier(Identity.generate(), listen=LOOPBACK) as hub:
        port = port_of(hub)
        async with open_libp2p_carrier(Identity.generate()) as leaf:
            await join(leaf, hub)
        closing = time.perf_counter()
    assert time.perf_counter() - closing < limits.CLOSE_TIMEOUT_S
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 1)


async def test_an_error_inside_the_block_comes_out_as_it_went_in() -> None:
    with pytest.raises(UsageError, match="mine"):
        async with open_libp2p_carrier(Identity.generate(), listen=LOOPBACK):
            raise UsageError("mine")


async def test_all_interfaces_are_advertised_by_their_addresses(opened: Open) -> None:
    hub = await opened(listen=("/ip4/0.0.0.0/tcp/0",))
    assert hub.addresses()
    assert not any("0.0.0.0" in address for address in hub.addresses())
    leaf = await opened(listen=())
    await join(leaf, hub)
    assert await ask(leaf, hub)


async def test_announced_addresses_win(opened: Open) -> None:
    hub = await opened(announce=("/ip4/203.0.113.7/tcp/4001",))
    assert hub.addresses() == ("/ip4/203.0.113.7/tcp/4001",)


async def test_gossip_reaches_every_subscriber_of_a_star_from_its_edge(opened: Open) -> None:
    hub = await opened()
    leaves = [await opened(listen=()) for _ in range(4)]
    heard: dict[str, list[bytes]] = {}
    for carrier in (hub, *leaves):

        async def hear(data: bytes, node: str = carrier.node) -> None:
            heard.setdefault(node, []).append(data)

        await carrier.subscribe("t", hear)
    for leaf in leaves:
        await join(leaf, hub)
    await wait_until(lambda: len(hub._gossip.pubsub.peer_topics.get("t", ())) == 4)
    await wait_until(lambda: bool(leaves[0]._gossip.pubsub.peer_topics.get("t")))
    await leaves[0].publish("t", b"from the edge")
    others = {carrier.node for carrier in (hub, *leaves[1:])}
    await wait_until(lambda: set(heard) >= others)
    assert all(heard[node] == [b"from the edge"] for node in others)
    assert leaves[0].node not in heard, "own messages are not heard"


async def test_gossip_reaches_all_of_five_nodes_in_a_line(opened: Open) -> None:
    line = [await opened() for _ in range(5)]
    heard: set[str] = set()
    for carrier in line:

        async def hear(data: bytes, node: str = carrier.node) -> None:
            heard.add(node)

        await carrier.subscribe("t", hear)
    for left, right in itertools.pairwise(line):
        await join(left, right)
    await wait_until(lambda: len(line[2]._gossip.pubsub.peer_topics.get("t", ())) == 2)
    with trio.fail_after(15):
        while len(heard) < 4:
            await line[0].publish("t", b"along the line")
            await trio.sleep(0.3)


async def test_a_subscription_that_was_forgotten_is_heard_again(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library forgets it when its own stream to the subscriber breaks."""
    monkeypatch.setattr(gossip, "SUBSCRIPTIONS_REPEAT_S", 0.2)
    learner, actor = await opened(), await opened(listen=())
    heard: list[bytes] = []

    async def hear(data: bytes) -> None:
        heard.append(data)

    await learner.subscribe("u", hear)
    await join(actor, learner)
    topics = actor._gossip.pubsub.peer_topics
    await wait_until(lambda: bool(topics.get("u")))
    actor._gossip.pubsub._handle_dead_peer(peer_of(learner.node))
    assert not topics.get("u")
    await wait_until(lambda: bool(topics.get("u")))
    with trio.fail_after(15):
        while not heard:
            await actor.publish("u", b"rollout")
            await trio.sleep(0.3)


async def test_a_publisher_that_is_not_subscribed_reaches_the_subscriber(opened: Open) -> None:
    learner, actor = await opened(), await opened(listen=())
    heard: list[bytes] = []

    async def hear(data: bytes) -> None:
        heard.append(data)

    await learner.subscribe("u", hear)
    await join(actor, learner)
    await wait_until(lambda: bool(actor._gossip.pubsub.peer_topics.get("u")))
    await actor.publish("u", b"rollout")
    await wait_until(lambda: heard == [b"rollout"])


async def test_a_slow_hearer_costs_messages_and_never_the_connection(opened: Open) -> None:
    hub, leaf = await opened(), await opened(listen=())
    go = trio.Event()

    async def hear(data: bytes) -> None:
        await go.wait()

    await hub.subscribe("t", hear)
    await join(leaf, hub)
    await wait_until(lambda: bool(leaf._gossip.pubsub.peer_topics.get("t")))
    for number in range(40):
        await leaf.publish("t", b"%d" % number)
        await trio.sleep(0.005)
    assert await ask(leaf, hub)
    go.set()


async def test_a_gossip_message_above_the_limit_is_our_own_error(opened: Open) -> None:
    hub = await opened()
    with pytest.raises(LocalError, match="limit"):
        await hub.publish("t", bytes(limits.GOSSIP_SIZE_BYTES_MAX + 1))


async def test_a_third_node_is_found_by_one_who_knows_only_the_hub(opened: Open) -> None:
    hub, giver = await opened(), await opened()
    seeker = await opened(listen=())
    await join(giver, hub)
    await join(seeker, hub)
    found: dict[str, tuple[str, ...]] = {}
    with trio.fail_after(15):
        while giver.node not in found:
            await giver.provide("echo2/run-1")
            found = dict(await seeker.find("echo2/run-1"))
            await trio.sleep(0.05)
    await seeker.connect(giver.node, found[giver.node])
    assert await ask(seeker, giver)
    assert giver.node in dict(await hub.find("echo2/run-1"))
    assert giver.node not in dict(await giver.find("echo2/run-1")), "nobody finds itself"
    assert dict(await seeker.find("echo2/run-2")) == {}


async def test_a_provider_still_finds_the_others(opened: Open) -> None:
    hub, one, two = await opened(), await opened(), await opened()
    await join(one, hub)
    await join(two, hub)
    with trio.fail_after(15):
        while two.node not in dict(await one.find("r")):
            await one.provide("r")
            await two.provide("r")
            await trio.sleep(0.05)


async def test_a_node_restarted_on_a_new_port_is_found_and_reached_again(opened: Open) -> None:
    hub, seeker = await opened(), await opened(listen=())
    await join(seeker, hub)
    identity = Identity.generate()
    async with contextlib.AsyncExitStack() as life:
        first = await life.enter_async_context(
            open_libp2p_carrier(identity, listen=LOOPBACK, bootstrap=(full(hub),))
        )
        old = first.addresses()
        await wait_until(lambda: first.node in hub.connected())
        await seeker.connect(first.node, old)
    second = await opened(identity=identity, bootstrap=(full(hub),))
    assert second.addresses() != old
    await wait_until(lambda: second.node in hub.connected())
    with trio.fail_after(15):
        while dict(await seeker.find("r")).get(second.node) != second.addresses():
            await second.provide("r")
            await trio.sleep(0.05)
    await seeker.connect(second.node, (*old, *second.addresses()))
    assert await ask(seeker, second)


async def test_a_bootstrap_node_that_comes_back_is_joined_again(opened: Open) -> None:
    identity = Identity.generate()
    async with open_libp2p_carrier(identity, listen=LOOPBACK) as hub:
        port, leaf = port_of(hub), await opened(listen=(), bootstrap=(full(hub),))
        await wait_until(lambda: hub.node in leaf.connected())
    await wait_until(lambda: not leaf.connected())
    hub = await opened(identity=identity, listen=(f"/ip4/127.0.0.1/tcp/{port}",))
    await wait_until(lambda: hub.node in leaf.connected())


def multicast_comes_back() -> bool:
    """True if this host hears its own multicast: some containers have none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as ear:
        ear.settimeout(1)
        try:
            ear.bind(("", 0))
            group = socket.inet_aton("224.0.0.251") + socket.inet_aton("0.0.0.0")
            ear.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, group)
            ear.sendto(b"hello", ("224.0.0.251", ear.getsockname()[1]))
            return ear.recv(10) == b"hello"
        except OSError:
            return False


async def test_mdns_finds_nodes_of_the_same_run_and_never_raises(opened: Open) -> None:
    giver = await opened(mdns=True, listen=("/ip4/0.0.0.0/tcp/0",))
    seeker = await opened(mdns=True, listen=())
    assert isinstance(await seeker.find("r"), tuple)
    if not multicast_comes_back():
        return
    with trio.fail_after(20):
        while dict(await seeker.find("r")).get(giver.node) != giver.addresses():
            await trio.sleep(0.1)


CHILD = """
import sys, trio
from echo2_mesh.identity import Identity
from echo2_mesh.net.libp2p_carrier import open_libp2p_carrier
async def echo(node, request): return b"re:" + request
async def main():
    identity = Identity(bytes.fromhex(sys.argv[1]))
    async with open_libp2p_carrier(identity, listen=("/ip4/127.0.0.1/tcp/0",)) as carrier:
        carrier.serve("/echo2/test/1", echo, request_bytes_max=1000)
        print(carrier.addresses()[0], flush=True)
        await trio.sleep_forever()
trio.run(main)
"""


@contextlib.contextmanager
def child(identity: Identity) -> Iterator[tuple[subprocess.Popen[str], str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", CHILD, identity.seed.hex()], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        yield process, process.stdout.readline().strip()
    finally:
        process.send_signal(signal.SIGCONT)
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_peer_that_dies_or_freezes_is_reached_again_at_its_new_port(
    opened: Open, end: signal.Signals
) -> None:
    leaf, identity = await opened(listen=()), Identity.generate()
    with child(identity) as (process, address), trio.fail_after(60):
        await leaf.connect(identity.node, (address,))
        process.send_signal(end)
        with child(identity) as (_, new_address):
            await leaf.connect(identity.node, (address, new_address))
            reply = await leaf.exchange(
                identity.node, ECHO, b"again", reply_bytes_max=100, timeout_s=5
            )
    assert reply == b"re:again"


async def test_a_request_to_a_frozen_peer_ends_at_its_deadline(opened: Open) -> None:
    leaf, identity = await opened(listen=()), Identity.generate()
    with child(identity) as (process, address), trio.fail_after(30):
        await leaf.connect(identity.node, (address,))
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(PeerError):
            await leaf.exchange(identity.node, ECHO, b"x", reply_bytes_max=100, timeout_s=0.5)
        await wait_until(lambda: identity.node not in leaf.connected())
    assert leaf.counters["connections_buried"] == 1


# --- strangers ---------------------------------------------------------------------------------


async def serves_honest_peers(hub: Libp2pCarrier) -> bool:
    async with open_libp2p_carrier(Identity.generate(), topics=("t",)) as guest:
        with trio.fail_after(10):
            await join(guest, hub)
            return await ask(guest, hub) == b"re:x"


async def test_random_bytes_on_the_port_hurt_nobody(opened: Open) -> None:
    hub, rng = await opened(), random.Random(1)
    greetings = (
        b"",
        b"\x13/multistream/1.0.0\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"\x16\x03\x01\x02\x00",
    )
    for number in range(40):
        stream = await trio.open_tcp_stream("127.0.0.1", port_of(hub))
        with contextlib.suppress(trio.BrokenResourceError):
            await stream.send_all(greetings[number % 4] + rng.randbytes(rng.randrange(1, 2000)))
        await stream.aclose()
    assert await serves_honest_peers(hub)


async def test_silent_connections_do_not_lock_honest_peers_out(opened: Open) -> None:
    hub = await opened()
    held = [await trio.open_tcp_stream("127.0.0.1", port_of(hub)) for _ in range(400)]
    assert await serves_honest_peers(hub)
    assert hub.counters["handshakes_dropped"] >= 400 - guards.HANDSHAKES_PER_IP_MAX
    for stream in held:
        await stream.aclose()


async def test_places_of_peers_that_left_are_free_again(
    opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guards, "INBOUND_PER_IP_MAX", 2)
    hub = await opened()
    for _ in range(4):
        assert await serves_honest_peers(hub)
        await wait_until(lambda: not hub.connected())
    one, two, three = [await opened(listen=()) for _ in range(3)]
    await join(one, hub)
    await join(two, hub)
    with pytest.raises(PeerError):
        await join(three, hub)
    assert hub.counters["connections_refused"] == 1


def varint(number: int) -> bytes:
    out = b""
    while number > 127:
        out += bytes((number & 127 | 128,))
        number >>= 7
    return out + bytes((number,))


PAYLOADS = (
    os.urandom(200),
    varint(300) + random.Random(2).randbytes(300),
    varint(1 << 40) + b"x" * 50,
    varint(500) + b"abc",
    bytes(64),
    b"\xff" * 40,
    b"",
)


async def test_rubbish_on_every_protocol_leaves_the_host_serving(opened: Open) -> None:
    hub, stranger = await opened(), await opened(listen=())

    async def ignore(data: bytes) -> None:
        await trio.lowlevel.checkpoint()

    await hub.subscribe("t", ignore)
    for protocol in [str(name) for name in hub._host.get_mux().get_protocols() if name]:
        for payload in PAYLOADS:
            await join(stranger, hub)
            connection = stranger._connections.live(peer_of(hub.node))[0]
            with contextlib.suppress(Exception):
                stream = await streams.open_stream(connection, protocol, payload)
                await trio.sleep(0.005)
                await (stream.close() if len(payload) % 2 else stream.reset())
    assert hub.counters["streams_failed"] > 0, "the rubbish reached what the guard is for"
    assert await serves_honest_peers(hub)


def hostile_message(rng: random.Random, stranger: Libp2pCarrier) -> rpc_pb2.Message:
    own = stranger._host
    message = rpc_pb2.Message(
        data=rng.randbytes(100),
        topicIDs=["t"],
        from_id=rng.choice([rng.randbytes(40), b"", own.get_id().to_bytes()]),
        seqno=rng.choice([b"", rng.randbytes(8)]),
    )
    if rng.random() < 0.5:
        message.from_id, message.seqno = own.get_id().to_bytes(), rng.randbytes(8)
        signed = PUBSUB_SIGNING_PREFIX.encode() + message.SerializeToString()
        message.signature = own.get_private_key().sign(signed)
        message.key = own.get_public_key().serialize()
    else:
        message.signature, message.key = rng.randbytes(64), rng.randbytes(rng.randrange(60))
    return message


def hostile_rpc(rng: random.Random, stranger: Libp2pCarrier) -> bytes:
    rpc = rpc_pb2.RPC()
    rpc.publish.extend(hostile_message(rng, stranger) for _ in range(rng.randrange(3)))
    for _ in range(rng.randrange(3)):
        rpc.control.ihave.add(topicID="t", messageIDs=[rng.randbytes(20), b"(b'a', b'b')", b""])
        rpc.control.iwant.add(messageIDs=[rng.randbytes(20), b"(1,", b"x"])
        rpc.control.graft.add(topicID=rng.choice(["t", "zz", ""]))
        rpc.control.prune.add(topicID="t", backoff=rng.choice([0, 2**63])).peers.add(
            peerID=rng.randbytes(40), signedPeerRecord=rng.randbytes(100)
        )
    if rng.random() < 0.5:
        rpc.subscriptions.add(subscribe=rng.random() < 0.7, topicid=rng.choice(["t", "a" * 3000]))
    if rng.random() < 0.3:
        rpc.senderRecord = rng.randbytes(200)
    body = rpc.SerializeToString()
    return varint(len(body)) + body


async def test_wellformed_hostile_gossip_leaves_the_host_serving_and_hearing(opened: Open) -> None:
    hub, honest = await opened(), await opened(listen=())
    heard: list[bytes] = []

    async def hear(data: bytes) -> None:
        heard.append(data)

    await hub.subscribe("t", hear)
    await join(honest, hub)
    rng = random.Random(5)
    for _ in range(8):
        async with open_libp2p_carrier(Identity.generate(), topics=("t",)) as stranger:
            await join(stranger, hub)
            connection = stranger._connections.live(peer_of(hub.node))[0]
            attack = [hostile_rpc(rng, stranger) for _ in range(15)]
            stream = await streams.open_stream(connection, str(MESHSUB))
            with contextlib.suppress(Exception):  # the hub may hang up at any of them
                for rpc in attack:
                    await stream.write(rpc)
            await trio.sleep(0.05)
    assert hub.counters["tasks_failed"] > 0, "the attack reached what the guard is for"
    assert await serves_honest_peers(hub)
    await wait_until(lambda: bool(honest._gossip.pubsub.peer_topics.get("t")))
    with trio.fail_after(10):
        while b"still here" not in heard:
            await honest.publish("t", b"still here")
            await trio.sleep(0.2)
