"""How long a source may be silent: learnt from silences, whatever lands together."""

import pytest

from echo2_mesh import limits
from echo2_mesh.core.forest import Seat, plan
from echo2_mesh.core.swarm import Flight, Holder, Pace
from echo2_mesh.core.waits import Waits
from echo2_mesh.wire.messages import ChunkRef
from echo2_mesh.wire.types import ChunkKind, Digest, NodeId

LEARNER, PEER = NodeId("learner"), NodeId("peer")
SIZE_BYTES = 1000
REF = ChunkRef(kind=ChunkKind.FULL, digest=Digest(bytes(32)), size_bytes=SIZE_BYTES)


def learnt(gaps_s):
    pace = Pace()
    for gap_s in gaps_s:
        pace.learn(gap_s, SIZE_BYTES)
    return pace.s_per_byte * SIZE_BYTES


@pytest.mark.parametrize("together", [1, 2, 3, 8, 16])
def test_chunks_that_land_together_share_one_silence(together):
    assert learnt([5.0, *[0.0] * (together - 1)] * 30) == pytest.approx(5.0, rel=0.05)


def test_a_first_chunk_at_once_teaches_nothing_for_ever():
    assert learnt([0.0, *[2.0] * 10]) == pytest.approx(2.0)


def test_one_long_silence_makes_nobody_slow_and_a_faster_line_is_believed():
    assert learnt([*[0.5] * 20, 15.0]) < 2.0
    assert learnt([*[5.0] * 20, *[0.1] * 300]) == pytest.approx(0.1, rel=0.1)


def test_a_source_of_bursts_is_not_late_between_two_of_them():
    seats = tuple(Seat(node=NodeId(f"node-{i}")) for i in range(4))
    holder = Holder(PEER)
    for _ in range(20):
        for gap_s in (5.0, *[0.0] * 7):
            holder.pace.learn(gap_s, SIZE_BYTES)
    flight = Flight(index=0, peer=PEER, asked_s=0.0, deadline_s=60.0, wait_s=1.5)
    silence_s = Waits(plan(seats, LEARNER), Pace()).silence_s(holder, flight, REF)
    assert 1.5 + 5.0 < silence_s <= 1.5 + limits.CHUNK_DEADLINE_S
