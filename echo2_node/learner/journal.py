"""The journal: the one way into the ledger, in order, off the event loop.

Facts are appended at the moment they are decided and written by one task in one worker thread,
as many as have gathered in one transaction. Whoever must not speak before they are kept waits
for them. A full disk stops the writing, not the daemon: it is tried again until it works, and
`paused` tells the desk to lease nothing meanwhile.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import structlog
import trio

from echo2_mesh.errors import LocalError
from echo2_mesh.wire.types import Reason
from echo2_node.learner.ledger import Ledger
from echo2_node.learner.threads import Threads
from echo2_node.scheduler.records import OpenLease, Record, Submission

log = structlog.get_logger()

Result = TypeVar("Result")

FACTS_PER_TRANSACTION_MAX = 4096
BACKLOG_FACTS_MAX = 16_384
"""Facts not yet written; above it intake and offers wait."""
RETRY_FIRST_S = 0.5
RETRY_LONGEST_S = 10.0


class Journal:
    """Appended facts, the oldest not yet written first."""

    def __init__(self, ledger: Ledger, *, inline: bool = False) -> None:
        self._ledger = ledger
        self._thread = Threads(1, inline=inline)
        self._entries: list[tuple[Record, bytes | None]] = []
        self._appended = 0
        self._written = 0
        self._stirred = trio.Event()
        self._advanced = trio.Event()
        self.last_error = ""

    @property
    def paused(self) -> bool:
        """The last attempt to write failed."""
        return bool(self.last_error)

    def append(self, facts: Sequence[Record], envelope: bytes | None = None) -> None:
        """Add facts; never waits, so that their order is the order of the decisions.

        Args:
            envelope: the payload of the submission among `facts`, kept if it was admitted.
        """
        self._entries += [(fact, _payload(fact, envelope)) for fact in facts]
        self._appended += len(facts)
        self._stirred.set()

    async def wait_written(self) -> None:
        """Return when everything appended so far is kept."""
        mark = self._appended
        while self._written < mark:
            await self._advanced.wait()

    async def wait_room(self) -> None:
        """Return when the backlog is short enough to take more."""
        while self._appended - self._written >= BACKLOG_FACTS_MAX:
            await self._advanced.wait()

    async def read(self, question: Callable[[], Result]) -> Result:
        """Ask the ledger something, between two transactions."""
        return await self._thread.run(question)

    async def recall_lease(self, lease_id: str) -> OpenLease | None:
        """A lease that the clerk no longer remembers, with every verdict given on it so far."""
        await self.wait_written()
        return await self.read(lambda: self._ledger.lease(lease_id))

    async def run(self) -> None:
        """Write for ever.

        Errors:
            sqlite3.IntegrityError: a fact contradicts the books: our bug, ends the daemon.
        """
        retry_s = RETRY_FIRST_S
        while True:
            while not self._entries:
                self._stirred = trio.Event()
                await self._stirred.wait()
            entries = self._entries[:FACTS_PER_TRANSACTION_MAX]
            try:
                await self.read(functools.partial(_apply, self._ledger, entries))
            except LocalError as error:
                log.warning("ledger cannot be written", reason=str(error), seconds=retry_s)
                self.last_error = error.what
                await trio.sleep(retry_s)
                retry_s = min(2 * retry_s, RETRY_LONGEST_S)
                continue
            retry_s, self.last_error = RETRY_FIRST_S, ""
            del self._entries[: len(entries)]
            self._written += len(entries)
            self._advanced.set()
            self._advanced = trio.Event()


def _payload(fact: Record, envelope: bytes | None) -> bytes | None:
    admitted = isinstance(fact, Submission) and fact.verdict is Reason.ADMITTED
    return envelope if admitted else None


def _apply(ledger: Ledger, entries: Sequence[tuple[Record, bytes | None]]) -> None:
    ledger.apply(
        [fact for fact, _ in entries],
        {
            fact.digest: payload
            for fact, payload in entries
            if isinstance(fact, Submission) and payload is not None
        },
    )
