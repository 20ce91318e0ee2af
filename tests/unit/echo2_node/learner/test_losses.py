import pytest
import torch

from echo2_mesh.errors import UsageError
from echo2_node.learner.losses import LOSSES, Scale, TokenBatch, make_loss, metrics_of
from echo2_node.learner.lossnames import LOSS_ARGUMENTS


def tokens(new, old, advantages, sequence=None):
    return TokenBatch(
        logprobs_N=torch.tensor(new, dtype=torch.float64, requires_grad=True),
        behaviour_N=torch.tensor(old, dtype=torch.float64),
        sequence_N=torch.tensor(sequence or range(len(new))),
        advantage_S=torch.tensor(advantages, dtype=torch.float64),
    )


def slope(loss, batch):
    """d loss / d log-prob, times the token count."""
    value, _ = loss(batch, Scale(tokens=len(batch.logprobs_N), sequences=len(batch.advantage_S)))
    value.backward()
    return (batch.logprobs_N.grad * len(batch.logprobs_N)).tolist()


def test_an_unknown_loss_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="no loss 'dpo'") as refusal:
        make_loss("dpo", {})
    assert "grpo" in refusal.value.hint
    assert "Did you mean" in refusal.value.hint


def test_the_names_that_are_told_without_torch_are_those_that_exist():
    assert {name: tuple(kind.__struct_fields__) for name, kind in LOSSES.items()} == LOSS_ARGUMENTS


def test_an_unknown_argument_is_refused_with_the_known_ones():
    with pytest.raises(UsageError, match="no argument 'clip'") as refusal:
        make_loss("grpo", {"clip": 0.2})
    assert "clip_low" in refusal.value.hint


def test_an_argument_out_of_bounds_is_refused_by_name():
    with pytest.raises(UsageError, match="refuses tau"):
        make_loss("dppo", {"tau": 1.5})


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_gradient_is_the_policy_gradient(name):
    batch = tokens([-1.0, -2.0], [-1.0, -2.0], [1.0, -0.5])
    assert slope(make_loss(name, {}), batch) == pytest.approx([-1.0, 0.5])


@pytest.mark.parametrize("name", LOSSES)
def test_on_policy_the_monitors_say_so(name):
    batch = tokens([-1.0, -2.0, -0.1], [-1.0, -2.0, -0.1], [1.0, -0.5, 0.3])
    scale = Scale(tokens=3, sequences=3)
    _, sums = make_loss(name, {})(batch, scale)
    metrics = metrics_of({key: float(value) for key, value in sums.items()}, scale)
    assert metrics["kl"] == pytest.approx(0.0, abs=1e-9)
    assert metrics["ess"] == pytest.approx(1.0)
    assert metrics["ratio_mean"] == pytest.approx(1.0)
    assert metrics["clip_fraction"] == 0.0
    assert metrics["mask_fraction"] == 0.0


def test_monitors_measure_the_distance_from_the_behaviour_policy():
    batch = tokens([0.0, -2.0], [-1.0, -2.0], [1.0, 1.0])
    scale = Scale(tokens=2, sequences=2)
    _, sums = make_loss("dapo", {})(batch, scale)
    metrics = metrics_of({key: float(value) for key, value in sums.items()}, scale)
    ratio = 2.718281828
    assert metrics["kl"] == pytest.approx((ratio - 1 - 1) / 2)
    assert metrics["ess"] == pytest.approx((ratio + 1) ** 2 / (2 * (ratio**2 + 1)))
    assert metrics["clip_fraction"] == 0.5


def test_dapo_stops_at_its_upper_clip_only_where_that_would_gain():
    above = torch.tensor(1.5).log().item()
    assert slope(make_loss("dapo", {}), tokens([above - 1], [-1.0], [1.0])) == [0.0]
    assert slope(make_loss("dapo", {}), tokens([above - 1], [-1.0], [-1.0])) == pytest.approx([1.5])


def test_a_capped_ratio_keeps_its_gradient_with_the_weight_of_the_cap():
    batch = tokens([0.0], [-3.0], [-1.0])
    assert slope(make_loss("grpo", {"ratio_cap": 2.0}), batch) == pytest.approx([2.0])


def test_grpo_gives_every_sequence_the_same_weight_and_dapo_every_token():
    new = [-1.0] * 4
    grpo = slope(make_loss("grpo", {}), tokens(new, new, [1.0, 1.0], [0, 1, 1, 1]))
    dapo = slope(make_loss("dapo", {}), tokens(new, new, [1.0, 1.0], [0, 1, 1, 1]))
    assert grpo == pytest.approx([-2.0, -2 / 3, -2 / 3, -2 / 3])
    assert dapo == pytest.approx([-1.0] * 4)


def test_dppo_leaves_alone_a_token_that_already_moved_as_its_advantage_wants():
    up = tokens([-0.1], [-0.5], [1.0])
    assert slope(make_loss("dppo", {"pull": 0.0}), up) == [0.0]
    against = tokens([-0.1], [-0.5], [-1.0])
    assert slope(make_loss("dppo", {"pull": 0.0}), against)[0] > 0.0


def test_dppo_leaves_out_a_sequence_far_from_the_policy_that_made_it():
    far = tokens([-0.1, -0.1, -1.0], [-1.0, -1.0, -1.0], [1.0, 1.0], [0, 0, 1])
    slopes = slope(make_loss("dppo", {}), far)
    assert slopes[:2] == [0.0, 0.0]
    assert slopes[2] < 0.0


def test_dppo_leaves_out_a_bad_sequence_the_policy_has_moved_away_from():
    away = tokens([-1.5], [-1.0], [-1.0])
    assert slope(make_loss("dppo", {"tau": 0.9}), away) == [0.0]
    good = tokens([-1.5], [-1.0], [1.0])
    assert slope(make_loss("dppo", {"tau": 0.9}), good)[0] < 0.0


def test_dppo_leaves_out_a_sequence_with_a_number_that_is_not_finite():
    batch = tokens([-1.0, -1.0], [float("-inf"), -1.0], [1.0, 1.0])
    loss, sums = make_loss("dppo", {})(batch, Scale(tokens=2, sequences=2))
    assert torch.isfinite(loss)
    assert int(sums["masked"]) == 1


def test_dppo_pulls_towards_the_behaviour_policy():
    batch = tokens([-1.2], [-1.0], [0.0])
    assert slope(make_loss("dppo", {"pull": 0.5}), batch) == pytest.approx([2 * 0.5 * -0.2])
