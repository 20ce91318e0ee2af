"""What the ledger says after the demo, as plain values. Called by `demo.show`."""

from __future__ import annotations

from pathlib import Path

import msgspec

from echo2_node.learner.ledger import Ledger


class Account(msgspec.Struct, frozen=True, kw_only=True):
    """The books of one run."""

    problems: tuple[str, ...]
    """Empty: the ledger verifies."""
    versions_published: int
    staleness: dict[str, int]
    """Staleness in steps -> consumed trajectories."""
    refusals: dict[str, int]
    by_actor: dict[str, tuple[int, int]]
    """Node id -> accepted, refused."""


def read_account(path: Path) -> Account:
    """Verify and sum up a ledger.

    Errors:
        LocalError: it cannot be opened.
    """
    with Ledger.open(path) as ledger:
        problems = tuple(ledger.verify())
        summary = ledger.summary()
    if summary.consumed == 0:
        problems += ("nothing was ever trained",)
    return Account(
        problems=problems,
        versions_published=summary.versions_published,
        staleness={str(age): n for age, n in sorted(summary.staleness_histogram.items())},
        refusals=dict(summary.refusals),
        by_actor={row.actor: (row.accepted, row.refused) for row in summary.actors},
    )
