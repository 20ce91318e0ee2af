"""Versions spread as patches on the simulated network; what goes wrong with one does not last."""

import errno

import pytest
import trio

from echo2_mesh import limits
from echo2_mesh.chunks import ChunkStore, digest_of
from echo2_mesh.net.blobs import BLOB_PROTOCOL
from echo2_mesh.testing import flip_bits, make_patch, make_version, open_fleet, seeds
from echo2_mesh.wire.messages import Announce
from echo2_mesh.wire.types import ChunkKind, PolicyVersion

KIB = 1024


async def started(fleet, count, **kwargs):
    await fleet.start("learner")
    return [await fleet.start(f"actor-{i}", **kwargs) for i in range(count)]


async def wait_version(node, version, within_s=90.0):
    """The complete version, its data in the node's store bit for bit."""
    with trio.fail_after(within_s):
        while True:
            ready = await node.mesh.versions().receive()
            if ready.version == version:
                break
    data = b"".join(node.store.read(chunk.digest) for chunk in ready.manifest.chunks)
    assert digest_of(data) == ready.manifest.state_digest
    node.mesh.set_state(version=version)
    return ready


@pytest.mark.parametrize("seed", seeds())
async def test_six_versions_spread_as_patches(autojump_clock, tmp_path, seed):
    async with open_fleet(tmp_path, seed=seed, bandwidth_bytes_per_s=400 * KIB) as fleet:
        actors = await started(fleet, 5)
        await fleet.publish(0, chunks=12, chunk_bytes=16 * KIB)
        for actor in actors:
            assert (await wait_version(actor, 0)).fetched_patch_bytes == 0
        for version in range(1, 6):
            await fleet.publish_step(version)
            for actor in actors:
                ready = await wait_version(actor, version)
                assert ready.fetched_full_bytes == 0
                assert 0 < ready.fetched_patch_bytes < 12 * 16 * KIB / 8
        for actor in actors:
            assert actor.mesh.counters["rebuilt_chunks"] == 5 * 12
            assert actor.mesh.counters["bad_rebuilds"] == 0
        # Who came by patches can give whole chunks: the joiner does not need the learner.
        out = fleet.learner.mesh.counters["bytes_out_blobs"]
        joiner = await fleet.start("joiner", know=("learner", "actor-0"))
        ready = await wait_version(joiner, 5)
        assert ready.fetched_full_bytes >= 12 * 16 * KIB
        assert fleet.learner.mesh.counters["bytes_out_blobs"] - out < 12 * 16 * KIB
        # From its first version on it takes patches like everybody else.
        await fleet.publish_step(6)
        assert (await wait_version(joiner, 6)).fetched_full_bytes == 0


