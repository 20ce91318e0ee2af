"""The envelope: how a message becomes signed bytes and back. Pure; keys are passed as functions.

Order of trust, never changed: size before decoding, version and kind before anything else,
signature over the payload *bytes* before their meaning, meaning before effect. Nobody
re-encodes what somebody else signed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Annotated

import msgspec
from msgspec import Meta

from echo2_mesh import limits
from echo2_mesh.errors import PeerError
from echo2_mesh.wire.messages import KIND_OF, KINDS, Manifest, Message, Trajectory, Value
from echo2_mesh.wire.types import NodeId, NodeIdField, RunIdField, SignatureField

Sign = Callable[[bytes], bytes]
Verify = Callable[[NodeId, bytes, bytes], bool]

_DOMAIN = b"echo2 envelope\x00"


class Envelope(Value, frozen=True, kw_only=True):
    """A message in its signed cover. `payload` is the MessagePack of the struct named by `kind`."""

    v: Annotated[int, Meta(ge=0, le=2**31)]
    kind: Annotated[str, Meta(min_length=1, max_length=32)]
    run_id: RunIdField
    sender: NodeIdField
    payload: bytes
    signature: SignatureField


class Opened(msgspec.Struct, frozen=True, kw_only=True):
    """A verified envelope and the message in it."""

    sender: NodeId
    message: Message
    raw: bytes
    """The envelope's own bytes, for forwarding and for storing as evidence."""


class _Versioned(Value, frozen=True, kw_only=True):
    """What every envelope, older or newer, has in common."""

    v: Annotated[int, Meta(ge=0, le=2**31)]


_encoder = msgspec.msgpack.Encoder()
_envelope_decoder = msgspec.msgpack.Decoder(Envelope)
_version_decoder = msgspec.msgpack.Decoder(_Versioned)
_decoders = {kind: msgspec.msgpack.Decoder(cls) for kind, cls in KINDS.items()}


def signed_bytes(kind: str, run_id: str, sender: str, payload: bytes) -> bytes:
    """The exact bytes under the signature (proto/envelope.md).

    Domain, network version and every header field are length-prefixed, so no two different
    envelopes share signed bytes.
    """
    parts = [_DOMAIN, limits.NETWORK_VERSION.to_bytes(4, "big")]
    for field in (kind.encode(), run_id.encode(), sender.encode(), payload):
        parts += [len(field).to_bytes(4, "big"), field]
    return b"".join(parts)


def seal(message: Message, *, run_id: str, sender: NodeId, sign: Sign) -> bytes:
    """Encode and sign `message`. The result is what travels and what is stored."""
    kind = KIND_OF[type(message)]
    payload = _encoder.encode(message)
    signature = sign(signed_bytes(kind, run_id, sender, payload))
    return _encoder.encode(
        Envelope(
            v=limits.NETWORK_VERSION,
            kind=kind,
            run_id=run_id,
            sender=sender,
            payload=payload,
            signature=signature,
        )
    )


def unseal(raw: bytes, *, run_id: str, verify: Verify, size_bytes_max: int) -> Opened:
    """Check and decode one envelope.

    Args:
        raw: bytes from a peer, of any content.
        run_id: the run this node belongs to; another run's envelope is refused.
        verify: (sender, bytes, signature) -> bool.
        size_bytes_max: bound of the place the bytes came from.

    Raises:
        PeerError: too large, not an envelope, another network version or run, unknown kind, bad
            signature, or a payload that is not a legal message of its kind.
    """
    if len(raw) > size_bytes_max:
        raise PeerError(f"Envelope of {len(raw)} bytes refused: the limit is {size_bytes_max}.")
    envelope = _decode_envelope(raw)
    if envelope.kind not in _decoders:
        raise PeerError(f"Unknown message kind {envelope.kind!r}.")
    if envelope.run_id != run_id:
        raise PeerError(f"Envelope of run '{envelope.run_id}'; this node is in run '{run_id}'.")
    to_sign = signed_bytes(envelope.kind, envelope.run_id, envelope.sender, envelope.payload)
    if not verify(envelope.sender, to_sign, envelope.signature):
        raise PeerError(f"Bad signature on a {envelope.kind} from {envelope.sender}.")
    message = _decode(envelope.kind, envelope.payload)
    if isinstance(message, Manifest | Trajectory) and message.run_id != run_id:
        raise PeerError(f"A {envelope.kind} of run '{message.run_id}' in the cover of '{run_id}'.")
    return Opened(sender=envelope.sender, message=message, raw=raw)


def _decode_envelope(raw: bytes) -> Envelope:
    """The envelope in `raw`, of this network version, unverified."""
    try:
        envelope = _envelope_decoder.decode(raw)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        # Another version may have another envelope; `v` is the one field that all will share.
        with contextlib.suppress(msgspec.MsgspecError, RecursionError, ValueError):
            _refuse_other_version(_version_decoder.decode(raw).v)
        raise PeerError(f"Not an Echo-2 envelope: {error}.") from error
    _refuse_other_version(envelope.v)
    return envelope


def _refuse_other_version(version: int) -> None:
    if version != limits.NETWORK_VERSION:
        raise PeerError(
            f"Envelope of network version {version}; this node speaks {limits.NETWORK_VERSION}.",
            "Update the older of the two with `pip install -U echo2`.",
        )


def _decode(kind: str, payload: bytes) -> Message:
    try:
        return _decoders[kind].decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise PeerError(f"Illegal {kind} message: {error}.") from error
