"""The three kinds of failure, by who can mend it.

    Echo2Error
    ├── PeerError    they: a peer sent something wrong, or did not answer
    ├── LocalError   this host: port in use, child process died, corrupt file
    │   └── DiskFull     what may be tried again once there is room
    └── UsageError   the person: a typo in a file, an unknown name, a damaged ticket

Every error says three things: what happened, to what, and (in `hint`) what to do now. Peers'
errors are caught and counted where peer input enters; the other two end the command with a
paragraph and an exit code (`exit_code`).
"""

from __future__ import annotations


class Echo2Error(Exception):
    """Base of all deliberate errors.

    Args:
        what: what happened and to what, one sentence with the offending value in it.
        hint: what to do now; shown apart by the command line. May be empty.
    """

    exit_code = 1

    def __init__(self, what: str, hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.what} {self.hint}".strip()


class PeerError(Echo2Error):
    """A peer sent something wrong or did not answer in time. Never ends a daemon.

    Args:
        code: a word for programs; what a `Refusal` carries. Empty where nothing depends on it.
    """

    exit_code = 4

    def __init__(self, what: str, hint: str = "", *, code: str = "") -> None:
        super().__init__(what, hint)
        self.code = code


class LocalError(Echo2Error):
    """This host cannot do what is asked: disk, port, file, child process."""

    exit_code = 3


class DiskFull(LocalError):
    """The disk has no room: nothing that was there is harmed, and waiting may help."""


class UsageError(Echo2Error):
    """The person asked for something that does not exist or does not fit."""

    exit_code = 2


def sole(error: BaseException) -> BaseException | None:
    """The one exception inside nested groups, or None where there are several."""
    while isinstance(error, BaseExceptionGroup):
        if len(error.exceptions) != 1:
            return None
        error = error.exceptions[0]
    return error
