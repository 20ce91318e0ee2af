"""Chunks there and back: bit patterns, methods, sizes, and encodings that must be refused."""

import numpy as np
import pytest

from echo2_mesh.delta import codec
from echo2_mesh.delta.codec import CLASSES_FAST, CLASSES_SMALL, Slice, apply_chunk, encode_chunk
from echo2_mesh.errors import PeerError

SPECIAL = np.array(
    [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81, 0x0001, 0x8001, 0x3F80], np.uint16
)
"""+0, -0, infinities, NaNs with payloads, denormals, one."""


def weights(count, seed=0, scale=0.04):
    floats = np.random.default_rng(seed).standard_normal(count, dtype=np.float32) * scale
    return (floats.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def stepped(old, share=0.01, seed=1):
    """Like an optimiser's step: small weights change more often, nine in ten by one."""
    rng = np.random.default_rng(seed)
    magnitude = (old & 0x7FFF).astype(np.int64)
    likely = share * 2.0 ** (np.median(magnitude >> 7) - (magnitude >> 7))
    hit = rng.random(len(old)) < likely
    new = old.copy()
    new[hit] += rng.choice(np.array([1, 1, 1, 2, -1, -1, -1], np.int16), int(hit.sum())).view("u2")
    return new


def methods(encoded):
    """(method, item bytes, size) of each record."""
    fields, found = codec.Fields(memoryview(encoded)), []
    while fields.left_bytes:
        tag, size = fields.octet(), fields.varint()
        fields.take(fields.varint())
        found.append((tag & 7, tag >> 3, size))
    return found


@pytest.mark.parametrize("classes", [CLASSES_FAST, 1, CLASSES_SMALL, 40])
@pytest.mark.parametrize("share", [0.0001, 0.003, 0.02, 0.1])
def test_an_optimisers_step_comes_back_exactly(classes, share):
    old = weights(100_003)
    new = stepped(old, share)
    encoded = encode_chunk(old, new, [Slice(old.nbytes, 2)], classes=classes)
    assert apply_chunk(old, encoded).tobytes() == new.tobytes()
    assert len(encoded) < 2 * np.count_nonzero(old != new) + 40


@pytest.mark.parametrize("item_bytes", [1, 2, 4])
@pytest.mark.parametrize("count", [2, 64, 3002, 40_000])
@pytest.mark.parametrize("share", [0.001, 0.05, 0.3, 0.6, 1.0])
def test_any_bit_pattern_comes_back_exactly_and_never_much_larger(item_bytes, count, share):
    rng = np.random.default_rng(count)
    old = rng.choice(SPECIAL, count)
    new = old.copy()
    hit = rng.random(count) < share
    new[hit] = rng.choice(SPECIAL, int(hit.sum()))
    for classes in (CLASSES_FAST, CLASSES_SMALL):
        encoded = encode_chunk(old, new, [Slice(old.nbytes, item_bytes)], classes=classes)
        assert apply_chunk(old, encoded).tobytes() == new.tobytes()
        assert len(encoded) <= new.nbytes + 8


def test_every_pair_of_special_numbers_comes_back():
    old, new = (grid.ravel() for grid in np.meshgrid(SPECIAL, SPECIAL))
    old, new = np.concatenate((old, weights(9000))), np.concatenate((new, weights(9000)))
    encoded = encode_chunk(old, new, [Slice(old.nbytes, 2)])
    assert methods(encoded) == [(1, 2, old.nbytes)]
    assert apply_chunk(old, encoded).tobytes() == new.tobytes()


def test_equal_chunks_need_no_bytes():
    old = SPECIAL.tobytes()
    assert encode_chunk(old, old, [Slice(len(old), 2)]) == b""
    assert encode_chunk(b"", b"", []) == b""
    assert bytes(apply_chunk(old, b"")) == old


def test_one_changed_item_needs_a_few_bytes():
    old = weights(500_000)
    new = old.copy()
    new[123_456] += 1
    encoded = encode_chunk(old, new, [Slice(old.nbytes, 2)])
    assert len(encoded) <= 32
    assert apply_chunk(old, encoded).tobytes() == new.tobytes()


def test_classes_make_a_step_a_sixth_smaller():
    old = weights(500_000)
    new = stepped(old, 0.005)
    fast = encode_chunk(old, new, [Slice(old.nbytes, 2)], classes=CLASSES_FAST)
    small = encode_chunk(old, new, [Slice(old.nbytes, 2)], classes=CLASSES_SMALL)
    changed = np.count_nonzero(old != new)
    assert len(small) < 0.85 * len(fast)
    assert len(fast) < 1.4 * changed


def test_dense_changes_take_planes_and_random_ones_stay_raw():
    old = weights(60_000)
    near = old + np.uint16(1)
    assert methods(encode_chunk(old, near, [Slice(old.nbytes, 2)])) == [(2, 2, old.nbytes)]
    fresh = weights(60_000, seed=5)
    assert methods(encode_chunk(old, fresh, [Slice(old.nbytes, 2)])) == [(3, 2, old.nbytes)]
    noise = np.random.default_rng(3).integers(0, 1 << 16, 60_000).astype(np.uint16)
    encoded = encode_chunk(old, noise, [Slice(old.nbytes, 2)])
    assert methods(encoded) == [(4, 2, old.nbytes)]
    assert len(encoded) == old.nbytes + 1 + 3 + 3
    for new in (near, fresh, noise):
        assert (
            apply_chunk(old, encode_chunk(old, new, [Slice(120_000, 2)])).view("u2") == new
        ).all()


def test_a_large_tensor_takes_its_own_method_and_small_ones_share():
    frozen, trained, rebuilt = weights(100_000), weights(100_000, 1), weights(100_000, 2)
    old = np.concatenate((frozen, trained[:50], trained, rebuilt))
    new = np.concatenate((frozen, trained[:50], stepped(trained), weights(100_000)))
    slices = [Slice(200_000, 2), Slice(100, 2), Slice(200_000, 2), Slice(200_000, 2)]
    encoded = encode_chunk(old, new, slices)
    assert methods(encoded) == [(0, 2, 200_100), (1, 2, 200_000), (3, 2, 200_000)]
    assert apply_chunk(old, encoded).tobytes() == new.tobytes()


def test_items_of_several_sizes_and_odd_ones_share_a_chunk():
    rng = np.random.default_rng(9)
    old = rng.integers(0, 256, 3 + 20 + 400 + 7, dtype=np.uint8)
    new = old.copy()
    new[[0, 5, 30, 425]] += 1
    slices = [Slice(3, 1), Slice(20, 2), Slice(400, 4), Slice(7, 2), Slice(0, 2)]
    encoded = encode_chunk(old.tobytes(), memoryview(new), slices)
    assert [(item, size) for _, item, size in methods(encoded)] == [
        (1, 3),
        (2, 20),
        (4, 400),
        (1, 7),
    ]
    assert apply_chunk(old.tobytes(), encoded).tobytes() == new.tobytes()


def test_slices_must_cover_the_chunk():
    with pytest.raises(ValueError, match="not of one size"):
        encode_chunk(b"1234", b"1235", [Slice(2, 2)])
    with pytest.raises(ValueError, match="not of one size"):
        encode_chunk(b"1234", b"12345", [Slice(4, 2)])


@pytest.mark.parametrize("classes", [CLASSES_FAST, CLASSES_SMALL])
def test_every_truncation_and_extension_is_refused(classes):
    old = weights(5000)
    new = stepped(old, 0.05)
    encoded = encode_chunk(old, new, [Slice(old.nbytes, 2)], classes=classes)
    for cut in range(1, len(encoded)):
        with pytest.raises(PeerError):
            apply_chunk(old, encoded[:cut])
    for more in (b"\0", b"\x10\x02\0", encoded):
        with pytest.raises(PeerError):
            apply_chunk(old, encoded + more)
    for other in (old[:-1], np.concatenate((old, old[:1]))):
        with pytest.raises(PeerError):
            apply_chunk(other, encoded)


def test_planes_that_unpack_to_another_size_are_refused():
    frame = codec.zstandard.ZstdCompressor(level=1).compress(bytes(1 << 20))
    record = bytes((2 | 2 << 3,)) + codec.varint(4000) + codec.varint(len(frame)) + frame
    with pytest.raises(PeerError, match="another size"):
        apply_chunk(bytes(4000), record)


def test_applying_twice_is_not_applying_once():
    # Why a patch is bound to the digest of its base: steps add up.
    old = weights(2000)
    encoded = encode_chunk(old, old + np.uint16(1), [Slice(old.nbytes, 2)])
    once = apply_chunk(old, encoded)
    assert apply_chunk(once, encoded).tobytes() != once.tobytes()
