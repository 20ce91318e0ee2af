"""A disk that is full, for this process, while a block runs: writes fail with EFBIG.

A block, never a fixture: pytest writes its own progress while fixtures are alive, and where its
output is a file that write would fail too.
"""

from __future__ import annotations

import contextlib
import resource
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def files_at_most(size_bytes: int) -> Iterator[None]:
    """Inside, no file of this process can grow beyond `size_bytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
