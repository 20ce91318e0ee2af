"""Caps shared by many lanes: whose turn it is, and that nobody is forgotten. The clock is a toy."""

import heapq
from collections import deque
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2_mesh.bulk.rates import GRAIN_BYTES, Bucket, Turnstile

RATE = 1e6
GRAIN_S = GRAIN_BYTES / RATE
LATE_S = 1e-6


class Clock:
    """The loop's clock and timers. `wakes` counts how often it was woken."""

    def __init__(self):
        self.now_s = 100.0
        self.timers = []
        self.wakes = 0
        self._order = count()

    def after(self, delay_s, call):
        assert delay_s > 0.0, "a loop that wakes at once for ever"
        heapq.heappush(self.timers, (self.now_s + delay_s, next(self._order), call))

    def step(self):
        """The next timer rings, a little late as all timers do."""
        at_s, _, call = heapq.heappop(self.timers)
        self.now_s = max(self.now_s, at_s + LATE_S)
        self.wakes += 1
        call()


def turnstile(rate=RATE):
    clock = Clock()
    bucket = Bucket(rate, clock.now_s)
    return clock, bucket, Turnstile(bucket, lambda: clock.now_s, clock.after)


def test_all_are_served_in_the_order_in_which_they_came():
    clock, bucket, turns = turnstile()
    served = []

    def turn(name):
        assert bucket.take(GRAIN_BYTES, clock.now_s) == GRAIN_BYTES
        served.append(name)

    for name in "cab":
        turns.wait(lambda name=name: turn(name))
    assert served == [], "nobody is served while it is still asking"
    while clock.timers:
        clock.step()
    assert served == list("cab")


def test_one_wake_serves_as_many_as_there_are_grains():
    clock, bucket, turns = turnstile()
    served = []

    def turn(number):
        served.append(number)
        assert bucket.take(GRAIN_BYTES, clock.now_s)

    for number in range(5):
        turns.wait(lambda number=number: turn(number))
    clock.now_s += 2.5 * GRAIN_S
    clock.step()
    assert served == [0, 1]
    clock.step()
    assert served == [0, 1, 2]


def test_who_wants_nothing_any_more_costs_nobody_a_grain():
    clock, bucket, turns = turnstile()
    served = []
    for number in range(4):
        turns.wait(lambda number=number: served.append(number))
    turns.wait(lambda: served.append(bucket.take(GRAIN_BYTES, clock.now_s)))
    clock.step()
    assert served == [0, 1, 2, 3, GRAIN_BYTES]
    assert not clock.timers


def test_who_waits_again_goes_behind_those_that_wait_already():
    clock, bucket, turns = turnstile()
    served = []

    def turn(name, left):
        assert bucket.take(GRAIN_BYTES, clock.now_s)
        served.append(name)
        if left:
            turns.wait(lambda: turn(name, left - 1))

    for name in "abc":
        turns.wait(lambda name=name: turn(name, 2))
    while clock.timers:
        clock.step()
    assert served == list("abcabcabc")


def test_one_wake_serves_nobody_twice():
    """Else two that want much would keep the loop from everything else."""
    clock, bucket, turns = turnstile()
    served = []

    def turn(name):
        served.append(name)
        turns.wait(lambda: turn(name))  # takes nothing: the grain stays

    turns.wait(lambda: turn("a"))
    turns.wait(lambda: turn("b"))
    clock.step()
    assert served == ["a", "b"]
    assert bucket.ready(clock.now_s)


def test_one_timer_serves_all_and_none_is_left_when_nobody_waits():
    clock, bucket, turns = turnstile()
    for _ in range(10):
        turns.wait(lambda: bucket.take(GRAIN_BYTES, clock.now_s))
        assert len(clock.timers) == 1
    while clock.timers:
        clock.step()
        assert len(clock.timers) <= 1
    assert clock.wakes <= 11
    turns.wait(lambda: None)
    assert len(clock.timers) == 1, "and one again for who comes later"


def test_a_grain_that_another_took_meanwhile_is_waited_for_once_more():
    clock, bucket, turns = turnstile()
    served = []
    turns.wait(lambda: served.append(bucket.take(GRAIN_BYTES, clock.now_s)))
    clock.now_s += GRAIN_S
    assert bucket.take(GRAIN_BYTES, clock.now_s) == GRAIN_BYTES
    clock.step()
    assert served == []
    clock.step()
    assert served == [GRAIN_BYTES]


