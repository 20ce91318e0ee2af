"""What a relay promises, and what it does not."""

from echo2_mesh.core.relay_book import Denial, RelayBook, RelayLimits
from echo2_mesh.wire.types import NodeId

A, B, C, D = (NodeId(name) for name in "ABCD")


def test_a_place_is_had_prolonged_left_and_lost_by_time():
    book = RelayBook(RelayLimits(reservation_s=100))
    assert book.reserve(A, "192.0.2.1", 0.0) is None
    assert book.reserve(A, "192.0.2.1", 90.0) is None
    assert book.open(B, A, 150.0) is None
    assert book.reservations(189.0) == 1
    assert book.reservations(190.0) == 0
    assert book.open(B, A, 190.0) is Denial.NO_RESERVATION
    book.reserve(C, "192.0.2.1", 200.0)
    book.leave(C)
    book.leave(C)
    assert book.open(B, C, 201.0) is Denial.NO_RESERVATION


def test_no_address_takes_every_place_and_no_crowd_more_than_there_are():
    book = RelayBook(RelayLimits(reservations=3, reservations_per_ip=2))
    assert book.reserve(A, "192.0.2.1", 0.0) is None
    assert book.reserve(B, "192.0.2.1", 0.0) is None
    assert book.reserve(C, "192.0.2.1", 0.0) is Denial.FULL
    assert book.reserve(C, "192.0.2.2", 0.0) is None
    assert book.reserve(D, "192.0.2.3", 0.0) is Denial.FULL
    assert book.reserve(A, "192.0.2.1", 1.0) is None, "who has a place keeps it"
    assert book.holders() == {A, B, C}


def test_circuits_are_bounded_in_all_and_at_either_end_and_come_back():
    book = RelayBook(RelayLimits(circuits=3, circuits_per_node=2))
    for node in (A, B, C):
        book.reserve(node, node, 0.0)
    assert book.open(D, A, 0.0) is None
    assert book.open(D, B, 0.0) is None
    assert book.open(D, C, 0.0) is Denial.FULL, "two of D already"
    assert book.open(B, A, 0.0) is None
    assert book.open(C, A, 0.0) is Denial.FULL, "two of A, and three in all"
    assert book.circuits == 3
    book.close(D, A)
    assert book.open(C, A, 0.0) is None
    for source, target in ((D, B), (B, A), (C, A)):
        book.close(source, target)
    assert book.circuits == 0


def test_the_rate_is_shared_by_all_and_unused_time_is_not_saved_up():
    book = RelayBook(RelayLimits(bytes_per_s=100.0))
    assert book.delay_s(50, 0.0) == 0.0
    assert book.delay_s(50, 0.0) == 0.5
    assert book.delay_s(100, 0.0) == 1.0
    assert book.delay_s(1, 2.0) == 0.0
    assert book.delay_s(100, 60.0) == 0.0
    assert book.delay_s(100, 60.0) == 1.0
