"""How long a source may be silent: learnt from silences, whatever lands together."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo2_mesh import limits
from echo2_mesh.core.forest import Seat, plan
from echo2_mesh.core.swarm import Flight, Holder, Pace
from echo2_mesh.core.waits import WINDOW_S, Waits
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


# --- how much is asked of one source at once ----------------------------------------------------

FOUR = plan(tuple(Seat(node=NodeId(f"node-{i}")) for i in range(4)), LEARNER)


def ref_of(size_bytes):
    return ChunkRef(kind=ChunkKind.FULL, digest=Digest(bytes(32)), size_bytes=size_bytes)


def paced(s_per_chunk, size_bytes=SIZE_BYTES):
    holder = Holder(PEER)
    holder.pace.s_per_byte = None if s_per_chunk is None else s_per_chunk / max(1, size_bytes)
    return holder


def bound(size_bytes, sources):
    """What is asked of a source however fast it is: a share of the bytes and of the questions."""
    count = -(-limits.FETCH_WINDOW_BYTES // max(1, size_bytes))
    share = limits.FETCH_IN_FLIGHT_MAX // sources
    most = min(count, share, limits.FETCH_IN_FLIGHT_PER_PEER_MAX)
    return max(limits.FETCH_IN_FLIGHT_PER_PEER_MIN, most)


@pytest.mark.parametrize("s_per_chunk", [None, 0.0])
def test_a_source_of_unknown_pace_is_asked_for_as_much_as_may_be(s_per_chunk):
    waits = Waits(FOUR, Pace())
    for size_bytes in (1, SIZE_BYTES, limits.MIB, 16 * limits.MIB):
        for sources in (1, 4, 8, 64, 100):
            holder = paced(s_per_chunk, size_bytes)
            assert waits.window(ref_of(size_bytes), holder, sources) == bound(size_bytes, sources)


def test_the_pace_of_all_together_narrows_nobodys_window():
    everybody = Pace()
    everybody.learn(100.0, SIZE_BYTES)
    assert Waits(FOUR, everybody).window(REF, paced(None), 4) == bound(SIZE_BYTES, 4)


def test_the_window_falls_with_the_pace_to_what_keeps_a_source_busy():
    waits = Waits(FOUR, Pace())
    windows = {s: waits.window(REF, paced(s), 4) for s in (0.01, 0.125, 0.25, 0.5, 1.0, 60.0)}
    assert windows == {0.01: 16, 0.125: 12, 0.25: 6, 0.5: 3, 1.0: 2, 60.0: 2}


def test_a_slow_source_narrows_its_own_window_alone():
    """One table of windows serves all sources: it must not keep the pace of whoever came first."""
    waits = Waits(FOUR, Pace())
    for s_per_chunk, window in ((60.0, 2), (None, 16), (0.25, 6), (60.0, 2), (None, 16)):
        assert waits.window(REF, paced(s_per_chunk), 4) == window


@given(
    size_bytes=st.integers(0, limits.CHUNK_SIZE_BYTES_MAX),
    sources=st.integers(1, 200),
    paces_s=st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=8),
)
def test_a_window_is_within_its_bounds_and_never_wider_for_a_slower_source(
    size_bytes, sources, paces_s
):
    waits, most = Waits(FOUR, Pace()), bound(size_bytes, sources)
    last = most
    for pace_s in sorted(paces_s):
        window = waits.window(ref_of(size_bytes), paced(pace_s, size_bytes), sources)
        assert limits.FETCH_IN_FLIGHT_PER_PEER_MIN <= window <= last
        assert window == most or window * pace_s >= 0.999 * WINDOW_S, "it would be idle"
        last = window
