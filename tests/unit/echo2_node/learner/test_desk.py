from __future__ import annotations

from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
import trio

from echo2_mesh.errors import PeerError, UsageError
from echo2_mesh.identity import Identity
from echo2_mesh.wire.codec import Envelope, seal
from echo2_mesh.wire.messages import LeaseReturn, Refusal, RolloutBatch, Sampling, VersionSpan
from echo2_mesh.wire.ticket import admission_proof
from echo2_mesh.wire.types import ChunkKind, Digest, PolicyVersion, Reason, StopReason
from echo2_node.learner.desk import NoSignal, rules_of
from tests.desk_kit import RUN_ID, Actor, Run


async def test_leases_become_a_batch_that_is_consumed_once(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        actor = Actor(office)
        grant = await actor.lease(groups_max=2)
        for lease in grant.leases:
            assert set((await actor.finish(lease)).values()) == {Reason.ADMITTED}
        batch = await office.desk.next_batch(PolicyVersion(0))
        assert len(batch.samples) == 4
        assert batch.staleness_steps == (0, 0, 0, 0)
        assert sum(sample.advantage for sample in batch.samples) == pytest.approx(0)
        assert {sample.reward for sample in batch.samples if sample.trajectory.index == 0} == {1.0}
        await office.desk.trained(batch, step=1, version_before=PolicyVersion(0), skipped=False)
        assert office.ledger.verify() == []
        summary = office.ledger.summary()
        assert (summary.consumed, summary.steps, summary.accepted) == (4, 1, 4)
        assert office.desk.staleness_histogram == {"0": 4}
        assert office.desk.groups_alive == 0


async def test_one_lease_more_than_the_slots_is_not_given(tmp_path, autojump_clock):
    async with Run(tmp_path, limit_steps=1).open_desk() as office:
        grant = await Actor(office).lease(groups_max=64)
        assert len(grant.leases) == 4  # (S + 1) * P
        empty = await Actor(office, 2).lease(groups_max=1)
        assert empty.leases == ()
        assert 0 < empty.retry_after_s <= 1.0


async def test_a_waiting_request_is_answered_when_a_slot_frees(tmp_path, autojump_clock):
    async with Run(tmp_path, limit_steps=0).open_desk() as office:
        first, second = Actor(office, 1), Actor(office, 2)
        grant = await first.lease(groups_max=2)
        grants = []

        async def wait():
            grants.append(await second.lease(groups_max=1))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(wait)
            await trio.testing.wait_all_tasks_blocked()
            assert grants == []
            answer = office.mesh.handlers[LeaseReturn]
            await answer(first.node, LeaseReturn(lease_ids=(grant.leases[0].lease_id,)))
        assert grants[0].leases[0].item_index == grant.leases[0].item_index
        assert grants[0].leases[0].lease_id != grant.leases[0].lease_id


async def test_a_lease_that_its_actor_does_not_know_of_ends_when_it_asks_again(
    tmp_path, autojump_clock
):
    """A learner that is killed between recording a grant and sending it leaves such leases."""
    async with Run(tmp_path, limit_steps=0).open_desk() as office:
        actor, other = Actor(office, 1), Actor(office, 2)
        kept, lost = (await actor.lease(groups_max=2)).leases
        assert (await other.lease(groups_max=1)).leases == ()
        await actor.lease(groups_max=1, held=(kept.lease_id,))
        (again,) = (await other.lease(groups_max=2)).leases
        assert again.item_index == lost.item_index
        assert set((await actor.finish(kept)).values()) == {Reason.ADMITTED}
        assert set((await actor.finish(lost)).values()) == {Reason.LATE}


FORGERIES = {
    "reward from the actor": ({"reward": 0.75}, Reason.REWARD_MISMATCH),
    "an infinite reward": ({"reward": float("inf")}, Reason.MALFORMED),
    "another prompt's name": ({"item_index": 77}, Reason.WRONG_PROMPT),
    "another tokenizer": ({"tokenizer_digest": Digest(b"x" * 32)}, Reason.WRONG_DIGESTS),
    "another sampling": ({"sampling": Sampling(temperature=0.1)}, Reason.MALFORMED),
    "cut but not at the limit": ({"stop_reason": StopReason.LENGTH}, Reason.MALFORMED),
    "mask over the prompt": ({"loss_mask": b"\x01" * 10}, Reason.MALFORMED),
    "a gap in the segments": (
        {"segments": (VersionSpan(version=PolicyVersion(0), start=6, end=10),)},
        Reason.MALFORMED,
    ),
    "a future version": (
        {"segments": (VersionSpan(version=PolicyVersion(9), start=5, end=10),)},
        Reason.FROM_THE_FUTURE,
    ),
    "a log-prob above zero": (
        {"logprobs": np.array([0] * 5 + [0.5] * 5, "<f4").tobytes()},
        Reason.LOGPROB_MISMATCH,
    ),
    "a log-prob that is none": (
        {"logprobs": np.array([0] * 5 + [np.nan] * 5, "<f4").tobytes()},
        Reason.NON_FINITE,
    ),
    "a log-prob that nobody samples and that makes a ratio overflow": (
        {"logprobs": np.array([0] * 5 + [-0.5] * 4 + [-100], "<f4").tobytes()},
        Reason.LOGPROB_MISMATCH,
    ),
    "log-probs shifted into the prompt": (
        {"logprobs": np.array([0] * 4 + [-0.5] * 5 + [0], "<f4").tobytes()},
        Reason.LOGPROB_MISMATCH,
    ),
    "arrays of different lengths": ({"logprobs": b"\0" * 8}, Reason.MALFORMED),
}


@pytest.mark.parametrize("name", FORGERIES)
async def test_a_faulty_trajectory_gets_its_reason(name, tmp_path, autojump_clock):
    changes, reason = FORGERIES[name]
    async with Run(tmp_path).open_desk() as office:
        actor = Actor(office)
        (lease,) = (await actor.lease()).leases
        header = actor.header(actor.trajectory(lease, 0, **changes))
        assert await actor.hand_in(header) == {(lease.lease_id, 0): reason}
        assert office.desk.refusals == {reason.value: 1}
        assert office.ledger.verify() == []


async def test_a_token_outside_the_vocabulary_is_refused(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        actor = Actor(office)
        (lease,) = (await actor.lease()).leases
        honest = actor.trajectory(lease, 0)
        ids = honest.token_ids[:-8] + np.array([10**6, 1], "<i4").tobytes()
        forged = msgspec.structs.replace(honest, token_ids=ids)
        assert set((await actor.hand_in(actor.header(forged))).values()) == {Reason.MALFORMED}


async def test_other_prompt_tokens_are_refused(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        actor = Actor(office)
        (lease,) = (await actor.lease()).leases
        honest = actor.trajectory(lease, 0)
        ids = honest.token_ids[4:8] + honest.token_ids[:4] + honest.token_ids[8:]
        if ids == honest.token_ids:
            ids = honest.token_ids[8:16] + honest.token_ids[8:]
        forged = msgspec.structs.replace(honest, token_ids=ids)
        assert set((await actor.hand_in(actor.header(forged))).values()) == {Reason.WRONG_PROMPT}


async def test_a_payload_with_a_bad_signature_is_refused(tmp_path, autojump_clock):
    """The gossip envelope around it was verified by the mesh; the payload's own counts."""
    async with Run(tmp_path).open_desk() as office:
        actor = Actor(office)
        (lease,) = (await actor.lease()).leases
        trajectory = actor.trajectory(lease, 0)
        raw = seal(trajectory, run_id=RUN_ID, sender=actor.node, sign=lambda _: bytes(64))
        header = actor.header(trajectory, raw=raw)
        assert set((await actor.hand_in(header)).values()) == {Reason.BAD_SIGNATURE}
        assert office.desk.accepted == 0


async def test_a_tampered_payload_is_refused(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        actor = Actor(office)
        (lease,) = (await actor.lease()).leases
        trajectory = actor.trajectory(lease, 1)
        sealed = seal(trajectory, run_id=RUN_ID, sender=actor.node, sign=actor.identity.sign)
        envelope = msgspec.msgpack.decode(sealed, type=Envelope)
        better = msgspec.msgpack.encode(actor.trajectory(lease, 1, right=True))
        raw = msgspec.msgpack.encode(msgspec.structs.replace(envelope, payload=better))
        verdicts = await actor.hand_in(actor.header(trajectory, raw=raw))
        assert set(verdicts.values()) == {Reason.BAD_SIGNATURE}


async def test_a_payload_signed_by_another_key_is_refused(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        actor, other = Actor(office), Identity(b"\x09" * 32)
        (lease,) = (await actor.lease()).leases
        trajectory = actor.trajectory(lease, 0)
        raw = seal(trajectory, run_id=RUN_ID, sender=other.node, sign=other.sign)
        verdicts = await actor.hand_in(actor.header(trajectory, raw=raw))
        assert set(verdicts.values()) == {Reason.WRONG_ACTOR}


async def test_a_stranger_cannot_use_up_somebody_elses_lease(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        actor, thief = Actor(office, 1), Actor(office, 2)
        (lease,) = (await actor.lease()).leases
        stolen = thief.header(thief.trajectory(lease, 0))
        assert set((await thief.hand_in(stolen)).values()) == {Reason.WRONG_ACTOR}
        replayed = actor.header(actor.trajectory(lease, 1))
        assert set((await thief.hand_in(replayed)).values()) == {Reason.WRONG_ACTOR}
        assert set((await actor.finish(lease)).values()) == {Reason.ADMITTED}
        assert office.ledger.verify() == []


async def test_an_unknown_lease_is_counted_and_not_itemised(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        actor = Actor(office)
        (lease,) = (await actor.lease()).leases
        made_up = msgspec.structs.replace(lease, lease_id="0" * 32)
        header = actor.header(actor.trajectory(made_up, 0))
        assert set((await actor.hand_in(header)).values()) == {Reason.UNKNOWN_LEASE}
        assert office.ledger.summary().refusals == {"unknown_lease": 1}


async def test_a_replay_repeats_the_first_verdict_and_is_recorded(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        actor = Actor(office)
        (lease,) = (await actor.lease()).leases
        header = actor.header(actor.trajectory(lease, 0))
        for _ in range(3):
            assert await actor.hand_in(header) == {(lease.lease_id, 0): Reason.ADMITTED}
        summary = office.ledger.summary()
        assert (summary.accepted, summary.duplicates) == (1, 2)


async def test_a_second_answer_for_a_member_never_replaces_the_first(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        actor = Actor(office)
        (lease,) = (await actor.lease()).leases
        wrong = actor.header(actor.trajectory(lease, 0, reward=0.9))
        right = actor.header(actor.trajectory(lease, 0))
        assert set((await actor.hand_in(wrong)).values()) == {Reason.REWARD_MISMATCH}
        assert set((await actor.hand_in(right)).values()) == {Reason.REWARD_MISMATCH}


async def test_a_late_result_is_refused_and_the_members_are_leased_again(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        slow, quick = Actor(office, 1), Actor(office, 2)
        (lease,) = (await slow.lease()).leases
        assert set((await slow.hand_in(slow.header(slow.trajectory(lease, 0)))).values()) == {
            Reason.ADMITTED
        }
        await trio.sleep(31)
        (refill,) = (await quick.lease()).leases
        assert (refill.group_id, refill.indices) == (lease.group_id, (1,))
        late = slow.header(slow.trajectory(lease, 1))
        assert set((await slow.hand_in(late)).values()) == {Reason.LATE}
        assert set((await quick.finish(refill)).values()) == {Reason.ADMITTED}
        assert office.ledger.verify() == []


async def test_a_lease_of_a_gone_actor_ends_early(tmp_path, autojump_clock):
    async with Run(tmp_path, limit_steps=0).open_desk() as office:
        dead, alive = Actor(office, 1), Actor(office, 2)
        grant = await dead.lease(groups_max=2)
        office.mesh.present = (
            SimpleNamespace(
                node=dead.node,
                standing=SimpleNamespace(value="gone"),
                heartbeat=SimpleNamespace(incarnation_unix_ms=1),
            ),
        )
        await trio.sleep(1.5)
        again = await alive.lease(groups_max=2)
        assert {lease.item_index for lease in again.leases} == {
            lease.item_index for lease in grant.leases
        }


async def test_a_large_payload_is_pulled_by_digest_and_leaves_the_store(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        actor = Actor(office)
        (lease,) = (await actor.lease()).leases
        header = actor.header(actor.trajectory(lease, 0), inline=False)
        assert set((await actor.hand_in(header)).values()) == {Reason.ADMITTED}
        assert not office.mesh.store.has(header.payload.digest)


async def test_an_unavailable_payload_gets_no_verdict_and_may_come_again(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        actor = Actor(office)
        (lease,) = (await actor.lease()).leases
        header = actor.header(actor.trajectory(lease, 0), inline=False)
        blobs, office.mesh.blobs = office.mesh.blobs, {}
        assert await actor.hand_in(header) == {}
        office.mesh.blobs = blobs
        assert set((await actor.hand_in(header)).values()) == {Reason.ADMITTED}


async def test_gossiped_trajectories_are_acknowledged_after_recording(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        actor = Actor(office)
        (lease,) = (await actor.lease()).leases
        headers = tuple(actor.header(actor.trajectory(lease, i)) for i in lease.indices)
        await office.mesh.hearers[RolloutBatch](actor.node, RolloutBatch(headers=headers))
        while not office.mesh.told:
            await trio.sleep(0.1)
        ((node, verdicts),) = office.mesh.told
        assert node == actor.node
        assert {note.verdict for note in verdicts.notes} == {Reason.ADMITTED}
        assert office.ledger.summary().accepted == 2


async def test_equal_rewards_are_dropped_and_end_the_run_when_there_is_nothing_else(
    tmp_path, autojump_clock
):
    async with Run(tmp_path, zero_variance_groups_max=3).open_desk() as office:
        actor = Actor(office)

        async def work():
            for _ in range(3):
                (lease,) = (await actor.lease()).leases
                await actor.finish(lease, right=True)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(work)
            with pytest.raises(NoSignal, match="3 groups in a row"):
                await office.desk.next_batch(PolicyVersion(0))
        assert office.desk.zero_variance_groups == 3
        assert office.desk.groups_alive == 0


async def test_another_task_is_named_in_the_refusal(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        reply = await Actor(office).lease(task_digest=Digest(b"x" * 32))
        assert isinstance(reply, Refusal)
        assert reply.code == "wrong-digests"
        assert "task" in reply.text


async def test_a_closed_run_wants_the_tickets_secret(tmp_path, autojump_clock):
    secret = b"s" * 32
    async with Run(tmp_path).open_desk(secret=secret) as office:
        actor = Actor(office)
        refused = await actor.lease()
        assert isinstance(refused, Refusal)
        assert refused.code == "not-admitted"
        others = admission_proof(secret, run_id=RUN_ID, node=Actor(office, 2).node)
        assert isinstance(await actor.lease(admission=others), Refusal)
        proof = admission_proof(secret, run_id=RUN_ID, node=actor.node)
        assert (await actor.lease(admission=proof)).leases


async def test_an_actor_ahead_of_the_learner_gets_nothing(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        assert (await Actor(office).lease(version=4)).leases == ()


async def test_after_the_end_nothing_is_leased_or_admitted(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        actor = Actor(office)
        (lease,) = (await actor.lease()).leases
        await office.desk.close(ended=True)
        assert (await actor.lease()).code == "run-ended"
        assert set((await actor.finish(lease)).values()) == {Reason.RUN_ENDED}
        assert office.ledger.verify() == []


async def test_a_restarted_desk_keeps_results_and_leases_and_offers_nothing_twice(
    tmp_path, autojump_clock
):
    run = Run(tmp_path, limit_steps=3)
    async with run.open_desk(seed=1) as office:
        actor = Actor(office)
        done, half, running = (await actor.lease(groups_max=3)).leases
        await actor.finish(done)
        await actor.hand_in(actor.header(actor.trajectory(half, 0)))
    async with run.open_desk(seed=2) as office:
        actor = Actor(office)
        assert office.desk.groups_alive == 3
        repeated = await actor.hand_in(actor.header(actor.trajectory(half, 0)))
        assert set(repeated.values()) == {Reason.ADMITTED}
        new = (await actor.lease(groups_max=1)).leases[0]
        assert new.item_index == 3
        await actor.finish(running)
        batch = await office.desk.next_batch(PolicyVersion(0))
        assert set(batch.group_ids) == {done.group_id, running.group_id}
        await office.desk.trained(batch, step=1, version_before=PolicyVersion(0), skipped=False)
        assert office.ledger.verify() == []


async def test_rolled_back_groups_are_trained_again_and_counted_once(tmp_path, autojump_clock):
    run = Run(tmp_path, limit_steps=3)
    async with run.open_desk(seed=1) as office:
        actor = Actor(office)
        for lease in (await actor.lease(groups_max=4)).leases:
            await actor.finish(lease)
        for step in (1, 2):
            batch = await office.desk.next_batch(PolicyVersion(step - 1))
            before = PolicyVersion(step - 1)
            await office.desk.trained(batch, step=step, version_before=before, skipped=False)
            await office.desk.published(PolicyVersion(step), Digest(b"m" * 32))
        assert office.ledger.roll_back(1) == 1
        assert office.ledger.version_max() == 2
    async with run.open_desk(seed=2, version=3) as office:
        again = await office.desk.next_batch(PolicyVersion(3))
        assert again.group_ids == batch.group_ids
        assert set(again.staleness_steps) == {3}
        await office.desk.trained(again, step=2, version_before=PolicyVersion(3), skipped=False)
        summary = office.ledger.summary()
        assert (summary.consumed, summary.steps, summary.steps_undone) == (8, 2, 1)
        assert office.ledger.verify() == []


async def test_a_full_disk_pauses_granting_and_acknowledging_until_there_is_room(
    tmp_path, autojump_clock
):
    async with Run(tmp_path).open_desk() as office:
        actor = Actor(office)
        (lease,) = (await actor.lease()).leases
        bulk = {f"{number:0>100}": 0.5 for number in range(60)}
        headers = [
            actor.header(actor.trajectory(lease, index, metrics=bulk)) for index in lease.indices
        ]
        sql = office.ledger._sql
        pages = sql.execute("PRAGMA page_count").fetchone()[0]
        sql.execute(f"PRAGMA max_page_count = {pages}")
        verdicts = []

        async def announce():
            while not verdicts:
                verdicts.append(await actor.hand_in(*headers))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(announce)
            await trio.sleep(3)
            assert "cannot be written" in office.desk.last_error
            assert (await actor.lease()).leases == ()
            assert verdicts == []
            sql.execute("PRAGMA max_page_count = 1000000")
        assert set(verdicts[0].values()) == {Reason.ADMITTED}
        assert office.desk.last_error == ""
        assert (await actor.lease()).leases
        assert office.ledger.verify() == []


def test_publishing_too_rarely_for_the_limit_is_refused_before_the_run(tmp_path):
    config = Run(tmp_path, limit_steps=1).config
    staleness = msgspec.structs.replace(config.staleness, publish_every_steps=3)
    with pytest.raises(UsageError, match="publish_every_steps = 3 is more than"):
        rules_of(msgspec.structs.replace(config, staleness=staleness))


async def test_nobody_can_keep_the_verdicts_of_anothers_lease_back(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        victim, thief = Actor(office, 1), Actor(office, 2)
        (lease,) = (await victim.lease()).leases
        (bait,) = (await thief.lease()).leases

        async def never(ref, holders, *, timeout_s):
            await trio.sleep(timeout_s)
            raise PeerError("It never comes.")

        office.mesh.fetch_blob = never
        headers = [victim.header(victim.trajectory(lease, index)) for index in lease.indices]
        unserved = thief.header(thief.trajectory(bait, 0), inline=False)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(thief.hand_in, unserved, *headers)
            await trio.testing.wait_all_tasks_blocked()
            before_s = trio.current_time()
            assert set((await victim.hand_in(*headers)).values()) == {Reason.ADMITTED}
            assert trio.current_time() - before_s < 1.0


async def test_payloads_that_never_come_do_not_hold_up_those_of_others(tmp_path, autojump_clock):
    async with Run(tmp_path, group_size=16, groups_per_step=8).open_desk() as office:
        honest, silent = Actor(office, 1), Actor(office, 2)
        (lease,) = (await honest.lease()).leases
        leases = (await silent.lease(groups_max=10)).leases
        deliver = office.mesh.fetch_blob

        async def fetch_blob(ref, holders, *, timeout_s):
            if silent.node in holders:
                await trio.sleep(timeout_s)
            await deliver(ref, holders, timeout_s=timeout_s)

        office.mesh.fetch_blob = fetch_blob
        for one in leases:
            unserved = [silent.header(silent.trajectory(one, i), inline=False) for i in one.indices]
            await office.mesh.hearers[RolloutBatch](silent.node, RolloutBatch(headers=unserved))
        await trio.testing.wait_all_tasks_blocked()
        header = honest.header(honest.trajectory(lease, 0), inline=False)
        await office.mesh.hearers[RolloutBatch](honest.node, RolloutBatch(headers=(header,)))
        with trio.fail_after(1.0):
            while honest.node not in [node for node, _ in office.mesh.told]:
                await trio.sleep(0.1)


async def test_a_blob_of_the_learners_own_is_not_deleted_as_a_payload(tmp_path, autojump_clock):
    async with Run(tmp_path).open_desk() as office:
        actor = Actor(office)
        (lease,) = (await actor.lease()).leases
        weights = office.mesh.store.add(ChunkKind.FULL, b"weights")
        office.mesh.blobs[weights.digest] = b"weights"
        header = actor.header(actor.trajectory(lease, 0), inline=False)
        header = msgspec.structs.replace(header, payload=weights)
        assert await actor.hand_in(header) == {(lease.lease_id, 0): Reason.MALFORMED}
        assert office.mesh.store.has(weights.digest)


async def test_strangers_cost_neither_memory_nor_messages_without_bound(
    tmp_path, autojump_clock, monkeypatch
):
    monkeypatch.setattr("echo2_node.learner.tallies.STRAY_ACTORS_MAX", 5)
    async with Run(tmp_path).open_desk() as office:
        actor = Actor(office)
        (lease,) = (await actor.lease()).leases
        for seed in range(10, 20):
            stranger = Actor(office, seed)
            foreign = stranger.header(stranger.trajectory(lease, 0))
            message = RolloutBatch(headers=(foreign,) * 200)
            await office.mesh.hearers[RolloutBatch](stranger.node, message)
        await trio.sleep(1.0)
        assert office.mesh.told == []
        counts = office.desk.verdicts_by_actor
        assert len(counts) <= 6
        assert sum(count["wrong_actor"] for count in counts.values()) == 10 * 16
        assert set((await actor.finish(lease)).values()) == {Reason.ADMITTED}
