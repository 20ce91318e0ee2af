"""The run ticket: everything a volunteer needs to join, in one pasteable word.

`echo2v<network version>` followed by base32 of MessagePack and a 4-byte BLAKE3 checksum: letters
and digits only, so a double click selects all of it; white space picked up by wrapping is
ignored. The network version stands outside the encoding, so that an old client can say which
version it would need.
"""

from __future__ import annotations

import base64
import binascii
import re
from typing import Annotated

import blake3
import msgspec
from msgspec import Meta

from echo2_mesh import limits
from echo2_mesh.errors import UsageError
from echo2_mesh.wire.messages import Value
from echo2_mesh.wire.types import (
    AddressField,
    CountField,
    DigestField,
    NodeId,
    NodeIdField,
    RunIdField,
)

_SHAPE = re.compile(r"echo2v(0|[1-9][0-9]{0,5})x([a-z2-7]+)")
_CHECKSUM_BYTES = 4
_ASK_AGAIN = "Ask whoever runs the learner for a new ticket (`echo2-node ticket` prints it)."


class RunTicket(Value, frozen=True, kw_only=True):
    """An invitation into one run."""

    run_id: RunIdField
    learner: NodeIdField
    addresses: Annotated[tuple[AddressField, ...], Meta(max_length=limits.ADDRESSES_MAX)]
    manifest: DigestField | None = None
    """Digest of the first version's manifest: pins the model a volunteer agreed to run."""
    secret: Annotated[bytes, Meta(min_length=16, max_length=64)] | None = None
    """Needed to take leases where the run is not open to everyone. Never printed by itself."""
    expires_unix_s: CountField | None = None

    def __repr__(self) -> str:
        return f"RunTicket(run_id={self.run_id!r}, learner={self.learner!r})"


def _checksum(prefix: str, body: bytes) -> bytes:
    return blake3.blake3(prefix.encode() + body).digest()[:_CHECKSUM_BYTES]


def write_ticket(ticket: RunTicket) -> str:
    """The pasteable form of a ticket."""
    body = msgspec.msgpack.encode(ticket)
    prefix = f"echo2v{limits.NETWORK_VERSION}x"
    coded = base64.b32encode(body + _checksum(prefix, body)).decode("ascii")
    word = prefix + coded.rstrip("=").lower()
    assert len(word) <= limits.TICKET_CHARACTERS_MAX
    return word


def read_ticket(text: str, *, now_unix_s: float) -> RunTicket:
    """Parse a pasted ticket.

    Raises:
        UsageError: not a ticket, damaged, of another network version, or expired; each with its
            own sentence.
    """
    if len(text) > 2 * limits.TICKET_CHARACTERS_MAX:  # room for white space
        raise UsageError(f"A ticket is shorter than {len(text)} characters.", _ASK_AGAIN)
    word = "".join(text.split())
    # Some letters of other alphabets have ASCII ones as their lower case.
    shape = _SHAPE.fullmatch(word.lower()) if word.isascii() else None
    if shape is None:
        raise UsageError(
            f"'{text.strip()[:24]}…' is not an Echo-2 ticket: a ticket starts with "
            f"'echo2v{limits.NETWORK_VERSION}x' and has only letters and digits.",
            "Paste the whole word that the learner printed.",
        )
    version, coded = int(shape[1]), shape[2]
    if version != limits.NETWORK_VERSION:
        older = version < limits.NETWORK_VERSION
        raise UsageError(
            f"This ticket is for network version {version}; this program speaks version "
            f"{limits.NETWORK_VERSION}.",
            "The run needs an update of its learner."
            if older
            else "Update with `pip install -U echo2` and join again.",
        )
    body = _decode_body(version, coded)
    try:
        ticket = msgspec.msgpack.decode(body, type=RunTicket)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise UsageError(f"The ticket's content is not legal: {error}.", _ASK_AGAIN) from error
    if ticket.expires_unix_s is not None and now_unix_s >= ticket.expires_unix_s:
        hours = (now_unix_s - ticket.expires_unix_s) / 3600
        raise UsageError(f"This ticket expired {hours:.1f} hours ago.", _ASK_AGAIN)
    return ticket


def _decode_body(version: int, coded: str) -> bytes:
    """The checked MessagePack in a ticket's letters.

    Raises:
        UsageError: a letter is missing, added or wrong.
    """
    try:
        raw = base64.b32decode(coded.upper() + "=" * (-len(coded) % 8))
    except (binascii.Error, ValueError) as error:
        raise UsageError("The ticket is damaged: characters are missing.", _ASK_AGAIN) from error
    body, checksum = raw[:-_CHECKSUM_BYTES], raw[-_CHECKSUM_BYTES:]
    # The last letter has bits that decode to nothing; they must be as they were written.
    canonical = base64.b32encode(raw).decode("ascii").rstrip("=").lower() == coded
    if not canonical or checksum != _checksum(f"echo2v{version}x", body):
        raise UsageError(
            "The ticket is damaged: its checksum does not fit.",
            "Copy it again, whole; if that does not help: " + _ASK_AGAIN,
        )
    return body


def admission_proof(secret: bytes, *, run_id: str, node: NodeId) -> bytes:
    """32 bytes that only a holder of the ticket's secret can make, and only for its own node id."""
    key = blake3.blake3(b"echo2 admission\x00" + secret).digest()
    return blake3.blake3(f"{run_id}\x00{node}".encode(), key=key).digest()
