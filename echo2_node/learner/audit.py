"""Reading the books: the counts people ask for, and the proof that everything adds up.

Plain SQL over an open ledger; it changes nothing. `verify` does not rely on the constraints that
the tables have, because a file may come from anywhere. Called by `learner.ledger`.
"""

from __future__ import annotations

import sqlite3

import msgspec

from echo2_mesh.chunks import digest_of
from echo2_mesh.wire.types import Reason

PROBLEMS_PER_RULE_MAX = 20
"""Of each rule broken, this many places are named."""


class ActorRow(msgspec.Struct, frozen=True, kw_only=True):
    """One actor's record."""

    actor: str
    leases: int
    accepted: int
    refused: int
    duplicates: int
    consumed: int
    tokens: int
    """Tokens of accepted trajectories, prompts included."""
    reasons: dict[str, int]
    """Refusals by reason."""
    commonest_refusal: str | None


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """A run in numbers. Steps and consumption are those of the surviving line."""

    run_id: str
    staleness_limit_steps: int
    steps: int
    steps_skipped: int
    steps_undone: int
    resumes: int
    versions_published: int
    version_newest: int | None
    leases: int
    lease_ends: dict[str, int]
    groups: int
    groups_consumed: int
    groups_dropped: dict[str, int]
    accepted: int
    refused: int
    duplicates: int
    refusals: dict[str, int]
    """Trajectories by reason, those without a lease included."""
    unused: dict[str, int]
    """Accepted trajectories in groups that were dropped, by the group's reason."""
    consumed: int
    staleness_histogram: dict[int, int]
    """Age in steps of consumed trajectories."""
    staleness_steps_max: int
    actors: tuple[ActorRow, ...]


def summarise(sql: sqlite3.Connection) -> Summary:
    """Count everything once."""

    def counts(query: str) -> dict[str, int]:
        return dict(sql.execute(query).fetchall())

    def one(query: str) -> int:
        value: int = sql.execute(query).fetchone()[0]
        return value

    run = dict(sql.execute("SELECT key, value FROM run").fetchall())
    ages = dict(
        sql.execute(
            "SELECT version_before - version_oldest, count(*) FROM consumption "
            "JOIN submissions USING (group_id) WHERE undone = 0 AND verdict = 'admitted' "
            "GROUP BY 1 ORDER BY 1"
        ).fetchall()
    )
    refusals = counts(
        "SELECT reason, sum(times) FROM (SELECT verdict AS reason, 1 AS times FROM submissions "
        "WHERE verdict != 'admitted' UNION ALL SELECT reason, times FROM strays) "
        "GROUP BY 1 ORDER BY 2 DESC"
    )
    return Summary(
        run_id=run.get("run_id", ""),
        staleness_limit_steps=int(run.get("staleness_limit", 0)),
        steps=one("SELECT count(*) FROM steps WHERE undone = 0"),
        steps_skipped=one("SELECT count(*) FROM steps WHERE undone = 0 AND skipped"),
        steps_undone=one("SELECT count(*) FROM steps WHERE undone"),
        resumes=one("SELECT count(*) FROM resumes"),
        versions_published=one("SELECT count(*) FROM published"),
        version_newest=one("SELECT max(version) FROM published"),
        leases=one("SELECT count(*) FROM leases"),
        lease_ends=counts("SELECT how, count(*) FROM lease_ends GROUP BY 1"),
        groups=one("SELECT count(*) FROM groups"),
        groups_consumed=one("SELECT count(*) FROM consumption WHERE undone = 0"),
        groups_dropped=counts("SELECT reason, count(*) FROM drops GROUP BY 1"),
        accepted=one("SELECT count(*) FROM submissions WHERE verdict = 'admitted'"),
        refused=sum(refusals.values()),
        duplicates=one("SELECT coalesce(sum(duplicates), 0) FROM submissions"),
        refusals=refusals,
        unused=counts(
            "SELECT reason, count(*) FROM drops JOIN submissions USING (group_id) "
            "WHERE verdict = 'admitted' GROUP BY 1"
        ),
        consumed=sum(ages.values()),
        staleness_histogram=ages,
        staleness_steps_max=max(ages, default=0),
        actors=_actors(sql),
    )


def _actors(sql: sqlite3.Connection) -> tuple[ActorRow, ...]:
    leases = dict(sql.execute("SELECT actor, count(*) FROM leases GROUP BY 1").fetchall())
    reasons: dict[str, dict[str, int]] = {actor: {} for actor in leases}
    for actor, reason, times in sql.execute(
        "SELECT actor, verdict, count(*) FROM submissions WHERE verdict != 'admitted' "
        "GROUP BY 1, 2 UNION ALL SELECT actor, reason, times FROM strays"
    ):
        mine = reasons.setdefault(actor, {})
        mine[reason] = mine.get(reason, 0) + times
    good = {
        actor: (accepted, tokens, consumed)
        for actor, accepted, tokens, consumed in sql.execute(
            "SELECT actor, count(*), sum(tokens), sum(group_id IN "
            "(SELECT group_id FROM consumption WHERE undone = 0)) "
            "FROM submissions WHERE verdict = 'admitted' GROUP BY 1"
        )
    }
    duplicates = dict(
        sql.execute("SELECT actor, sum(duplicates) FROM submissions GROUP BY 1").fetchall()
    )
    rows = []
    for actor, refused in sorted(reasons.items()):
        accepted, tokens, consumed = good.get(actor, (0, 0, 0))
        rows.append(
            ActorRow(
                actor=actor,
                leases=leases.get(actor, 0),
                accepted=accepted,
                refused=sum(refused.values()),
                duplicates=duplicates.get(actor, 0),
                consumed=consumed,
                tokens=tokens,
                reasons=refused,
                commonest_refusal=max(refused, key=refused.__getitem__, default=None),
            )
        )
    return tuple(rows)


