"""Prompts of the run: from an item's index to its tokens, its lease on the wire, and its score.

Holds no state but a cache: the task makes the same item from the same seed and index, always.
Called by offers (leases out), intake (what a trajectory must look like) and the desk.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable

import msgspec

from echo2_mesh.wire.messages import Lease, Sampling, Trajectory
from echo2_mesh.wire.types import StopReason
from echo2_node.config import RolloutSection
from echo2_node.scheduler.examination import completion_ids
from echo2_node.scheduler.records import OpenLease
from echo2_node.tasks.protocol import Item, Score, Task

PROMPTS_CACHED_MAX = 8192


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """An item and its tokens, int32[P] little-endian."""

    item: Item
    token_ids: bytes


class Prompts:
    """The task of this run with its seed and sampling.

    Args:
        encode_prompt: text to int32 bytes, chat template applied.
        decode: int32 bytes to text, special tokens removed; PeerError on illegal ids.
    """

    def __init__(
        self,
        task: Task,
        *,
        seed: int,
        rollout: RolloutSection,
        encode_prompt: Callable[[str], bytes],
        decode: Callable[[bytes], str],
    ) -> None:
        self._task = task
        self.seed = seed
        self._rollout = rollout
        self._encode_prompt = encode_prompt
        self._decode = decode
        self._cache: OrderedDict[int, Prompt] = OrderedDict()
        self.size_bytes_max = 4
        """The longest prompt so far, in bytes of token ids."""

    def get(self, item_index: int) -> Prompt:
        """Prompt `item_index` of the run."""
        known = self._cache.get(item_index)
        if known is not None:
            return known
        item = self._task.item(self.seed, item_index)
        prompt = Prompt(item=item, token_ids=self._encode_prompt(item.prompt))
        self._cache[item_index] = prompt
        self.size_bytes_max = max(self.size_bytes_max, len(prompt.token_ids))
        while len(self._cache) > PROMPTS_CACHED_MAX:
            self._cache.popitem(last=False)
        return prompt

    def sampling(self, lease: OpenLease) -> Sampling:
        """What the lease says about sampling."""
        rollout = self._rollout
        return Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            tokens_max=rollout.tokens_max,
            seed=lease.seed,
        )

    def lease(self, lease: OpenLease) -> Lease:
        """The lease as an actor gets it."""
        return Lease(
            lease_id=lease.lease_id,
            group_id=lease.group_id,
            item_index=lease.item_index,
            prompt_ids=self.get(lease.item_index).token_ids,
            indices=lease.indices,
            group_size=self._rollout.group_size,
            sampling=self.sampling(lease),
            version_min=lease.version_min,
            ttl_s=self._rollout.lease_ttl_s,
        )

    def score(self, item: Item, trajectory: Trajectory) -> Score:
        """The learner's own judgement, from the tokens alone.

        Raises:
            PeerError: the tokens cannot be decoded.
        """
        text = self._decode(completion_ids(trajectory))
        return self._task.score(item, text, finished=trajectory.stop_reason is StopReason.STOP)
