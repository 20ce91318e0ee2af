"""The vectors of differences and patches in `proto/vectors/delta.json`, made from fixed numbers.

Called by `scripts/schema` alone. Frames are written by hand, so that another release of the
compressor does not change the vectors; `proto/deltas.md` says what they mean.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

from echo2_mesh.delta.codec import Slice, apply_chunk, encode_chunk
from echo2_mesh.delta.fields import varint
from echo2_mesh.delta.patches import write_patch
from echo2_mesh.errors import PeerError

SAME, SPARSE, STEP_PLANES, NEW_PLANES, RAW = range(5)


def delta_vectors() -> dict[str, Any]:
    """Content of `proto/vectors/delta.json`."""
    golden = [
        {
            "name": name,
            "base": base.hex(),
            "encoded": encoded.hex(),
            "result": bytes(apply_chunk(base, encoded)).hex(),
        }
        for name, base, encoded in _golden()
    ]
    rejected = [
        {"name": name, "base": base.hex(), "encoded": encoded.hex()}
        for name, base, encoded in _rejected()
        if _refused(base, encoded)
    ]
    parts = [b"\x01", b"", b"\x02\x03"]
    blob = write_patch(parts)
    return {
        "golden": golden,
        "must_reject": rejected,
        "patches": [{"blob": blob.hex(), "count": 3, "parts": [part.hex() for part in parts]}],
        "patches_must_reject": [
            {"name": "shorter", "blob": blob[:-1].hex(), "count": 3},
            {"name": "longer", "blob": (blob + b"\0").hex(), "count": 3},
            {"name": "of another count", "blob": blob.hex(), "count": 2},
        ],
    }


def _refused(base: bytes, encoded: bytes) -> bool:
    try:
        apply_chunk(base, encoded)
    except PeerError:
        return True
    raise AssertionError(f"read without complaint: {encoded.hex()}")


def _weights(count: int) -> bytes:
    """BF16 patterns of all exponents around 2^-5, of both signs, the smaller the rarer."""
    state, items = 12345, []
    for _ in range(count):
        state = (1103515245 * state + 12345) % (1 << 31)
        exponent = 121 - min((state >> 8 & -(state >> 8)).bit_length(), 12)
        items.append((state >> 30 & 1) << 15 | exponent << 7 | state >> 16 & 0x7F)
    return struct.pack(f"<{count}H", *items)


def _stepped(base: bytes) -> bytes:
    """Some items a step up or down, small ones further."""
    items = list(struct.unpack(f"<{len(base) // 2}H", base))
    state = 777
    for place, item in enumerate(items):
        state = (1103515245 * state + 12345) % (1 << 31)
        small = max(0, 118 - (item >> 7 & 0xFF))
        if state >> 8 & 0xFF < 36 + 16 * small:
            distance = 1 + (state >> 20) % (1 + 2 * small * small)
            items[place] = (item + (distance if state >> 30 else -distance)) % (1 << 16)
    return struct.pack(f"<{len(items)}H", *items)


def _frame(content: bytes) -> bytes:
    """A zstd frame (RFC 8878, 3.1.1) of one raw block, with its content size in one octet."""
    block = (len(content) << 3 | 1).to_bytes(3, "little")
    return b"\x28\xb5\x2f\xfd\x20" + bytes((len(content),)) + block + content


def _record(method: int, item_bytes: int, size_bytes: int, payload: bytes) -> bytes:
    return bytes((method | item_bytes << 3,)) + varint(size_bytes) + varint(len(payload)) + payload


def _golden() -> Iterator[tuple[str, bytes, bytes]]:
    base = _weights(2000)
    new = _stepped(base)
    whole = [Slice(len(base), 2)]
    yield "nothing changed", b"\x80\x3f\x00\x00", b""
    yield "sparse", base, encode_chunk(base, new, whole)
    yield "sparse with classes", base, encode_chunk(base, new, whole, classes=4)
    one = base[:-2] + b"\x00\x80"
    yield "a single item, far away", base, encode_chunk(base, one, whole)
    zeros = bytes.fromhex("0000008001800080ffff7f7f0080") + bytes(50)
    crossed = bytes.fromhex("0080000001000180fe7f807f0000") + bytes(50)
    yield "through zero, infinity and NaN", zeros, encode_chunk(zeros, crossed, [Slice(64, 2)])
    octets = bytes(range(64))
    yield "items of one octet", octets, encode_chunk(octets, b"\xff" + octets[1:], [Slice(64, 1)])
    floats = struct.pack("<16f", *range(16))
    other = struct.pack("<16f", -1e-40, *range(1, 16))
    yield "items of four octets", floats, encode_chunk(floats, other, [Slice(64, 4)])
    planes = bytes((2, 1, 0, 3)) + bytes((0, 0, 0, 1))
    four = bytes.fromhex("803f80bf00000080")
    yield "step planes", four, _record(STEP_PLANES, 2, 8, _frame(planes))
    yield "new planes", four, _record(NEW_PLANES, 2, 8, _frame(b"abcdefgh"))
    rows = _record(SAME, 2, 4, b"") + _record(RAW, 1, 3, b"raw") + _record(SAME, 1, 1, b"")
    yield "several runs", four, rows


def _rejected() -> Iterator[tuple[str, bytes, bytes]]:
    base = _weights(1400)
    encoded = encode_chunk(base, _stepped(base), [Slice(len(base), 2)], classes=4)
    four = bytes(8)
    yield "cut short", base, encoded[:-1]
    yield "goes on", base, encoded + b"\x00"
    yield "for a larger chunk", base[:-2], encoded
    yield "for a smaller chunk", base + b"\0\0", encoded
    yield "an unknown method", four, _record(5, 2, 8, b"")
    yield "items of three octets", four, _record(RAW, 3, 8, bytes(8))
    yield "half an item", four, _record(RAW, 2, 3, bytes(3)) + _record(RAW, 1, 5, bytes(5))
    yield "a run of nothing", four, _record(SAME, 2, 0, b"") + _record(RAW, 2, 8, bytes(8))
    yield "unchanged, with a payload", four, _record(SAME, 2, 8, b"\0")
    yield "raw bytes too few", four, _record(RAW, 2, 8, bytes(7))
    yield "a number without end", four, b"\x22" + b"\x80" * 6 + b"\x00"
    yield "planes of another size", four, _record(STEP_PLANES, 2, 8, _frame(bytes(9)))
    yield "planes and more", four, _record(NEW_PLANES, 2, 8, _frame(bytes(8)) + b"\0")
    yield "planes that are none", four, _record(NEW_PLANES, 2, 8, bytes(17))

    def sparse(head: str, unary: str = "", rest: str = "", item_bytes: int = 2) -> bytes:
        return _record(SPARSE, item_bytes, 8, bytes.fromhex(head + unary + rest))

    # wide, below, classes, outside, listed, unary length; then the columns' shifts.
    yield "more changes than a quarter", four, sparse("000000020001000000", "03", "00")
    yield "more listed than changes", four, sparse("000000010201000000", "07", "00")
    yield "a change beyond the last item", four, sparse("000000010001000000", "10", "00")
    yield "too few numbers", four, sparse("000000010001000000", "00", "00")
    yield "too many numbers", four, sparse("000000010001000000", "03", "00")
    yield "a shift of 32", four, sparse("000000010001200000", "01", "00000000 00")
    yield "classes without an exponent", four, sparse("0000010000010100000000", "01", "00")
    yield "an exponent without classes", four, sparse("007000010001000000", "01", "00")
    yield "wide items of one octet", four, sparse("700000010001000000", "03", "00", 1)
    yield "bits left over", four, sparse("000000010001000000", "01", "0000")
