"""The forest simulator's bars, on a fleet small enough for every day."""

import json
import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "sim_forest.py"
OWN_BARS = {"joiner": {"joiner_completed", "joiner_over_bound", "joiner_egress"}}


@pytest.fixture(scope="module")
def sim():
    return runpy.run_path(str(SCRIPT), run_name="sim_forest")


@pytest.fixture(scope="module")
def clean_s(sim):
    return sim["simulate"]("clean", "delta", 24, 1)["last_s"]


@pytest.fixture
def told(sim, monkeypatch):
    """Sets what the simulation of a scenario finds, in place of simulating it."""
    found = {}

    def simulate(scenario, name, count, seed):
        result = {"scenario": scenario, "payload": name, "nodes": count, "bound_s": 10.0}
        return result | {"learner_copies": 1.0, "unfinished": 0} | found[scenario]

    monkeypatch.setitem(sim["judge"].__globals__, "simulate", simulate)
    return found


def verdicts(bars):
    return {bar["name"].split("_delta_24_")[1]: bar["ok"] for bar in bars}


@pytest.mark.parametrize("scenario", ["clean", "mixed", "liars", "stallers", "joiner", "churn"])
def test_a_delta_reaches_everybody_close_to_the_bound(sim, clean_s, scenario):
    result = sim["simulate"](scenario, "delta", 24, 1)
    bars = sim["bars_of"](result, clean_s)
    assert bars
    assert all(bar["ok"] for bar in bars), bars
    assert OWN_BARS.get(scenario, set()) <= set(verdicts(bars))


def test_a_joiner_that_never_completes_meets_no_bar_of_time(sim, told):
    joiner = {"last_s": 11.0, "joiner_bound_s": 10.0, "joiner_copies": 0.0}
    told["clean"] = {"last_s": 11.0}
    told["joiner"] = joiner | {"joiner_s": 11.0}
    assert all(verdicts(sim["judge"](["joiner"], ["delta"], [24], 1)).values())
    told["joiner"] = joiner | {"joiner_s": None}
    found = verdicts(sim["judge"](["joiner"], ["delta"], [24], 1))
    assert [name for name, ok in found.items() if not ok] == [
        "joiner_completed",
        "joiner_over_bound",
    ]


@pytest.mark.parametrize("scenario", ["liars", "stallers"])
def test_trouble_alone_is_compared_with_good_health(sim, told, scenario):
    told["clean"], told[scenario] = {"last_s": 100.0}, {"last_s": 200.0}
    (bar,) = sim["judge"]([scenario], ["delta"], [24], 1)
    assert (bar["value"], bar["ok"]) == (2.0, False)


@pytest.mark.parametrize("scenario", ["clean", "mixed", "liars", "stallers", "joiner"])
@pytest.mark.parametrize("never", [None, float("inf"), float("nan")])
def test_what_never_came_is_null_and_meets_no_bar(sim, told, capsys, scenario, never):
    told["clean"] = {"last_s": never}
    told.setdefault(scenario, {"last_s": 10.0 if scenario in ("liars", "stallers") else never})
    told[scenario] |= {"joiner_s": never, "joiner_bound_s": 10.0, "joiner_copies": 0.0}
    sim["emit"]("sim_forest", sim["judge"]([scenario], ["delta"], [24], 1), last_s=never)
    line = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert (line["bars"][0]["value"], line["bars"][0]["ok"]) == (None, False)
    assert line["last_s"] is None


def test_churn_counts_those_that_never_finish(sim, told):
    told["clean"], told["churn"] = {"last_s": 11.0}, {"last_s": None, "unfinished": 2}
    found = verdicts(sim["judge"](["churn"], ["delta"], [24], 1))
    assert found == {"unfinished": False, "learner_egress": True}
