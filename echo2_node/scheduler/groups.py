"""Groups: G samples of one prompt, from the first lease to the training step.

    from      event                               to
    WAITING   a lease is granted                  OPEN
    OPEN      last lease lost, nothing arrived    WAITING
    OPEN      last member arrived, rewards vary   READY
    READY     taken into a batch                  TRAINING
    any       zero variance, stale, lost too      (gone)
              often, trained

WAITING groups are prompts without work behind them: they hold no slot. The shelf keeps groups
and finds the oldest; it grants nothing and knows no clock. The clerk owns it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import Enum

from echo2_mesh.wire.types import PolicyVersion
from echo2_node.scheduler.records import Member

REWARD_SPREAD_MIN = 1e-9
"""Rewards closer together than this carry no signal."""


class Phase(Enum):
    WAITING = "waiting"
    OPEN = "open"
    READY = "ready"
    TRAINING = "training"
    GONE = "gone"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.WAITING: frozenset({Phase.OPEN, Phase.GONE}),
    Phase.OPEN: frozenset({Phase.WAITING, Phase.READY, Phase.GONE}),
    Phase.READY: frozenset({Phase.TRAINING, Phase.GONE}),
    Phase.TRAINING: frozenset({Phase.GONE}),
    Phase.GONE: frozenset(),
}
ALIVE = frozenset({Phase.OPEN, Phase.READY, Phase.TRAINING})


def advantages(rewards: Sequence[float]) -> tuple[float, ...]:
    """A_i = R_i - mean(R) over one group; no division by the spread (Dr. GRPO, 2503.20783)."""
    mean = sum(rewards) / len(rewards)
    return tuple(reward - mean for reward in rewards)


class Group:
    """One prompt's samples. Changed by the shelf and the clerk alone."""

    def __init__(self, group_id: str, *, item_index: int, size: int, order: int) -> None:
        self.group_id = group_id
        self.item_index = item_index
        self.size = size
        self.order = order
        """Counts up over all groups: the tie-break of oldest first."""
        self.phase = Phase.WAITING
        self.members: dict[int, Member] = {}
        self.lease_id: str | None = None
        """The live lease on it: one at a time, for everything that is missing."""
        self.losses = 0
        """Leases that ended with members missing."""

    @property
    def full(self) -> bool:
        return len(self.members) == self.size

    @property
    def varied(self) -> bool:
        rewards = [member.reward for member in self.members.values()]
        return max(rewards) - min(rewards) > REWARD_SPREAD_MIN

    @property
    def oldest(self) -> PolicyVersion:
        """The oldest version in any member: the group's age is counted from it."""
        return min(member.version_oldest for member in self.members.values())

    def missing(self) -> tuple[int, ...]:
        """Indices that nobody delivered."""
        return tuple(index for index in range(self.size) if index not in self.members)


class Shelf:
    """All groups that are not gone, with a count of the alive ones."""

    def __init__(self) -> None:
        self._groups: dict[str, Group] = {}
        self._orders = 0
        self.alive = 0

    def __iter__(self) -> Iterator[Group]:
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    def find(self, group_id: str) -> Group | None:
        return self._groups.get(group_id)

    def get(self, group_id: str) -> Group:
        """A group that must be here."""
        return self._groups[group_id]

    def open(self, group_id: str, *, item_index: int, size: int) -> Group:
        """A new group, waiting for its first lease."""
        assert group_id not in self._groups, f"group {group_id} exists twice"
        group = Group(group_id, item_index=item_index, size=size, order=self._orders)
        self._orders += 1
        self._groups[group_id] = group
        return group

    def move(self, group: Group, phase: Phase) -> None:
        """Change phase; only the transitions of the table exist."""
        if group.phase is phase:
            return
        assert phase in TRANSITIONS[group.phase], f"{group.group_id}: {group.phase} -> {phase}"
        self.alive += (phase in ALIVE) - (group.phase in ALIVE)
        group.phase = phase
        if phase is Phase.GONE:
            del self._groups[group.group_id]

    def ready(self) -> list[Group]:
        """Groups that could be trained, oldest version first, then in order of opening."""
        ready = [group for group in self if group.phase is Phase.READY]
        return sorted(ready, key=lambda group: (group.oldest, group.order))

    def wanting(self) -> list[Group]:
        """Groups with members missing and no lease on them, the most complete first.

        Those with members come first (oldest version first): they hold a slot until they are
        whole. Waiting ones follow in order of opening.
        """
        wanting = [
            group
            for group in self
            if group.phase in (Phase.OPEN, Phase.WAITING) and group.lease_id is None
        ]
        return sorted(
            wanting,
            key=lambda group: (
                (0, group.oldest, group.order) if group.members else (1, 0, group.order)
            ),
        )

    def check(self, group: Group) -> None:
        """What must hold for `group` between two events."""
        match group.phase:
            case Phase.WAITING:
                assert not group.members
                assert group.lease_id is None
            case Phase.OPEN:
                assert group.members or group.lease_id
                assert not group.full
            case Phase.READY | Phase.TRAINING:
                assert group.full
                assert group.varied
                assert group.lease_id is None
            case Phase.GONE:
                assert group.group_id not in self._groups
