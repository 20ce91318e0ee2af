"""A version is signed, recorded, then announced; the ticket names the first one."""

import pytest
import trio
from structlog.testing import capture_logs

from echo2_mesh.chunks import ChunkStore
from echo2_mesh.errors import LocalError
from echo2_mesh.identity import Identity, verify
from echo2_mesh.wire.codec import seal, unseal
from echo2_mesh.wire.messages import Probe, TensorSpan
from echo2_mesh.wire.ticket import read_ticket
from echo2_mesh.wire.types import ChunkKind, Digest, PolicyVersion
from echo2_node.config import ModelSection, RunConfig, TaskSection
from echo2_node.learner.place import Place
from echo2_node.learner.port import Exported
from echo2_node.learner.publisher import Publisher
from echo2_node.tasks.registry import make_task, task_spec
from tests.actor_kit import run_sync_inline

RUN_ID = "demo-0123abcd"
TASK = make_task("sort_digits", {"digits": 3})


class World:
    """Mesh, trainer and ledger of a publisher, each noting in `deeds` what was done with it."""

    def __init__(self, folder, *, secret=None, quota_bytes=10_000):
        self.identity = Identity(b"\x04" * 32)
        self.node, self.run_id = self.identity.node, RUN_ID
        self.store = ChunkStore(folder / "chunks", quota_bytes)
        self.deeds = []
        self.fails_at = None
        self.place = Place(folder, resume=False, name="demo")
        config = RunConfig(model=ModelSection(path="model"), task=TaskSection(id="sort_digits"))
        self.publisher = Publisher(
            self,
            self,
            place=self.place,
            task=TASK,
            config=config,
            secret=secret,
            record=self.record,
        )

    def do(self, deed):
        if self.fails_at == deed[0]:
            raise LocalError(f"{deed[0]} failed.")
        self.deeds.append(deed)

    def seal(self, message):
        return seal(message, run_id=RUN_ID, sender=self.node, sign=self.identity.sign)

    def addresses(self):
        return (f"/ip4/10.0.0.1/tcp/4201/p2p/{self.node}",)

    async def export(self, version):
        await trio.lowlevel.checkpoint()
        self.do(("export", version))
        # As the trainer's process does: its own store on the folder, which never evicts.
        store = ChunkStore(self.store.folder, None)
        chunk = store.add(ChunkKind.FULL, bytes([version]) * 3000)
        span = TensorSpan(
            name="weight", dtype="BF16", shape=(1500,), offset_bytes=0, size_bytes=3000
        )
        return Exported(
            version=version,
            chunks=(chunk,),
            tensors=(span,),
            tied=(),
            files=(),
            state_digest=chunk.digest,
            tokenizer_digest=Digest(b"\x01" * 32),
            template_digest=Digest(b"\x02" * 32),
            probe=Probe(token_ids=bytes(8), logprobs=bytes(4)),
            seconds=0.0,
        )

    async def record(self, version, digest):
        await trio.lowlevel.checkpoint()
        self.do(("record", version, digest))

    async def announce_version(self, ref, version, size_bytes):
        await trio.lowlevel.checkpoint()
        self.do(("announce", version, ref.digest))
        assert size_bytes == 3000
        self.store.pin("weights", (ref.digest,))

    def ticket(self):
        return read_ticket(self.place.ticket.read_text().strip(), now_unix_s=0)


@pytest.fixture
def world(tmp_path, monkeypatch):
    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync_inline)
    return World(tmp_path)


async def test_the_manifest_is_signed_by_the_learner_and_says_what_was_exported(world):
    ref = await world.publisher.publish(PolicyVersion(3))
    opened = unseal(
        world.store.read(ref.digest), run_id=RUN_ID, verify=verify, size_bytes_max=2**20
    )
    assert opened.sender == world.node
    assert opened.message.version == 3
    assert opened.message.task == task_spec(TASK)
    assert opened.message.tensors[0].name == "weight"


async def test_a_version_is_recorded_before_anybody_hears_of_it(world):
    ref = await world.publisher.publish(PolicyVersion(0))
    assert world.deeds == [("export", 0), ("record", 0, ref.digest), ("announce", 0, ref.digest)]


async def test_what_cannot_be_recorded_is_not_announced(world):
    world.fails_at = "record"
    with pytest.raises(LocalError, match="record failed"):
        await world.publisher.publish(PolicyVersion(0))
    assert world.deeds == [("export", 0)]
    assert not world.place.ticket.exists()


async def test_the_ticket_pins_the_first_manifest_for_ever(world):
    first = await world.publisher.publish(PolicyVersion(0))
    await world.publisher.publish(PolicyVersion(1))
    ticket = world.ticket()
    assert ticket.manifest == first.digest
    assert (ticket.run_id, ticket.learner) == (RUN_ID, world.node)
    assert ticket.addresses == world.addresses()
    assert ticket.secret is None
    assert ticket.expires_unix_s is None


async def test_the_ticket_of_a_closed_run_holds_its_secret_and_is_private(tmp_path, monkeypatch):
    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync_inline)
    closed = World(tmp_path, secret=b"s" * 24)
    await closed.publisher.publish(PolicyVersion(0))
    assert closed.ticket().secret == b"s" * 24
    assert closed.place.ticket.stat().st_mode & 0o077 == 0


async def test_an_operator_is_told_once_where_the_ticket_lies_and_never_the_ticket(world):
    with capture_logs() as lines:
        await world.publisher.publish(PolicyVersion(0))
        await world.publisher.publish(PolicyVersion(1))
    told = [line for line in lines if line["event"] == "open for actors"]
    assert [line["ticket"] for line in told] == [str(world.place.ticket)]
    assert world.place.ticket.read_text().strip() not in str(lines)


async def test_the_store_is_kept_below_its_quota_though_the_trainer_writes_it(world):
    for version in range(12):
        await world.publisher.publish(PolicyVersion(version))
    assert world.store.used_bytes <= 10_000
    held = sum(path.stat().st_size for path in world.store.folder.iterdir())
    assert held <= 10_000
