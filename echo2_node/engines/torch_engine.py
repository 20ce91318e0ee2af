"""The default engine: any transformers causal LM, decoded in one continuous batch.

Decides which sequence joins the batch when, and keeps its log-probs and versions; the forward
pass and weights are `torch_model`'s, the distribution is `sampling`'s. Finished rows leave after
every token and waiting requests take their place; the members of a group share one prefill. A new
version is taken between two tokens: running sequences are prefilled again under the new weights,
so each later log-prob is that of one policy on the whole prefix. Runs in `engines.worker`.
"""

from __future__ import annotations

from collections import deque
from pathlib import Path
from time import perf_counter

import numpy as np
import torch

from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.wire.messages import Manifest, Sampling, VersionSpan
from echo2_mesh.wire.types import Digest, PolicyVersion, StopReason
from echo2_node.engines.differences import find_changes
from echo2_node.engines.fingerprint import compare
from echo2_node.engines.flips import Flip, prepare_flip
from echo2_node.engines.matching import probe_ids
from echo2_node.engines.protocol import EngineInfo, Generation, GenerationRequest, InstallReport
from echo2_node.engines.registry import EngineSettings
from echo2_node.engines.sampling import Filters, Uniforms, draw
from echo2_node.engines.torch_model import Pairs, TorchModel
from echo2_node.engines.weights import Staged, read_checked, stage


class Sequence:
    """A running member of a request. Its keys and values cover all its tokens but the last."""

    __slots__ = (
        "index", "logprobs", "prompt_length", "request_id", "sampling", "starts", "tokens",
        "uniforms",
    )  # fmt: skip

    def __init__(
        self, request: GenerationRequest, prompt: list[int], index: int, version: PolicyVersion
    ) -> None:
        self.request_id = request.request_id
        self.index = index
        self.sampling: Sampling = request.sampling
        self.prompt_length = len(prompt)
        self.tokens = list(prompt)
        self.logprobs: list[float] = []
        self.starts: list[tuple[PolicyVersion, int]] = [(version, 0)]
        """(version, first completion token it chose)."""
        self.uniforms = Uniforms(request.sampling.seed + index)

    def generation(self, stop_reason: StopReason) -> Generation:
        """What is sent of it, once it has ended."""
        count = len(self.logprobs)
        ends = [start for _, start in self.starts[1:]] + [count]
        return Generation(
            request_id=self.request_id,
            index=self.index,
            token_ids=np.array(self.tokens[self.prompt_length :], dtype="<i4").tobytes(),
            logprobs=np.array(self.logprobs, dtype="<f4").tobytes(),
            segments=tuple(
                VersionSpan(version=version, start=start, end=end)
                for (version, start), end in zip(self.starts, ends, strict=True)
                if end > start
            ),
            stop_reason=stop_reason,
        )


Ended = tuple[Sequence, StopReason]


class _Waiting:
    """A request of which members are still to be started."""

    def __init__(self, request: GenerationRequest, prompt: list[int]) -> None:
        self.request = request
        self.prompt = prompt
        self.indices = deque(request.indices)


