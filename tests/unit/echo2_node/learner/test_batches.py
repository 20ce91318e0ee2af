import numpy as np
import pytest

from echo2_node.learner.batches import flaw_of, pack, plan, rows_of
from tests.samples import make_sample


def test_sequences_of_like_length_share_a_micro_batch_within_the_budget():
    assert plan([9, 2, 2, 9, 3], 9) == ((1, 2, 4), (0,), (3,))


def test_a_sequence_above_the_budget_still_gets_its_micro_batch():
    assert plan([100, 1], 10) == ((1,), (0,))


def test_padding_is_on_the_right_and_only_chosen_tokens_are_loss_tokens():
    samples = (
        make_sample([5, 6], [7, 8, 9], [-1.0, 0.0, -3.0], advantage=1.0, masked=(1,)),
        make_sample([5], [4], [-2.0], advantage=-1.0, index=1, temperature=0.5),
    )
    packed = pack(rows_of(samples, std_normalised=False))
    assert packed.ids_BT.tolist() == [[5, 6, 7, 8, 9], [5, 4, 0, 0, 0]]
    assert list(zip(packed.rows_N.tolist(), packed.positions_N.tolist(), strict=True)) == [
        (0, 2),
        (0, 4),
        (1, 1),
    ]
    assert packed.behaviour_N.tolist() == [-1.0, -3.0, -2.0]
    assert packed.temperature_N.tolist() == [1.0, 1.0, 0.5]


def test_std_normalised_advantages_are_divided_by_their_own_groups_deviation():
    samples = tuple(
        make_sample([5], [4], [-1.0], advantage=r - 0.5, reward=r, group=group, index=int(r))
        for group, r in [(0, 0.0), (0, 1.0), (1, 0.4), (1, 0.6)]
    )
    rows = rows_of(samples, std_normalised=True)
    assert [round(row.advantage, 3) for row in rows] == [-1.0, 1.0, -1.0, 1.0]
    assert [row.advantage for row in rows_of(samples, std_normalised=False)][:2] == [-0.5, 0.5]


def test_a_sample_without_a_loss_token_is_left_out():
    sample = make_sample([5], [4], [0.0], advantage=1.0, masked=(0,))
    assert rows_of((sample,), std_normalised=False) == ()


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"advantage": float("nan")}, "not finite"),
        ({"reward": float("inf")}, "not finite"),
        ({"logprobs": [float("-inf")]}, "not finite"),
        ({"completion": [99]}, "outside the vocabulary"),
        ({"completion": [-1]}, "outside the vocabulary"),
        ({"logprobs": [-1.0, -1.0]}, "different lengths"),
        ({"prompt": []}, "first token"),
    ],
)
def test_a_flawed_sample_is_told_by_member_and_group(changes, why):
    good = {"prompt": [5], "completion": [4], "logprobs": [-1.0], "advantage": 1.0}
    assert flaw_of((make_sample(**good, group=1),), 64) == ""
    flaw = flaw_of((make_sample(**{**good, **changes}, group=1, index=3),), 64)
    assert why in flaw
    assert flaw.startswith("member 3 of group 00000000")


def test_a_masked_log_prob_may_be_anything():
    sample = make_sample([5], [4, 6], [float("nan"), -1.0], advantage=1.0, masked=(0,))
    assert flaw_of((sample,), 64) == ""
    assert np.isfinite(pack(rows_of((sample,), std_normalised=False)).behaviour_N).all()
