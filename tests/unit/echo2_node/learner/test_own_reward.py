"""The reward that trains is the learner's own, however little the actor's claim differs."""

import msgspec

from echo2_mesh.wire.types import PolicyVersion, Reason
from echo2_node.learner.intake import REWARD_TOLERANCE
from tests.desk_kit import Actor, Run


async def test_a_claim_within_the_tolerance_is_admitted_and_not_what_is_trained(tmp_path):
    run = Run(tmp_path)
    async with run.open_desk() as office:
        actor = Actor(office)
        own = {}
        for _ in range(2):
            (lease,) = (await actor.lease()).leases
            headers = []
            for index in lease.indices:
                truth = actor.trajectory(lease, index)
                own[(lease.group_id, index)] = truth.reward
                claim = msgspec.structs.replace(truth, reward=truth.reward + REWARD_TOLERANCE / 2)
                headers.append(actor.header(claim))
            assert set((await actor.hand_in(*headers)).values()) == {Reason.ADMITTED}
        batch = await office.desk.next_batch(PolicyVersion(0))
        trained = {
            (sample.trajectory.group_id, sample.trajectory.index): sample.reward
            for sample in batch.samples
        }
        assert trained == own
