"""What the actor daemon needs of an engine: a few verbs. `engines.process` drives a real engine
in a child process; `engines.fake` has one that lives on a virtual clock."""

from __future__ import annotations

from typing import Protocol

from echo2_mesh.wire.types import Digest
from echo2_node.engines.protocol import EngineInfo, Generation, GenerationRequest, InstallReport


class EnginePort(Protocol):
    """An engine seen from trio. Every verb raises LocalError once the engine is dead."""

    info: EngineInfo

    @property
    def alive(self) -> bool:
        """False once the engine is dead."""
        ...

    @property
    def tokens_per_s(self) -> float:
        """Completion tokens per second over the last few seconds."""
        ...

    async def generate(self, request: GenerationRequest) -> tuple[Generation, ...]:
        """All members of a request; many calls may run at once.

        Raises:
            UsageError: the engine cannot take this request (context, vocabulary).
            LocalError: the engine died.
        """
        ...

    async def install(self, manifest: Digest) -> InstallReport:
        """Change the weights between two tokens; running requests go on.

        Raises:
            UsageError: the version does not fit the engine; the old weights stay.
            LocalError: the engine died; where it is alive, the version cannot be read or was
                taken back, and the old weights stay.
        """
        ...

    def cancel_nowait(self, request_id: str) -> None:
        """Forget a request; never fails."""
        ...
