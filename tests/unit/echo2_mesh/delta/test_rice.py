import numpy as np
import pytest

from echo2_mesh.delta import rice
from echo2_mesh.delta.places import true_places
from echo2_mesh.errors import PeerError


def whole(*values):
    return np.array(values, np.int64)


def test_unary_is_zeros_and_a_one_lowest_bit_first():
    assert rice.write_unary([whole(0, 2), whole(3)]) == bytes((0b10001001,))
    assert rice.read_unary(memoryview(bytes((0b10001001,))), 3).tolist() == [0, 2, 3]
    assert rice.read_unary(memoryview(b""), 0).tolist() == []


def test_more_numbers_than_expected_are_refused():
    with pytest.raises(PeerError, match="more numbers"):
        rice.read_unary(memoryview(b"\xff"), 7)


@pytest.mark.parametrize("shift", [1, 3, 7, 8, 9, 15, 16, 17, 31])
@pytest.mark.parametrize("count", [1, 8, 1001])
def test_low_bits_come_back(shift, count):
    values = np.random.default_rng(shift).integers(0, 1 << 40, count)
    packed = rice.write_low(values, shift)
    assert len(packed) == rice.low_size_bytes(count, shift)
    assert (rice.read_low(memoryview(packed), count, shift) == values & ((1 << shift) - 1)).all()


def test_ragged_bits_come_back():
    rng = np.random.default_rng(2)
    shifts = rng.integers(0, 16, 500)
    values = rng.integers(0, 1 << 20, 500)
    packed = rice.write_ragged(values, shifts)
    assert (rice.read_ragged(memoryview(packed), shifts) == values & ((1 << shifts) - 1)).all()
    with pytest.raises(PeerError, match="wrong length"):
        rice.read_ragged(memoryview(packed[:-1]), shifts)


@pytest.mark.parametrize("mean", [0.1, 1, 30, 1000, 1e9])
def test_the_chosen_shift_is_within_a_hundredth_of_the_best(mean):
    values = np.random.default_rng(4).exponential(mean, 4000).astype(np.int64)
    costs = [len(values) * k + int((values >> k).sum()) for k in range(rice.SHIFT_MAX + 1)]
    assert costs[rice.best_shift(values)] <= 1.02 * min(costs)
    assert rice.best_shift(whole()) == 0


@pytest.mark.parametrize("share", [0.0, 0.01, 0.5, 1.0])
@pytest.mark.parametrize("count", [0, 5, 8, 10_003])
def test_true_places_are_those_of_flatnonzero(share, count):
    flags = np.random.default_rng(5).random(count) < share
    assert (true_places(flags) == np.flatnonzero(flags)).all()
