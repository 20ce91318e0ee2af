"""What this actor has generated and the learner has not yet acknowledged. Pure.

Gossip promises neither delivery nor order, so a header is announced by gossip first and, without
a verdict, handed to the learner directly, again and again, until its lease cannot count any
more. Sending the same header twice is harmless: the ledger gives each (lease, index) one verdict.
Called by `actor.rollouts`, which sends what `due` returns and knows the clock.
"""

from __future__ import annotations

import msgspec

from echo2_mesh import limits
from echo2_mesh.wire.messages import TrajectoryHeader, VerdictNote
from echo2_mesh.wire.types import Reason

HEADERS_MAX = 4096
"""Unacknowledged headers kept; with more, no new lease is taken."""
GATHER_S = 0.1
"""Headers finished within this time leave as one announcement: gossip costs per message."""
RETRY_S = 1.0
RETRY_S_MAX = 15.0
DIRECT_FIRST, DIRECT_MAX = 4, 64
"""Announcements that go directly at once after gossip failed."""
HEADER_OVERHEAD_BYTES = 512


class Send(msgspec.Struct, frozen=True, kw_only=True):
    """One announcement: by gossip the first time, directly afterwards."""

    headers: tuple[TrajectoryHeader, ...]
    directly: bool


class _Waiting(msgspec.Struct, kw_only=True):
    header: TrajectoryHeader
    due_s: float
    expires_s: float
    sent_count: int = 0
    gossiped: bool = False


class Outbox:
    """Headers by (lease, index), each with the time of its next announcement.

    Where gossip brought no verdict before the retry, the next announcements go directly at once,
    twice as many each time, before gossip is tried again: a retry's delay makes rollouts stale.
    """

    def __init__(self) -> None:
        self._waiting: dict[tuple[str, int], _Waiting] = {}
        self._direct_left = 0
        self._direct_next = DIRECT_FIRST
        self.expired_count = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def lease_ids(self) -> frozenset[str]:
        """Leases with members whose verdicts are still to come."""
        return frozenset(lease_id for lease_id, _ in self._waiting)

    def full(self) -> bool:
        """True when no new lease may be taken."""
        return len(self._waiting) >= HEADERS_MAX

    def add(self, header: TrajectoryHeader, now_s: float, *, expires_s: float) -> None:
        """A trajectory exists; keep telling the learner until `expires_s`."""
        self._waiting[(header.lease_id, header.index)] = _Waiting(
            header=header, due_s=now_s + GATHER_S, expires_s=expires_s
        )

    def acknowledge(self, notes: tuple[VerdictNote, ...]) -> tuple[TrajectoryHeader, ...]:
        """Forget what has a verdict; the headers forgotten, whose payloads may go."""
        found = [self._waiting.pop((note.lease_id, note.index), None) for note in notes]
        if any(entry is not None and entry.gossiped for entry in found):
            self._direct_next = DIRECT_FIRST
        return tuple(entry.header for entry in found if entry is not None)

    def due(self, now_s: float) -> tuple[Send, ...]:
        """What to announce now, and forget what has expired."""
        for key, entry in list(self._waiting.items()):
            if now_s >= entry.expires_s:
                del self._waiting[key]
                self.expired_count += 1
        due = [entry for entry in self._waiting.values() if entry.due_s <= now_s]
        if any(entry.sent_count == 0 for entry in due):
            # What finished meanwhile goes along: announcements cost by number, not by size.
            due += [
                entry
                for entry in self._waiting.values()
                if entry.sent_count == 0 and entry.due_s > now_s
            ]
        if any(entry.gossiped for entry in due):
            self._direct_left = self._direct_next
            self._direct_next = min(2 * self._direct_next, DIRECT_MAX)
        gossip = self._direct_left == 0
        if any(entry.sent_count == 0 for entry in due):
            self._direct_left = max(0, self._direct_left - 1)
        by_way: dict[bool, list[TrajectoryHeader]] = {False: [], True: []}
        for entry in due:
            entry.gossiped = gossip and entry.sent_count == 0
            by_way[not entry.gossiped].append(entry.header)
            entry.sent_count += 1
            entry.due_s = now_s + min(RETRY_S * 2 ** (entry.sent_count - 1), RETRY_S_MAX)
        return tuple(
            Send(headers=part, directly=directly)
            for directly, headers in by_way.items()
            for part in _split(headers)
        )

    def next_due_s(self) -> float | None:
        """When `due` will next have something to say; None while empty."""
        return min((entry.due_s for entry in self._waiting.values()), default=None)

    def retry_now(self, now_s: float) -> None:
        """The learner is back: announce everything without waiting."""
        for entry in self._waiting.values():
            entry.due_s = min(entry.due_s, now_s)


def _split(headers: list[TrajectoryHeader]) -> list[tuple[TrajectoryHeader, ...]]:
    """Parts that each fit one gossip message."""
    parts: list[list[TrajectoryHeader]] = []
    size_bytes = 0
    for header in headers:
        cost = HEADER_OVERHEAD_BYTES + len(header.inline or b"")
        over = size_bytes + cost > limits.ROLLOUT_BATCH_SIZE_BYTES_MAX
        if not parts or over or len(parts[-1]) >= limits.ROLLOUT_BATCH_HEADERS_MAX:
            parts.append([])
            size_bytes = 0
        parts[-1].append(header)
        size_bytes += cost
    return [tuple(part) for part in parts]


class Tally:
    """How this actor's rollouts fared, from the learner's verdicts."""

    def __init__(self) -> None:
        self.by_reason: dict[Reason, int] = {}

    def count(self, notes: tuple[VerdictNote, ...]) -> None:
        """Add verdicts; call once per acknowledged header."""
        for note in notes:
            self.by_reason[note.verdict] = self.by_reason.get(note.verdict, 0) + 1

    @property
    def accepted(self) -> int:
        return self.by_reason.get(Reason.ADMITTED, 0)

    @property
    def refused(self) -> int:
        return sum(self.by_reason.values()) - self.accepted

    @property
    def commonest_refusal(self) -> Reason | None:
        """The reason this actor's rollouts are most often refused for; None if none was."""
        refusals = {r: n for r, n in self.by_reason.items() if r is not Reason.ADMITTED}
        return max(refusals, key=lambda r: (refusals[r], r.value)) if refusals else None
