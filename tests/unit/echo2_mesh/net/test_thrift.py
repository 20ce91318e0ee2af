"""The library's habits, mended: how often it speaks and verifies, and that it still does."""

from types import SimpleNamespace

import libp2p.pubsub.gossipsub as gossipsub
import libp2p.pubsub.pubsub as pubsub
import pytest
import trio
from libp2p.pubsub.pb import rpc_pb2
from libp2p.security.secure_session import SecureSession
from libp2p.stream_muxer.yamux.yamux import YamuxStream

from echo2_mesh.net import thrift


@pytest.fixture
def untouched(monkeypatch):
    """The names that thrift replaces are put back afterwards."""
    monkeypatch.setattr(
        YamuxStream,
        "_auto_tune_and_send_window_update",
        YamuxStream._auto_tune_and_send_window_update,
    )
    for module in (pubsub, gossipsub):
        for name in ("env_to_send_in_RPC", "maybe_consume_signed_record"):
            monkeypatch.setattr(module, name, getattr(module, name))
    monkeypatch.setattr(pubsub.Pubsub, "write_msg", pubsub.Pubsub.write_msg)
    monkeypatch.setattr(SecureSession, "read", SecureSession.read)
    return monkeypatch


async def test_credit_is_given_when_half_of_the_window_is_used(untouched):
    given = []

    async def give(stream, *, bytes_read=0):
        given.append(stream.target_recv_window - stream.recv_window)

    untouched.setattr(YamuxStream, "_auto_tune_and_send_window_update", give)
    thrift.thrifty_windows()
    stream = SimpleNamespace(
        conn=SimpleNamespace(stream_buffers={7: bytearray(100)}),
        stream_id=7,
        recv_window=900,
        target_recv_window=1000,
        _grow_threshold=lambda: 500,
    )
    for window in (900, 899, 401, 400, 399):
        stream.recv_window = window
        await YamuxStream._auto_tune_and_send_window_update(stream, bytes_read=1)
    # A hundred of the missing bytes lie unread in the buffer: they are not free yet.
    assert given == [600, 601]


def test_a_record_is_verified_once_and_made_once_a_second(untouched):
    made, verified, now = [], [], SimpleNamespace(s=1000.0)
    untouched.setattr(thrift.time, "monotonic", lambda: now.s)

    def make(host):
        made.append(host)
        return b"record", True

    def consume(message, host, peer):
        verified.append(message.senderRecord)
        return message.senderRecord != b"bad"

    untouched.setattr(pubsub, "env_to_send_in_RPC", make)
    untouched.setattr(pubsub, "maybe_consume_signed_record", consume)
    thrift.thrifty_records()
    host = SimpleNamespace(get_id=lambda: "me")
    assert [gossipsub.env_to_send_in_RPC(host)[0] for _ in range(3)] == [b"record"] * 3
    assert len(made) == 1
    now.s += 2 * thrift.RECORD_MADE_S
    pubsub.env_to_send_in_RPC(host)
    assert len(made) == 2

    def heard(record, peer="peer"):
        message = SimpleNamespace(HasField=lambda _: record is not None, senderRecord=record)
        return gossipsub.maybe_consume_signed_record(message, host, peer)

    assert heard(None)
    assert [heard(b"one"), heard(b"one"), heard(b"one", "other"), heard(b"two")] == [True] * 4
    assert verified == [b"one", b"one", b"two"]
    assert [heard(b"bad"), heard(b"bad")] == [False, False]
    assert verified[3:] == [b"bad", b"bad"]
    now.s += 2 * thrift.RECORD_TRUSTED_S
    assert heard(b"two")
    assert verified[-1] == b"two"


@pytest.fixture
def wire(untouched):
    """Streams by hand: `sent` is what was written to each, `works` whether the next write does."""
    wire = SimpleNamespace(sent=[], works=True)

    async def write(self, stream, rpc):
        await trio.lowlevel.checkpoint()
        wire.sent.append((stream.name, rpc.SerializeToString()))
        return wire.works

    async def send(stream, rpc):
        """The record and the topics that arrive."""
        written = await pubsub.Pubsub.write_msg(None, stream, rpc)
        assert written is wire.works
        name, data = wire.sent[-1]
        assert name == stream.name
        arrived = rpc_pb2.RPC.FromString(data)
        assert [message.data for message in arrived.publish] == [b"news"]
        return arrived.senderRecord if arrived.HasField("senderRecord") else None

    untouched.setattr(pubsub.Pubsub, "write_msg", write)
    thrift.thrifty_writes()
    wire.send = send
    return wire


def stream_named(name):
    return SimpleNamespace(name=name)


def rpc_of(record):
    message = rpc_pb2.RPC(publish=[rpc_pb2.Message(data=b"news")])
    if record is not None:
        message.senderRecord = record
    return message