_REASONS = ", ".join(f"'{reason.value}'" for reason in Reason)

_RULES: tuple[tuple[str, str], ...] = (
    (
        "group {} was consumed {} times in the surviving line",
        "SELECT group_id, count(*) FROM consumption WHERE undone = 0 GROUP BY 1 "
        "HAVING count(*) > 1",
    ),
    (
        "member {1} of group {0} was admitted {2} times",
        "SELECT group_id, member, count(*) FROM submissions WHERE verdict = 'admitted' "
        "GROUP BY 1, 2 HAVING count(*) > 1",
    ),
    (
        "group {} was consumed with {} of {} members admitted",
        "SELECT group_id, (SELECT count(DISTINCT member) FROM submissions WHERE verdict = "
        "'admitted' AND submissions.group_id = groups.group_id) AS admitted, size FROM groups "
        "WHERE group_id IN (SELECT group_id FROM consumption) AND admitted != size",
    ),
    (
        "group {} was consumed and also dropped ({})",
        "SELECT group_id, reason FROM drops "
        "WHERE group_id IN (SELECT group_id FROM consumption WHERE undone = 0)",
    ),
    (
        "group {} was consumed in step {}, which does not exist",
        "SELECT group_id, step FROM consumption WHERE NOT EXISTS (SELECT 1 FROM steps WHERE "
        "steps.step = consumption.step AND steps.undone = consumption.undone "
        "AND steps.version_before = consumption.version_before)",
    ),
    (
        "step {} was taken {} times in the surviving line",
        "SELECT step, count(*) FROM steps WHERE undone = 0 GROUP BY 1 HAVING count(*) > 1",
    ),
    (
        "step {} is missing in the surviving line",
        "SELECT step + 1 FROM steps WHERE undone = 0 "
        "AND step < (SELECT max(step) FROM steps WHERE undone = 0) "
        "AND step + 1 NOT IN (SELECT step FROM steps WHERE undone = 0)",
    ),
    (
        "member {1} of group {0} was trained {2} versions old; the limit is {3}",
        "SELECT consumption.group_id, member, consumption.version_before - version_oldest, "
        "staleness_limit FROM consumption JOIN submissions USING (group_id) "
        "JOIN steps ON steps.step = consumption.step AND steps.undone = consumption.undone "
        "WHERE verdict = 'admitted' AND (consumption.version_before - version_oldest > "
        "staleness_limit OR version_newest > consumption.version_before)",
    ),
    (
        "member {1} of lease {0} has the unknown verdict '{2}'",
        "SELECT lease_id, member, coalesce(verdict, '') FROM submissions "
        f"WHERE coalesce(verdict, '') NOT IN ({_REASONS})",
    ),
    (
        "member {1} of lease {0} was judged {2} times",
        "SELECT lease_id, member, count(*) FROM submissions GROUP BY 1, 2 HAVING count(*) > 1",
    ),
    (
        "member {1} of lease {0} was not leased to {2}",
        "SELECT submissions.lease_id, member, submissions.actor FROM submissions "
        "LEFT JOIN leases USING (lease_id) WHERE leases.actor IS NULL "
        "OR leases.actor != submissions.actor OR leases.group_id != submissions.group_id "
        "OR NOT EXISTS (SELECT 1 FROM json_each(leases.indices) WHERE value = member)",
    ),
    (
        "lease {} ended {} times",
        "SELECT lease_id, count(*) FROM lease_ends GROUP BY 1 HAVING count(*) > 1",
    ),
    (
        "lease {} ended but was never granted",
        "SELECT lease_id FROM lease_ends WHERE lease_id NOT IN (SELECT lease_id FROM leases)",
    ),
    (
        "lease {} is called completed with members that have no verdict",
        "SELECT leases.lease_id FROM leases JOIN lease_ends USING (lease_id) "
        "WHERE how = 'completed' AND json_array_length(indices) != (SELECT count(*) FROM "
        "submissions WHERE submissions.lease_id = leases.lease_id)",
    ),
    (
        "member {1} of lease {0} is of version {2}, which nobody trained",
        "SELECT lease_id, member, version_oldest FROM submissions WHERE verdict = 'admitted' "
        "AND version_oldest NOT IN (SELECT version FROM published) "
        "AND version_oldest > (SELECT coalesce(max(version_before), -1) + 1 FROM steps)",
    ),
    (
        "the payload of member {1} of group {0} is missing",
        "SELECT group_id, member FROM submissions WHERE verdict = 'admitted' "
        "AND digest NOT IN (SELECT digest FROM payloads) "
        "AND group_id NOT IN (SELECT group_id FROM drops) "
        "AND group_id NOT IN (SELECT group_id FROM consumption WHERE undone = 0)",
    ),
    (
        "group {} was dropped for the unknown reason '{}'",
        "SELECT group_id, coalesce(reason, '') FROM drops "
        f"WHERE coalesce(reason, '') NOT IN ({_REASONS})",
    ),
)


def problems(sql: sqlite3.Connection) -> list[str]:
    """Every broken rule with the places where it is broken; empty when the books are right."""
    found = [
        f"the file is damaged: {line}"
        for (line,) in sql.execute("PRAGMA quick_check(20)").fetchall()
        if line != "ok"
    ]
    if found:
        return found
    for sentence, query in _RULES:
        rows = sql.execute(query).fetchmany(PROBLEMS_PER_RULE_MAX)
        found += [sentence.format(*row) for row in rows]
    for digest, envelope in sql.execute("SELECT digest, envelope FROM payloads"):
        if digest_of(envelope) != digest:
            found.append(f"payload {digest.hex()[:8]} does not hash to its name")
    return found
