"""An engine without a model: it follows a rule, imperfectly, with honest log-probs.

For tests, simulations and demos of the plumbing. At each position the rule names the right token;
the fake draws it with probability `skill(version)` and any other with the rest, at temperature 1,
and reports the log-prob of what it drew. `FakeEngine` is an `Engine` for the worker process;
`FakeEnginePort` is an `EnginePort` that lives on trio's (virtual) clock.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import numpy as np
import trio

from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.wire.messages import Cohort, Manifest, Sampling, VersionSpan
from echo2_mesh.wire.types import Digest, PolicyVersion, StopReason
from echo2_node.engines.protocol import EngineInfo, Generation, GenerationRequest, InstallReport
from echo2_node.engines.registry import EngineSettings
from echo2_node.engines.weights import read_manifest

FAKE_VARIABLE = "ECHO2_FAKE_ENGINE"
"""JSON of `FakeSettings`, read by the engine in the worker process."""

Rule = Callable[[tuple[int, ...]], tuple[int, ...]]
"""Prompt ids -> the right completion, end token included."""


class FakeSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How well and how fast it answers. The defaults fit the character tokenizer."""

    vocabulary: int = 13
    eos_id: int = 1
    skill_start: float = 0.5
    skill_per_version: float = 0.02
    skill_max: float = 0.98
    step_s: float = 0.0
    """Time of one token."""
    install_s: float = 0.0
    probe_error: float = 0.0
    """Added to the probe's log-probs: an engine that failed to take the weights."""
    length_tokens_max: int = 4096

    def skill(self, version: PolicyVersion) -> float:
        """Probability of the right token under `version`."""
        return min(self.skill_max, self.skill_start + self.skill_per_version * version)


def sort_rule(eos_id: int) -> Rule:
    """Sort all prompt tokens but the last: right for sort_digits, whose digits are in id order."""
    return lambda prompt: (*sorted(prompt[:-1]), eos_id)


class _Running:
    """One member, drawn token by token; its random numbers depend on seed and index alone."""

    def __init__(
        self,
        request: GenerationRequest,
        index: int,
        answer: tuple[int, ...],
        settings: FakeSettings,
    ) -> None:
        self.request_id = request.request_id
        self.index = index
        self._sampling: Sampling = request.sampling
        self._answer = answer
        self._settings = settings
        self._random = np.random.default_rng([request.sampling.seed, index])
        self.tokens: list[int] = []
        self._logprobs: list[float] = []
        self._spans: list[VersionSpan] = []

    def advance(self, version: PolicyVersion) -> Generation | None:
        """Draw one token; the whole sequence if that ended it."""
        settings, place = self._settings, len(self.tokens)
        right = self._answer[place] if place < len(self._answer) else settings.eos_id
        skill = settings.skill(version)
        probabilities = np.full(settings.vocabulary, (1 - skill) / (settings.vocabulary - 1))
        probabilities[right] = skill
        powered = probabilities ** (1 / self._sampling.temperature)
        powered /= powered.sum()
        token = int(self._random.choice(settings.vocabulary, p=powered))
        self.tokens.append(token)
        self._logprobs.append(float(np.log(powered[token])))
        if self._spans and self._spans[-1].version == version:
            self._spans[-1] = msgspec.structs.replace(self._spans[-1], end=place + 1)
        else:
            self._spans.append(VersionSpan(version=version, start=place, end=place + 1))
        if token == settings.eos_id:
            return self._ended(StopReason.STOP)
        if place + 1 >= self._sampling.tokens_max:
            return self._ended(StopReason.LENGTH)
        return None

    def _ended(self, stop_reason: StopReason) -> Generation:
        return Generation(
            request_id=self.request_id,
            index=self.index,
            token_ids=np.array(self.tokens, dtype="<i4").tobytes(),
            logprobs=np.array(self._logprobs, dtype="<f4").tobytes(),
            segments=tuple(self._spans),
            stop_reason=stop_reason,
        )


class _Fake:
    """What both fakes share: checks, versions and members."""

    def __init__(
        self,
        read: Callable[[Digest], Manifest],
        settings: FakeSettings,
        sequences_max: int,
        rule: Rule | None,
    ) -> None:
        self._read = read
        self._settings = settings
        self._rule = rule or sort_rule(settings.eos_id)
        self._version: PolicyVersion | None = None
        self.info = EngineInfo(
            cohort=Cohort(engine="fake", dtype="float32", device="cpu"),
            vocabulary=settings.vocabulary,
            length_tokens_max=settings.length_tokens_max,
            parameters=0,
            sequences_max=sequences_max,
        )

    def _members(self, request: GenerationRequest) -> list[_Running]:
        if self._version is None:
            raise UsageError(f"Request {request.request_id} came before the first weights.")
        if len(request.prompt_ids) % 4 or not request.prompt_ids or not request.indices:
            raise UsageError(f"Request {request.request_id} is empty or not int32 tokens.")
        prompt = tuple(np.frombuffer(request.prompt_ids, dtype="<i4").tolist())
        if len(prompt) + request.sampling.tokens_max > self._settings.length_tokens_max:
            raise UsageError(f"Request {request.request_id} exceeds the context.")
        if min(prompt) < 0 or max(prompt) >= self._settings.vocabulary:
            raise UsageError(f"Request {request.request_id} exceeds the vocabulary.")
        answer = self._rule(prompt)
        return [_Running(request, index, answer, self._settings) for index in request.indices]

    def _take(self, manifest: Digest) -> InstallReport:
        content = self._read(manifest)
        self._version = content.version
        truth = np.frombuffer(content.probe.logprobs, dtype="<f4")
        measured = (truth + self._settings.probe_error).astype("<f4")
        return InstallReport(
            version=content.version,
            pause_s=self._settings.install_s,
            total_s=self._settings.install_s,
            probe_logprobs=measured.tobytes(),
        )


