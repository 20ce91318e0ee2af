"""How many groups may be alive, and how old a trajectory may be when it is trained.

Two guards over one bound S. *Slots* decide when a prompt is leased, so that nothing is born
stale; the *hard filter* decides when a group is trained, whatever happened in between. Pure
arithmetic over versions and counts; the clerk asks, nobody else.

Why the slots are right: trained oldest first, P groups a step, a group leased while `alive`
others exist is trained at version v + floor(alive / P) at the latest, if it is ready by then.
Its age there is at most S exactly when alive < (S + 1 - (v - w)) * P (AReaL's capacity rule,
written for one group of version w).
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from echo2_mesh.wire.types import PolicyVersion

DISCARD_ALIVE_FACTOR = 4
"""The `discard` preset leases freely up to this many times the paced bound."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """The run's settings as far as the clerk needs them."""

    groups_per_step: Annotated[int, Meta(ge=1)]
    """P."""
    group_size: Annotated[int, Meta(ge=2)]
    """G."""
    staleness_limit_steps: Annotated[int, Meta(ge=0)]
    """S."""
    policy: Literal["paced", "discard"] = "paced"
    lease_ttl_s: float = 300.0
    refills_per_group_max: int = 3
    zero_variance_groups_max: int = 2000


def staleness_steps(*, trained: PolicyVersion, oldest: PolicyVersion) -> int:
    """Age of a trajectory trained at version `trained`, counted from its oldest token."""
    return trained - oldest


def is_fresh(rules: Rules, *, trained: PolicyVersion, oldest: PolicyVersion) -> bool:
    """The hard filter: v_oldest >= v_t - S."""
    return oldest >= trained - rules.staleness_limit_steps


def slots(rules: Rules, *, learner: PolicyVersion, actor: PolicyVersion, alive: int) -> int:
    """Groups that an actor with version `actor` installed may still be leased; never negative."""
    if not is_fresh(rules, trained=learner, oldest=actor):
        return 0
    return max(0, alive_max(rules, lag_steps=learner - actor) - alive)


def alive_max(rules: Rules, *, lag_steps: int = 0) -> int:
    """The most groups alive at once for an actor `lag_steps` behind the learner."""
    bound_steps = rules.staleness_limit_steps + 1
    if rules.policy == "discard":
        return DISCARD_ALIVE_FACTOR * bound_steps * rules.groups_per_step
    return max(0, bound_steps - max(0, lag_steps)) * rules.groups_per_step
