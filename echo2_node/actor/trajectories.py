"""A generation under a lease, as the trajectory that travels: one array layout for both. Pure."""

from __future__ import annotations

import numpy as np

from echo2_mesh.wire.messages import Cohort, Lease, Manifest, Trajectory, VersionSpan
from echo2_node.engines.protocol import Generation


def make_trajectory(
    lease: Lease,
    generation: Generation,
    *,
    run_id: str,
    reward: float,
    metrics: dict[str, float],
    cohort: Cohort,
    manifest: Manifest,
) -> Trajectory:
    """Put prompt and completion together: arrays over T = P + C tokens, P masked out.

    Completion spans [start, end) move to trajectory coordinates by adding P.
    """
    prompt_length = len(lease.prompt_ids) // 4
    completion_length = len(generation.token_ids) // 4
    return Trajectory(
        run_id=run_id,
        lease_id=lease.lease_id,
        group_id=lease.group_id,
        index=generation.index,
        item_index=lease.item_index,
        token_ids=lease.prompt_ids + generation.token_ids,
        prompt_length=prompt_length,
        loss_mask=bytes(prompt_length) + b"\x01" * completion_length,
        logprobs=np.zeros(prompt_length, dtype="<f4").tobytes() + generation.logprobs,
        segments=tuple(
            VersionSpan(
                version=span.version, start=span.start + prompt_length, end=span.end + prompt_length
            )
            for span in generation.segments
        ),
        reward=reward,
        metrics=metrics,
        stop_reason=generation.stop_reason,
        sampling=lease.sampling,
        cohort=cohort,
        tokenizer_digest=manifest.tokenizer_digest,
        template_digest=manifest.template_digest,
        task_digest=manifest.task.digest,
    )
