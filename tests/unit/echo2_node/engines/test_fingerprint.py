"""The canary: near misses pass, stale weights do not."""

import numpy as np

from echo2_node.engines.fingerprint import compare

TRUTH = np.linspace(-8, -0.1, 31).astype("<f4")


def test_rounding_passes_and_a_stale_head_does_not() -> None:
    rng = np.random.default_rng(0)
    for dtype, rounding in (("float32", 4e-5), ("bfloat16", 0.08)):
        near = (TRUTH + rng.normal(0, rounding, 31)).astype("<f4")
        assert compare(TRUTH.tobytes(), near.tobytes(), dtype=dtype).matches
        stale = (TRUTH + rng.normal(0, 3.0, 31)).astype("<f4")
        found = compare(TRUTH.tobytes(), stale.tobytes(), dtype=dtype)
        assert not found.matches
        assert "differ by" in found.why


def test_the_version_before_is_noticed_in_float32() -> None:
    """A small step moves log-probs by hundredths of a nat: more than float32 rounding."""
    moved = (TRUTH + 0.01).astype("<f4")
    assert not compare(TRUTH.tobytes(), moved.tobytes(), dtype="float32").matches


def test_what_is_not_comparable_does_not_match() -> None:
    assert "published" in compare(TRUTH.tobytes(), TRUTH[:-1].tobytes(), dtype="float32").why
    poisoned = TRUTH.copy()
    poisoned[3] = np.nan
    assert "finite" in compare(TRUTH.tobytes(), poisoned.tobytes(), dtype="float32").why
