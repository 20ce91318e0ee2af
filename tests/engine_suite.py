"""What every engine must do, as plain functions over a `Case`; run for fake, torch and vllm."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.wire.messages import Sampling
from echo2_mesh.wire.types import Digest, StopReason
from echo2_node.engines.protocol import Engine, Generation, GenerationRequest


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """An engine with version 1 installed, and the truth about versions 1 and 2."""

    engine: Engine
    versions: dict[int, Digest]
    broken: Digest
    """A version that cannot be installed."""
    truth: Callable[[int, list[int], list[int], float], np.ndarray]
    """(version, prompt, completion, temperature) -> float[C] log-probs, computed elsewhere."""
    prompt: list[int]
    eos_id: int
    tolerance: float = 1e-4


def ids_of(packed: bytes) -> list[int]:
    return np.frombuffer(packed, dtype="<i4").tolist()


def request(
    prompt: list[int],
    name: str = "a",
    indices: tuple[int, ...] = (0, 1, 2, 3),
    *,
    tokens_max: int = 12,
    seed: int = 7,
    temperature: float = 1.0,
    top_p: float = 1.0,
    top_k: int = 0,
) -> GenerationRequest:
    return GenerationRequest(
        request_id=name,
        prompt_ids=np.array(prompt, dtype="<i4").tobytes(),
        indices=indices,
        sampling=Sampling(
            tokens_max=tokens_max, seed=seed, temperature=temperature, top_p=top_p, top_k=top_k
        ),
    )


def run(engine: Engine, *, steps: int = 1000) -> list[Generation]:
    ended: list[Generation] = []
    for _ in range(steps):
        if not engine.busy():
            return ended
        ended += engine.step()
    return ended


def wrongness(case: Case, generation: Generation, prompt: list[int], temperature: float) -> float:
    """Largest error of a sequence's log-probs, each token judged by the version that labels it."""
    completion = ids_of(generation.token_ids)
    claimed = np.frombuffer(generation.logprobs, dtype="<f4")
    assert len(claimed) == len(completion) > 0
    place, worst = 0, 0.0
    for span in generation.segments:
        assert span.start == place < span.end, "segments cover the completion in order"
        place = span.end
        true = case.truth(span.version, prompt, completion, temperature)
        difference = np.abs(true[span.start : span.end] - claimed[span.start : span.end])
        worst = max(worst, float(difference.max()))
    assert place == len(completion), "segments cover the completion whole"
    return worst


def check_logprobs_are_those_of_the_drawn_tokens(case: Case) -> None:
    for temperature in (1.0, 0.6):
        case.engine.submit(request(case.prompt, temperature=temperature))
        case.engine.submit(request(case.prompt[:2], "b", (0, 5), temperature=temperature))
        ended = run(case.engine)
        assert sorted((g.request_id, g.index) for g in ended) == [
            ("a", 0), ("a", 1), ("a", 2), ("a", 3), ("b", 0), ("b", 5),
        ]  # fmt: skip
        for generation in ended:
            prompt = case.prompt if generation.request_id == "a" else case.prompt[:2]
            assert wrongness(case, generation, prompt, temperature) < case.tolerance


def check_a_shift_by_one_token_would_be_noticed(case: Case) -> None:
    """The measure above has teeth: the classical fault is far outside the tolerance."""
    case.engine.submit(request(case.prompt, indices=tuple(range(8))))
    worst = 0.0
    for generation in run(case.engine):
        shifted = np.roll(np.frombuffer(generation.logprobs, dtype="<f4"), 1)
        tampered = msgspec.structs.replace(generation, logprobs=shifted.tobytes())
        worst = max(worst, wrongness(case, tampered, case.prompt, 1.0))
    assert worst > 100 * case.tolerance


