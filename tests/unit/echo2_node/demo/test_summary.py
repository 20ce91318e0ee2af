import json

import pytest

from echo2_mesh.errors import LocalError
from echo2_node.demo.summary import (
    Part,
    Reward,
    Seconds,
    Summary,
    draw,
    reward_curve,
    reward_of,
    write_json,
)


def make_summary(**fields):
    part = Part(
        id="12D3KooWabcdefgh",
        name="actor-2",
        joined_s=1.0,
        left_s=30.5,
        how="killed",
        accepted=40,
        refused=2,
    )
    values = {
        "run_id": "demo-1",
        "task": "sort_digits",
        "loss": "dppo",
        "seed": 1,
        "steps": 10,
        "reward": Reward(first_fifth=0.3, last_fifth=0.8, gain=0.5),
        "staleness_steps_max": 2,
        "staleness_limit_steps": 3,
        "staleness_histogram": {"0": 10, "2": 4},
        "ledger_verified": True,
        "ledger_problems": (),
        "versions_published": 11,
        "accepted": 80,
        "refusals": {"stale": 2},
        "actors": (part,),
        "seconds": Seconds(setup=0.0, warm_up=1.0, run=30.0),
    }
    return Summary(**{**values, **fields})


def test_the_json_has_every_promised_field(tmp_path):
    path = tmp_path / "new" / "out.json"
    write_json(path, make_summary())
    written = json.loads(path.read_text())
    assert written["reward"].keys() >= {"first_fifth", "last_fifth", "gain"}
    assert written["seconds"].keys() >= {"setup", "warm_up", "run"}
    assert written["actors"][0].keys() >= {
        "id", "joined_s", "left_s", "how", "accepted", "refused",
    }  # fmt: skip
    assert written.keys() >= {
        "staleness_steps_max", "staleness_limit_steps", "ledger_verified", "versions_published",
        "refusals",
    }  # fmt: skip
    assert written["ledger_verified"] is True


def test_a_summary_that_cannot_be_written_is_told(tmp_path):
    with pytest.raises(LocalError, match="cannot be written"):
        write_json(tmp_path, make_summary())


def test_reward_compares_the_first_and_the_last_fifth():
    curve = [0.1, 0.3] + [0.5] * 6 + [0.8, 1.0]
    assert reward_of(curve) == Reward(
        first_fifth=pytest.approx(0.2), last_fifth=pytest.approx(0.9), gain=pytest.approx(0.7)
    )
    assert reward_of([0.25]).gain == 0.0
    assert reward_of([]).gain == 0.0


def test_a_step_that_was_done_again_counts_as_it_ended():
    lines = [
        {"step": 1, "reward_mean": 0.1},
        {"step": 2, "reward_mean": 0.2},
        {"step": 2, "reward_mean": 0.4},
        {"event": "resumed"},
        {"step": 3, "reward_mean": None},
    ]
    assert reward_curve(lines) == [0.1, 0.4]


def test_the_plot_is_a_png(tmp_path):
    path = tmp_path / "reward.png"
    metrics = [{"step": n, "reward_mean": n / 10} for n in range(1, 11)]
    draw(path, make_summary(), metrics, ["3:actor-2 killed"])
    assert path.read_bytes().startswith(b"\x89PNG\r\n")
    assert path.stat().st_size > 10_000


def test_an_empty_run_can_be_drawn_too(tmp_path):
    draw(tmp_path / "empty.png", make_summary(staleness_histogram={}), [], [])
    assert (tmp_path / "empty.png").exists()
