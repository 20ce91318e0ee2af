"""The trio side of an engine: a child process behind the verbs of `EnginePort`.

It matches replies to callers, counts tokens, and turns the child's death, silence included, into
one LocalError for everybody who waits. It never restarts a child: the actor daemon does.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Generic, TypeVar, assert_never

import trio

from echo2_mesh.child import Child, open_child
from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.wire.types import Digest
from echo2_node.config import ActorConfig
from echo2_node.engines.frames import (
    Cancel,
    Command,
    Event,
    Failed,
    Finished,
    Install,
    Installed,
    Load,
    Loaded,
    Pulse,
    Submit,
    decode_event,
    encode,
)
from echo2_node.engines.protocol import EngineInfo, Generation, GenerationRequest, InstallReport
from echo2_node.engines.registry import EngineSettings, check_engine_name

LOAD_TIMEOUT_S = 600.0
INSTALL_TIMEOUT_S = 600.0
SILENCE_S_MAX = 300.0
"""A child that has said nothing for this long (it pulses every second, between two steps) hangs."""
RATE_WINDOW_S = 10.0
OUTBOX_MAX = 4096
"""Commands not yet written; a caller waits, and a cancellation is dropped, when it is full."""
_SMALL_HOST_CORES = 4

T = TypeVar("T")


class _Reply(Generic[T]):
    """One value or error, set once by the reading task and awaited by one caller."""

    def __init__(self) -> None:
        self._ready = trio.Event()
        self._value: T | None = None
        self._error: Exception | None = None

    def set(self, value: T) -> None:
        self._value = value
        self._ready.set()

    def fail(self, error: Exception) -> None:
        self._error = error
        self._ready.set()

    async def get(self) -> T:
        await self._ready.wait()
        if self._error is not None:
            raise self._error
        assert self._value is not None
        return self._value


class _Call:
    """A request in the engine, and the members of it that have ended."""

    def __init__(self, request: GenerationRequest) -> None:
        self.waiting_for = set(request.indices)
        self.ended: list[Generation] = []
        self.reply: _Reply[tuple[Generation, ...]] = _Reply()


class EngineProcess:
    """See `engines.port.EnginePort`; any number of tasks may call it at once."""

    def __init__(self, child: Child, info: EngineInfo) -> None:
        self.info = info
        self._child = child
        self._death: LocalError | None = None
        self._calls: dict[str, _Call] = {}
        self._install: tuple[Digest, _Reply[InstallReport]] | None = None
        self._installing = trio.Lock()
        self._outbox, self._to_write = trio.open_memory_channel[Command](OUTBOX_MAX)
        self._counts: deque[tuple[float, int]] = deque()

    @property
    def alive(self) -> bool:
        """False once the child has died; every verb raises then."""
        return self._death is None

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def tokens_per_s(self) -> float:
        """Tokens of ended sequences per second, over the last `RATE_WINDOW_S`."""
        if len(self._counts) < 2:
            return 0.0
        (first_s, first), (last_s, last) = self._counts[0], self._counts[-1]
        recent = trio.current_time() - last_s < RATE_WINDOW_S
        return (last - first) / (last_s - first_s) if recent and last_s > first_s else 0.0

    async def generate(self, request: GenerationRequest) -> tuple[Generation, ...]:
        """See `EnginePort.generate`; in the order of `request.indices`.

        Being cancelled cancels the request in the engine.
        """
        self._check_alive()
        if request.request_id in self._calls:
            raise UsageError(f"Request {request.request_id} is running already.")
        call = self._calls[request.request_id] = _Call(request)
        try:
            await self._outbox.send(Submit(request=request))
            return await call.reply.get()
        finally:
            if self._calls.pop(request.request_id, None) is call:
                self._cancel_in_engine(request.request_id)

    async def install(self, manifest: Digest) -> InstallReport:
        """See `EnginePort.install`. A second call waits for the first."""
        async with self._installing:
            self._check_alive()
            reply: _Reply[InstallReport] = _Reply()
            self._install = (manifest, reply)
            try:
                with trio.fail_after(INSTALL_TIMEOUT_S):
                    await self._outbox.send(Install(manifest=manifest))
                    return await reply.get()
            except trio.TooSlowError:
                self._child.kill()
                raise LocalError(
                    f"The engine did not install {manifest.hex()[:8]} in {INSTALL_TIMEOUT_S:.0f} s."
                ) from None
            finally:
                self._install = None

    def cancel_nowait(self, request_id: str) -> None:
        """See `EnginePort.cancel_nowait`. Whoever waits for that request gets a LocalError."""
        call = self._calls.pop(request_id, None)
        if call is not None:
            call.reply.fail(LocalError(f"Request {request_id} was cancelled."))
            self._cancel_in_engine(request_id)

    def _cancel_in_engine(self, request_id: str) -> None:
        with suppress(trio.WouldBlock):
            self._outbox.send_nowait(Cancel(request_id=request_id))

    def _check_alive(self) -> None:
        if self._death is not None:
            raise LocalError(self._death.what, self._death.hint)

    async def _write(self) -> None:
        """The one writing task."""
        async for command in self._to_write:
            try:
                await self._child.send(encode(command))
            except LocalError as error:
                self._die(error)

    async def _read(self) -> None:
        """The one reading task; ends with the child."""
        while self._death is None:
            try:
                with trio.fail_after(SILENCE_S_MAX):
                    frame = await self._child.receive()
            except LocalError as error:
                self._die(error)
            except trio.TooSlowError:
                self._child.kill()
                self._die(
                    LocalError(
                        f"The engine process {self.pid} said nothing for {SILENCE_S_MAX:.0f} s "
                        "and was killed."
                    )
                )
            else:
                self._hear(decode_event(frame))

    def _die(self, error: LocalError) -> None:
        """Remember why, and tell everybody who waits."""
        if self._death is not None:
            return
        self._death = error
        calls, self._calls = self._calls, {}
        for call in calls.values():
            call.reply.fail(LocalError(error.what, error.hint))
        if self._install is not None:
            self._install[1].fail(LocalError(error.what, error.hint))

    def _hear(self, event: Event) -> None:
        match event:
            case Finished(generations=generations):
                for generation in generations:
                    self._finish(generation)
            case Installed(manifest=manifest, report=report):
                if self._install is not None and self._install[0] == manifest:
                    self._install[1].set(report)
            case Failed():
                self._fail(event)
            case Pulse(tokens_total=total):
                now_s = trio.current_time()
                self._counts.append((now_s, total))
                while self._counts[0][0] < now_s - RATE_WINDOW_S:
                    self._counts.popleft()
            case Loaded():
                raise AssertionError("an engine is loaded once")
            case _ as never:
                assert_never(never)

    def _finish(self, generation: Generation) -> None:
        call = self._calls.get(generation.request_id)
        if call is None or generation.index not in call.waiting_for:
            return
        call.waiting_for.discard(generation.index)
        call.ended.append(generation)
        if not call.waiting_for:
            del self._calls[generation.request_id]
            call.reply.set(tuple(sorted(call.ended, key=lambda ended: ended.index)))

    def _fail(self, failed: Failed) -> None:
        error = _error(failed)
        if failed.request_id is not None:
            call = self._calls.pop(failed.request_id, None)
            if call is not None:
                call.reply.fail(error)
        elif self._install is not None and self._install[0] == failed.manifest:
            self._install[1].fail(error)


@asynccontextmanager
async def open_engine(
    model_folder: Path,
    store_dir: Path,
    *,
    config: ActorConfig,
    log_path: Path,
    extra_env: Mapping[str, str] | None = None,
) -> AsyncIterator[EngineProcess]:
    """Start an engine child and load `config.engine` for a model; it has no weights yet.

    Args:
        model_folder: config and tokenizer files of the run's manifest.
        store_dir: the chunk store from which versions are installed.

    Resources: a child process in its own group, gone when the context ends.

    Errors:
        UsageError: unknown engine, not installed, or a model that it cannot run.
        LocalError: the child died, or did not load in `LOAD_TIMEOUT_S`.
    """
    check_engine_name(config.engine)
    settings = EngineSettings(
        model_folder=str(model_folder),
        store_dir=str(store_dir),
        device=config.device,
        dtype=config.dtype,
        threads=config.threads or default_threads(_cores()),
        sequences_max=config.sequences_max,
    )
    environment = {**_thread_environment(settings.threads), **(extra_env or {})}
    argv = (sys.executable, "-m", "echo2_node.engines.worker")
    async with open_child(argv, log_path=log_path, env=environment) as child:
        await child.send(encode(Load(engine=config.engine, settings=settings)))
        engine = EngineProcess(child, await _loaded(child))
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(engine._read)
                nursery.start_soon(engine._write)
                yield engine
                nursery.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            if len(group.exceptions) > 1:
                raise
            # The two tasks raise nothing, so this is the caller's own error: hand it back bare.
            raise group.exceptions[0] from None


def default_threads(cores: int) -> int:
    """Threads of an engine where none are configured.

    On a small host learner, actors and daemons share the cores, and two processes with two
    threads each are three times slower than with one, because their barriers spin.
    """
    return 1 if cores <= _SMALL_HOST_CORES else cores // 2


def _cores() -> int:
    """Cores this process may use, which a container makes fewer than the host has."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux
    return len(affinity(0)) if affinity is not None else os.cpu_count() or 1


def _thread_environment(threads: int) -> dict[str, str]:
    """Read by the numeric libraries when they are imported, hence set before the child starts."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
    return {name: str(threads) for name in names}


async def _loaded(child: Child) -> EngineInfo:
    try:
        with trio.fail_after(LOAD_TIMEOUT_S):
            event = decode_event(await child.receive())
    except trio.TooSlowError:
        child.kill()
        raise LocalError(f"The engine did not load in {LOAD_TIMEOUT_S:.0f} s.") from None
    if isinstance(event, Failed):
        raise _error(event)
    assert isinstance(event, Loaded), f"{type(event).__name__} before Loaded"
    return event.info


def _error(failed: Failed) -> UsageError | LocalError:
    return (UsageError if failed.usage else LocalError)(failed.what, failed.hint)
