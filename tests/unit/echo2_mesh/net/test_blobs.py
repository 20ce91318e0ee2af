"""Blobs over the control connection: who waits for what, and what is counted."""

from collections import Counter

import msgspec
import pytest
import trio

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore, digest_of
from echo2_mesh.net import blobs as blobs_module
from echo2_mesh.net.blobs import HERE, ILLEGAL, MISSING, Blobs, Workers
from echo2_mesh.net.driver import Guard
from echo2_mesh.net.traffic import Flow, Traffic
from echo2_mesh.testing import identity_of
from echo2_mesh.wire.messages import BlobAsk, ChunkRef
from echo2_mesh.wire.types import ChunkKind

PEER = identity_of("peer").node
DATA = b"weights"
REF = ChunkRef(kind=ChunkKind.FULL, digest=digest_of(DATA), size_bytes=len(DATA))


class Wire:
    """A carrier with one peer at the other end."""

    def __init__(self, reply=HERE + DATA):
        self.reply = reply
        self.asked = []
        self.serve_blob = None

    def serve(self, protocol, handler, *, request_bytes_max):
        self.serve_blob = handler

    async def exchange(self, node, protocol, request, *, reply_bytes_max, timeout_s):
        self.asked.append(msgspec.msgpack.decode(request, type=BlobAsk))
        return self.reply


@pytest.fixture
async def kit(tmp_path, nursery):
    async def reach(node):
        pass

    wire, counters = Wire(), Counter()
    store = ChunkStore(tmp_path)
    blobs = Blobs(wire, store, Workers(inline=True), Guard(nursery, counters), reach)
    return wire, store, blobs, counters


def ask(*, wait_s=0.0, digest=REF.digest):
    return msgspec.msgpack.encode(BlobAsk(digest=digest, size_bytes=len(DATA), wait_s=wait_s))


async def test_an_expected_blob_is_waited_for_until_it_lands(kit, autojump_clock):
    wire, store, blobs, _ = kit
    blobs.expect([REF.digest])

    async def land():
        await trio.sleep(5)
        store.put(REF, DATA)
        blobs.landed([REF.digest])

    async with trio.open_nursery() as nursery:
        nursery.start_soon(land)
        began_s = trio.current_time()
        assert await wire.serve_blob(PEER, ask(wait_s=20)) == HERE + DATA
        assert trio.current_time() - began_s == pytest.approx(5, abs=0.01)


async def test_an_expected_blob_is_waited_for_as_long_as_the_asker_will(kit, autojump_clock):
    wire, _, blobs, _ = kit
    blobs.expect([REF.digest])
    began_s = trio.current_time()
    assert await wire.serve_blob(PEER, ask(wait_s=3)) == MISSING
    assert trio.current_time() - began_s == pytest.approx(3, abs=0.01)
    assert blobs._awaited == {}


async def test_a_blob_that_nobody_expects_is_waited_for_a_second(kit, autojump_clock):
    wire, _, blobs, _ = kit
    blobs.expect([])
    began_s = trio.current_time()
    assert await wire.serve_blob(PEER, ask(wait_s=20)) == MISSING
    assert trio.current_time() - began_s == pytest.approx(limits.LANE_UNEXPECTED_WAIT_S, abs=0.01)


async def test_who_does_not_wait_is_answered_at_once_and_nonsense_too(kit, autojump_clock):
    wire, _, _, counters = kit
    began_s = trio.current_time()
    assert await wire.serve_blob(PEER, ask()) == MISSING
    assert await wire.serve_blob(PEER, b"nonsense") == ILLEGAL
    assert trio.current_time() == began_s
    assert counters["bad_blob_asks"] == 1


async def test_so_many_asks_wait_and_no_more(kit, autojump_clock, monkeypatch):
    monkeypatch.setattr(blobs_module, "WAITING_MAX", 2)
    wire, _, blobs, _ = kit
    blobs.expect([REF.digest])
    async with trio.open_nursery() as nursery:
        for _ in range(2):
            nursery.start_soon(wire.serve_blob, PEER, ask(wait_s=20))
        await trio.sleep(0.1)
        began_s = trio.current_time()
        assert await wire.serve_blob(PEER, ask(wait_s=20)) == MISSING
        assert trio.current_time() == began_s
        nursery.cancel_scope.cancel()


async def test_a_fetch_passes_the_wait_on_counts_and_wakes(kit, autojump_clock):
    wire, store, blobs, _ = kit

    async def wait():
        assert await wire.serve_blob(PEER, ask(wait_s=20)) == HERE + DATA

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        await trio.sleep(0.5)
        await blobs.fetch_from(PEER, REF, timeout_s=60, wait_s=4)
    assert wire.asked[0].wait_s == 4
    assert store.read(REF.digest) == DATA
    report = blobs.traffic()
    assert report.kinds == {ChunkKind.FULL: Flow(in_bytes=len(DATA))}
    assert report.peers == {PEER: Flow(in_bytes=len(DATA), out_bytes=len(DATA))}
    assert report.lanes == {}


def test_traffic_forgets_the_peer_that_was_silent_longest(monkeypatch):
    monkeypatch.setattr(limits, "TRAFFIC_PEERS_MAX", 2)
    traffic = Traffic()
    for name in ("a", "b", "a", "c"):
        traffic.count(identity_of(name).node, ChunkKind.PATCH, in_bytes=1)
    assert set(traffic.peers()) == {identity_of("a").node, identity_of("c").node}
    assert traffic.kinds() == {ChunkKind.PATCH: Flow(in_bytes=4)}


@pytest.mark.parametrize("wait_s", [0.001, 0.5, 0.999])
async def test_an_ask_that_waits_less_than_a_second_is_answered_and_harms_nobody(
    kit, autojump_clock, wait_s
):
    wire, _, blobs, _ = kit
    blobs.expect([REF.digest])
    began_s = trio.current_time()
    assert await wire.serve_blob(PEER, ask(wait_s=wait_s)) == MISSING
    assert trio.current_time() - began_s == pytest.approx(wait_s, abs=0.01)
