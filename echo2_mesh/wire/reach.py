"""The question by which a node learns how others come to it: who am I from there, can you dial me?

Part of the messages (`wire.messages` names them); `net.reach` asks and answers.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from echo2_mesh import limits
from echo2_mesh.wire.blocks import Value
from echo2_mesh.wire.types import AddressField

PlaceField = Annotated[str, Meta(max_length=64)]
"""/ip4|ip6/<address>/tcp/<port>, or empty where it is not known."""


class ReachAsk(Value, frozen=True, kw_only=True):
    """Ask: from where do you see me, and can you dial me at the ports of these addresses?

    The answerer dials the address it sees the asker at, and no other: nobody is made to knock at a
    stranger's door.
    """

    addresses: Annotated[tuple[AddressField, ...], Meta(max_length=limits.ADDRESSES_MAX)] = ()


class ReachAnswer(Value, frozen=True, kw_only=True):
    """Reply: where the asker's connection comes from, and which of its places answered a dial."""

    observed: PlaceField = ""
    """Empty where the connection is relayed."""
    tried: bool = True
    """False where the asker was dialled back a moment ago, or too many others are being."""
    reached: Annotated[tuple[AddressField, ...], Meta(max_length=limits.ADDRESSES_MAX)] = ()
