"""Late and slow actors get work too, and nothing is held back for nobody."""

from __future__ import annotations

from echo2_mesh.wire.types import NodeId
from echo2_node.scheduler.shares import ACTORS_MAX, HUNGRY_S, Shares

QUICK, LATE, OTHER = NodeId("quick"), NodeId("late"), NodeId("other")


def left(shares, actor, free, held=None, waiting=None, now_s=0.0):
    return shares.left_for(actor, free, held=held or {}, waiting=waiting or [actor], now_s=now_s)


def test_while_nobody_went_away_with_nothing_everything_may_be_taken():
    shares = Shares()
    shares.served(LATE, 1, 0.0)
    assert left(shares, QUICK, 16) == 16


def test_a_fair_share_is_kept_for_who_went_away_with_nothing():
    shares = Shares()
    shares.served(LATE, 0, 0.0)
    assert left(shares, QUICK, 16) == 8
    assert left(shares, QUICK, 16, held={OTHER: 2}) == 10  # three share 18; LATE is kept 6


def test_what_the_hungry_hold_already_counts():
    shares = Shares()
    shares.served(LATE, 0, 0.0)
    assert left(shares, QUICK, 8, held={LATE: 4}) == 6  # a fair share is 6, LATE lacks 2


def test_the_hungry_themselves_and_those_in_the_line_need_no_reserve():
    shares = Shares()
    shares.served(LATE, 0, 0.0)
    assert left(shares, LATE, 16) == 16
    assert left(shares, QUICK, 16, waiting=[QUICK, LATE]) == 16


def test_who_holds_nothing_gets_one_whatever_is_reserved():
    shares = Shares()
    shares.served(LATE, 0, 0.0)
    assert left(shares, QUICK, 1) == 1
    assert left(shares, QUICK, 1, held={QUICK: 1}) == 0


def test_who_does_not_come_back_is_waited_for_only_so_long():
    shares = Shares()
    shares.served(LATE, 0, 0.0)
    assert left(shares, QUICK, 16, now_s=HUNGRY_S) == 8
    assert left(shares, QUICK, 16, now_s=HUNGRY_S + 0.1) == 16


def test_being_served_ends_the_hunger():
    shares = Shares()
    shares.served(LATE, 0, 0.0)
    shares.served(LATE, 2, 1.0)
    assert left(shares, QUICK, 16, now_s=1.0) == 16


def test_invented_actors_are_bounded():
    shares = Shares()
    for number in range(ACTORS_MAX + 10):
        shares.served(NodeId(str(number)), 0, 0.0)
    assert left(shares, NodeId("0"), 1, held={NodeId("0"): 1}) == 0
    assert len(shares._hungry) == ACTORS_MAX
