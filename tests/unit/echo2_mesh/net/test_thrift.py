"""The library's habits, mended: how often it speaks and verifies, and that it still does."""

from types import SimpleNamespace

import libp2p.pubsub.gossipsub as gossipsub
import libp2p.pubsub.pubsub as pubsub
import pytest
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
