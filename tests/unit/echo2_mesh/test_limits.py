"""Bounds are whole, positive, and carry their unit; their relations hold at import."""

import runpy
from pathlib import Path

import pytest

from echo2_mesh import limits

NAMES = [name for name in vars(limits) if name.isupper()]


@pytest.mark.parametrize("name", NAMES)
def test_every_limit_is_a_positive_number(name):
    value = getattr(limits, name)
    assert type(value) in (int, float)
    assert value > 0
    if name.endswith("_BYTES_MAX"):
        assert type(value) is int


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GOSSIP_SIZE_BYTES_MAX", "2 * MIB"),
        ("INLINE_PAYLOAD_SIZE_BYTES_MAX", "96 * KIB"),
        ("CHUNK_SIZE_BYTES_DEFAULT", "32 * MIB"),
        ("FETCH_IN_FLIGHT_PER_PEER_MAX", "65"),
        ("CONNECTIONS_LOW_WATERMARK", "200"),
        ("TICKET_CHARACTERS_MAX", "4096"),
    ],
)
def test_a_limit_that_breaks_a_relation_fails_at_import(name, value, tmp_path):
    lines = Path(limits.__file__).read_text().splitlines()
    changed = [f"{name} = {value}" if line.startswith(f"{name} =") else line for line in lines]
    assert changed != lines
    module = tmp_path / "limits.py"
    module.write_text("\n".join(changed))
    with pytest.raises(AssertionError):
        runpy.run_path(str(module))
