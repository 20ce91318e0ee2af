"""From a nursery's group of errors to the one that a person should read."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import trio

from echo2_mesh.errors import Echo2Error, LocalError, PeerError, UsageError

__all__ = ["Echo2Error", "LocalError", "PeerError", "UsageError", "as_one_error", "leaves"]


def leaves(error: BaseException) -> tuple[BaseException, ...]:
    """The plain errors inside arbitrarily nested groups, cancellations left out."""
    if isinstance(error, BaseExceptionGroup):
        return tuple(leaf for inner in error.exceptions for leaf in leaves(inner))
    return () if isinstance(error, trio.Cancelled) else (error,)


@contextlib.contextmanager
def as_one_error() -> Iterator[None]:
    """Let a group that holds only deliberate errors out as the first of them.

    Anything else is a bug of ours and passes unchanged, with its whole traceback.
    """
    try:
        yield
    except BaseExceptionGroup as group:
        inside = leaves(group)
        if inside and all(isinstance(error, Echo2Error) for error in inside):
            raise inside[0] from group
        raise