async def test_a_laggard_follows_the_chain_from_what_it_has(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        actor, other = await started(fleet, 2)
        await fleet.publish(0, chunks=8, chunk_bytes=16 * KIB)
        await wait_version(actor, 0)
        await wait_version(other, 0)
        await trio.sleep(0.1)
        await fleet.crash("actor-0")
        for version in range(1, 5):
            await fleet.publish_step(version)
            await wait_version(other, version)
        # A restart: what it has is known from the list in its folder.
        actor = await fleet.start("actor-0")
        ready = await wait_version(actor, 4)
        assert ready.fetched_full_bytes == 0
        assert actor.mesh.counters["rebuilt_chunks"] == 8


async def test_a_laggard_whose_chain_is_not_listed_fetches_whole(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        (actor,) = await started(fleet, 1)
        await fleet.publish(0)
        await wait_version(actor, 0)
        await trio.sleep(0.1)
        await fleet.crash("actor-0")
        for version in range(1, 5):
            await fleet.publish_step(version, steps=2)
        actor = await fleet.start("actor-0")
        ready = await wait_version(actor, 4)
        assert ready.fetched_patch_bytes == 0
        assert ready.fetched_full_bytes >= 8 * 4096


@pytest.mark.parametrize(
    "bend",
    [
        lambda blob: blob[:-1],
        lambda blob: blob[:3],
        lambda blob: blob[:-1] + bytes([blob[-1] ^ 1]),
        lambda blob: bytes(len(blob)),
    ],
    ids=["truncated", "cut to nothing", "a flipped bit", "zeros"],
)
async def test_a_bad_patch_that_the_learner_signed_is_replaced_by_whole_chunks(
    autojump_clock, tmp_path, bend
):
    async with open_fleet(tmp_path, seed=1) as fleet:
        actors = await started(fleet, 3)
        await fleet.publish(0)
        for actor in actors:
            await wait_version(actor, 0)
        await fleet.publish_step(1, bend=bend)
        for actor in actors:
            await wait_version(actor, 1)
            assert actor.mesh.counters["bad_rebuilds"] >= 1  # a bent last byte may spare a chunk
        await fleet.publish_step(2, steps=1)
        for actor in actors:
            assert (await wait_version(actor, 2)).fetched_full_bytes == 0


async def test_a_patch_for_other_weights_of_the_same_number_is_not_applied(
    autojump_clock, tmp_path
):
    async with open_fleet(tmp_path, seed=1) as fleet:
        (actor,) = await started(fleet, 1)
        await fleet.publish(0)
        await wait_version(actor, 0)
        rng, learner = fleet.network.rng, fleet.learner
        foreign = [rng.randbytes(4096) for _ in range(8)]
        pieces = [piece[:-1] + b"x" for piece in foreign]
        patch = make_patch(learner.store, (PolicyVersion(0), foreign), (PolicyVersion(1), pieces))
        ref, size = make_version(learner.mesh, PolicyVersion(1), pieces, patches=(patch,))
        await learner.mesh.announce_version(ref, PolicyVersion(1), size)
        ready = await wait_version(actor, 1)
        assert ready.fetched_patch_bytes == 0
        assert actor.mesh.counters["bad_rebuilds"] == 0


async def test_a_base_lost_before_the_patch_or_damaged_is_made_good(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        lost, damaged = await started(fleet, 2)
        await fleet.publish(0)
        first = (await wait_version(lost, 0)).manifest.chunks
        await wait_version(damaged, 0)
        lost.store.path(first[3].digest).unlink()
        path = damaged.store.path(first[5].digest)
        path.write_bytes(bytes(path.stat().st_size))
        await fleet.publish_step(1)
        ready = await wait_version(lost, 1)
        assert ready.fetched_full_bytes == 4096
        ready = await wait_version(damaged, 1)
        assert ready.fetched_full_bytes == 4096
        assert damaged.mesh.counters["lost_bases"] == 1


async def test_a_liar_of_patches_is_caught_at_the_chunk_and_the_rest_patch_on(
    autojump_clock, tmp_path
):
    async with open_fleet(tmp_path, seed=1, bandwidth_bytes_per_s=100 * KIB) as fleet:
        actors = await started(fleet, 5)
        await fleet.publish(0)
        for actor in actors:
            await wait_version(actor, 0)
        fleet.network.nodes[actors[0].node].spoil = flip_bits(BLOB_PROTOCOL)
        for version in (1, 2, 3):
            await fleet.publish_step(version)
            for actor in actors:
                await wait_version(actor, version)
        assert sum(actor.mesh.counters["bad_chunks"] for actor in actors) > 0, "nobody was lied to"
        for actor in actors:
            assert actor.mesh.counters["bad_rebuilds"] == 0


async def test_an_older_manifest_said_again_changes_nothing(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        (actor,) = await started(fleet, 1)
        await fleet.publish(0)
        await wait_version(actor, 0)
        old = await fleet.publish_step(1)
        await wait_version(actor, 1)
        await fleet.publish_step(2)
        await wait_version(actor, 2)
        await fleet.learner.mesh.gossip(
            Announce(
                version=PolicyVersion(1), manifest=old, size_bytes=1, incarnation_unix_ms=1_000_001
            )
        )
        await trio.sleep(5)
        assert actor.mesh.counters["replayed_announces"] >= 1
        with pytest.raises(trio.WouldBlock):
            actor.mesh.versions().receive_nowait()


async def test_a_full_disk_holds_a_rebuild_up_and_does_not_end_it(
    autojump_clock, tmp_path, monkeypatch
):
    async with open_fleet(tmp_path, seed=1) as fleet:
        (actor,) = await started(fleet, 1)
        await fleet.publish(0)
        await wait_version(actor, 0)
        write = ChunkStore._write_once
        full = True

        def write_once(store, digest, data):
            if full and store.folder == actor.store.folder and len(data) == 4096:
                raise OSError(errno.ENOSPC, "No space left on device")
            write(store, digest, data)

        monkeypatch.setattr(ChunkStore, "_write_once", write_once)
        await fleet.publish_step(1)
        await trio.sleep(20)
        assert "is full" in actor.mesh.heartbeat().last_error
        assert actor.mesh.counters["store_failures"] >= 1
        full = False
        ready = await wait_version(actor, 1)
        assert ready.fetched_full_bytes == 0
        assert actor.mesh.heartbeat().last_error == ""


async def test_old_versions_and_unlisted_patches_leave_the_disk_after_a_while(
    autojump_clock, tmp_path
):
    async with open_fleet(tmp_path, seed=1) as fleet:
        (actor,) = await started(fleet, 1)
        await fleet.publish(0)
        refs = [await wait_version(actor, 0)]
        for version in range(1, 6):
            await fleet.publish_step(version, steps=2)
            refs.append(await wait_version(actor, version))
        await trio.sleep(1)
        assert actor.store.has(refs[0].manifest.chunks[0].digest), "not before the grace is over"
        await trio.sleep(2 * limits.RETENTION_GRACE_S)
        for node in (actor, fleet.learner):
            for ready in refs[:-2]:
                assert not node.store.has(ready.manifest_ref.digest)
                assert not any(node.store.has(ref.digest) for ref in ready.manifest.chunks)
            for ready in refs[-2:]:
                assert all(node.store.has(ref.digest) for ref in ready.manifest.chunks)
            kept = {c.ref.digest for p in refs[-1].manifest.patches for c in p.chunks}
            assert all(node.store.has(digest) for digest in kept)
            old = {c.ref.digest for r in refs for p in r.manifest.patches for c in p.chunks} - kept
            assert old
            assert not any(node.store.has(digest) for digest in old)


async def test_a_version_whose_blobs_are_gone_everywhere_is_left_for_the_next(
    autojump_clock, tmp_path
):
    """The one that is being fetched may have been deleted by all others meanwhile."""
    async with open_fleet(tmp_path, seed=1) as fleet:
        (actor,) = await started(fleet, 1)
        await fleet.publish(0)
        await wait_version(actor, 0)
        fleet.network.nodes[fleet.learner.node].stalls = frozenset({BLOB_PROTOCOL})
        await fleet.publish(1)
        await trio.sleep(3)
        for ref in fleet.learner.store.folder.iterdir():
            ref.unlink()
        fleet.network.nodes[fleet.learner.node].stalls = frozenset()
        await fleet.publish(2)
        await wait_version(actor, 2, within_s=120)


async def test_a_served_blob_stays_as_long_as_it_is_asked_for(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        (actor,) = await started(fleet, 1)
        await fleet.publish(0)
        first = (await wait_version(actor, 0)).manifest.chunks
        for version in (1, 2):
            await fleet.publish_step(version)
            await wait_version(actor, version)
        for _ in range(20):
            await trio.sleep(5)
            fleet.learner.store.read(first[0].digest)
        assert fleet.learner.store.has(first[0].digest)
        assert not fleet.learner.store.has(first[1].digest)
        ref = first[0]
        assert ref.kind is ChunkKind.FULL
