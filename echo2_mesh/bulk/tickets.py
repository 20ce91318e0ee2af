"""Who may open a lane here: one-time tokens, each for one peer and a few seconds.

`bulk.worker` admits what the daemon agreed over signed questions; `bulk.opening` redeems what a
stranger shows. Bounded in all and per peer: the oldest ticket of the peer goes first.
"""

from __future__ import annotations

from typing import NamedTuple

from echo2_mesh import limits
from echo2_mesh.wire.types import NodeId


class Ticket(NamedTuple):
    """Whose it is, until when, and how the lane came about."""

    peer: NodeId
    expires_s: float
    way: str


class Tickets:
    """Tokens that have been given out and not yet shown."""

    def __init__(self) -> None:
        self._tickets: dict[bytes, Ticket] = {}

    def admit(self, token: bytes, ticket: Ticket, now_s: float) -> None:
        """Let the ticket's peer in once."""
        for known in [t for t, old in self._tickets.items() if old.expires_s <= now_s]:
            del self._tickets[known]
        mine = [t for t, old in self._tickets.items() if old.peer == ticket.peer]
        if len(mine) >= limits.LANE_TICKETS_PER_PEER_MAX:
            del self._tickets[mine[0]]
        elif len(self._tickets) >= limits.LANE_TICKETS_MAX:
            del self._tickets[next(iter(self._tickets))]
        self._tickets[token] = ticket

    def redeem(self, token: bytes, now_s: float) -> Ticket | None:
        """The ticket, which is used up; None where there is none or its time has passed."""
        ticket = self._tickets.pop(token, None)
        return ticket if ticket is not None and now_s < ticket.expires_s else None
