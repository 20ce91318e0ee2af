import numpy as np
import pytest

from echo2_mesh.delta.patches import read_patch, write_patch
from echo2_mesh.errors import PeerError


def test_parts_come_back_without_a_copy_empty_ones_too():
    blob = write_patch([b"one", b"", b"three"])
    parts = read_patch(blob, 3)
    assert [bytes(part) for part in parts] == [b"one", b"", b"three"]
    assert np.shares_memory(np.frombuffer(parts[2], np.uint8), np.frombuffer(blob, np.uint8))
    assert blob == bytes((3, 0, 0, 0, 0, 0, 0, 0, 5, 0, 0, 0)) + b"onethree"


@pytest.mark.parametrize(
    ("blob", "count"),
    [
        (b"", 1),
        (b"", 0),
        (write_patch([b"one"]), 2),
        (write_patch([b"one"])[:-1], 1),
        (write_patch([b"one"]) + b"x", 1),
        (b"\xff\xff\xff\xff", 1),
        (bytes(40), 1 << 40),
    ],
)
def test_a_blob_that_is_not_exactly_its_parts_is_refused(blob, count):
    with pytest.raises(PeerError, match="A patch of"):
        read_patch(blob, count)
