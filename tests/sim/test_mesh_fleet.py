"""Fleets on the simulated network: versions spread, whoever lies, stalls, dies or joins late."""

import pytest
import trio

from echo2_mesh.chunks import digest_of
from echo2_mesh.core.members import Standing
from echo2_mesh.errors import PeerError
from echo2_mesh.net.blobs import BLOB_PROTOCOL
from echo2_mesh.net.questions import ASK_PROTOCOL
from echo2_mesh.net.topics import topic_name
from echo2_mesh.testing import flip_bits, identity_of, make_version, open_fleet, seeds
from echo2_mesh.wire.messages import (
    Announce,
    CatchUp,
    CaughtUp,
    ChunkRef,
    Goodbye,
    LeaseRequest,
    RolloutBatch,
    TrajectoryHeader,
)
from echo2_mesh.wire.types import ChunkKind, Digest, PolicyVersion, Role

KIB = 1024


async def started(fleet, count, **kwargs):
    await fleet.start("learner")
    return [await fleet.start(f"actor-{i}", **kwargs) for i in range(count)]


async def wait_version(node, version, within_s=60.0):
    """The complete version, with every blob in the node's store."""
    with trio.fail_after(within_s):
        while True:
            ready = await node.mesh.versions().receive()
            if ready.version == version:
                break
    for chunk in ready.manifest.chunks:
        assert node.store.has(chunk.digest)
    node.mesh.set_state(version=version)
    return ready


async def wait_until(true, within_s=60.0):
    with trio.fail_after(within_s):
        while not true():
            await trio.sleep(0.05)


def assert_stores_are_sound(fleet):
    """No byte lies in any store under a name it does not hash to."""
    for node in fleet.nodes.values():
        for file in node.store.folder.iterdir():
            assert digest_of(file.read_bytes()).hex() == file.name


@pytest.mark.parametrize("seed", seeds())
async def test_eight_nodes_get_a_version_and_share_the_work(autojump_clock, tmp_path, seed):
    async with open_fleet(tmp_path, seed=seed, bandwidth_bytes_per_s=100 * KIB) as fleet:
        actors = await started(fleet, 7)
        begin_s = trio.current_time()
        await fleet.publish(0, chunks=64, chunk_bytes=16 * KIB)
        for actor in actors:
            await wait_version(actor, 0, within_s=120)
        assert_stores_are_sound(fleet)
        size = 64 * 16 * KIB
        egress = fleet.learner.mesh.counters["bytes_out_blobs"] / size
        received = sum(actor.mesh.counters["bytes_in_blobs"] for actor in actors) / (7 * size)
        # The floor is 10 s and one copy; a star would take 72 s and seven.
        assert trio.current_time() - begin_s < 20.0
        assert egress < 2.0
        assert received < 1.05, "nobody fetches a chunk twice"


@pytest.mark.parametrize("seed", seeds())
async def test_loss_duplicates_and_reordering_only_slow_things_down(autojump_clock, tmp_path, seed):
    async with open_fleet(tmp_path, seed=seed, loss=0.3, latency_s=0.2) as fleet:
        actors = await started(fleet, 5)
        for version in range(3):
            await fleet.publish(version)
            for actor in actors:
                await wait_version(actor, version, within_s=120)
        assert_stores_are_sound(fleet)


@pytest.mark.parametrize("seed", seeds())
async def test_a_liar_is_blamed_and_everybody_still_gets_the_version(
    autojump_clock, tmp_path, seed
):
    async with open_fleet(tmp_path, seed=seed, bandwidth_bytes_per_s=100 * KIB) as fleet:
        actors = await started(fleet, 5)
        liar = fleet.network.nodes[actors[0].node]
        liar.spoil = flip_bits(BLOB_PROTOCOL)
        await fleet.publish(0, chunks=32, chunk_bytes=16 * KIB)
        for actor in actors:
            await wait_version(actor, 0, within_s=120)
        late = await fleet.start("late", know=("actor-0", "learner"))
        await wait_version(late, 0, within_s=120)
        assert_stores_are_sound(fleet)
        caught = sum(node.mesh.counters["bad_chunks"] for node in fleet.nodes.values())
        assert caught > 0


