"""What a daemon says about itself: log lines for people and programs, and one metric line a step.

`configure` is called once by the command line; every other module only asks structlog for a
logger. `MetricsFile` appends JSON lines; a full disk costs lines, never the run. Nothing here
decides anything, and no secret, ticket or prompt is ever a field.
"""

from __future__ import annotations

import errno
import json
import logging
import logging.handlers
import sys
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TextIO

from echo2_mesh.errors import LocalError

if TYPE_CHECKING:
    import structlog  # a third of a second: only daemons pay for it

FULL_DISK = (errno.ENOSPC, errno.EDQUOT)
LOG_SIZE_BYTES_MAX = 8 * 1024 * 1024
LOG_FILES_KEPT = 2
METRIC_LINE_CHARACTERS_MAX = 1_000_000
_PEER_ID_PREFIX = "12D3KooW"
"""Every Ed25519 peer id begins with it, so it tells nobody anything."""


def short_id(node: str) -> str:
    """Eight characters that tell nodes apart: those after the prefix that all of them share."""
    return node.removeprefix(_PEER_ID_PREFIX)[:8]


def configure(*, log_path: Path | None = None, verbose: bool = False, console: bool = True) -> None:
    """Send structlog and stdlib logging to standard error and, as JSON, to a file.

    Args:
        log_path: a rotating file of JSON lines; its folder is created.
        verbose: developers' events too.
        console: write to standard error; people's form on a terminal, JSON otherwise.

    Errors:
        LocalError: the log folder cannot be created.
    """
    import structlog

    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="at"),
    ]
    structlog.configure(
        processors=[*shared, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        wrapper_class=structlog.make_filtering_bound_logger(
            logging.DEBUG if verbose else logging.INFO
        ),
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=False,
    )
    handlers: list[logging.Handler] = []
    if console:
        handlers.append(_StandardError())
        handlers[-1].setFormatter(_formatter(shared, for_people=sys.stderr.isatty()))
    if log_path is not None:
        handlers.append(_file_handler(log_path))
        handlers[-1].setFormatter(_formatter(shared, for_people=False))
    root = logging.getLogger()
    for old in tuple(root.handlers):
        root.removeHandler(old)
        old.close()
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(logging.DEBUG if verbose else logging.INFO)
    for noisy in ("libp2p", "asyncio", "aioquic", "zeroconf", "httpx", "matplotlib", "trio"):
        logging.getLogger(noisy).setLevel(logging.ERROR)


class MetricsFile:
    """JSON lines, one object each. `lost_lines` counts those that a full disk swallowed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lost_lines = 0
        self._file: TextIO | None = None
        self._torn = False

    def write(self, values: dict[str, Any]) -> None:
        """Append one object.

        Errors:
            LocalError: the file cannot be written for another reason than a full disk.
        """
        line = json.dumps(values, separators=(",", ":"), allow_nan=True) + "\n"
        try:
            if self._file is None:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                self._torn = _ends_torn(self.path)
                self._file = self.path.open("a", encoding="utf-8")
            self._file.write("\n" + line if self._torn else line)
            self._file.flush()
            self._torn = False
        except OSError as error:
            self._discard()
            self.lost_lines += 1
            if error.errno not in FULL_DISK:
                raise LocalError(
                    f"The metrics file {self.path} cannot be written: {error}."
                ) from error

    def close(self) -> None:
        """Release the file; a later write opens it again."""
        if self._file is not None:
            file, self._file = self._file, None
            file.close()

    def _discard(self) -> None:
        """Drop what could not be flushed: closing tries once more and may fail again."""
        try:
            self.close()
        except OSError:
            self._file = None

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """Every whole line of a metrics file, in order; lines torn by a crash are left out."""
    return list(_lines(path))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            while line := file.readline(METRIC_LINE_CHARACTERS_MAX):
                try:
                    values = json.loads(line)
                except ValueError:
                    continue
                if isinstance(values, dict):
                    yield values
    except FileNotFoundError:
        return
    except OSError as error:
        raise LocalError(f"The metrics file {path} cannot be read: {error}.") from error


def _ends_torn(path: Path) -> bool:
    """True where a crash or a full disk left the last line without its end."""
    try:
        with path.open("rb") as file:
            if file.seek(0, 2) == 0:
                return False
            file.seek(-1, 2)
            return file.read(1) != b"\n"
    except FileNotFoundError:
        return False


class _StandardError(logging.StreamHandler[TextIO]):
    """Looks standard error up at each line, so that a live display may stand in for it."""

    def emit(self, record: logging.LogRecord) -> None:
        self.stream = sys.stderr
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """A closed terminal or a full disk ends no daemon."""


class _RotatingFile(logging.handlers.RotatingFileHandler):
    def handleError(self, record: logging.LogRecord) -> None:
        """A full disk costs lines, not the run."""


def _file_handler(path: Path) -> logging.Handler:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LocalError(f"The log folder {path.parent} cannot be created: {error}.") from error
    return _RotatingFile(
        path,
        maxBytes=LOG_SIZE_BYTES_MAX,
        backupCount=LOG_FILES_KEPT,
        encoding="utf-8",
        delay=True,
    )


def _formatter(
    shared: list[structlog.typing.Processor], *, for_people: bool
) -> structlog.stdlib.ProcessorFormatter:
    import structlog

    last: list[structlog.typing.Processor] = [
        structlog.stdlib.ProcessorFormatter.remove_processors_meta
    ]
    if for_people:
        last += [_shorten_ids, structlog.dev.ConsoleRenderer(colors=True, pad_event_to=24)]
    else:
        last += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    return structlog.stdlib.ProcessorFormatter(foreign_pre_chain=shared, processors=last)


def _shorten_ids(
    logger: Any, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    for key, value in event.items():
        if isinstance(value, str) and value.startswith(_PEER_ID_PREFIX):
            event[key] = short_id(value)
        elif isinstance(value, bytes):
            event[key] = value.hex()[:8]
    if isinstance(event.get("at"), str):
        event["timestamp"] = event.pop("at")[11:19]
    return event
