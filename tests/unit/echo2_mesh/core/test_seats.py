"""Heartbeats become seats, and two nodes that heard almost the same plan from the same numbers."""

import pytest

from echo2_mesh.core.seats import rounded, seats_of
from echo2_mesh.testing import identity_of
from echo2_mesh.wire.messages import Heartbeat
from echo2_mesh.wire.types import Reach, Role


def beat(**fields):
    return Heartbeat(
        role=Role.ACTOR, state="generating", incarnation_unix_ms=1, sequence=1, **fields
    )


def test_seats_are_in_the_order_of_their_ids_and_say_what_the_heartbeats_say():
    nodes = [identity_of(name).node for name in ("a", "b")]
    seats = seats_of(
        {
            max(nodes): beat(reach=Reach.RELAYED),
            min(nodes): beat(uplink_bytes_per_s=2.0**20, downlink_bytes_per_s=2.0**21),
        }
    )
    assert [seat.node for seat in seats] == sorted(nodes)
    assert (seats[0].uplink_bytes_per_s, seats[0].downlink_bytes_per_s) == (2**20, 2**21)
    assert seats[1].uplink_bytes_per_s == 0.0
    assert seats[1].reach is Reach.RELAYED


@pytest.mark.parametrize("rate", [1.0, 1e3, 1.25e6, 9.9e8])
def test_a_rate_moves_by_an_eighth_of_an_octave_at_most_and_close_ones_are_alike(rate):
    assert 2**-0.125 <= rounded(rate) / rate <= 2**0.125
    assert rounded(rounded(rate) * 1.05) == rounded(rate)


def test_an_unknown_rate_stays_unknown():
    assert rounded(0.0) == 0.0
