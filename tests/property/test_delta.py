"""Whatever the bits: a patch comes back exactly, and a broken one never does harm."""

from contextlib import suppress

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from echo2_mesh.delta.codec import Slice, apply_chunk, encode_chunk
from echo2_mesh.delta.patches import read_patch, write_patch
from echo2_mesh.errors import PeerError

SIZES = st.sampled_from([1, 2, 4])
CLASSES = st.sampled_from([0, 1, 6, 16])


@st.composite
def changes(draw):
    """(old, new, slices): a few runs, each with its own share and kind of changes."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    olds, news, slices = [], [], []
    for _ in range(draw(st.integers(1, 4))):
        item_bytes = draw(SIZES)
        size = draw(st.integers(0, 3000)) * draw(st.sampled_from([1, 1, 40]))
        old = rng.integers(0, 256, size, dtype=np.uint8)
        if draw(st.booleans()):
            floats = rng.standard_normal(size // 2 + 1, dtype=np.float32)
            old = (floats.view(np.uint32) >> 16).astype("<u2").view(np.uint8)[:size].copy()
        new = old.copy()
        hit = rng.random(size) < draw(st.sampled_from([0, 0.0005, 0.01, 0.1, 0.5, 1]))
        spread = draw(st.sampled_from([2, 256]))
        new[hit] += rng.integers(0, spread, int(hit.sum()), dtype=np.uint8)
        olds.append(old)
        news.append(new)
        slices.append(Slice(size, item_bytes))
    return np.concatenate(olds), np.concatenate(news), slices


@settings(max_examples=120, deadline=None)
@given(change=changes(), classes=CLASSES)
def test_any_change_comes_back_exactly(change, classes):
    old, new, slices = change
    encoded = encode_chunk(old, new, slices, classes=classes)
    assert apply_chunk(old, encoded).tobytes() == new.tobytes()
    assert len(encoded) <= len(new) + 8 * len(slices)
    assert (encoded == b"") == (old.tobytes() == new.tobytes())
    assert encode_chunk(old, new, slices, classes=classes) == encoded


@settings(max_examples=150, deadline=None)
@given(
    change=changes(),
    classes=CLASSES,
    flips=st.lists(st.tuples(st.integers(0), st.integers(1, 255)), min_size=1, max_size=4),
)
def test_a_damaged_encoding_is_refused_or_gives_other_bytes(change, classes, flips):
    old, new, slices = change
    encoded = bytearray(encode_chunk(old, new, slices, classes=classes))
    for place, mask in flips if encoded else ():
        encoded[place % len(encoded)] ^= mask
    before = old.tobytes()
    with suppress(PeerError):
        assert len(apply_chunk(old, bytes(encoded))) == len(old)
    assert old.tobytes() == before


@settings(max_examples=150, deadline=None)
@given(base=st.binary(max_size=400), encoded=st.binary(max_size=80), method=st.integers(0, 7))
def test_garbage_is_refused_or_harmless(base, encoded, method):
    wrapped = bytes((method | 2 << 3, len(base) & 0x7F)) + bytes((len(encoded),)) + encoded
    for blob in (encoded, wrapped):
        with suppress(PeerError):
            assert len(apply_chunk(base, blob)) == len(base)


@settings(max_examples=60, deadline=None)
@given(parts=st.lists(st.binary(max_size=20), min_size=1, max_size=8), cut=st.integers(0, 40))
def test_a_patch_is_its_parts_or_refused(parts, cut):
    blob = write_patch(parts)
    assert [bytes(part) for part in read_patch(blob, len(parts))] == parts
    if cut < len(blob):
        try:
            found = read_patch(blob[:cut], len(parts))
        except PeerError:
            return
        raise AssertionError(f"{cut} of {len(blob)} bytes were read as {found}")
