"""What every machine of the mesh shares: immutable events and effects, and timers as values.

A machine decides; it holds no clock, socket, lock or logger. `handle(event, now_s)` returns
effects, and whoever owns the machine (`net.driver`) performs them in order. A timer is an effect
too: `Arm` asks for one `Woke` with the same key; arming a key again replaces its earlier time.
"""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what a machine is told."""


class Effect(msgspec.Struct, frozen=True, kw_only=True):
    """Base of what a machine wants done."""


class Woke(Event, frozen=True, kw_only=True):
    """The time armed under `key` has come."""

    key: str


class Arm(Effect, frozen=True, kw_only=True):
    """Wake the machine at `at_s` (monotonic seconds) with `Woke(key)`."""

    key: str
    at_s: float


def backoff_s(failures: int, *, first_s: float, longest_s: float) -> float:
    """Seconds before try `failures + 1`: doubling from `first_s`; jitter is the caller's."""
    return float(min(longest_s, first_s * 2.0 ** min(failures, 30)))
