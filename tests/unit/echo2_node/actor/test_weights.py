"""A version is used only once it is proved, and a disk's damage is mended from the mesh."""

import contextlib

import msgspec
import pytest
import trio

from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.wire.messages import VersionSpan
from echo2_node.actor.weights import (
    Weights,
    blobs_of,
    check_first_version,
    open_codec,
    write_model_files,
)
from tests.actor_kit import Engine, Mesh, Metrics, publish


@contextlib.asynccontextmanager
async def following(tmp_path, *versions, **engine):
    """Weights that follow on an engine; versions are handed over one by one by the test."""
    mesh = Mesh(tmp_path)
    weights = Weights(mesh, Metrics())
    ready = [publish(mesh, tmp_path, version) for version in versions]
    async with trio.open_nursery() as nursery:
        port = Engine(mesh.store, **engine)
        nursery.start_soon(weights.follow, port)
        yield mesh, weights, ready, port
        nursery.cancel_scope.cancel()


async def test_the_newest_version_is_installed_and_proved(autojump_clock, tmp_path):
    async with following(tmp_path, 0, 1) as (mesh, weights, (zero, one), engine):
        await mesh.send.send(zero)
        assert (await weights.wait_installed()).version == 0
        await mesh.send.send(one)
        assert (await weights.wait_newer(0)).version == 1
        assert engine.installed == [0, 1]


async def test_an_engine_that_did_not_take_the_weights_leaves_nothing_installed(
    autojump_clock, tmp_path
):
    async with following(tmp_path, 0, 1, probe_error=1.0) as (mesh, weights, (zero, _), engine):
        await mesh.send.send(zero)
        await trio.sleep(34)
        assert weights.installed is None
        assert "not what the learner published" in weights.last_error
        assert engine.installed == [0, 0, 0], "tried again after 5 and 10 seconds, next after 20"


async def test_a_version_that_fails_its_proof_is_left_for_the_one_before(autojump_clock, tmp_path):
    async with following(tmp_path, 0, 1, 2) as (mesh, weights, (zero, one, two), engine):
        await mesh.send.send(zero)
        await weights.wait_installed()
        good = damage(mesh, one)
        await mesh.send.send(one)
        await trio.sleep(0.01)
        assert engine.installed == [0, 1, 0]
        assert weights.installed is zero
        assert "not what the learner published" in weights.last_error
        assert not weights.trusts(spans(0, 1))
        assert not weights.trusts(spans(1))
        mesh.elsewhere = {one.manifest.chunks[0].digest: good}
        with trio.fail_after(6):
            assert (await weights.wait_newer(0)) is one
        assert weights.trusts(spans(0, 1))
        assert not weights.trusts(spans(0, 1, 0)), "gone back from"
        assert not weights.trusts(spans(1, 1)), "refused, then taken"
        await mesh.send.send(two)
        assert (await weights.wait_newer(1)) is two


async def test_what_the_engine_itself_refuses_leaves_the_version_before_at_work(
    autojump_clock, tmp_path
):
    async with following(tmp_path, 0, 1) as (mesh, weights, (zero, one), engine):
        await mesh.send.send(zero)
        await weights.wait_installed()
        engine.refusal = LocalError("Version 1 cannot be read.")
        await mesh.send.send(one)
        await trio.sleep(0.01)
        assert weights.installed is zero
        assert "cannot be read" in weights.last_error
        engine.refusal = None
        with trio.fail_after(6):
            assert (await weights.wait_newer(0)) is one
        assert weights.last_error == ""


async def test_an_install_is_told_with_what_it_cost(autojump_clock, tmp_path):
    metrics = Metrics()
    mesh = Mesh(tmp_path)
    weights = Weights(mesh, metrics)
    ready = msgspec.structs.replace(publish(mesh, tmp_path, 0), fetched_patch_bytes=70, fetch_s=1.5)
    await mesh.send.send(ready)
    with trio.move_on_after(5):
        await weights.follow(Engine(mesh.store, install_s=0.25))
    (row,) = weights.installs
    assert (row.version, row.fetched_full_bytes, row.fetched_patch_bytes) == (0, 0, 70)
    assert (row.fetch_s, row.since_announced_s, row.pause_s) == (1.5, 1.75, 0.25)
    (line,) = metrics.lines
    assert line["event"] == "installed"
    assert line["since_announced_s"] == 1.75


