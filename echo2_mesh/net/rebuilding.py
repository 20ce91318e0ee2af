"""Makes data chunks from patches while more patches arrive: jobs to a child, outcomes to events.

One route at a time, the one of the version being fetched. The child (`echo2_mesh.rebuild`) starts
with the first job and is started again when it dies; where it keeps dying, what it should make is
wanted whole. Simulations rebuild in place. Used by `net.following`; what is made of a bad or lost
chunk is the fetch machine's decision, reached by `WantMore`.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Awaitable, Callable
from itertools import accumulate
from pathlib import Path

import trio

from echo2_mesh import limits
from echo2_mesh import rebuild as worker
from echo2_mesh.child import Child, open_child
from echo2_mesh.chunks import ChunkStore
from echo2_mesh.core.fetching import FetchEvent, Made, WantMore
from echo2_mesh.core.holdings import needed_of
from echo2_mesh.core.machine import backoff_s
from echo2_mesh.core.routes import Rebuild, Route
from echo2_mesh.errors import LocalError
from echo2_mesh.net.blobs import Workers
from echo2_mesh.net.driver import Guard
from echo2_mesh.rebuild import Job, Outcome, Part
from echo2_mesh.wire.messages import Manifest, PatchChunk
from echo2_mesh.wire.types import Digest

RETRY_FIRST_S = 1.0
RETRY_LONGEST_S = 30.0
JOBS_AHEAD_PER_THREAD = 2


class Rebuilding:
    """The patches' end of the weight plane of one node.

    Args:
        post: takes `Made` and `WantMore` to the fetch machine.
        landed: told of the digests that were made, for whoever waits for them.
        log_path: of the child; None works in place, by `workers`.
    """

    def __init__(
        self,
        *,
        store: ChunkStore,
        workers: Workers,
        guard: Guard,
        post: Callable[[FetchEvent], Awaitable[None]],
        landed: Callable[[tuple[Digest, ...]], None],
        log_path: Path | None,
    ) -> None:
        self._store = store
        self._workers = workers
        self._guard = guard
        self._post = post
        self._landed = landed
        self._log_path = log_path
        self._threads = max(1, min(limits.REBUILD_THREADS_MAX, (os.cpu_count() or 2) - 1))
        self._manifest: Manifest | None = None
        self._name = Digest(b"")
        self._rebuild: Rebuild | None = None
        self._patch_chunks: dict[int, PatchChunk] = {}
        """Of the route alone: blob index -> patch chunk."""
        self._steps: dict[int, int] = {}
        """Blob index -> place in the chain: the manifest may list patches in another order."""
        self._pending: deque[tuple[int, ...]] = deque()
        self._flying: dict[int, tuple[int, ...]] = {}
        """Job number -> data chunks, of the current route."""
        self._number = 0
        self._wake = trio.Event()
        self._forgotten = trio.Event()
        """The version that is being made is given up."""
        self._deaths = 0
        self._failures = 0
        self.last_error = ""

    # --- the route -----------------------------------------------------------------------------

    def begin(self, name: Digest, manifest: Manifest, route: Route, held: frozenset[int]) -> None:
        """Follow `route` to the manifest called `name`, and forget any other."""
        self.forget()
        if route.base is None:
            return
        self._name, self._manifest = name, manifest
        counts = (len(patch.chunks) for patch in manifest.patches)
        starts = list(accumulate(counts, initial=needed_of(manifest)))
        for step, place in enumerate(route.patches):
            for blob, chunk in enumerate(manifest.patches[place].chunks, start=starts[place]):
                self._patch_chunks[blob], self._steps[blob] = chunk, step
        self._rebuild = Rebuild(route, held)
        self._enqueue(self._rebuild.makeable())

    def forget(self) -> None:
        """Nothing is to be made any more; what is under way may still land in the store."""
        self._forgotten.set()
        self._forgotten = trio.Event()
        self._manifest = None
        self._rebuild = None
        self._patch_chunks = {}
        self._steps = {}
        self._pending.clear()
        self._flying.clear()
        self.last_error = ""

    def arrived(self, blob: int) -> None:
        """Blob `blob` of the current manifest is in the store now."""
        if self._rebuild is not None:
            self._enqueue(self._rebuild.arrived(blob))

    def _enqueue(self, indices: tuple[int, ...]) -> None:
        """Cut into jobs, so that several threads share what one patch frees."""
        if not indices or self._manifest is None:
            return
        job: list[int] = []
        size_bytes = 0
        share_bytes = limits.REBUILD_JOB_BYTES_MAX // self._threads
        for index in sorted(indices):
            chunk_bytes = self._manifest.chunks[index].size_bytes
            if job and size_bytes + chunk_bytes > share_bytes:
                self._pending.append(tuple(job))
                job, size_bytes = [], 0
            job.append(index)
            size_bytes += chunk_bytes
        self._pending.append(tuple(job))
        self._wake.set()

    def _next_job(self) -> Job | None:
        """The next job for whoever works, or None while there is none."""
        manifest, rebuild = self._manifest, self._rebuild
        if manifest is None or rebuild is None or not self._pending:
            return None
        base = rebuild.route.base
        assert base is not None
        indices = self._pending.popleft()
        blobs = {blob for index in indices for blob in rebuild.route.needs[index]}
        self._number += 1
        self._flying[self._number] = indices
        return Job(
            number=self._number,
            parts=tuple(
                Part(index=i, ref=manifest.chunks[i], base=base.chunks[i].digest) for i in indices
            ),
            patches=tuple(
                self._patch_chunks[blob] for blob in sorted(blobs, key=self._steps.__getitem__)
            ),
        )

    # --- work ----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Work until cancelled; waits without a child as long as there is nothing to make."""
        while True:
            await self._wait_work()
            if self._log_path is None:
                await self._work_in_place()
            else:
                await self._work_in_child(self._log_path)

    async def _wait_work(self) -> None:
        while not self._pending:
            self._wake = trio.Event()
            await self._wake.wait()

    async def _work_in_place(self) -> None:
        job = self._next_job()
        if job is not None:
            await self._settle(await self._workers.run(worker.rebuild, self._store, job))

    async def _work_in_child(self, log_path: Path) -> None:
        """Keep one child busy until it dies; then count that, and wait a little."""
        argv = (
            sys.executable,
            "-m",
            "echo2_mesh.rebuild",
            str(self._store.folder),
            str(self._threads),
        )
        try:
            async with open_child(argv, log_path=log_path) as child, trio.open_nursery() as nursery:
                nursery.start_soon(self._hear, child, nursery.cancel_scope)
                await self._feed(child, nursery.cancel_scope)
        except LocalError as error:
            self.last_error = error.what
        self._guard.counters["rebuild_deaths"] += 1
        self._deaths += 1
        self._pending.extend(self._flying.values())
        self._flying.clear()
        if self._deaths >= limits.REBUILD_DEATHS_MAX:
            await self._give_up()
        deaths = max(0, self._deaths - 1)
        await trio.sleep(backoff_s(deaths, first_s=RETRY_FIRST_S, longest_s=RETRY_LONGEST_S))

    async def _feed(self, child: Child, scope: trio.CancelScope) -> None:
        while True:
            while len(self._flying) >= JOBS_AHEAD_PER_THREAD * self._threads or not self._pending:
                self._wake = trio.Event()
                await self._wake.wait()
            job = self._next_job()
            if job is None:
                continue
            try:
                await child.send(worker.encode(job))
            except LocalError as error:
                self.last_error = error.what
                scope.cancel()
                return

    async def _hear(self, child: Child, scope: trio.CancelScope) -> None:
        while True:
            try:
                raw = await child.receive()
            except LocalError as error:
                self.last_error = error.what
                scope.cancel()
                return
            await self._settle(worker.decode_outcome(raw))

    async def _give_up(self) -> None:
        """The child keeps dying, perhaps of these very patches: want the rest whole."""
        rebuild = self._rebuild
        if rebuild is not None:
            rest = frozenset(rebuild.unmade)
            rebuild.settled(rest)
            self._pending.clear()
            self._deaths = 0
            await self._post(WantMore(manifest=self._name, indices=rest))

    async def _settle(self, outcome: Outcome) -> None:
        """Tell the machine what became of a job, unless it belongs to a version of the past."""
        if outcome.bytes_written:
            await self._workers.run(self._store.landed, outcome.bytes_written)
        self._deaths = 0
        indices = self._flying.pop(outcome.number, None)
        self._wake.set()
        manifest, rebuild = self._manifest, self._rebuild
        if indices is None or manifest is None or rebuild is None:
            return
        name = self._name
        self._guard.counters["rebuilt_chunks"] += len(outcome.made)
        self._guard.counters["bad_rebuilds"] += len(outcome.bad)
        self._guard.counters["lost_bases"] += len(outcome.lost)
        rebuild.settled((*outcome.made, *outcome.bad, *outcome.lost))
        if outcome.made:
            self._landed(tuple(manifest.chunks[index].digest for index in outcome.made))
            await self._post(Made(manifest=name, indices=frozenset(outcome.made)))
        if outcome.bad or outcome.lost:
            indices_wanted = frozenset((*outcome.bad, *outcome.lost))
            await self._post(WantMore(manifest=name, indices=indices_wanted))
        if not outcome.undone:
            self._failures = 0
            self.last_error = ""
        elif self._manifest is manifest:
            await self._retry(name, outcome)

    async def _retry(self, name: Digest, outcome: Outcome) -> None:
        """This host could not store a chunk (its disk is full): make room, wait, try again."""
        self._guard.counters["store_failures"] += 1
        self.last_error = outcome.failure
        forgotten = self._forgotten
        await self._workers.run(self._store.trim)
        pause_s = backoff_s(self._failures, first_s=RETRY_FIRST_S, longest_s=RETRY_LONGEST_S)
        self._failures += 1
        with trio.move_on_after(pause_s):  # no later version waits for this one
            await forgotten.wait()
        if self._name == name and self._rebuild is not None:
            self._enqueue(outcome.undone)
