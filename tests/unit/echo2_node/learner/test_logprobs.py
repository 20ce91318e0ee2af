import pytest
import torch

from echo2_node.learner.logprobs import chunked_logprobs


def problem(seed=0, bias=False):
    torch.manual_seed(seed)
    hidden_NH = torch.randn(11, 5, dtype=torch.float32, requires_grad=True)
    weight_VH = torch.randn(17, 5, requires_grad=True)
    bias_V = torch.randn(17, requires_grad=True) if bias else None
    return hidden_NH, weight_VH, bias_V, torch.randint(0, 17, (11,)), 0.5 + torch.rand(11)


def plain(hidden_NH, weight_VH, bias_V, target_N, inverse_N):
    logits_NV = torch.nn.functional.linear(hidden_NH, weight_VH, bias_V) * inverse_N[:, None]
    return logits_NV.log_softmax(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 11, 100])
@pytest.mark.parametrize("bias", [False, True])
def test_chunked_log_probs_are_the_plain_ones_with_their_gradient(chunk_tokens, bias):
    parts = problem(bias=bias)
    leaves = [part for part in parts[:3] if part is not None]
    weights_N = torch.randn(11)
    logprobs_N, entropy_N = chunked_logprobs(*parts, chunk_tokens)
    gradients = torch.autograd.grad((logprobs_N * weights_N).sum(), leaves)
    all_NV = plain(*parts)
    wanted_N = all_NV.gather(1, parts[3][:, None])[:, 0]
    wanted = torch.autograd.grad((wanted_N * weights_N).sum(), leaves)
    torch.testing.assert_close(logprobs_N, wanted_N)
    torch.testing.assert_close(entropy_N, -(all_NV.exp() * all_NV).sum(-1))
    for gradient, wanted_gradient in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(gradient, wanted_gradient, atol=1e-5, rtol=1e-4)


def test_logits_of_one_chunk_at_most_exist_at_once():
    """Aim: memory follows the chunk, not the batch; the graph keeps nothing of size N times V."""
    parts = problem()
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: sizes.append(tensor.numel()) or tensor, lambda tensor: tensor
    ):
        chunked_logprobs(*parts, 2)
    assert max(sizes) < 11 * 17