def check_a_sequence_ends_at_the_end_token_or_the_limit(case: Case) -> None:
    ended: list[Generation] = []
    for seed in range(0, 800, 100):
        case.engine.submit(request(case.prompt, str(seed), tuple(range(8)), seed=seed))
        ended += run(case.engine)
    assert {g.stop_reason for g in ended} == {StopReason.STOP, StopReason.LENGTH}
    for generation in ended:
        tokens = ids_of(generation.token_ids)
        assert case.eos_id not in tokens[:-1]
        if generation.stop_reason is StopReason.STOP:
            assert tokens[-1] == case.eos_id
        else:
            assert tokens[-1] != case.eos_id
            assert len(tokens) == 12


def check_a_swap_between_two_tokens_labels_and_changes_what_follows(case: Case) -> None:
    case.engine.submit(request(case.prompt, indices=tuple(range(8)), tokens_max=10))
    ended = run(case.engine, steps=3)
    report = case.engine.install(case.versions[2])
    assert report.version == 2
    ended += run(case.engine)
    assert len(ended) == 8
    both = [g for g in ended if [s.version for s in g.segments] == [1, 2]]
    assert both, "some sequence lived through the change"
    assert all(1 <= g.segments[0].end <= 5 for g in both)
    for generation in ended:
        assert wrongness(case, generation, case.prompt, 1.0) < case.tolerance
    relabelled = both[0]
    spans = relabelled.segments
    moved = (
        msgspec.structs.replace(spans[0], end=spans[0].end - 1),
        msgspec.structs.replace(spans[1], start=spans[0].end - 1),
    )
    tampered = msgspec.structs.replace(relabelled, segments=moved)
    if moved[0].end > 0:
        assert wrongness(case, tampered, case.prompt, 1.0) > 10 * case.tolerance


def check_the_same_seed_draws_the_same_sequence_in_any_company(case: Case) -> None:
    case.engine.submit(request(case.prompt, "alone", (2,)))
    alone = run(case.engine)[0]
    case.engine.submit(request(case.prompt[:3], "other", (0, 1, 2), seed=99))
    case.engine.submit(request(case.prompt, "again", (0, 1, 2, 3)))
    together = {g.index: g for g in run(case.engine) if g.request_id == "again"}
    assert together[2].token_ids == alone.token_ids
    assert len({g.token_ids for g in together.values()}) > 1


def check_more_members_than_slots_all_end(case: Case) -> None:
    count = 2 * case.engine.info.sequences_max + 3
    case.engine.submit(request(case.prompt, indices=tuple(range(count)), tokens_max=4))
    ended = run(case.engine)
    assert sorted(g.index for g in ended) == list(range(count))
    assert max(wrongness(case, g, case.prompt, 1.0) for g in ended[-8:]) < case.tolerance


def check_a_cancelled_request_never_ends_and_harms_no_other(case: Case) -> None:
    case.engine.submit(request(case.prompt, "gone", (0, 1, 2), tokens_max=300))
    case.engine.submit(request(case.prompt, "stays", (0, 1)))
    ended = run(case.engine, steps=2)
    case.engine.cancel("gone")
    case.engine.cancel("unknown")
    ended += run(case.engine)
    stays = [g for g in ended if g.request_id == "stays"]
    assert len(stays) == 2
    assert max(wrongness(case, g, case.prompt, 1.0) for g in stays) < case.tolerance
    assert not case.engine.busy()


def check_requests_that_cannot_run_are_refused_at_once(case: Case) -> None:
    info = case.engine.info
    bad = [
        request([info.vocabulary]),
        request([-1]),
        request([]),
        request(case.prompt, indices=()),
        request(case.prompt, tokens_max=info.length_tokens_max),
        msgspec.structs.replace(request(case.prompt), prompt_ids=b"\0\0\0"),
    ]
    for wrong in bad:
        with pytest.raises(UsageError):
            case.engine.submit(wrong)
    assert not case.engine.busy()


def check_a_version_that_does_not_fit_leaves_the_old_weights(case: Case) -> None:
    case.engine.submit(request(case.prompt))
    ended = run(case.engine, steps=1)
    with pytest.raises((UsageError, LocalError)):
        case.engine.install(case.broken)
    ended += run(case.engine)
    assert all([s.version for s in g.segments] == [1] for g in ended)
    assert max(wrongness(case, g, case.prompt, 1.0) for g in ended) < case.tolerance


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]
