"""`proto/vectors/delta.json`, read twice: by our codec, and by a slow reader of `proto/deltas.md`.

The slow reader goes item by item and names nothing of ours.
"""

import json
from pathlib import Path

import pytest
import zstandard

from echo2_mesh.delta.codec import apply_chunk
from echo2_mesh.delta.patches import read_patch
from echo2_mesh.errors import PeerError

VECTORS = Path(__file__).parents[2] / "proto" / "vectors" / "delta.json"
FILE = json.loads(VECTORS.read_text())


def named(part):
    return pytest.mark.parametrize("vector", FILE[part], ids=lambda v: v["name"])


# --- the slow reader ---------------------------------------------------------------------------


class Refused(Exception):
    pass


def must(condition):
    if not condition:
        raise Refused


class Reader:
    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, count):
        must(self.at + count <= len(self.data))
        self.at += count
        return self.data[self.at - count : self.at]

    def octet(self):
        return self.take(1)[0]

    def varint(self):
        value = 0
        for index in range(5):
            octet = self.octet()
            value |= (octet & 0x7F) << 7 * index
            if octet < 0x80:
                return value
        raise Refused

    def rest(self):
        return self.take(len(self.data) - self.at)


def bits_of(data):
    return [octet >> place & 1 for octet in data for place in range(8)]


def number(bits):
    return sum(bit << place for place, bit in enumerate(bits))


def place_of(item, sign, width):
    top = 1 << 8 * width - 1
    if width == 1:
        return item
    if item & top == sign:
        return item ^ sign
    return ~(item & (top - 1)) % (2 * top)


def moved(old, step, width):
    top = 1 << 8 * width - 1
    if width == 1:
        return (old + step) % (2 * top)
    sign = old & top
    place = ((old ^ sign) + step) % (2 * top)
    new = place ^ sign if place < top else (~place % top) | (sign ^ top)
    assert place_of(new, sign, width) == place
    return new


def planes_of(payload, count, width):
    try:
        must(zstandard.frame_content_size(payload) == count * width)
        content = zstandard.ZstdDecompressor().decompress(payload, allow_extra_data=False)
    except zstandard.ZstdError as error:
        raise Refused from error
    return [number_of(content[place::count]) for place in range(count)]


def number_of(data):
    return int.from_bytes(data, "little")