class FakeEngine(_Fake):
    """See `engines.protocol.Engine`. Latency is slept for real."""

    def __init__(
        self,
        read: Callable[[Digest], Manifest],
        settings: FakeSettings,
        *,
        sequences_max: int,
        rule: Rule | None = None,
    ) -> None:
        super().__init__(read, settings, sequences_max, rule)
        self._running: list[_Running] = []

    def submit(self, request: GenerationRequest) -> None:
        """See `Engine.submit`."""
        self._running += self._members(request)

    def step(self) -> list[Generation]:
        """See `Engine.step`."""
        version = self._version
        if version is None:
            return []
        if self._settings.step_s:
            time.sleep(self._settings.step_s)
        active = self._running[: self.info.sequences_max]
        drawn = [(member, member.advance(version)) for member in active]
        ended = {id(member) for member, generation in drawn if generation is not None}
        self._running = [member for member in self._running if id(member) not in ended]
        return [generation for _, generation in drawn if generation is not None]

    def busy(self) -> bool:
        """See `Engine.busy`."""
        return bool(self._running)

    def cancel(self, request_id: str) -> None:
        """See `Engine.cancel`."""
        self._running = [member for member in self._running if member.request_id != request_id]

    def prepare(self, manifest: Digest) -> None:
        """See `Engine.prepare`."""
        self._read(manifest)

    def install(self, manifest: Digest) -> InstallReport:
        """See `Engine.install`."""
        if self._settings.install_s:
            time.sleep(self._settings.install_s)
        return self._take(manifest)

    def close(self) -> None:
        """See `Engine.close`."""
        self._running.clear()


class FakeEnginePort(_Fake):
    """See `engines.port.EnginePort`. Every call runs in its caller's task; no thread, no child.

    Args:
        read: the manifest of a digest, e.g. `partial(read_manifest, store.folder)`.
    """

    def __init__(
        self,
        read: Callable[[Digest], Manifest],
        settings: FakeSettings | None = None,
        *,
        sequences_max: int = 64,
        rule: Rule | None = None,
    ) -> None:
        super().__init__(read, settings or FakeSettings(), sequences_max, rule)
        self.tokens_per_s = 0.0
        self._slots = trio.CapacityLimiter(sequences_max)
        self._cancelled: set[str] = set()
        self._live: set[str] = set()
        self._death: LocalError | None = None
        self._started_s: float | None = None
        self._tokens_total = 0

    @property
    def alive(self) -> bool:
        """False once `die` was called."""
        return self._death is None

    async def generate(self, request: GenerationRequest) -> tuple[Generation, ...]:
        """See `EnginePort.generate`."""
        self._check_alive()
        members = self._members(request)
        self._live.add(request.request_id)
        generations: dict[int, Generation] = {}
        try:
            async with trio.open_nursery() as nursery:
                for member in members:
                    nursery.start_soon(self._run, member, generations)
        finally:
            self._live.discard(request.request_id)
            cancelled = request.request_id in self._cancelled
            self._cancelled.discard(request.request_id)
        self._check_alive()
        if cancelled:
            raise LocalError(f"Request {request.request_id} was cancelled.")
        return tuple(generations[index] for index in sorted(generations))

    async def install(self, manifest: Digest) -> InstallReport:
        """See `EnginePort.install`."""
        self._check_alive()
        await trio.sleep(self._settings.install_s)
        self._check_alive()
        return self._take(manifest)

    def cancel_nowait(self, request_id: str) -> None:
        """See `EnginePort.cancel_nowait`."""
        if request_id in self._live:
            self._cancelled.add(request_id)

    def die(self, why: str = "The engine process ended with SIGKILL.") -> None:
        """End as a killed child would: every running and later call raises LocalError."""
        self._death = LocalError(why)

    def _check_alive(self) -> None:
        if self._death is not None:
            raise LocalError(self._death.what, self._death.hint)

    async def _run(self, member: _Running, generations: dict[int, Generation]) -> None:
        async with self._slots:
            while self._death is None and member.request_id not in self._cancelled:
                await trio.sleep(self._settings.step_s)
                assert self._version is not None
                generation = member.advance(self._version)
                self._count()
                if generation is not None:
                    generations[member.index] = generation
                    return

    def _count(self) -> None:
        now_s = trio.current_time()
        self._started_s = now_s if self._started_s is None else self._started_s
        self._tokens_total += 1
        self.tokens_per_s = self._tokens_total / max(now_s - self._started_s, 1e-3)


@asynccontextmanager
async def open_fake_engine(
    model_folder: Path, store_dir: Path, *, settings: FakeSettings | None = None
) -> AsyncIterator[FakeEnginePort]:
    """A `FakeEnginePort` with the shape of `process.open_engine`, for simulations."""
    del model_folder
    await trio.lowlevel.checkpoint()
    yield FakeEnginePort(lambda digest: read_manifest(store_dir, digest), settings)


def load(settings: EngineSettings) -> FakeEngine:
    """The fake of the worker process; see `registry.load_engine`."""
    chosen = msgspec.convert(json.loads(os.environ.get(FAKE_VARIABLE, "{}")), FakeSettings)
    store_dir = Path(settings.store_dir)
    return FakeEngine(
        lambda digest: read_manifest(store_dir, digest),
        chosen,
        sequences_max=settings.sequences_max,
    )