async def test_a_version_that_failed_is_overtaken_by_the_next_at_once(autojump_clock, tmp_path):
    async with following(tmp_path, 0, 1) as (mesh, weights, (zero, one), engine):
        damage(mesh, zero)
        await mesh.send.send(zero)
        await trio.sleep(0.01)
        assert engine.installed == [0]
        assert weights.installed is None
        await mesh.send.send(one)
        with trio.fail_after(1):
            assert (await weights.wait_installed()).version == 1
        assert weights.last_error == ""


async def test_a_damaged_blob_is_dropped_and_fetched_again(autojump_clock, tmp_path):
    async with following(tmp_path, 0) as (mesh, weights, (zero,), _):
        mesh.elsewhere = {zero.manifest.chunks[0].digest: damage(mesh, zero)}
        await mesh.send.send(zero)
        with trio.fail_after(6):
            assert (await weights.wait_installed()).version == 0


async def test_a_blob_that_nobody_has_is_asked_for_again_and_again(autojump_clock, tmp_path):
    async with following(tmp_path, 0) as (mesh, weights, (zero,), _):
        good = damage(mesh, zero)
        await mesh.send.send(zero)
        await trio.sleep(30)
        assert weights.installed is None
        assert "Nobody has it" in weights.last_error
        mesh.elsewhere = {zero.manifest.chunks[0].digest: good}
        with trio.fail_after(6):
            await weights.wait_installed()


async def test_wait_whole_reads_everything_before_anybody_loads_it(autojump_clock, tmp_path):
    mesh = Mesh(tmp_path)
    weights = Weights(mesh, Metrics())
    ready = publish(mesh, tmp_path, 0)
    lost = ready.manifest.files[0].chunks[0]
    good = mesh.store.read(lost.digest)
    mesh.store.remove(lost.digest)
    with trio.move_on_after(20) as waited:
        await weights.wait_whole(ready)
    assert waited.cancelled_caught
    mesh.elsewhere = {lost.digest: good}
    await weights.wait_whole(ready)
    assert all(mesh.store.has(ref.digest) for ref in blobs_of(ready.manifest, ready.manifest_ref))


async def test_a_dead_engine_ends_following_and_the_next_starts_with_the_newest_version(
    autojump_clock, tmp_path
):
    mesh = Mesh(tmp_path)
    weights = Weights(mesh, Metrics())
    zero, one = publish(mesh, tmp_path, 0), publish(mesh, tmp_path, 1)
    await mesh.send.send(zero)
    dead = Engine(mesh.store)
    dead.die()
    with pytest.raises(LocalError, match="SIGKILL"):
        await weights.follow(dead)
    await mesh.send.send(one)
    alive = Engine(mesh.store)
    with trio.move_on_after(5):
        await weights.follow(alive)
    assert alive.installed == [1], "version 0 is not installed on the way"


def test_model_files_are_written_and_the_tokenizer_is_checked(tmp_path):
    mesh = Mesh(tmp_path)
    ready = publish(mesh, tmp_path, 0)
    folder = tmp_path / "model"
    write_model_files(ready.manifest, mesh.store, folder)
    assert open_codec(ready.manifest, folder).decode(
        open_codec(ready.manifest, folder).encode_prompt("12=")
    )
    (folder / "tokenizer.json").write_text((folder / "tokenizer.json").read_text() + " ")
    with pytest.raises(UsageError, match="not the one the learner signed"):
        open_codec(ready.manifest, folder)


def spans(*versions):
    return [VersionSpan(version=v, start=i, end=i + 1) for i, v in enumerate(versions)]


def damage(mesh, ready):
    """Flip a bit of the version's chunk on the disk; the good bytes."""
    path = mesh.store.path(ready.manifest.chunks[0].digest)
    good = path.read_bytes()
    path.write_bytes(bytes([good[0] ^ 1]) + good[1:])
    return good


def test_the_runs_first_version_must_be_the_one_of_the_ticket(tmp_path):
    mesh = Mesh(tmp_path)
    first, second = publish(mesh, tmp_path, 0), publish(mesh, tmp_path, 1)
    check_first_version(first, first.manifest_ref.digest)
    check_first_version(first, None)
    check_first_version(second, first.manifest_ref.digest)  # a later one says nothing of the first
    with pytest.raises(UsageError, match="another model than you were invited to"):
        check_first_version(first, second.manifest_ref.digest)
