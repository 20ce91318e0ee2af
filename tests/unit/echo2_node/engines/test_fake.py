"""The in-process fake on a virtual clock: concurrency, versions, death and cancellation."""

import msgspec
import numpy as np
import pytest
import trio
from trio.testing import MockClock

from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.wire.messages import Manifest, Probe, TaskSpec
from echo2_mesh.wire.types import Digest, PolicyVersion, StopReason
from echo2_node.engines.fake import FakeEnginePort, FakeSettings
from echo2_node.engines.fingerprint import compare
from tests.engine_suite import ids_of, request

NOTHING = Digest(bytes(32))
PROBE = Probe(token_ids=bytes(32), logprobs=np.full(7, -1.5, "<f4").tobytes())


def read(digest: Digest) -> Manifest:
    """A manifest whose version is the digest's first byte."""
    return Manifest(
        run_id="run-test",
        version=PolicyVersion(digest[0]),
        chunks=(),
        tensors=(),
        files=(),
        state_digest=NOTHING,
        tokenizer_digest=NOTHING,
        template_digest=NOTHING,
        task=TaskSpec(task_id="sort_digits", args_json="{}", digest=NOTHING),
        probe=PROBE,
    )


def version(number: int) -> Digest:
    return Digest(bytes([number]) + bytes(31))


async def test_time_passes_per_token_and_slots_are_bounded(autojump_clock: MockClock) -> None:
    settings = FakeSettings(skill_start=1.0, skill_max=1.0, step_s=1.0)
    engine = FakeEnginePort(read, settings, sequences_max=2)
    await engine.install(version(0))
    started_s = trio.current_time()
    ended = await engine.generate(request([5, 3, 4, 2], indices=(0, 1, 2, 3)))
    assert trio.current_time() - started_s == pytest.approx(8.0)
    assert all(ids_of(g.token_ids) == [3, 4, 5, 1] for g in ended)
    assert all(g.stop_reason is StopReason.STOP for g in ended)
    assert engine.tokens_per_s == pytest.approx(2.0, rel=0.2)


async def test_skill_rises_with_the_version(autojump_clock: MockClock) -> None:
    engine = FakeEnginePort(read, FakeSettings(skill_start=0.2, skill_per_version=0.1))
    right = []
    for number in (0, 7):
        await engine.install(version(number))
        ended = await engine.generate(request([5, 3, 4, 2], indices=tuple(range(200))))
        right.append(sum(ids_of(g.token_ids) == [3, 4, 5, 1] for g in ended))
    assert right[0] < 20 < 80 < right[1]


async def test_a_version_installed_meanwhile_labels_later_tokens(
    autojump_clock: MockClock,
) -> None:
    engine = FakeEnginePort(read, FakeSettings(skill_start=1.0, skill_max=1.0, step_s=1.0))
    await engine.install(version(4))
    async with trio.open_nursery() as nursery:

        async def change() -> None:
            await trio.sleep(2.5)
            await engine.install(version(5))

        nursery.start_soon(change)
        ended = await engine.generate(request([5, 3, 4, 2], indices=(0,)))
    spans = [(s.version, s.start, s.end) for s in ended[0].segments]
    assert spans == [(4, 0, 2), (5, 2, 4)]


async def test_death_and_cancellation_end_the_calls(autojump_clock: MockClock) -> None:
    settings = FakeSettings(skill_start=1.0, skill_max=1.0, step_s=1.0)
    engine = FakeEnginePort(read, settings)
    with pytest.raises(UsageError, match="first weights"):
        await engine.generate(request([5, 2]))
    await engine.install(version(1))
    for end in (lambda: engine.cancel_nowait("a"), engine.die):
        async with trio.open_nursery() as nursery:

            async def doomed() -> None:
                with pytest.raises(LocalError):
                    await engine.generate(request([5] * 30 + [2], tokens_max=40))

            nursery.start_soon(doomed)
            await trio.sleep(3)
            end()
    with pytest.raises(LocalError, match="SIGKILL"):
        await engine.install(version(2))


async def test_it_can_pretend_not_to_have_taken_the_weights() -> None:
    for error, expected in ((0.0, True), (0.5, False)):
        engine = FakeEnginePort(read, FakeSettings(probe_error=error))
        report = await engine.install(version(1))
        found = compare(PROBE.logprobs, report.probe_logprobs, dtype="float32")
        assert found.matches is expected


def test_settings_travel_as_json() -> None:
    settings = FakeSettings(skill_start=0.25)
    assert msgspec.json.decode(msgspec.json.encode(settings), type=FakeSettings) == settings
