"""Reading and writing the small fields of an encoded difference, with every read bounded.

`delta.codec` and `delta.sparse` use it. The integers are LEB128: seven bits a byte, lowest first.
"""

from __future__ import annotations

from typing import NoReturn

from echo2_mesh.errors import PeerError

_VARINT_BYTES_MAX = 5


def refuse(why: str) -> NoReturn:
    """Raise the PeerError of a malformed difference."""
    raise PeerError(f"Malformed difference: {why}.", "The data chunk is fetched whole.")


def varint(value: int) -> bytes:
    """A count or a size below 2^35."""
    coded = bytearray()
    while value > 0x7F:
        coded.append(value & 0x7F | 0x80)
        value >>= 7
    coded.append(value)
    return bytes(coded)


class Fields:
    """A cursor over one encoded difference; whatever would run past its end is refused."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0

    @property
    def left_bytes(self) -> int:
        return len(self._view) - self._at

    def octet(self) -> int:
        if not self.left_bytes:
            refuse("it ends too early")
        self._at += 1
        return self._view[self._at - 1]

    def varint(self) -> int:
        value = 0
        for index in range(_VARINT_BYTES_MAX):
            octet = self.octet()
            value |= (octet & 0x7F) << 7 * index
            if octet < 0x80:
                return value
        refuse("a number is too long")

    def take(self, size_bytes: int) -> memoryview:
        """The next `size_bytes`, without a copy."""
        if size_bytes > self.left_bytes:
            refuse("it ends too early")
        self._at += size_bytes
        return self._view[self._at - size_bytes : self._at]