def read_sparse(payload, items, width):
    reader = Reader(payload)
    wide_below, below, classes, outside = reader.octet(), reader.octet(), reader.octet(), 0
    must(classes <= 16)
    must((below > 0) == (classes > 0))
    must(width == 2 or not (below or wide_below))
    outside, listed, unary_length = reader.varint(), reader.varint(), reader.varint()
    counts = [outside, *(reader.varint() for _ in range(classes))]
    must(sum(counts) * 4 <= len(items))
    must(listed <= sum(counts))
    must(unary_length * 8 <= 4 * len(items) + 64)
    lengths = [*counts, listed, listed]
    shifts = [reader.octet() for _ in lengths]
    must(max(shifts) <= 31)
    quotients, zeros = [], 0
    for bit in bits_of(reader.take(unary_length)):
        if bit:
            quotients.append(zeros)
        zeros = 0 if bit else zeros + 1
    must(len(quotients) >= sum(lengths))
    columns = []
    for length, shift in zip(lengths, shifts, strict=True):
        values = [quotient << shift for quotient in quotients[:length]]
        del quotients[:length]
        for plane in range(shift):
            bits = bits_of(reader.take((length + 7) // 8))
            values = [value | bits[index] << plane for index, value in enumerate(values)]
        columns.append(values)

    def from_gaps(gaps, count):
        numbers, last = [], -1
        for gap in gaps:
            last += gap + 1
            must(last < count)
            numbers.append(last)
        return numbers

    def exponent(item):
        return item >> 7 & 0xFF

    changes = from_gaps(columns[0], len(items))
    for index in range(classes):
        wanted = below - 1 - index
        last = index == classes - 1
        members = [
            place
            for place, item in enumerate(items)
            if exponent(item) == wanted or (last and exponent(item) < wanted)
        ]
        changes += [members[n] for n in from_gaps(columns[1 + index], len(members))]
    directions = bits_of(reader.take((len(changes) + 7) // 8))
    distances = [1] * len(changes)
    wide = [n for n, place in enumerate(changes) if exponent(items[place]) < wide_below]
    must(len(quotients) == len(wide))
    tail = reader.rest()
    bits = bits_of(tail)
    used = 0
    for n, quotient in zip(wide, quotients, strict=True):
        width_bits = min(wide_below - 1 - exponent(items[changes[n]]), 15)
        must(used + width_bits <= len(bits))
        distances[n] += quotient << width_bits | number(bits[used : used + width_bits])
        used += width_bits
    must(len(tail) == (used + 7) // 8)
    for n, beyond in zip(from_gaps(columns[-2], len(changes)), columns[-1], strict=True):
        distances[n] = beyond + 2
    new = list(items)
    for place, distance, direction in zip(changes, distances, directions, strict=False):
        new[place] = moved(items[place], distance if direction else -distance, width)
    return new


def read_slowly(base, encoded):
    reader, result, at = Reader(encoded), b"", 0
    if not encoded:
        return base
    while reader.at < len(encoded):
        tag, size = reader.octet(), reader.varint()
        payload = reader.take(reader.varint())
        method, width = tag & 7, tag >> 3
        must(width in (1, 2, 4))
        must(size > 0)
        must(size % width == 0)
        must(at + size <= len(base))
        old = base[at : at + size]
        at += size
        items = [number_of(old[n : n + width]) for n in range(0, size, width)]
        if method == 0:
            must(not payload)
        elif method == 1:
            items = read_sparse(payload, items, width)
        elif method == 2:
            coded = planes_of(payload, len(items), width)
            steps = [-(c + 1) // 2 if c & 1 else c // 2 for c in coded]
            items = [moved(item, step, width) for item, step in zip(items, steps, strict=True)]
        elif method == 3:
            items = planes_of(payload, len(items), width)
        else:
            must(method == 4)
            must(len(payload) == size)
            items = [number_of(payload[n : n + width]) for n in range(0, size, width)]
        result += b"".join(item.to_bytes(width, "little") for item in items)
    must(at == len(base))
    return result


@named("golden")
def test_the_slow_reader_finds_the_result_of_a_golden_vector(vector):
    base, encoded = bytes.fromhex(vector["base"]), bytes.fromhex(vector["encoded"])
    assert read_slowly(base, encoded).hex() == vector["result"]


@named("must_reject")
def test_the_slow_reader_refuses_what_must_be_rejected(vector):
    with pytest.raises(Refused):
        read_slowly(bytes.fromhex(vector["base"]), bytes.fromhex(vector["encoded"]))


# --- our codec ---------------------------------------------------------------------------------


@named("golden")
def test_our_codec_finds_the_result_of_a_golden_vector(vector):
    base, encoded = bytes.fromhex(vector["base"]), bytes.fromhex(vector["encoded"])
    assert apply_chunk(base, encoded).tobytes().hex() == vector["result"]


@named("must_reject")
def test_our_codec_refuses_what_must_be_rejected(vector):
    with pytest.raises(PeerError, match="Malformed difference"):
        apply_chunk(bytes.fromhex(vector["base"]), bytes.fromhex(vector["encoded"]))


def test_patches_are_read_as_recorded():
    for vector in FILE["patches"]:
        parts = read_patch(bytes.fromhex(vector["blob"]), vector["count"])
        assert [bytes(part).hex() for part in parts] == vector["parts"]
    for vector in FILE["patches_must_reject"]:
        with pytest.raises(PeerError):
            read_patch(bytes.fromhex(vector["blob"]), vector["count"])
