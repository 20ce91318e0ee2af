"""How two nodes agree on a lane between their bulk ports. Imported through `wire.messages`."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

from msgspec import Meta

from echo2_mesh import limits
from echo2_mesh.wire.blocks import Value
from echo2_mesh.wire.types import AddressField

TokenField = Annotated[bytes, Meta(min_length=limits.LANE_TOKEN_BYTES, max_length=32)]
FingerprintField = Annotated[bytes, Meta(min_length=32, max_length=32)]
PlacesField = Annotated[tuple[AddressField, ...], Meta(max_length=limits.LANE_PLACES_MAX)]


class LaneWay(str, Enum):
    """Who opens the connection."""

    DIAL = "dial"
    """The asker dials the answerer."""
    REVERSE = "reverse"
    """The answerer dials the asker."""
    PUNCH = "punch"
    """Both at once, each from its bulk port: the asker is the TLS client."""


class LaneAsk(Value, frozen=True, kw_only=True):
    """Ask: let us have a lane, this way."""

    way: LaneWay
    places: PlacesField = ()
    """Multiaddresses of the asker's bulk port: to be dialled (reverse), or to be met (punch)."""
    certificate: FingerprintField
    """SHA-256 of the asker's certificate, DER: the one to expect where it is the TLS server."""
    token: TokenField
    """Opens the asker's bulk port once, for the answerer alone."""


class LaneOffer(Value, frozen=True, kw_only=True):
    """Reply: come (dial), I am there (reverse), or I am on my way (punch)."""

    places: PlacesField = ()
    certificate: FingerprintField
    token: TokenField
    """Opens the answerer's bulk port once, for the asker alone."""
