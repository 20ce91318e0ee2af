"""How many leases an actor may hold, after what became of those it had.

Nothing is held against a newcomer. Who lets leases get lost (not delivered in time, handed back, or
delivered as rubbish) rests for a while, longer each time, and may then hold as many as it has left
less those it lost, but always one; every lease that it delivers whole allows one more. So whoever
takes all slots and answers nothing can do that once, an actor that loses one of many hardly
notices, and one that broke down is back at work in a few rounds.
Decides only for the clerk, which owns it; forgets the longest undisturbed first.
"""

from __future__ import annotations

from collections import OrderedDict

from echo2_mesh.wire.types import NodeId

ACTORS_MAX = 4096
ALLOWED_MAX = 4096
"""Allowed so many again, an actor is as good as a newcomer."""
REST_FIRST_S = 1.0
REST_LONGEST_S = 64.0


class _Record:
    def __init__(self) -> None:
        self.allowed = 1
        self.failures = 0
        self.lost = 0
        self.failed_s = float("-inf")
        self.rest_until_s = float("-inf")


class Conduct:
    """Records of the actors that failed."""

    def __init__(self) -> None:
        self._records: OrderedDict[NodeId, _Record] = OrderedDict()

    def allowed(self, actor: NodeId, now_s: float) -> int:
        """How many leases `actor` may hold at once; 0 while it rests."""
        record = self._records.get(actor)
        if record is None:
            return ALLOWED_MAX
        return 0 if now_s < record.rest_until_s else record.allowed

    def delivered(self, actor: NodeId) -> None:
        """A lease was delivered whole."""
        record = self._records.get(actor)
        if record is not None:
            record.failures = 0
            record.allowed += 1
            if record.allowed >= ALLOWED_MAX:
                del self._records[actor]

    def failed(self, actor: NodeId, now_s: float, *, left: int) -> None:
        """A lease of `actor` was lost, `left` others live on. What is lost at once fails once."""
        record = self._records.setdefault(actor, _Record())
        self._records.move_to_end(actor)
        if len(self._records) > ACTORS_MAX:
            self._records.popitem(last=False)
        if record.failed_s != now_s:
            record.failed_s, record.lost = now_s, 0
            record.rest_until_s = now_s + min(REST_FIRST_S * 2**record.failures, REST_LONGEST_S)
            record.failures = min(record.failures + 1, 16)
        record.lost += 1
        record.allowed = max(1, left - record.lost)