async def test_a_record_goes_once_on_each_stream_and_again_when_it_has_changed(wire):
    one, other = stream_named("one"), stream_named("other")
    assert [await wire.send(one, rpc_of(b"old")) for _ in range(3)] == [b"old", None, None]
    assert [await wire.send(other, rpc_of(b"old")) for _ in range(2)] == [b"old", None]
    assert [await wire.send(one, rpc_of(b"new")) for _ in range(2)] == [b"new", None]
    assert await wire.send(one, rpc_of(b"old")) == b"old", "only the newest is trusted to be known"
    assert await wire.send(other, rpc_of(b"old")) is None
    assert await wire.send(stream_named("one"), rpc_of(b"old")) == b"old", "a stream made anew"


async def test_a_record_is_sent_again_when_it_has_to_be_verified_anew(wire, untouched):
    """The library forgets a record after two hours, however long the stream lives."""
    now = SimpleNamespace(s=1000.0)
    untouched.setattr(thrift.time, "monotonic", lambda: now.s)
    stream = stream_named("one")
    assert await wire.send(stream, rpc_of(b"old")) == b"old"
    now.s += thrift.RECORD_TRUSTED_S - 1.0
    assert await wire.send(stream, rpc_of(b"old")) is None
    now.s += 1.0
    assert await wire.send(stream, rpc_of(b"old")) == b"old"
    assert await wire.send(stream, rpc_of(b"old")) is None


async def test_a_message_without_a_record_forgets_nothing(wire):
    stream = stream_named("one")
    assert await wire.send(stream, rpc_of(None)) is None
    assert await wire.send(stream, rpc_of(b"old")) == b"old"
    assert await wire.send(stream, rpc_of(None)) is None
    assert await wire.send(stream, rpc_of(b"old")) is None


async def test_a_record_that_could_not_be_written_is_sent_again(wire):
    stream = stream_named("one")
    wire.works = False
    assert [await wire.send(stream, rpc_of(b"old")) for _ in range(2)] == [b"old", b"old"]
    wire.works = True
    assert [await wire.send(stream, rpc_of(b"old")) for _ in range(2)] == [b"old", None]
    wire.works = False
    assert await wire.send(stream, rpc_of(b"new")) == b"new"
    wire.works = True
    assert await wire.send(stream, rpc_of(b"new")) == b"new"


async def test_a_write_that_raises_passes_it_on_and_remembers_nothing(untouched):
    tries = []

    async def write(self, stream, rpc):
        await trio.lowlevel.checkpoint()
        tries.append(rpc.senderRecord)
        if len(tries) == 1:
            raise OSError("gone")
        return True

    untouched.setattr(pubsub.Pubsub, "write_msg", write)
    thrift.thrifty_writes()
    stream = stream_named("one")
    with pytest.raises(OSError, match="gone"):
        await pubsub.Pubsub.write_msg(None, stream, rpc_of(b"old"))
    assert await pubsub.Pubsub.write_msg(None, stream, rpc_of(b"old"))
    assert tries == [b"old", b"old"]


async def test_the_message_that_others_are_sent_too_is_not_touched(wire):
    message, streams = rpc_of(b"old"), [stream_named("one"), stream_named("other")]
    before = message.SerializeToString()
    assert await wire.send(streams[0], message) == b"old"
    assert await wire.send(streams[0], message) is None
    assert message.SerializeToString() == before
    assert await wire.send(streams[1], message) == b"old"


def connection_over(session):
    return SimpleNamespace(muxed_conn=SimpleNamespace(secured_conn=session))


async def test_what_comes_is_noted_with_its_time(untouched, autojump_clock):
    incoming = [b"abc", b"de"]

    async def read_msg():
        await trio.sleep(10.0)
        return incoming.pop(0) if incoming else b""

    thrift.thrifty_probes()
    session = SecureSession.__new__(SecureSession)  # as after a handshake that nobody needs here
    session.conn = SimpleNamespace(read_msg=read_msg)
    session._reset_internal_buffer()
    connection = connection_over(session)
    began_s = trio.current_time()
    assert thrift.heard_s(connection) == float("-inf")
    assert await session.read() == b"abc"
    assert thrift.heard_s(connection) == pytest.approx(began_s + 10.0)
    await trio.sleep(5.0)
    assert thrift.heard_s(connection) == pytest.approx(began_s + 10.0)
    assert await session.read(2) == b"de"
    assert thrift.heard_s(connection) == pytest.approx(began_s + 25.0)
    with pytest.raises(Exception, match="closed"):
        await session.read(1)
    assert thrift.heard_s(connection) == pytest.approx(began_s + 25.0), "an end is no sign of life"


def test_a_connection_without_a_session_was_never_heard():
    assert thrift.heard_s(connection_over(None)) == float("-inf")
    assert thrift.heard_s(SimpleNamespace(muxed_conn=SimpleNamespace())) == float("-inf")
