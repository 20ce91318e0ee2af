"""Two and three bulk workers over loopback sockets: honest traffic, and lanes that end badly."""

import os
import time

import pytest

from echo2_mesh import limits
from echo2_mesh.bulk import words
from echo2_mesh.chunks import digest_of
from echo2_mesh.core.fetching import Fault
from echo2_mesh.wire.messages import ChunkRef
from echo2_mesh.wire.types import ChunkKind
from tests.bulk_kit import BulkNode

BLOB = os.urandom(700_000)


@pytest.fixture
def world(tmp_path):
    nodes = []

    def make(name, **options):
        nodes.append(BulkNode(name, tmp_path, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()


def absent(data):
    """A reference to something that no store has."""
    return ChunkRef(kind=ChunkKind.FULL, digest=digest_of(data), size_bytes=len(data))


def test_blobs_go_both_ways_over_one_lane_and_are_counted(world):
    a, b = world("a"), world("b")
    mine, theirs = a.add(BLOB), b.add(b"p" * 10, ChunkKind.PATCH)
    b.link(a)
    assert a.hear(words.LaneUp).peer == b.node
    assert isinstance(b.fetch(a, mine), words.Got)
    assert b.store.read(mine.digest) == BLOB
    assert isinstance(a.fetch(b, theirs), words.Got)
    measures = a.hear(words.Measures)
    assert measures.kinds[ChunkKind.FULL] == (0, len(BLOB))
    assert measures.kinds[ChunkKind.PATCH] == (10, 0)
    assert measures.peers[b.node] == (10, len(BLOB))


def test_an_empty_blob_arrives(world):
    a, b = world("a"), world("b")
    ref = a.add(b"", ChunkKind.FILE)
    assert isinstance(b.link(a).fetch(a, ref), words.Got)
    assert b.store.has(ref.digest)


def test_a_token_is_good_for_one_lane(world):
    a, b = world("a"), world("b")
    token = a.admit(b)
    assert b.dial(a, token) == ""
    assert "hung up" in b.dial(a, token)
    assert a.count("unknown_lane_tokens") == 1
    assert isinstance(b.fetch(a, a.add(BLOB)), words.Got)


def test_a_token_that_has_expired_opens_nothing(world):
    a, b = world("a"), world("b")
    assert "hung up" in b.dial(a, a.admit(b, lifetime_s=0.0))


def test_another_certificate_than_the_one_agreed_is_not_shown_the_token(world):
    a, b = world("a"), world("b")
    token = a.admit(b)
    assert "certificate" in b.dial(a, token, certificate=b"\0" * 32)
    assert b.count("wrong_certificates") == 1
    assert b.dial(a, token) == ""  # it is still good


def test_of_several_places_the_one_with_the_right_certificate_counts(world):
    a, b, c = world("a"), world("b"), world("c")
    places = (*c.address.places, *a.address.places)
    assert b.dial(a, a.admit(b), places=places) == ""


def test_a_place_where_nobody_listens_is_told(world):
    a, b = world("a"), world("b", listen=())
    assert b.dial(a, a.admit(b), places=(("127.0.0.1", b.address.port),)) == "econnrefused"


def test_wrong_bytes_are_neither_kept_nor_passed_on(world):
    a, b, c = world("a"), world("b"), world("c")
    ref = a.add(BLOB)
    a.hub.shelf.known = lambda digest, size_bytes: memoryview(b"x" + BLOB[1:])
    b.link(a)
    c.link(b)
    b.say(words.Expect(digests=(ref.digest,)))
    waiting = c.get(b, ref, wait_s=5)
    failed = b.fetch(a, ref)
    assert failed.fault is Fault.LIED
    assert not b.store.has(ref.digest)
    assert b.count("bad_chunks") == 1
    b.say(words.Expect(digests=()))
    late = c.hear(words.Failed)
    assert (late.request, late.fault) == (waiting, Fault.MISSING)


def test_a_blob_of_another_size_is_refused_before_a_byte_of_it(world):
    a, b = world("a"), world("b")
    ref = a.add(BLOB)
    a.hub.shelf.known = lambda digest, size_bytes: memoryview(BLOB + b"more")
    assert b.link(a).fetch(a, ref).fault is Fault.LIED
    assert not b.store.has(ref.digest)


def test_a_lane_that_ends_in_the_middle_of_a_blob_leaves_nothing_behind(world):
    a, b = world("a", uplink_bytes_per_s=500_000.0), world("b")
    ref = a.add(BLOB)
    number = b.link(a).get(a, ref)
    while not any(lane._sending for lanes in a.hub._lanes.values() for lane in lanes):
        time.sleep(0.001)
    time.sleep(0.2)
    a.say(words.HangUp(peer=b.node))
    failed = b.hear(words.Failed)
    assert (failed.request, failed.fault, failed.no_lane) == (number, Fault.BROKEN, False)
    assert b.hear(words.LaneDown).peer == a.node
    assert not b.store.has(ref.digest)
    assert b.fetch(a, ref).no_lane


@pytest.mark.parametrize("direction", ["uplink_bytes_per_s", "downlink_bytes_per_s"])
def test_a_cap_is_kept_within_a_seventh(world, direction):
    cap = 2_000_000.0
    slow = {direction: cap}
    a = world("a", **(slow if direction.startswith("up") else {}))
    b = world("b", **(slow if direction.startswith("down") else {}))
    refs = [a.add(os.urandom(500_000)) for _ in range(6)]
    b.link(a)
    start_s = time.monotonic()
    for ref in refs:
        b.get(a, ref)
    for _ in refs:
        assert isinstance(b.hear(words.Got, words.Failed), words.Got)
    assert 3_000_000 / (time.monotonic() - start_s) == pytest.approx(cap, rel=0.15)


def test_an_ask_for_an_expected_blob_is_answered_when_the_blob_comes(world):
    a, b, c = world("a"), world("b"), world("c")
    ref = absent(BLOB)
    b.link(a)
    c.link(b)
    b.say(words.Expect(digests=(ref.digest,)))
    first = c.get(b, ref, wait_s=8)
    time.sleep(limits.LANE_UNEXPECTED_WAIT_S + 0.2)
    a.add(BLOB)
    assert isinstance(b.fetch(a, ref), words.Got)  # cut through: a to b, and on to c
    assert c.hear(words.Got, words.Failed) == words.Got(request=first)


def test_a_blob_that_another_process_has_put_into_the_store_wakes_too(world):
    a, b = world("a"), world("b")
    ref = absent(BLOB)
    a.say(words.Expect(digests=(ref.digest,)))
    number = b.link(a).get(a, ref, wait_s=8)
    time.sleep(0.1)
    a.add(BLOB)
    start_s = time.monotonic()
    a.say(words.Landed(digests=(ref.digest,)))
    assert b.hear(words.Got, words.Failed) == words.Got(request=number)
    assert time.monotonic() - start_s < 1.0


def test_an_ask_for_a_blob_that_nobody_expects_waits_a_second_at_most(world):
    a, b = world("a"), world("b")
    start_s = time.monotonic()
    assert b.link(a).fetch(a, absent(b"?"), wait_s=30).fault is Fault.MISSING
    assert time.monotonic() - start_s < limits.LANE_UNEXPECTED_WAIT_S + 1.0
    assert b.fetch(a, absent(b"?")).fault is Fault.MISSING


def test_a_late_blob_is_given_up_and_the_lane_goes_on(world):
    a, b = world("a", uplink_bytes_per_s=400_000.0), world("b")
    ref, small = a.add(BLOB), a.add(b"small")
    assert b.link(a).fetch(a, ref, timeout_s=0.3).fault is Fault.LATE
    assert isinstance(b.fetch(a, small), words.Got)
    assert not b.store.has(ref.digest)


def test_what_is_cancelled_is_not_reported_and_makes_way(world):
    a, b = world("a", uplink_bytes_per_s=400_000.0), world("b")
    ref, small = a.add(BLOB), a.add(b"small")
    b.link(a)
    waiting = b.get(a, absent(b"never"), wait_s=30)
    number = b.get(a, ref)
    time.sleep(0.1)
    b.say(words.Cancel(request=number))
    b.say(words.Cancel(request=waiting))
    start_s = time.monotonic()
    assert isinstance(b.fetch(a, small), words.Got)
    assert time.monotonic() - start_s < 1.5  # the whole blob would take 1.75 s
    assert b.hub._used_bytes == 0
    assert not a.hub._lanes[b.node][0]._owed


def test_a_full_store_is_this_host_s_fault(world, monkeypatch):
    a, b = world("a"), world("b")
    ref = a.add(BLOB)

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(b.hub.shelf._store, "_write_once", full)
    failed = b.link(a).fetch(a, ref)
    assert failed.fault is None
    assert "full" in failed.text
    monkeypatch.undo()
    assert isinstance(b.fetch(a, ref), words.Got)


def test_memory_for_blobs_is_bounded_and_nothing_is_lost(world, monkeypatch):
    monkeypatch.setattr(limits, "LANE_BUFFERS_BYTES_MAX", 2 * len(BLOB))
    nodes = [world(name) for name in "abcd"]
    sink = world("z")
    refs = [[node.add(os.urandom(600_000)) for _ in range(4)] for node in nodes]
    for node in nodes:
        sink.link(node)
    for node, own in zip(nodes, refs, strict=True):
        for ref in own:
            sink.get(node, ref)
    for _ in range(16):
        assert isinstance(sink.hear(words.Got, words.Failed), words.Got)
    assert sink.hub._used_bytes == 0


def test_both_connect_at_once_and_one_lane_is_had(world):
    a, b = world("a"), world("b", listen=())
    token = a.admit(b, way="punched")
    a.say(
        words.Punch(
            attempt=1,
            peer=b.node,
            places=(("127.0.0.1", b.address.port),),
            server=True,
            timeout_s=5,
        )
    )
    b.say(
        words.Punch(
            attempt=1,
            peer=a.node,
            places=a.address.places,
            server=False,
            certificate=a.address.certificate,
            token=token,
            timeout_s=5,
        )
    )
    assert b.hear(words.Reached).why == ""
    assert a.hear(words.LaneUp).way == "punched"
    assert isinstance(b.fetch(a, a.add(BLOB)), words.Got)


def test_a_punch_that_meets_nobody_ends(world):
    a, b = world("a"), world("b", listen=())
    a.say(
        words.Punch(
            attempt=9,
            peer=b.node,
            places=(("127.0.0.1", b.address.port),),
            server=True,
            timeout_s=0.5,
        )
    )
    reached = a.hear(words.Reached)
    assert reached.attempt == 9
    assert reached.why


def test_more_lanes_to_a_peer_than_allowed_are_refused(world):
    a, b = world("a"), world("b")
    for _ in range(limits.LANES_PER_PEER_MAX):
        b.link(a)
    assert b.dial(a, a.admit(b)) != ""
