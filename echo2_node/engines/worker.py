"""The engine child: `python -m echo2_node.engines.worker`. One engine, stepped between commands.

Takes its pipes before anything heavy is imported, loads the engine named by the first frame, then
loops: drain the commands, one step, send what ended. It blocks only when the engine is idle. A
new version is read by a thread while steps go on, so generation pauses just for the copy. What an
engine refuses goes back as `Failed`; any other exception ends the process, with its traceback in
the log, and the daemon starts another. Started by `engines.process` alone.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from typing import assert_never

from echo2_mesh.child import ChildPipe, take_pipes
from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.wire.types import Digest
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
    decode_command,
    encode,
)
from echo2_node.engines.protocol import Engine

PULSE_INTERVAL_S = 1.0
COMMANDS_MAX = 4096
"""Commands read but not yet obeyed; the parent waits when there are more."""


class _Prepared:
    """A version was read, or could not be; comes from the reading thread."""

    def __init__(self, manifest: Digest, error: UsageError | LocalError | None) -> None:
        self.manifest = manifest
        self.error = error


class Worker:
    """Feeds one engine from a queue and writes what comes out."""

    def __init__(self, pipe: ChildPipe, engine: Engine) -> None:
        self._pipe = pipe
        self._engine = engine
        self._queue: queue.Queue[Command | _Prepared | None] = queue.Queue(COMMANDS_MAX)
        self._tokens_total = 0
        self._pulsed_s = 0.0

    def run(self) -> None:
        """Work until the parent hangs up."""
        threading.Thread(target=self._read, name="commands", daemon=True).start()
        while True:
            self._pulse()
            if not self._obey():
                self._engine.close()
                return
            if self._engine.busy():
                ended = self._engine.step()
                if ended:
                    self._tokens_total += sum(len(g.token_ids) // 4 for g in ended)
                    self._say(Finished(generations=tuple(ended)))

    def _read(self) -> None:
        """Move frames from the pipe into the queue; None when the parent has hung up."""
        while True:
            frame = self._pipe.read()
            self._queue.put(None if frame is None else decode_command(frame))
            if frame is None:
                return

    def _obey(self) -> bool:
        """Everything that is queued; waits for something if the engine is idle."""
        while True:
            try:
                if self._engine.busy():
                    command = self._queue.get_nowait()
                else:
                    command = self._queue.get(timeout=PULSE_INTERVAL_S)
            except queue.Empty:
                return True
            if command is None:
                return False
            self._perform(command)

    def _perform(self, command: Command | _Prepared) -> None:
        match command:
            case Submit(request=request):
                try:
                    self._engine.submit(request)
                except (UsageError, LocalError) as error:
                    self._say(_failed(error, request_id=request.request_id))
            case Cancel(request_id=request_id):
                self._engine.cancel(request_id)
            case Install(manifest=manifest):
                threading.Thread(
                    target=self._prepare, args=(manifest,), name="prepare", daemon=True
                ).start()
            case _Prepared(manifest=manifest, error=None):
                try:
                    report = self._engine.install(manifest)
                except (UsageError, LocalError) as error:
                    self._say(_failed(error, manifest=manifest))
                else:
                    self._say(Installed(manifest=manifest, report=report))
            case _Prepared(manifest=manifest, error=UsageError() | LocalError() as error):
                self._say(_failed(error, manifest=manifest))
            case Load():
                raise AssertionError("an engine is loaded once")
            case _ as never:
                assert_never(never)  # type: ignore[arg-type]

    def _prepare(self, manifest: Digest) -> None:
        error: UsageError | LocalError | None = None
        try:
            self._engine.prepare(manifest)
        except (UsageError, LocalError) as failure:
            error = failure
        except BaseException as bug:
            error = LocalError(f"Version {manifest.hex()[:8]} cannot be read: {bug!r}.")
            raise
        finally:
            self._queue.put(_Prepared(manifest, error))

    def _pulse(self) -> None:
        now_s = time.monotonic()
        if now_s - self._pulsed_s >= PULSE_INTERVAL_S:
            self._pulsed_s = now_s
            self._say(Pulse(tokens_total=self._tokens_total))

    def _say(self, event: Event) -> None:
        self._pipe.write(encode(event))


def _failed(
    error: UsageError | LocalError,
    *,
    request_id: str | None = None,
    manifest: Digest | None = None,
) -> Failed:
    return Failed(
        usage=isinstance(error, UsageError),
        what=error.what,
        hint=error.hint,
        request_id=request_id,
        manifest=manifest,
    )


def main() -> None:
    """Serve one engine on stdin and stdout."""
    pipe = take_pipes()
    first = pipe.read()
    if first is None:
        return
    load = decode_command(first)
    assert isinstance(load, Load), "the first command loads"
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false")
    from echo2_node.engines.registry import load_engine

    try:
        engine = load_engine(load.engine, load.settings)
    except (UsageError, LocalError) as error:
        pipe.write(encode(_failed(error)))
        return
    pipe.write(encode(Loaded(info=engine.info)))
    Worker(pipe, engine).run()


if __name__ == "__main__":
    main()
