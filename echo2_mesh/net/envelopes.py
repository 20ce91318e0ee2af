"""The mesh's pen and its eye: signs what this node says, checks what others say.

The pure codec with this node's key, run and counters filled in. Decides nothing; raises what the
codec raises.
"""

from __future__ import annotations

from collections import Counter

from echo2_mesh.errors import PeerError
from echo2_mesh.identity import Identity, verify
from echo2_mesh.wire.codec import Opened, seal, unseal
from echo2_mesh.wire.messages import KIND_OF, Message


class Envelopes:
    """Seals and opens envelopes of one run."""

    def __init__(self, identity: Identity, run_id: str, counters: Counter[str]) -> None:
        self.node = identity.node
        self.run_id = run_id
        self._identity = identity
        self._counters = counters

    def seal(self, message: Message) -> bytes:
        """Sign `message` as this node."""
        raw = seal(message, run_id=self.run_id, sender=self.node, sign=self._identity.sign)
        self._counters[f"bytes_out_{KIND_OF[type(message)]}"] += len(raw)
        return raw

    def unseal(self, raw: bytes, *, size_bytes_max: int) -> Opened:
        """Check and decode bytes from anywhere.

        Raises:
            PeerError: they are not a legal envelope of this run; counted.
        """
        try:
            opened = unseal(raw, run_id=self.run_id, verify=verify, size_bytes_max=size_bytes_max)
        except PeerError:
            self._counters["oversized" if len(raw) > size_bytes_max else "bad_envelopes"] += 1
            raise
        self._counters[f"bytes_in_{KIND_OF[type(opened.message)]}"] += len(raw)
        return opened