async def test_a_liar_alone_never_makes_a_version_ready(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        (actor,) = await started(fleet, 1)
        fleet.network.nodes[fleet.learner.node].spoil = flip_bits(BLOB_PROTOCOL)
        await fleet.publish(0)
        await trio.sleep(300)
        with pytest.raises(trio.WouldBlock):
            actor.mesh.versions().receive_nowait()
        assert actor.mesh.counters["bad_chunks"] >= 1
        assert list(actor.store.folder.iterdir()) == []


@pytest.mark.parametrize("seed", seeds())
async def test_a_staller_costs_one_deadline_and_no_more(autojump_clock, tmp_path, seed):
    async with open_fleet(tmp_path, seed=seed) as fleet:
        actors = await started(fleet, 4)
        await fleet.publish(0, chunks=24)
        for actor in actors:
            await wait_version(actor, 0)
        fleet.network.nodes[actors[0].node].stalls = frozenset({BLOB_PROTOCOL})
        late = await fleet.start("late", know=("actor-0", "actor-1"))
        await wait_version(late, 0, within_s=120)
        assert_stores_are_sound(fleet)


@pytest.mark.parametrize("seed", seeds())
async def test_churn_does_not_keep_a_version_from_those_that_stay(autojump_clock, tmp_path, seed):
    async with open_fleet(tmp_path, seed=seed, bandwidth_bytes_per_s=100 * KIB, loss=0.05) as fleet:
        await started(fleet, 6)
        for version in range(5):
            await fleet.publish(version, chunks=32, chunk_bytes=8 * KIB)
            await trio.sleep(1.0)
            victim = f"actor-{version}"
            await fleet.crash(victim)
            await trio.sleep(2.0)
            await fleet.start(victim)
        for node in tuple(fleet.nodes.values()):
            if node.name != "learner":
                await wait_version(node, 4, within_s=240)
        assert_stores_are_sound(fleet)


@pytest.mark.parametrize("seed", seeds())
async def test_a_learner_back_on_another_port_is_found_and_followed(autojump_clock, tmp_path, seed):
    async with open_fleet(tmp_path, seed=seed) as fleet:
        actors = await started(fleet, 3)
        await fleet.publish(0)
        for actor in actors:
            await wait_version(actor, 0)
        await trio.sleep(30)
        await fleet.crash("learner")
        await trio.sleep(40)
        standing = {m.node: m.standing for m in actors[0].mesh.members()}
        assert standing[identity_of("learner").node] is Standing.GONE
        learner = await fleet.start("learner", know=("actor-1",))
        await fleet.publish(1)
        for actor in actors:
            await wait_version(actor, 1)
            assert learner.node in actor.mesh.connected()


async def test_a_restarted_learner_finds_its_fleet_from_memory_alone(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        actors = await started(fleet, 3)
        await trio.sleep(30)
        await fleet.crash("learner")
        await trio.sleep(5)
        await fleet.start("learner", know=())
        await fleet.publish(1)
        for actor in actors:
            await wait_version(actor, 1)


async def test_a_node_that_only_dials_is_served_asked_and_serves(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        learner = await fleet.start("learner")
        shy = await fleet.start("shy", dialable=False)
        await fleet.publish(0)
        await wait_version(shy, 0)
        reply = await learner.mesh.ask(shy.node, CatchUp())
        assert isinstance(reply, CaughtUp)
        ref = shy.store.add(ChunkKind.TRAJECTORY, b"what the learner pulls")
        await learner.mesh.fetch_blob(ref, [shy.node], timeout_s=5)
        assert learner.store.read(ref.digest) == b"what the learner pulls"


async def test_a_node_that_knows_any_member_finds_the_rest(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        await started(fleet, 3)
        await fleet.publish(0)
        late = await fleet.start("late", know=("actor-2",))
        await wait_version(late, 0, within_s=5)
        await wait_until(lambda: len(late.mesh.members()) == 4, within_s=10)
        assert fleet.learner.node in late.mesh.connected()


async def test_joining_takes_less_than_a_second(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1, latency_s=0.01) as fleet:
        await fleet.start("learner")
        await fleet.publish(0)
        await trio.sleep(10)
        begin_s = trio.current_time()
        actor = await fleet.start("actor")
        await wait_version(actor, 0)
        assert trio.current_time() - begin_s < 0.5


async def test_a_healed_partition_catches_up(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        actors = await started(fleet, 4)
        await fleet.publish(0)
        for actor in actors:
            await wait_version(actor, 0)
        apart = frozenset({actors[0].node, actors[1].node})
        fleet.network.partition(apart)
        await fleet.publish(1)
        await wait_version(actors[2], 1)
        await trio.sleep(100)
        with pytest.raises(trio.WouldBlock):
            actors[0].mesh.versions().receive_nowait()
        fleet.network.partition()
        for actor in actors[:2]:
            await wait_version(actor, 1)


async def test_a_version_reaches_a_node_that_can_no_longer_see_the_learner(
    autojump_clock, tmp_path
):
    """Everybody passes on what is signed: the learner is needed once, not always."""
    async with open_fleet(tmp_path, seed=1) as fleet:
        actors = await started(fleet, 2)
        await fleet.publish(0)
        for actor in actors:
            await wait_version(actor, 0)
        await fleet.crash("learner")
        late = await fleet.start("late", know=("actor-0",))
        await wait_version(late, 0)


async def test_an_announcement_by_another_than_the_learner_is_refused(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        actor, rogue = await started(fleet, 2)
        await trio.sleep(2)
        ref, size = make_version(rogue.mesh, PolicyVersion(9), [b"poison"])
        message = Announce(
            version=PolicyVersion(9), manifest=ref, size_bytes=size, incarnation_unix_ms=9_999_999
        )
        await rogue.mesh.gossip(message)
        await trio.sleep(30)
        with pytest.raises(trio.WouldBlock):
            actor.mesh.versions().receive_nowait()
        assert actor.mesh.counters["forged_announces"] == 1


async def test_a_kind_on_another_kinds_topic_is_refused_and_counted(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        actor, rogue = await started(fleet, 2)
        heard = []

        async def hear(sender, batch):
            heard.append(sender)

        actor.mesh.hear(RolloutBatch, hear)
        await trio.sleep(2)
        header = TrajectoryHeader(
            lease_id="0" * 32,
            group_id="0" * 32,
            index=0,
            version_min=PolicyVersion(0),
            version_max=PolicyVersion(0),
            tokens=1,
            reward=0.0,
            payload=ChunkRef(kind=ChunkKind.TRAJECTORY, digest=Digest(bytes(32)), size_bytes=1),
        )
        raw = rogue.mesh.seal(RolloutBatch(headers=(header,)))
        await rogue.mesh._carrier.publish(topic_name(rogue.mesh.run_id, "control"), raw)
        await trio.sleep(5)
        assert heard == []
        assert actor.mesh.counters["refused_gossip"] == 1


async def test_a_manifest_signed_by_another_key_is_refused(autojump_clock, tmp_path):
    """The announcement is the learner's own, the manifest it names is not."""
    async with open_fleet(tmp_path, seed=1) as fleet:
        actor, rogue = await started(fleet, 2)
        ref, size = make_version(rogue.mesh, PolicyVersion(0), [b"poison"])
        fleet.learner.store.put(ref, rogue.store.read(ref.digest))
        message = Announce(
            version=PolicyVersion(0), manifest=ref, size_bytes=size, incarnation_unix_ms=1_000_001
        )
        await trio.sleep(2)
        await fleet.learner.mesh.gossip(message)
        await trio.sleep(30)
        with pytest.raises(trio.WouldBlock):
            actor.mesh.versions().receive_nowait()
        assert actor.mesh.counters["refused_manifests"] == 1
        await fleet.publish(1)
        await wait_version(actor, 1)


async def test_a_manifest_of_another_version_than_announced_is_refused(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        (actor,) = await started(fleet, 1)
        ref, size = make_version(fleet.learner.mesh, PolicyVersion(3), [b"old weights"])
        message = Announce(
            version=PolicyVersion(4), manifest=ref, size_bytes=size, incarnation_unix_ms=1_000_001
        )
        await trio.sleep(2)
        await fleet.learner.mesh.gossip(message)
        await trio.sleep(30)
        assert actor.mesh.counters["refused_manifests"] == 1
        with pytest.raises(trio.WouldBlock):
            actor.mesh.versions().receive_nowait()


async def test_a_replayed_older_announcement_is_counted_and_changes_nothing(
    autojump_clock, tmp_path
):
    async with open_fleet(tmp_path, seed=1) as fleet:
        actor, rogue = await started(fleet, 2)
        await fleet.publish(0)
        await wait_version(actor, 0)
        old = (await rogue.mesh.ask(fleet.learner.node, CatchUp())).announce
        await fleet.publish(1)
        await wait_version(actor, 1)
        topic = f"echo2/{fleet.run_id}/control"
        await fleet.network.nodes[rogue.node].publish(topic, old)
        await trio.sleep(5)
        assert actor.mesh.counters["replayed_announces"] >= 1  # gossip may repeat it
        with pytest.raises(trio.WouldBlock):
            actor.mesh.versions().receive_nowait()


async def test_only_the_newest_of_several_versions_is_handed_on(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        (actor,) = await started(fleet, 1)
        for version in range(4):
            await fleet.publish(version)
            await trio.sleep(10)
        assert (await actor.mesh.versions().receive()).version == 3
        with pytest.raises(trio.WouldBlock):
            actor.mesh.versions().receive_nowait()


async def test_versions_faster_than_the_line_still_arrive_one_by_one(autojump_clock, tmp_path):
    """A version takes about 4 s on this line and a new one comes every second."""
    async with open_fleet(tmp_path, seed=1, bandwidth_bytes_per_s=64 * KIB) as fleet:
        (actor,) = await started(fleet, 1)
        got = []

        async def install():
            async for ready in actor.mesh.versions():
                got.append(ready.version)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(install)
            for version in range(40):
                await fleet.publish(version, chunks=16, chunk_bytes=16 * KIB)
                await trio.sleep(1.0)
            await wait_until(lambda: got[-1:] == [39])
            nursery.cancel_scope.cancel()
        assert len(got) >= 5
        assert got == sorted(set(got))


async def test_a_store_that_cannot_be_written_pauses_the_fetch_and_no_more(
    autojump_clock, tmp_path
):
    async with open_fleet(tmp_path, seed=1) as fleet:
        (actor,) = await started(fleet, 1)
        away = tmp_path / "away"
        actor.store.folder.rename(away)
        await fleet.publish(0)
        await trio.sleep(60)
        assert actor.mesh.counters["store_failures"] >= 2
        heartbeat = next(iter(fleet.learner.mesh.members())).heartbeat
        assert "cannot be written" in heartbeat.last_error
        away.rename(actor.store.folder)
        await wait_version(actor, 0)
        assert actor.mesh.counters["banned_peers"] == 0


async def test_the_current_version_and_the_one_before_survive_a_small_quota(
    autojump_clock, tmp_path
):
    async with open_fleet(tmp_path, seed=1) as fleet:
        (actor,) = await started(fleet, 1, store_quota_bytes=100 * KIB)
        kept = []
        for version in range(6):
            await fleet.publish(version, chunks=4, chunk_bytes=8 * KIB)
            kept.append(await wait_version(actor, version))
        for ready in kept[-2:]:
            assert all(actor.store.has(chunk.digest) for chunk in ready.manifest.chunks)
        assert not any(actor.store.has(chunk.digest) for chunk in kept[0].manifest.chunks)


async def test_what_is_being_fetched_is_not_evicted_by_itself(autojump_clock, tmp_path):
    """Two versions do not fit under the quota: it gives way, not the versions in use."""
    async with open_fleet(tmp_path, seed=1) as fleet:
        (actor,) = await started(fleet, 1, store_quota_bytes=40 * KIB)
        for version in range(3):
            await fleet.publish(version, chunks=8, chunk_bytes=4 * KIB)
            await wait_version(actor, version)
        assert actor.mesh.counters["bytes_in_blobs"] < 3 * 40 * KIB, "nothing was fetched twice"


async def test_an_interrupted_fetch_resumes_with_what_is_already_here(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1, bandwidth_bytes_per_s=64 * KIB) as fleet:
        (actor,) = await started(fleet, 1)
        await fleet.publish(0, chunks=32, chunk_bytes=16 * KIB)
        await trio.sleep(5)
        here, wanted = actor.mesh.fetch_progress_bytes()
        assert 0 < here < wanted
        await fleet.crash("actor-0")
        actor = await fleet.start("actor-0")
        await wait_version(actor, 0)
        assert actor.mesh.counters["bytes_in_blobs"] < wanted - here / 2


async def test_state_and_progress_reach_the_others(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        (actor,) = await started(fleet, 1)
        actor.mesh.set_state(state="generating", tokens_per_s=12.5, accepted=3)
        await trio.sleep(5)
        (member,) = fleet.learner.mesh.members()
        assert member.heartbeat.state == "generating"
        assert member.heartbeat.tokens_per_s == 12.5
        assert member.heartbeat.accepted == 3
        assert member.heartbeat.role is Role.ACTOR
        assert member.connected
        with pytest.raises(TypeError):
            actor.mesh.set_state(colour="blue")


async def test_a_goodbye_is_heard_by_gossip_or_directly(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        (actor,) = await started(fleet, 1)
        heard = []

        async def hear(node, message):
            heard.append((node, message.why))

        fleet.learner.mesh.hear(Goodbye, hear)
        await trio.sleep(2)
        await actor.mesh.say_goodbye("drained")
        await wait_until(lambda: heard)
        assert heard[0] == (actor.node, "drained")
        (member,) = fleet.learner.mesh.members()
        assert member.standing is Standing.GONE


async def test_questions_are_typed_and_refusals_keep_their_code(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        (actor,) = await started(fleet, 1)

        async def refuse(node, request):
            raise PeerError(f"No lease for {node[-8:]}.", code="wrong_digests")

        fleet.learner.mesh.answer(LeaseRequest, refuse)
        request = lease_request()
        with pytest.raises(PeerError, match="No lease for") as caught:
            await actor.mesh.ask(fleet.learner.node, request)
        assert caught.value.code == "wrong_digests"
        with pytest.raises(PeerError) as caught:
            await fleet.learner.mesh.ask(actor.node, request)
        assert caught.value.code == "unknown_question"
        with pytest.raises(PeerError) as caught:
            await actor.mesh.ask(identity_of("nobody").node, request)
        assert caught.value.code == "unreachable"


def lease_request():
    return LeaseRequest(
        version=PolicyVersion(0),
        groups_max=1,
        cohort={"engine": "fake", "dtype": "none", "device": "none"},
        tokenizer_digest=bytes(32),
        template_digest=bytes(32),
        task_digest=bytes(32),
    )


async def test_a_question_in_anothers_name_is_not_answered(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        actor, rogue = await started(fleet, 2)
        await trio.sleep(1)
        stolen = actor.mesh.seal(CatchUp())
        with pytest.raises(PeerError):
            await fleet.network.nodes[rogue.node].exchange(
                fleet.learner.node, ASK_PROTOCOL, stolen, reply_bytes_max=10**6, timeout_s=5
            )
        assert fleet.learner.mesh.counters["foreign_asks"] == 1


@pytest.mark.parametrize("protocol", [ASK_PROTOCOL, BLOB_PROTOCOL])
async def test_rubbish_on_a_protocol_harms_nobody(autojump_clock, tmp_path, protocol):
    async with open_fleet(tmp_path, seed=1) as fleet:
        actor, rogue = await started(fleet, 2)
        await trio.sleep(1)
        wire = fleet.network.nodes[rogue.node]
        for size in (0, 1, 50, 250):
            rubbish = fleet.network.rng.randbytes(size)
            try:
                await wire.exchange(
                    fleet.learner.node, protocol, rubbish, reply_bytes_max=100, timeout_s=5
                )
            except PeerError:
                continue
        topic = f"echo2/{fleet.run_id}/control"
        await wire.publish(topic, fleet.network.rng.randbytes(500))
        await trio.sleep(1)
        counters = fleet.learner.mesh.counters
        assert counters["refused_gossip"] >= 1
        assert counters["bad_envelopes" if protocol == ASK_PROTOCOL else "bad_blob_asks"] >= 1
        await fleet.publish(0)
        await wait_version(actor, 0)


async def test_rollouts_are_heard_by_the_learner_alone(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        actor, other = await started(fleet, 2)
        heard = {"learner": 0, "other": 0}

        def counting(name):
            async def hear(node, batch):
                assert node == actor.node
                heard[name] += 1

            return hear

        fleet.learner.mesh.hear(RolloutBatch, counting("learner"))
        other.mesh.hear(RolloutBatch, counting("other"))
        await trio.sleep(2)
        header = TrajectoryHeader(
            lease_id="0" * 32,
            group_id="1" * 32,
            index=0,
            version_min=PolicyVersion(0),
            version_max=PolicyVersion(0),
            tokens=5,
            reward=1.0,
            payload=actor.store.add(ChunkKind.TRAJECTORY, b"payload"),
        )
        await actor.mesh.gossip(RolloutBatch(headers=(header,)))
        await wait_until(lambda: heard["learner"])
        assert heard["other"] == 0


async def test_a_bug_in_a_handler_ends_the_mesh_and_is_not_swallowed(autojump_clock, tmp_path):
    with pytest.raises(BaseExceptionGroup) as caught:  # noqa: PT012
        async with open_fleet(tmp_path, seed=1) as fleet:
            (actor,) = await started(fleet, 1)

            async def broken(node, message):
                raise ZeroDivisionError

            fleet.learner.mesh.answer(LeaseRequest, broken)
            with pytest.raises(PeerError):
                await actor.mesh.ask(fleet.learner.node, lease_request())
            await trio.sleep(1)
    assert caught.group_contains(ZeroDivisionError)


async def test_a_silent_connection_is_cut_and_dialled_again(autojump_clock, tmp_path):
    """Half-open: the peer is listed as connected and neither says nor answers anything."""
    async with open_fleet(tmp_path, seed=1) as fleet:
        (actor,) = await started(fleet, 1)
        await trio.sleep(5)
        corpse = fleet.network.nodes[fleet.learner.node]
        corpse.stalls = frozenset({ASK_PROTOCOL, BLOB_PROTOCOL})
        corpse.mute = True
        await wait_until(lambda: fleet.learner.node not in actor.mesh.connected(), within_s=60)
        corpse.stalls = frozenset()
        corpse.mute = False
        await wait_until(lambda: fleet.learner.node in actor.mesh.connected(), within_s=60)
        await fleet.publish(0)
        await wait_version(actor, 0)


async def test_blobs_come_from_the_first_holder_that_delivers(autojump_clock, tmp_path):
    async with open_fleet(tmp_path, seed=1) as fleet:
        first, second, third = await started(fleet, 3)
        ref = second.store.add(ChunkKind.TRAJECTORY, b"a long story" * 100)
        third.store.add(ChunkKind.TRAJECTORY, b"a long story" * 100)
        fleet.network.nodes[second.node].spoil = flip_bits(BLOB_PROTOCOL)
        holders = [first.node, second.node, third.node]
        await trio.sleep(1)
        await fleet.learner.mesh.fetch_blob(ref, holders, timeout_s=5)
        assert fleet.learner.store.has(ref.digest)
        assert fleet.learner.mesh.counters["bad_chunks"] == 1
        absent = third.store.add(ChunkKind.TRAJECTORY, b"removed")
        third.store.remove(absent.digest)
        with pytest.raises(PeerError, match="Nobody delivered"):
            await fleet.learner.mesh.fetch_blob(absent, holders, timeout_s=5)


async def test_the_same_seed_gives_the_same_story(autojump_clock, tmp_path):
    async def story(folder):
        folder.mkdir()
        async with open_fleet(folder, seed=7, loss=0.1) as fleet:
            begin_s = trio.current_time()
            actors = await started(fleet, 4)
            await fleet.publish(0)
            for actor in actors:
                await wait_version(actor, 0)
            return trio.current_time() - begin_s, fleet.learner.mesh.counters["bytes_out_blobs"]

    assert await story(tmp_path / "one") == pytest.approx(await story(tmp_path / "two"))
