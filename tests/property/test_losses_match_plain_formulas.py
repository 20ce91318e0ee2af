"""Every loss against a loop written from its formula, and micro-batches against the whole."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo2_node.learner.losses import LOSSES, Scale, TokenBatch, make_loss

logprob = st.floats(-8.0, -0.001)


@st.composite
def batches(draw):
    """Per sequence: advantage, new and old log-probs."""
    sequences = []
    for _ in range(draw(st.integers(1, 5))):
        old = draw(st.lists(logprob, min_size=1, max_size=6))
        shift = draw(st.lists(st.floats(-1.5, 1.5), min_size=len(old), max_size=len(old)))
        new = [min(-1e-4, value + move) for value, move in zip(old, shift, strict=True)]
        sequences.append((draw(st.floats(-2.0, 2.0)), new, old))
    return sequences


def token_batch(sequences):
    lengths = [len(new) for _, new, _ in sequences]
    return TokenBatch(
        logprobs_N=torch.tensor(
            [n for _, new, _ in sequences for n in new], dtype=torch.float64, requires_grad=True
        ),
        behaviour_N=torch.tensor([b for _, _, old in sequences for b in old], dtype=torch.float64),
        sequence_N=torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)),
        advantage_S=torch.tensor([a for a, _, _ in sequences], dtype=torch.float64),
    )


def scale_of(sequences):
    return Scale(tokens=sum(len(new) for _, new, _ in sequences), sequences=len(sequences))


def plain_clipped(sequences, low, high, cap, per_sequence):
    scale, total = scale_of(sequences), 0.0
    for advantage, new, old in sequences:
        terms = []
        for n, b in zip(new, old, strict=True):
            ratio = math.exp(n - b)
            clipped = min(max(ratio, 1 - low), 1 + high)
            terms.append(min(min(ratio, cap) * advantage, clipped * advantage))
        total += np.mean(terms) / scale.sequences if per_sequence else sum(terms) / scale.tokens
    return -total


def plain_dppo(sequences, tau=0.2, cap=5.0, pull=1e-3):
    total = 0.0
    for advantage, new, old in sequences:
        drift = float(np.mean(np.array(new) - np.array(old)))
        if not 0.5 <= math.exp(drift) <= 2.0 or (advantage < 0 and -drift > 0.35):
            continue
        for n, b in zip(new, old, strict=True):
            moved = math.exp(n) - math.exp(b)
            leaving = (advantage > 0 and moved > tau) or (advantage < 0 and moved < -tau)
            weight = 0.0 if leaving else min(math.exp(n - b), cap)
            total += -weight * advantage * n + pull * (n - b) ** 2
    return total / scale_of(sequences).tokens


PLAIN = {
    "grpo": lambda s: plain_clipped(s, 0.2, 0.2, 2.0, True),
    "dapo": lambda s: plain_clipped(s, 0.2, 0.28, 5.0, False),
    "dppo": plain_dppo,
}


def test_every_loss_has_a_plain_formula_here():
    assert set(PLAIN) == set(LOSSES)


@given(batches())
def test_a_loss_is_its_formula(sequences):
    for name, plain in PLAIN.items():
        loss, _ = make_loss(name, {})(token_batch(sequences), scale_of(sequences))
        assert loss.item() == pytest.approx(plain(sequences), rel=1e-6, abs=1e-9), name


@given(batches(), st.integers(1, 4))
def test_micro_batches_add_up_to_the_whole(sequences, cut):
    scale = scale_of(sequences)
    for name in LOSSES:
        loss = make_loss(name, {})
        whole, sums = loss(token_batch(sequences), scale)
        parts = [part for part in (sequences[:cut], sequences[cut:]) if part]
        pieces = [loss(token_batch(part), scale) for part in parts]
        assert whole.item() == pytest.approx(sum(p[0].item() for p in pieces), abs=1e-9)
        for key, value in sums.items():
            assert float(value) == pytest.approx(sum(float(p[1][key]) for p in pieces), abs=1e-6)