class TorchEngine:
    """See `engines.protocol.Engine`."""

    def __init__(self, model: TorchModel, *, store_dir: Path, sequences_max: int) -> None:
        self._model = model
        self._store_dir = store_dir
        self._version: PolicyVersion | None = None
        self._prepared: Staged | Flip | None = None
        self._prepare_s = 0.0
        self._installed: tuple[Digest, Manifest] | None = None
        """The version whose published values the parameters are known to hold, bit for bit."""
        self._last_flip: Flip | None = None
        """How the installed version was reached, where that was a flip: the way back."""
        self._waiting: deque[_Waiting] = deque()
        self._ended: list[Ended] = []
        """Ended while a version was being proved; told by the next step."""
        self._running: list[Sequence] = []
        """Sequence i sits in slot i of the cache."""
        self._cache = model.make_cache(sequences_max)
        self._filters: Filters | None = None
        self.info = EngineInfo(
            cohort=model.cohort,
            vocabulary=model.vocabulary,
            length_tokens_max=model.length_tokens_max,
            parameters=model.parameters,
            sequences_max=sequences_max,
        )

    def submit(self, request: GenerationRequest) -> None:
        """See `Engine.submit`."""
        if self._version is None:
            raise UsageError(
                f"Request {request.request_id} came before the first weights.",
                "Install a version first.",
            )
        if len(request.prompt_ids) % 4:
            raise UsageError(f"The prompt of request {request.request_id} is not int32 tokens.")
        prompt = np.frombuffer(request.prompt_ids, dtype="<i4").tolist()
        length = len(prompt) + request.sampling.tokens_max
        if not prompt or not request.indices:
            raise UsageError(f"Request {request.request_id} is empty.")
        if length > self.info.length_tokens_max:
            raise UsageError(
                f"Request {request.request_id} may grow to {length} tokens; the model's context "
                f"has {self.info.length_tokens_max}.",
                "Lower rollout.tokens_max, or choose a model with a longer context.",
            )
        if min(prompt) < 0 or max(prompt) >= self.info.vocabulary:
            raise UsageError(
                f"Request {request.request_id} holds a token outside the vocabulary of "
                f"{self.info.vocabulary}."
            )
        self._waiting.append(_Waiting(request, prompt))

    def busy(self) -> bool:
        """See `Engine.busy`."""
        return bool(self._waiting or self._running or self._ended)

    @torch.inference_mode()
    def step(self) -> list[Generation]:
        """Start what fits, then one token for every running sequence."""
        ended, self._ended = self._ended, []
        ended += self._admit()
        ended += self._decode()
        return [sequence.generation(reason) for sequence, reason in ended]

    def _decode(self) -> list[Ended]:
        """One token for every running sequence; those that it ended."""
        if not self._running:
            return []
        logits_BV = self._model.decode(
            self._cache,
            [sequence.tokens[-1] for sequence in self._running],
            [len(sequence.tokens) - 1 for sequence in self._running],
        )
        if self._filters is None:
            self._filters = self._filters_of(self._running)
        self._sample(self._running, logits_BV, self._filters)
        return self._leave(range(len(self._running)))

    @torch.inference_mode()
    def cancel(self, request_id: str) -> None:
        """See `Engine.cancel`."""
        kept = [waiting for waiting in self._waiting if waiting.request.request_id != request_id]
        self._waiting = deque(kept)
        self._ended = [one for one in self._ended if one[0].request_id != request_id]
        for row in reversed(range(len(self._running))):
            if self._running[row].request_id == request_id:
                self._vacate(row)

    def prepare(self, manifest: Digest) -> None:
        """See `Engine.prepare`. Only what differs, where the store has both versions whole."""
        began_s = perf_counter()
        self._prepared = self._flip_to(manifest) or stage(self._store_dir, manifest)
        self._prepare_s = perf_counter() - began_s

    def _flip_to(self, digest: Digest) -> Flip | None:
        """The short way from what is installed; None where only a full install will do."""
        base, last = self._installed, self._last_flip
        if base is None or base[0] == digest:
            return None
        if last is not None and last.base == digest:
            return last.reversed()
        manifest = read_checked(self._store_dir, digest)
        changes = find_changes(self._store_dir, base[1], manifest)
        if changes is None:
            return None
        pairs = self._model.pairs(manifest)
        try:
            return prepare_flip(pairs, changes, base=base, digest=digest, manifest=manifest)
        except torch.OutOfMemoryError:
            # A whole install needs no room on the device beside the parameters.
            self._last_flip = None
            return None

    @torch.inference_mode()
    def install(self, manifest: Digest) -> InstallReport:
        """See `Engine.install`. All is read and checked before the first parameter changes.

        Running sequences go on while the probe is computed. Where it says that a flip did not
        give what the learner published, the old values are written back and what the sequences
        drew meanwhile is forgotten: no generation holds a token of weights that were refused.
        """
        if not self._is_prepared(manifest):
            self.prepare(manifest)
        prepared, self._prepared = self._prepared, None
        assert prepared is not None
        began_s = perf_counter()
        content = prepared.manifest
        pairs = self._model.pairs(content)
        ids = probe_ids(content, self.info.vocabulary)
        paused_s = perf_counter()
        self._write(prepared, pairs)
        for sequence in self._running:
            sequence.starts.append((content.version, len(sequence.logprobs)))
        self._prefill_running()
        pause_s = perf_counter() - paused_s
        logprobs = self._prove(prepared, ids)
        self._version = content.version
        ended_s = perf_counter()
        return InstallReport(
            version=content.version,
            pause_s=pause_s,
            total_s=ended_s - began_s + self._prepare_s,
            probe_logprobs=logprobs,
            probe_s=ended_s - paused_s - pause_s,
            changed=prepared.changed if isinstance(prepared, Flip) else None,
        )

    def _is_prepared(self, digest: Digest) -> bool:
        prepared, base = self._prepared, self._installed
        if prepared is None or prepared.digest != digest:
            return False
        return isinstance(prepared, Staged) or (base is not None and base[0] == prepared.base)

    def _write(self, prepared: Staged | Flip, pairs: Pairs) -> None:
        if isinstance(prepared, Flip):
            prepared.apply()
        else:
            self._installed = self._last_flip = None
            self._model.copy(prepared, pairs)

    def _prove(self, prepared: Staged | Flip, ids: list[int]) -> bytes:
        """The probe's log-probs under what was just written, and what follows from them.

        Weights that are not what their manifest says are no base of anything. Nor are those that
        somebody went back to: the newer version is doubted, perhaps for what lies on the disk, so
        the next install reads its version whole.
        """
        ended: list[Ended] = []
        manifest = prepared.manifest
        flip = prepared if isinstance(prepared, Flip) else None
        try:
            between = (lambda: ended.extend(self._decode())) if self._running else None
            logprobs = self._model.probe(ids, between)
            proof = compare(manifest.probe.logprobs, logprobs, dtype=self.info.cohort.dtype)
            if flip is not None and not proof.matches:
                raise LocalError(
                    f"Version {manifest.version} is not what the learner published: {proof.why}; "
                    f"version {self._version} goes on."
                )
        except BaseException:
            if flip is not None:
                flip.undo()
                self._rewind(ended)
                self._installed = self._last_flip = None
            raise
        self._ended += ended
        last = self._last_flip
        back = flip is not None and last is not None and last.base == flip.digest
        self._last_flip = None if back else flip
        self._installed = (prepared.digest, manifest) if proof.matches and not back else None
        return logprobs

    def _rewind(self, ended: list[Ended]) -> None:
        """Forget every token that was drawn under the version taken last."""
        self._running += [sequence for sequence, _ in ended]
        self._filters = None
        for sequence in self._running:
            _, start = sequence.starts.pop()
            del sequence.logprobs[start:]
            del sequence.tokens[sequence.prompt_length + start :]
        self._prefill_running()

    def _prefill_running(self) -> None:
        """Keys and values of running sequences, computed again under the present weights."""
        if self._running:
            self._model.prefill(
                self._cache, 0, [s.tokens[:-1] for s in self._running], logits=False
            )

    def close(self) -> None:
        """See `Engine.close`."""
        self._waiting.clear()
        self._running.clear()
        self._ended.clear()

    def _admit(self) -> list[Ended]:
        """Start waiting members in free slots; their first token comes from the prefill."""
        version = self._version
        free = self.info.sequences_max - len(self._running)
        prompts: list[list[int]] = []
        groups: list[list[Sequence]] = []
        while version is not None and free and self._waiting:
            waiting = self._waiting[0]
            taken = [waiting.indices.popleft() for _ in range(min(free, len(waiting.indices)))]
            free -= len(taken)
            if not waiting.indices:
                self._waiting.popleft()
            prompts.append(waiting.prompt)
            request, prompt = waiting.request, waiting.prompt
            groups.append([Sequence(request, prompt, index, version) for index in taken])
        if not groups:
            return []
        first_row = len(self._running)
        logits_RV = self._model.prefill(self._cache, first_row, prompts, logits=True)
        started = [group[0] for group in groups]
        owners = list(range(len(groups)))
        for owner, group in enumerate(groups):
            copies = range(first_row + len(started), first_row + len(started) + len(group) - 1)
            self._cache.copy_row(first_row + owner, list(copies), len(prompts[owner]))
            started += group[1:]
            owners += [owner] * (len(group) - 1)
        self._running += started
        assert logits_RV is not None
        self._sample(started, logits_RV[owners], self._filters_of(started))
        self._filters = None
        return self._leave(range(first_row, len(self._running)))

    def _filters_of(self, sequences: list[Sequence]) -> Filters:
        samplings = [sequence.sampling for sequence in sequences]
        return Filters(
            [sampling.temperature for sampling in samplings],
            [sampling.top_k for sampling in samplings],
            [sampling.top_p for sampling in samplings],
            self._model.device,
        )

    def _sample(self, sequences: list[Sequence], logits_BV: torch.Tensor, filters: Filters) -> None:
        """Append a token and its log-prob to each sequence."""
        uniforms = [sequence.uniforms.next() for sequence in sequences]
        tokens_B, logprobs_B = draw(filters.logprobs(logits_BV), uniforms)
        drawn = zip(sequences, tokens_B.tolist(), logprobs_B.tolist(), strict=True)
        for sequence, token, logprob in drawn:
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)

    def _leave(self, rows: range) -> list[Ended]:
        """Take out the rows whose last token ended them."""
        ended = []
        eos_ids = self._model.eos_ids
        for row in reversed(rows):
            sequence = self._running[row]
            if sequence.tokens[-1] in eos_ids:
                ended.append((sequence, StopReason.STOP))
            elif len(sequence.logprobs) >= sequence.sampling.tokens_max:
                ended.append((sequence, StopReason.LENGTH))
            else:
                continue
            self._vacate(row)
        return ended

    def _vacate(self, row: int) -> None:
        """Drop a row; the last one moves into its slot."""
        last = self._running.pop()
        if row < len(self._running):
            self._running[row] = last
            self._cache.copy_row(len(self._running), [row], len(last.tokens) - 1)
        self._filters = None


def load(settings: EngineSettings) -> TorchEngine:
    """Build the model of a folder, without weights; see `registry.load_engine`."""
    return TorchEngine(
        TorchModel.build(settings),
        store_dir=Path(settings.store_dir),
        sequences_max=settings.sequences_max,
    )
