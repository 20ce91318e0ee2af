"""Frames, tickets, caps and meters: the bulk plane's rules without a socket."""

import pytest

from echo2_mesh import limits
from echo2_mesh.bulk import frames
from echo2_mesh.bulk.frames import Kind, Status
from echo2_mesh.bulk.rates import GRAIN_BYTES, Bucket, Meter
from echo2_mesh.bulk.shelf import Shelf
from echo2_mesh.bulk.tickets import Ticket, Tickets
from echo2_mesh.chunks import ChunkStore, digest_of
from echo2_mesh.errors import PeerError
from echo2_mesh.testing import identity_of
from echo2_mesh.wire.messages import ChunkRef
from echo2_mesh.wire.types import ChunkKind

NODE, OTHER = identity_of("a").node, identity_of("b").node


def test_a_header_is_48_bytes_and_says_what_was_put_in():
    header = frames.ask(7, b"d" * 32, 1000, 2.5, 1)
    assert len(header) == frames.HEADER_BYTES == 48
    frame = frames.unpack(header)
    assert (frame.kind, frame.request, frame.size_bytes) == (Kind.ASK, 7, 1000)
    assert (frame.wait_ms, frame.blob_kind, frame.digest) == (2500, 1, b"d" * 32)
    assert frames.unpack(frames.answer(7, Status.BUSY)).status == Status.BUSY
    assert frames.unpack(frames.data(7, 9)).size_bytes == 9
    assert frames.unpack(frames.cancel(7)).kind == Kind.CANCEL


def test_a_token_opens_once_and_in_time():
    tickets = Tickets()
    tickets.admit(b"once", Ticket(NODE, 10.0, "dialled"), 0.0)
    tickets.admit(b"late", Ticket(OTHER, 10.0, "dialled"), 0.0)
    assert tickets.redeem(b"once", 9.0) == Ticket(NODE, 10.0, "dialled")
    assert tickets.redeem(b"once", 9.0) is None
    assert tickets.redeem(b"late", 10.0) is None
    assert tickets.redeem(b"never", 1.0) is None


def test_a_peer_that_asks_for_many_tokens_loses_its_own_oldest_ones():
    tickets = Tickets()
    tickets.admit(b"other", Ticket(OTHER, 10.0, ""), 0.0)
    for number in range(limits.LANE_TICKETS_PER_PEER_MAX + 1):
        tickets.admit(b"%d" % number, Ticket(NODE, 10.0, ""), 0.0)
    assert tickets.redeem(b"0", 1.0) is None
    assert tickets.redeem(b"1", 1.0) is not None
    assert tickets.redeem(b"other", 1.0) is not None


def test_expired_tickets_make_room():
    tickets = Tickets()
    tickets.admit(b"old", Ticket(NODE, 1.0, ""), 0.0)
    tickets.admit(b"new", Ticket(OTHER, 9.0, ""), 2.0)
    assert tickets.redeem(b"old", 0.5) is None


@pytest.mark.parametrize("rate", [100_000.0, 1e6, 1e9])
def test_a_bucket_gives_its_rate_and_no_more(rate):
    bucket, now_s, given = Bucket(rate, 0.0), 0.0, 0
    while now_s < 3.0:
        count = bucket.take(limits.LANE_PIECE_BYTES_MAX, now_s)
        given += count
        now_s += 0.0 if count else bucket.wait_s()
    assert given == pytest.approx(3.0 * rate, rel=0.15)


def test_what_was_granted_and_not_moved_is_given_back():
    bucket = Bucket(1e6, 0.0)
    assert bucket.take(GRAIN_BYTES, 0.05) == GRAIN_BYTES
    bucket.give_back(GRAIN_BYTES)
    assert bucket.take(GRAIN_BYTES, 0.05) == GRAIN_BYTES


def test_a_bucket_without_a_rate_grants_everything():
    assert Bucket(0.0, 0.0).take(10**9, 0.0) == 10**9


def test_a_meter_counts_only_spells_in_which_the_line_was_wanted():
    meter = Meter(0.0)
    meter.moved(500)
    assert meter.bytes_per_s(1.0) == 0.0  # nobody waited: the line may be much faster
    meter.busy(True, 1.0)
    meter.moved(2000)
    meter.busy(False, 2.0)
    assert meter.bytes_per_s(2.0) == 2000.0
    meter.busy(True, 2.0)
    meter.moved(1000)
    assert meter.bytes_per_s(3.0) == 2000.0  # the best of the last spells


def test_the_shelf_hashes_a_file_once_and_again_when_it_has_changed(tmp_path):
    store = ChunkStore(tmp_path, quota_bytes=None)
    ref = store.add(ChunkKind.FULL, b"weights")
    shelf = Shelf(tmp_path)
    assert shelf.known(ref.digest, 7) is None
    assert shelf.vouch(ref.digest, 8) is None
    view = shelf.vouch(ref.digest, 7)
    assert view is not None
    assert bytes(view) == b"weights"
    known = shelf.known(ref.digest, 7)
    assert known is not None
    assert bytes(known) == b"weights"
    store.path(ref.digest).write_bytes(b"damaged")
    assert shelf.known(ref.digest, 7) is None
    assert shelf.vouch(ref.digest, 7) is None
    assert shelf.vouch(digest_of(b"absent"), 7) is None


def test_the_shelf_keeps_nothing_that_does_not_hash_to_its_name(tmp_path):
    shelf = Shelf(tmp_path)
    ref = ChunkRef(kind=ChunkKind.FULL, digest=digest_of(b"right"), size_bytes=5)
    with pytest.raises(PeerError):
        shelf.keep(ref, memoryview(b"wrong"))
    assert list(tmp_path.iterdir()) == []
    shelf.keep(ref, memoryview(b"right"))
    assert shelf.known(ref.digest, 5) is not None


def test_an_empty_blob_can_be_served(tmp_path):
    ref = ChunkStore(tmp_path, quota_bytes=None).add(ChunkKind.FILE, b"")
    view = Shelf(tmp_path).vouch(ref.digest, 0)
    assert view is not None
    assert len(view) == 0