@settings(max_examples=60, deadline=None)
@given(
    rate=st.sampled_from([50_000.0, 1e6, 125e6]),
    needs=st.lists(st.integers(1, 6 * GRAIN_BYTES), min_size=1, max_size=12),
    pieces=st.lists(st.integers(1, 4 * GRAIN_BYTES), min_size=1, max_size=8),
    chance=st.randoms(use_true_random=False),
)
def test_nobody_is_forgotten_whatever_is_taken_and_whoever_comes_between(
    rate, needs, pieces, chance
):
    clock, bucket, turns = turnstile(rate)
    waiting, left, taken = deque(), list(needs), []

    def wait(lane):
        waiting.append(lane)
        turns.wait(lambda: turn(lane))

    def turn(lane):
        assert waiting.popleft() == lane, "out of turn"
        assert bucket.ready(clock.now_s), "called for nothing"
        if chance.random() < 0.1:
            left[lane] = 0  # its lane was lost
        want = min(left[lane], chance.choice(pieces))
        granted = bucket.take(want, clock.now_s) if want else 0
        assert granted == want or granted >= min(want, GRAIN_BYTES)
        left[lane] -= granted
        taken.append(granted)
        if left[lane] > 0:
            wait(lane)

    lanes = list(range(len(needs)))
    chance.shuffle(lanes)
    late = [lane for lane in lanes if chance.random() < 0.3]
    for lane in lanes:
        if lane not in late:
            wait(lane)
    steps = 0
    while waiting or late:
        if late and (not waiting or chance.random() < 0.5):
            clock.now_s += chance.uniform(0.0, 2.0 * GRAIN_BYTES / rate)
            wait(late.pop())
        if chance.random() < 0.2:  # a lane that did not have to wait
            bucket.take(chance.choice(pieces), clock.now_s)
        assert len(clock.timers) == bool(waiting), "the timer is armed once while somebody waits"
        clock.step()
        steps += 1
        assert steps < 2000, f"{len(waiting)} are never served"
    assert max(left) == 0
    assert not clock.timers
    assert sum(taken) <= sum(needs)


@settings(max_examples=60, deadline=None)
@given(needs=st.lists(st.integers(1, 5), min_size=1, max_size=10))
def test_waiting_in_turn_loses_no_time(needs):
    """Who moves grains by turns has what the cap allows, but for one wake's slack."""
    clock, bucket, turns = turnstile()
    began_s = clock.now_s

    def turn(left):
        assert bucket.take(GRAIN_BYTES, clock.now_s) == GRAIN_BYTES
        if left > 1:
            turns.wait(lambda: turn(left - 1))

    for need in needs:
        turns.wait(lambda need=need: turn(need))
    while clock.timers:
        clock.step()
    assert clock.now_s - began_s == pytest.approx(sum(needs) * GRAIN_S, rel=1e-3)


def test_a_little_that_another_took_meanwhile_costs_a_little_time():
    clock, bucket, turns = turnstile()
    served_s = []
    assert bucket.take(GRAIN_BYTES, clock.now_s) == 0
    began_s = clock.now_s
    turns.wait(lambda: served_s.append(clock.now_s - began_s))
    clock.now_s += GRAIN_S / 2
    assert bucket.take(1000, clock.now_s) == 1000
    while clock.timers:
        clock.step()
    assert served_s == pytest.approx([GRAIN_S + 1000 / RATE], rel=0.1)


@settings(max_examples=100, deadline=None)
@given(
    rate=st.floats(1e3, 1e9),
    steps=st.lists(st.tuples(st.floats(0.0, 1.0), st.integers(1, 10**6)), max_size=20),
)
def test_a_bucket_is_ready_when_it_would_grant_a_grain(rate, steps):
    bucket, now_s = Bucket(rate, 5.0), 5.0
    for pause_s, want in steps:
        now_s += pause_s
        is_ready = bucket.ready(now_s)
        assert bucket.ready(now_s) == is_ready, "asking takes nothing"
        granted = bucket.take(max(want, GRAIN_BYTES), now_s)
        assert is_ready == (granted >= GRAIN_BYTES) == (granted > 0)


def test_a_refusal_says_how_long_until_the_bucket_is_ready():
    bucket = Bucket(RATE, 0.0)
    assert bucket.take(GRAIN_BYTES, 0.25 * GRAIN_S) == 0
    wait_s = bucket.wait_s()
    assert wait_s == pytest.approx(0.75 * GRAIN_S)
    assert not bucket.ready(0.25 * GRAIN_S + 0.9 * wait_s)
    assert bucket.ready(0.25 * GRAIN_S + 1.001 * wait_s)


def test_who_left_is_not_called_and_not_kept():
    """Under a tiny cap a grain is hours away; lanes that come and go meanwhile must not pile up."""
    clock, _, turns = turnstile(rate=1.0)
    served = []
    stayed = lambda: served.append("stayed")  # noqa: E731
    turns.wait(stayed)
    for _ in range(1000):
        left = lambda: served.append("left")  # noqa: E731
        turns.wait(left)
        turns.leave(left)
        turns.leave(left)
    assert len(turns._waiting) == len(clock.timers) == 1
    clock.step()
    assert served == ["stayed"]


def test_a_turn_may_make_others_leave():
    """A lane that breaks may take its neighbours along."""
    clock, _, turns = turnstile()
    served = []
    others = [lambda: served.append("other") for _ in range(3)]
    turns.wait(lambda: [turns.leave(other) for other in others])
    for other in others:
        turns.wait(other)
    clock.step()
    assert served == []
    assert not clock.timers
