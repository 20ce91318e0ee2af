"""New data chunks from old ones and patches: the work itself, and the child process that does it.

`rebuild` reads a base chunk and patches from the store, applies them, and stores the result under
the name that the manifest promised, after hashing it. `net.rebuilding` calls it in place
(simulations) or starts `python -m echo2_mesh.rebuild <store folder> <threads>` and sends jobs.
It decides nothing about what is made when, and touches no network.
"""

from __future__ import annotations

import contextlib
import os
import queue
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec

from echo2_mesh.child import ChildPipe, take_pipes
from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import LocalError, PeerError
from echo2_mesh.wire.messages import ChunkRef, PatchChunk
from echo2_mesh.wire.types import Digest

NICENESS = 5
"""Rebuilding yields to the daemon, whose heartbeats and leases must not wait."""


class Part(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """A data chunk to make: its index and name, and the base chunk it is made from."""

    index: int
    ref: ChunkRef
    base: Digest


class Job(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """Some data chunks, and the patch chunks to apply to each that they cover, oldest first."""

    number: int
    parts: tuple[Part, ...]
    patches: tuple[PatchChunk, ...]


class Outcome(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What became of a job; every index of its parts is in one of the lists.

    `bad` did not hash right or had a malformed patch, `lost` had no (sound) base or patch here,
    `undone` were not tried because this host failed, which `failure` tells.
    """

    number: int
    made: tuple[int, ...] = ()
    bad: tuple[int, ...] = ()
    lost: tuple[int, ...] = ()
    undone: tuple[int, ...] = ()
    failure: str = ""
    bytes_written: int = 0


def rebuild(store: ChunkStore, job: Job) -> Outcome:
    """Make the data chunks of `job` and store them. Never raises for bad or missing bytes."""
    made: list[int] = []
    bad: list[int] = []
    lost: list[int] = []
    written_bytes = 0
    with contextlib.ExitStack() as stack:
        read = [_read(store, chunk, stack) for chunk in job.patches]
        for place, part in enumerate(job.parts):
            try:
                known = store.has(part.ref.digest)
                if not known:
                    _make(store, part, job.patches, read)
                    written_bytes += part.ref.size_bytes
                made.append(part.index)
            except PeerError:
                # A base that was damaged on this disk is not the learner's fault.
                (bad if _is_sound(store, part.base) else lost).append(part.index)
            except KeyError:
                lost.append(part.index)
            except LocalError as error:
                return Outcome(
                    number=job.number,
                    made=tuple(made),
                    bad=tuple(bad),
                    lost=tuple(lost),
                    undone=tuple(later.index for later in job.parts[place:]),
                    failure=str(error),
                    bytes_written=written_bytes,
                )
    return Outcome(
        number=job.number,
        made=tuple(made),
        bad=tuple(bad),
        lost=tuple(lost),
        bytes_written=written_bytes,
    )


_Pieces = tuple[memoryview, ...] | PeerError | KeyError


def _read(store: ChunkStore, chunk: PatchChunk, stack: contextlib.ExitStack) -> _Pieces:
    """The pieces of one patch blob, or why there are none."""
    from echo2_mesh.delta.patches import read_patch  # heavy: the daemon only sends jobs

    try:
        return read_patch(stack.enter_context(store.view(chunk.ref.digest)), chunk.count)
    except (PeerError, KeyError) as error:
        return error


def _make(
    store: ChunkStore, part: Part, patches: Sequence[PatchChunk], read: Sequence[_Pieces]
) -> None:
    """Make one data chunk.

    Raises:
        PeerError: a patch is malformed, or the result does not have the promised digest.
        KeyError: the base or a patch is not here.
        LocalError: the store cannot take it.
    """
    from echo2_mesh.delta.codec import apply_chunk  # heavy: the daemon only sends jobs

    with store.view_unverified(part.base) as base:
        data: memoryview = base
        for chunk, pieces in zip(patches, read, strict=True):
            if not chunk.first <= part.index < chunk.first + chunk.count:
                continue
            if isinstance(pieces, Exception):
                raise pieces
            piece = pieces[part.index - chunk.first]
            if len(piece):
                data = apply_chunk(data, piece).data
        store.put(part.ref, data)


def _is_sound(store: ChunkStore, digest: Digest) -> bool:
    """Reads the blob whole; one that is damaged is dropped by the store."""
    with contextlib.suppress(KeyError), store.view(digest):
        return True
    return False


# --- the child ---------------------------------------------------------------------------------

_encoder = msgspec.msgpack.Encoder()
_jobs = msgspec.msgpack.Decoder(Job)
_outcomes = msgspec.msgpack.Decoder(Outcome)


def encode(frame: Job | Outcome) -> bytes:
    return _encoder.encode(frame)


def decode_outcome(raw: bytes) -> Outcome:
    return _outcomes.decode(raw)


def main(arguments: Sequence[str]) -> None:
    """Serve one daemon until it hangs up."""
    pipe = take_pipes()
    os.nice(NICENESS)
    store = ChunkStore(Path(arguments[0]), quota_bytes=None)
    outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
    # One thread writes, whichever finished: frames on a pipe must not interleave.
    threading.Thread(target=_write, args=(pipe, outcomes), daemon=True).start()
    with ThreadPoolExecutor(max_workers=int(arguments[1])) as pool:
        while (raw := pipe.read()) is not None:
            pool.submit(_work, store, _jobs.decode(raw), outcomes)


def _work(store: ChunkStore, job: Job, outcomes: queue.SimpleQueue[Outcome]) -> None:
    try:
        outcomes.put(rebuild(store, job))
    except BaseException as error:
        # A bug, or no memory: the daemon sees the process end and this text in its log.
        sys.stderr.write(f"rebuild of job {job.number} failed: {error!r}\n")
        sys.stderr.flush()
        os._exit(1)


def _write(pipe: ChildPipe, outcomes: queue.SimpleQueue[Outcome]) -> None:
    while True:
        pipe.write(_encoder.encode(outcomes.get()))


if __name__ == "__main__":
    main(sys.argv[1:])
