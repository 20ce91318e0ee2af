"""What is generated is announced until it has a verdict, and counted once."""

from __future__ import annotations

import itertools

from echo2_mesh import limits
from echo2_mesh.wire.messages import ChunkRef, TrajectoryHeader, VerdictNote
from echo2_mesh.wire.types import ChunkKind, Digest, PolicyVersion, Reason
from echo2_node.actor.outbox import (
    DIRECT_FIRST,
    GATHER_S,
    RETRY_S,
    RETRY_S_MAX,
    Outbox,
    Tally,
)

LEASE = "0" * 32


def header(index: int, inline_bytes: int = 100) -> TrajectoryHeader:
    return TrajectoryHeader(
        lease_id=LEASE,
        group_id="1" * 32,
        index=index,
        version_min=PolicyVersion(0),
        version_max=PolicyVersion(0),
        tokens=10,
        reward=0.5,
        payload=ChunkRef(kind=ChunkKind.TRAJECTORY, digest=Digest(bytes(32)), size_bytes=1),
        inline=b"x" * inline_bytes,
    )


def note(index: int, verdict: Reason = Reason.ADMITTED) -> VerdictNote:
    return VerdictNote(lease_id=LEASE, index=index, verdict=verdict)


def test_headers_that_finish_together_leave_as_one_gossip_message():
    box = Outbox()
    for index in range(8):
        box.add(header(index), 0.0, expires_s=100.0)
    assert box.due(0.0) == ()
    (send,) = box.due(GATHER_S)
    assert not send.directly
    assert [h.index for h in send.headers] == list(range(8))


def test_what_finished_while_another_waited_goes_along_with_it():
    box = Outbox()
    for index in range(4):
        box.add(header(index), index * GATHER_S / 4, expires_s=100.0)
    (send,) = box.due(GATHER_S)
    assert [h.index for h in send.headers] == [0, 1, 2, 3]
    assert box.next_due_s() == GATHER_S + RETRY_S


def test_what_gossip_lost_is_sent_directly_until_a_verdict_comes():
    box = Outbox()
    box.add(header(0), 0.0, expires_s=1000.0)
    box.due(GATHER_S)
    assert box.due(GATHER_S + RETRY_S / 2) == ()
    (second,) = box.due(GATHER_S + RETRY_S)
    assert second.directly
    assert box.acknowledge((note(0),)) == (header(0),)
    assert box.due(999.0) == ()
    assert box.next_due_s() is None


def announce(box: Outbox, index: int, at_s: float) -> bool:
    """Add one header and announce it: True if directly."""
    box.add(header(index), at_s, expires_s=1e9)
    (send,) = [s for s in box.due(at_s + GATHER_S) if index in {h.index for h in s.headers}]
    return send.directly


def test_after_gossip_failed_announcements_go_directly_at_once_and_gossip_is_tried_again():
    box = Outbox()
    assert not announce(box, 0, 0.0)
    box.due(GATHER_S + RETRY_S)
    box.acknowledge((note(0),))
    ways = []
    for index in range(1, DIRECT_FIRST + 2):
        ways.append(announce(box, index, 100.0 * index))
        box.acknowledge((note(index),))
    assert ways == [True] * DIRECT_FIRST + [False]


def test_gossip_that_failed_again_is_left_alone_for_longer_and_success_is_forgiven():
    box = Outbox()
    index, at_s = 0, 0.0

    def next_way() -> bool:
        nonlocal index, at_s
        index, at_s = index + 1, at_s + 100.0
        return announce(box, index, at_s)

    for expected in (DIRECT_FIRST, 2 * DIRECT_FIRST):
        assert not next_way()
        box.due(at_s + GATHER_S + RETRY_S)
        box.acknowledge((note(index),))
        for _ in range(expected):
            assert next_way()
            box.acknowledge((note(index),))
    assert not next_way()
    box.acknowledge((note(index),))
    assert not next_way()
    box.due(at_s + GATHER_S + RETRY_S)
    box.acknowledge((note(index),))
    ways = []
    for _ in range(DIRECT_FIRST + 1):
        ways.append(next_way())
        box.acknowledge((note(index),))
    assert ways == [True] * DIRECT_FIRST + [False]


def test_the_pauses_between_announcements_grow_to_a_bound():
    box = Outbox()
    box.add(header(0), 0.0, expires_s=10_000.0)
    times = []
    for _ in range(10):
        due_s = box.next_due_s()
        assert due_s is not None
        times.append(due_s)
        assert box.due(due_s)
    gaps = [round(b - a, 6) for a, b in itertools.pairwise(times)]
    assert gaps == sorted(gaps)
    assert gaps[-1] == RETRY_S_MAX


def test_an_expired_header_is_forgotten_and_counted():
    box = Outbox()
    box.add(header(0), 0.0, expires_s=1.0)
    assert box.due(1.0) == ()
    assert len(box) == 0
    assert box.expired_count == 1


def test_large_headers_are_split_so_that_each_message_fits():
    box = Outbox()
    for index in range(40):
        size_bytes = limits.INLINE_PAYLOAD_SIZE_BYTES_MAX
        box.add(header(index, size_bytes), 0.0, expires_s=9.0)
    sends = box.due(GATHER_S)
    assert sum(len(send.headers) for send in sends) == 40
    for send in sends:
        size_bytes = sum(len(h.inline or b"") for h in send.headers)
        assert size_bytes <= limits.ROLLOUT_BATCH_SIZE_BYTES_MAX


def test_a_verdict_for_something_unknown_or_acknowledged_before_is_harmless():
    box = Outbox()
    box.add(header(0), 0.0, expires_s=9.0)
    assert box.acknowledge((note(0), note(0), note(5))) == (header(0),)


def test_the_learners_return_makes_everything_due_at_once():
    box = Outbox()
    box.add(header(0), 0.0, expires_s=1000.0)
    box.due(GATHER_S)
    box.retry_now(0.5)
    assert box.due(0.5)[0].directly


def test_the_tally_names_the_commonest_refusal():
    tally = Tally()
    tally.count((note(0), note(1, Reason.STALE), note(2, Reason.STALE), note(3, Reason.LATE)))
    assert (tally.accepted, tally.refused) == (1, 3)
    assert tally.commonest_refusal is Reason.STALE
    assert Tally().commonest_refusal is None
