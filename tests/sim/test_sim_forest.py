"""The forest simulator's bars, on a fleet small enough for every day."""

import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sim_forest.py"


@pytest.fixture(scope="module")
def sim():
    return runpy.run_path(str(SCRIPT), run_name="sim_forest")


@pytest.fixture(scope="module")
def clean_s(sim):
    return sim["simulate"]("clean", "delta", 24, 1)["last_s"]


@pytest.mark.parametrize("scenario", ["clean", "mixed", "liars", "stallers", "joiner", "churn"])
def test_a_delta_reaches_everybody_close_to_the_bound(sim, clean_s, scenario):
    result = sim["simulate"](scenario, "delta", 24, 1)
    bars = sim["bars_of"](result, clean_s)
    assert bars
    assert all(bar["ok"] for bar in bars), bars
