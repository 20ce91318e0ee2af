"""The trainer's arithmetic on a tiny random model; one process, no pipes."""

import copy
import dataclasses

import msgspec
import pytest
import torch

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import UsageError
from echo2_node.learner import batches
from echo2_node.learner.stepper import Stepper
from tests.samples import behaviour, make_sample, run_config, sampled_batch, write_trainable_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    torch.set_num_threads(1)
    return write_trainable_folder(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def make(folder, tmp_path):
    def build(**learner):
        store = ChunkStore(tmp_path / "chunks", quota_bytes=None)
        return Stepper(run_config(folder, **learner), store, None)

    return build


def bits(stepper):
    """Everything a step may change, as a comparable value."""
    state = stepper._optimizer.state_dict()["state"]
    return (
        [p.detach().clone() for p in stepper.policy.parameters],
        [m.detach().clone() for m in stepper.policy.masters],
        [value.clone() for entry in state.values() for value in entry.values()],
        [group["lr"] for group in stepper._optimizer.param_groups],
        stepper.updates,
    )


def same_bits(left, right):
    return left[3:] == right[3:] and all(
        len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
        for a, b in zip(left[:3], right[:3], strict=True)
    )


def gradients(stepper, samples):
    rows = batches.rows_of(samples, std_normalised=stepper._loss.std_normalised)
    metrics = stepper.accumulate(rows)
    stepper.policy.take_gradients()
    taken = [master.grad.clone() for master in stepper.policy.masters]
    stepper.policy.drop_gradients()
    return metrics, taken


def test_the_weights_that_compute_are_the_published_rounding_of_the_masters(make):
    stepper = make(lr=1e-2)
    stepper.step(sampled_batch(stepper.policy.model))
    moved = 0
    pairs = zip(stepper.policy.parameters, stepper.policy.masters, strict=True)
    for parameter, master in pairs:
        assert torch.equal(parameter, master.to(torch.bfloat16).float())
        moved += int((parameter != master).sum())
    assert moved > 0, "masters must keep what the published weights cannot"


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_at_staleness_zero_every_ratio_is_one(make, temperature):
    """Aim: log-probs shifted by one token, a wrong temperature or a wrong mask show here."""
    stepper = make()
    samples = sampled_batch(stepper.policy.model, temperature=temperature)
    report = stepper.step(samples)
    assert report.metrics["log_ratio_abs_mean"] < 1e-5
    assert report.metrics["ess"] == pytest.approx(1.0, abs=1e-6)
    again = stepper.step(samples)
    assert again.metrics["log_ratio_abs_mean"] > 1e-4, "the first step must have moved the policy"


def test_each_log_prob_is_that_of_its_own_token_given_all_before_it(make):
    stepper = make()
    prompt, completion = [3, 4, 5], [9, 8, 7, 6]
    wanted = behaviour(stepper.policy.model, prompt, completion, 1.0)
    positions_N = torch.arange(3, 7)
    logprobs_N, _ = stepper.policy.logprobs(
        torch.tensor([[*prompt, *completion, 0, 0]]),
        torch.zeros(4, dtype=torch.long),
        positions_N,
        torch.ones(4),
    )
    assert logprobs_N.tolist() == pytest.approx(wanted, abs=1e-5)
    assert len(set(wanted)) == 4, "the four must differ for the order to be seen"


@pytest.mark.parametrize("loss", ["dppo", "dapo", "grpo"])
def test_micro_batches_give_the_gradient_of_the_whole_batch(make, loss):
    whole = make(loss=loss)
    samples = sampled_batch(whole.policy.model, noise=0.3)
    metrics, gradient = gradients(whole, samples)
    cut_metrics, cut_gradient = gradients(
        make(loss=loss, tokens_per_micro_batch=20, logprob_chunk_tokens=3), samples
    )
    assert metrics["micro_batches"] == 1
    assert cut_metrics["micro_batches"] > 3
    for name in ("loss", "kl", "ess", "entropy", "clip_fraction", "mask_fraction"):
        assert cut_metrics[name] == pytest.approx(metrics[name], abs=1e-5), name
    scale = max(float(g.abs().max()) for g in gradient)
    for left, right in zip(gradient, cut_gradient, strict=True):
        torch.testing.assert_close(left, right, atol=1e-5 * scale, rtol=1e-4)


def test_the_loss_gradient_is_that_of_a_plain_forward_pass(make):
    """Aim: hidden states, head, shift, mask and padding together against the model's own logits."""
    stepper = make(loss="dapo")
    samples = sampled_batch(stepper.policy.model, groups=2, noise=0.0)
    _, taken = gradients(stepper, samples)
    model = copy.deepcopy(stepper.policy.model)
    rows = batches.rows_of(samples, std_normalised=False)
    tokens = sum(int(row.loss_mask.sum()) for row in rows)
    for row in rows:
        ids = torch.tensor(row.token_ids.astype("int64"))[None]
        logprobs = model(input_ids=ids, use_cache=False).logits[0].log_softmax(-1)
        for position in row.loss_mask.nonzero()[0]:
            value = logprobs[position - 1, row.token_ids[position]]
            (-row.advantage * value / tokens).backward(retain_graph=True)
    for parameter, gradient in zip(model.parameters(), taken, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, atol=1e-5, rtol=1e-3)


def test_a_step_makes_good_tokens_likelier_and_bad_ones_less_so(make):
    stepper = make(lr=1e-3)
    prompt, good, bad = [3, 4], [9, 8, 7], [12, 13, 14]

    def totals():
        return [sum(behaviour(stepper.policy.model, prompt, c, 1.0)) for c in (good, bad)]

    before = totals()
    logprobs = [behaviour(stepper.policy.model, prompt, c, 1.0) for c in (good, bad)]
    report = stepper.step(
        (
            make_sample(prompt, good, logprobs[0], advantage=0.5, reward=1.0),
            make_sample(prompt, bad, logprobs[1], advantage=-0.5, reward=0.0, index=1),
        )
    )
    after = totals()
    assert not report.skipped
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_tokens_outside_the_loss_mask_have_no_say(make):
    stepper = make()
    prompt, completion = [3, 4], [9, 8, 7]
    logprobs = behaviour(stepper.policy.model, prompt, completion, 1.0)
    plain = make_sample(prompt, completion, logprobs, advantage=1.0, masked=(1,))
    wild = make_sample(
        prompt, completion, [logprobs[0], 50.0, logprobs[2]], advantage=1.0, masked=(1,)
    )
    metrics, gradient = gradients(stepper, (plain,))
    wild_metrics, wild_gradient = gradients(stepper, (wild,))
    assert metrics == wild_metrics
    assert metrics["tokens"] == 2
    assert all(torch.equal(a, b) for a, b in zip(gradient, wild_gradient, strict=True))


@pytest.mark.parametrize("where", ["sample", "loss", "gradient"])
def test_a_step_that_is_not_finite_is_skipped_and_keeps_every_bit(make, where):
    stepper = make(lr_warmup_steps=5)
    samples = sampled_batch(stepper.policy.model)
    assert not stepper.step(samples).skipped
    before = bits(stepper)
    poisoned = samples
    if where == "sample":
        poisoned = (msgspec.structs.replace(samples[0], advantage=float("nan")), *samples[1:])
    elif where == "loss":
        poisoned = (msgspec.structs.replace(samples[0], advantage=1e38), *samples[1:])
        poisoned = tuple(msgspec.structs.replace(s, advantage=3e38) for s in poisoned)
    else:
        hook = stepper.policy.parameters[3].register_hook(lambda gradient: gradient / 0.0)
    report = stepper.step(poisoned)
    assert report.skipped
    assert report.why_skipped
    assert same_bits(before, bits(stepper))
    if where == "gradient":
        hook.remove()
    assert not stepper.step(samples).skipped
    assert not same_bits(before, bits(stepper))


def test_a_batch_in_which_nothing_can_be_learned_is_skipped(make):
    stepper = make()
    report = stepper.step((make_sample([3], [4], [0.0], advantage=1.0, masked=(0,)),))
    assert report.skipped
    assert "no sample has a loss token" in report.why_skipped


def test_the_learning_rate_warms_up_over_applied_steps(make):
    stepper = make(lr=1e-3, lr_warmup_steps=3)
    samples = sampled_batch(stepper.policy.model)
    rates = [stepper.step(samples).metrics["lr"] for _ in range(5)]
    assert rates == pytest.approx([2.5e-4, 5e-4, 7.5e-4, 1e-3, 1e-3])


def test_the_gradient_is_clipped_to_its_bound(make):
    stepper = make(grad_clip=1e-3)
    report = stepper.step(sampled_batch(stepper.policy.model))
    assert report.metrics["grad_norm"] > 1e-3


def test_a_model_that_caps_its_logits_takes_the_slow_path_and_still_agrees(make):
    """Aim: a head that does more than a product is found out, not silently ignored."""
    stepper = make()
    assert stepper.policy._plain_head
    model = stepper.policy.model
    plain_forward = model.forward

    def capped(**inputs):
        output = plain_forward(**inputs)
        return dataclasses.replace(output, logits=2.0 * torch.tanh(output.logits / 2.0))

    model.forward = capped
    assert not stepper.policy._head_is_plain()
    stepper.policy._plain_head = stepper.policy._head_is_plain()
    report = stepper.step(sampled_batch(model))
    assert report.metrics["log_ratio_abs_mean"] < 1e-5


def test_an_unknown_loss_is_told_before_the_model_is_loaded(folder, tmp_path):
    store = ChunkStore(tmp_path / "chunks", quota_bytes=None)
    with pytest.raises(UsageError, match="no loss"):
        Stepper(run_config(folder.parent / "nowhere", loss="nonsense"), store, None)
