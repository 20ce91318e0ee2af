"""The bitmap of a manifest's blobs, and what must be refused of one."""

import pytest

from echo2_mesh.core.holdings import bitmap_of, held_in
from echo2_mesh.errors import PeerError


def test_bits_are_numbered_from_the_least_significant():
    assert bitmap_of([0, 9], 10) == b"\x01\x02"


def test_nothing_held_is_an_empty_bitmap():
    assert bitmap_of([], 10) == b""
    assert held_in(b"", 10) == frozenset()


def test_what_is_written_is_read():
    for count in (1, 7, 8, 9, 64, 65):
        held = frozenset(range(0, count, 3))
        assert held_in(bitmap_of(held, count), count) == held


@pytest.mark.parametrize("bitmap", [b"\x01", b"\x01\x00\x00", b"\x00" * 5000])
def test_a_bitmap_of_the_wrong_length_is_refused(bitmap):
    with pytest.raises(PeerError):
        held_in(bitmap, 10)


def test_bits_beyond_the_last_blob_are_refused():
    with pytest.raises(PeerError):
        held_in(b"\x00\x04", 10)


def test_an_index_out_of_range_is_our_bug():
    with pytest.raises(ValueError, match="index 10"):
        bitmap_of([10], 10)
