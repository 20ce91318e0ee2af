"""Prompt and completion become arrays of one length, in which spans know their place."""

import numpy as np

from echo2_mesh.wire.messages import Cohort, VersionSpan
from echo2_mesh.wire.types import PolicyVersion, StopReason
from echo2_node.actor.trajectories import make_trajectory
from echo2_node.engines.protocol import Generation
from tests.actor_kit import RUN_ID, Mesh, lease, open_tokenizer, publish


def test_arrays_run_over_prompt_and_completion_and_the_prompt_is_masked(tmp_path):
    mesh = Mesh(tmp_path)
    manifest = publish(mesh, tmp_path, 0).manifest
    given = lease(7, open_tokenizer(tmp_path / "model"))
    completion = np.array([4, 5, 1], "<i4")
    logprobs = np.array([-0.5, -0.25, -1.0], "<f4")
    generation = Generation(
        request_id=given.lease_id,
        index=1,
        token_ids=completion.tobytes(),
        logprobs=logprobs.tobytes(),
        segments=(
            VersionSpan(version=PolicyVersion(3), start=0, end=1),
            VersionSpan(version=PolicyVersion(4), start=1, end=3),
        ),
        stop_reason=StopReason.STOP,
    )
    cohort = Cohort(engine="fake", dtype="float32", device="cpu")
    made = make_trajectory(
        given,
        generation,
        run_id=RUN_ID,
        reward=0.5,
        metrics={"exact": 0.0},
        cohort=cohort,
        manifest=manifest,
    )
    prompt = len(given.prompt_ids) // 4
    assert made.prompt_length == prompt == 4
    assert np.frombuffer(made.token_ids, "<i4").tolist()[prompt:] == [4, 5, 1]
    assert made.loss_mask == bytes(prompt) + b"\x01\x01\x01"
    found = np.frombuffer(made.logprobs, "<f4")
    assert found[:prompt].tolist() == [0.0] * prompt
    assert found[prompt:].tolist() == logprobs.tolist()
    spans = [(span.version, span.start, span.end) for span in made.segments]
    assert spans == [(3, prompt, prompt + 1), (4, prompt + 1, prompt + 3)]
    assert (made.lease_id, made.group_id, made.index, made.item_index) == (
        given.lease_id,
        given.group_id,
        1,
        7,
    )
    assert made.sampling == given.sampling
    assert made.tokenizer_digest == manifest.tokenizer_digest
    assert made.task_digest == manifest.task.digest
