"""Strangers and bad peers on the bulk port: refused, counted, and nobody else is hurt."""

import contextlib
import os
import socket
import ssl
import struct
import time

import pytest

from echo2_mesh import limits
from echo2_mesh.bulk import frames, words
from echo2_mesh.bulk.certificate import make_contexts
from echo2_mesh.bulk.frames import Kind, Status
from tests.bulk_kit import BulkNode, RawClient

BLOB = os.urandom(300_000)


class Wire:
    """TLS over a socket that somebody else has used before."""

    def __init__(self, sock, context, *, server_side):
        self.sock, self.incoming, self.outgoing = sock, ssl.MemoryBIO(), ssl.MemoryBIO()
        self.tls = context.wrap_bio(self.incoming, self.outgoing, server_side=server_side)

    def shake(self):
        while True:
            try:
                self.tls.do_handshake()
                return self.sock.sendall(self.outgoing.read())
            except ssl.SSLWantReadError:
                self.sock.sendall(self.outgoing.read())
                if not (data := self.sock.recv(65536)):
                    raise EOFError from None
                self.incoming.write(data)

    def write(self, data):
        self.tls.write(data)
        self.sock.sendall(self.outgoing.read())


@pytest.fixture
def served(tmp_path, monkeypatch):
    """A node with a blob, an honest peer with a lane to it, and a check that it still works."""
    monkeypatch.setattr(limits, "LANE_HANDSHAKE_TIMEOUT_S", 0.6)
    a, b = BulkNode("a", tmp_path), BulkNode("b", tmp_path)
    b.link(a)
    yield a, b
    assert isinstance(b.fetch(a, a.add(os.urandom(100_000))), words.Got)
    assert b.dial(a, a.admit(b)) == ""
    a.close()
    b.close()


@pytest.fixture
def member(served):
    """A peer with a valid token that speaks frames by hand."""
    a, b = served
    client = RawClient(a, token=a.admit(b))
    assert client.receive(len(frames.HELLO)) == frames.HELLO
    yield client
    client.close()


def closed(sock):
    sock.settimeout(5)
    try:
        return sock.recv(1) == b""
    except ConnectionError:
        return True


@pytest.mark.parametrize(
    "words_of_a_stranger",
    [b"GET / HTTP/1.1\r\n\r\n", b"\xa7" * 4096, b"\x16\x03\x01" + b"\xff" * 600, b"\0" * 100],
    ids=["http", "noise", "nearly", "zeros"],
)
def test_what_is_no_tls_ends_the_connection(served, words_of_a_stranger):
    a, _ = served
    with socket.create_connection(a.address.places[0]) as sock:
        sock.sendall(words_of_a_stranger)
        assert closed(sock)
    assert a.count("broken_lane_handshakes") == 1


def test_silence_is_cut_off_after_the_handshake_s_time(served):
    a, _ = served
    with socket.create_connection(a.address.places[0]) as sock:
        start_s = time.monotonic()
        assert closed(sock)
        assert time.monotonic() - start_s < 3
    assert a.count("late_lane_handshakes") == 1


def test_bytes_that_drip_do_not_buy_time(served):
    a, _ = served
    with socket.create_connection(a.address.places[0]) as sock:
        start_s = time.monotonic()
        try:
            while time.monotonic() - start_s < 4:
                sock.sendall(b"\x16")
                time.sleep(0.05)
        except ConnectionError:
            pass
        assert time.monotonic() - start_s < 3


def test_one_address_has_so_many_half_open_connections(served):
    a, _ = served
    count = limits.LANE_HALF_OPEN_PER_ADDRESS_MAX
    socks = [socket.create_connection(a.address.places[0]) for _ in range(count + 5)]
    assert a.count("refused_half_open") >= 1
    for sock in socks:
        assert closed(sock)
        sock.close()
    assert not a.worker._door._half_open


def test_a_token_that_nobody_gave_out_opens_nothing(served):
    a, _ = served
    client = RawClient(a, token=b"\x07" * 32)
    assert client.is_cut()
    client.close()
    assert a.count("unknown_lane_tokens") == 1


def test_another_greeting_opens_nothing(served):
    a, _ = served
    client = RawClient(a)
    client.send(b"x" * 64)
    assert client.is_cut()
    client.close()


def test_a_token_that_drips_is_cut_off(served):
    a, _ = served
    client = RawClient(a)
    client.send(frames.HELLO + b"\x07" * 31)
    assert client.is_cut()
    client.close()
    assert a.count("late_lane_handshakes") == 1


@pytest.mark.parametrize(
    "frame",
    [
        b"\xff" * 48,
        b"\0" * 48,
        frames.answer(1, Status.HERE, 5),
        frames.data(9, 2**32 - 1),
        frames.data(0, 1),
        struct.pack("!BBBxIII32s", Kind.DATA, 0, 0, 1, 0, 0, bytes(32)),
    ],
    ids=["unknown", "zeros", "unasked", "huge", "number 0", "empty piece"],
)
def test_an_illegal_frame_ends_the_lane(served, member, frame):
    a, _ = served
    member.send(frame)
    assert member.is_cut()
    assert a.count("illegal_lanes") == 1


def test_an_ask_of_an_impossible_size_or_kind_is_answered_so(served, member):
    member.send(frames.ask(1, b"d" * 32, limits.CHUNK_SIZE_BYTES_MAX + 1, 0.0))
    assert member.frame()[:4] == (Kind.ANSWER, Status.ILLEGAL, 0, 1)
    member.send(frames.ask(2, b"d" * 32, 5, 0.0, 99))
    assert member.frame()[:4] == (Kind.ANSWER, Status.ILLEGAL, 0, 2)


def test_asks_beyond_the_bound_are_answered_with_busy(served, member):
    count = limits.LANE_ASKS_MAX
    for number in range(1, count + 3):
        member.send(frames.ask(number, number.to_bytes(32, "big"), 5, 30.0))
    answers = [member.frame() for _ in range(2)]
    assert [(x.status, x.request) for x in answers] == [
        (Status.BUSY, count + 1),
        (Status.BUSY, count + 2),
    ]


def test_a_request_number_in_use_ends_the_lane(served, member):
    member.send(frames.ask(1, b"d" * 32, 5, 30.0) * 2)
    assert member.is_cut()


def test_cancelling_what_is_unknown_is_no_offence(served, member):
    a, _ = served
    ref = a.add(BLOB)
    member.send(frames.cancel(77) + frames.ask(1, ref.digest, ref.size_bytes, 0.0))
    assert member.frame()[:4] == (Kind.ANSWER, Status.HERE, 0, 1)


def test_who_asks_and_never_reads_is_not_read_either(served, member):
    a, _ = served
    ref = a.add(BLOB)
    asks = b"".join(
        frames.ask(n, ref.digest, ref.size_bytes, 0.0) for n in range(1, 60)
    ) + b"".join(frames.ask(n, b"?" * 32, 5, 0.0) for n in range(100, 9000))
    member.sock.settimeout(1)
    with pytest.raises(TimeoutError):
        member.send(asks * 200)
    lanes = [lane for lanes in a.hub._lanes.values() for lane in lanes]
    assert max(len(lane._control) for lane in lanes) < 2**20


def test_a_peer_that_sends_what_nobody_asked_for_is_cut_off(served, tmp_path, monkeypatch):
    monkeypatch.setattr(limits, "LANE_STRAY_BYTES_MAX", 1_000_000)
    a, b = served
    client = RawClient(a, token=a.admit(b))
    client.receive(len(frames.HELLO))
    ref = a.add(BLOB)
    missing = type(ref)(kind=ref.kind, digest=b"\x01" * 32, size_bytes=2_000_000)
    a.number = 500
    # The lane with least to do is taken: fill the honest one.
    busy = [a.get(b, missing, wait_s=30) for _ in range(3)]
    asked = client.frame()
    assert asked.kind == Kind.ASK
    for number in busy:
        a.say(words.Cancel(request=number))
    piece = os.urandom(limits.LANE_PIECE_BYTES_MAX)
    with pytest.raises((ConnectionError, ssl.SSLError)):
        client.send((frames.data(asked.request, len(piece)) + piece) * 200)
    assert a.count("illegal_lanes") == 1
    client.close()


def test_cancelled_asks_count_until_the_work_on_them_has_ended(served, member):
    count = limits.LANE_ASKS_MAX
    for number in range(1, count + 1):
        member.send(frames.ask(number, number.to_bytes(32, "big"), 5, 30.0))
        member.send(frames.cancel(number))
    member.send(frames.ask(count + 1, b"?" * 32, 5, 30.0))
    answer = member.frame()
    assert (answer.status, answer.request) == (Status.BUSY, count + 1)
    # After a second the hub has seen that nobody waits: there is room again.
    until_s = time.monotonic() + 10
    number = count + 1
    while answer.status == Status.BUSY and time.monotonic() < until_s:
        time.sleep(0.1)
        number += 1
        member.send(frames.ask(number, b"?" * 32, 5, 0.0))
        answer = member.frame()
    assert (answer.status, answer.request) == (Status.MISSING, number)


def test_a_cancelled_ask_s_number_is_not_taken_again_while_it_is_sought(served, member):
    member.send(frames.ask(1, b"d" * 32, 5, 30.0) + frames.cancel(1))
    member.send(frames.ask(1, b"e" * 32, 5, 30.0))
    assert member.is_cut()


@pytest.mark.parametrize(
    "place", [("fe80::1%zz9", 9), ("::1%nowhere", 9), ("no address", 9), ("::1\0", 9)]
)
def test_a_place_that_is_none_fails_its_dial_alone(served, place):
    a, b = served
    assert b.dial(a, a.admit(b), places=(place,))


def test_whoever_shook_hands_as_a_stranger_proves_itself_anew_when_it_is_punched_to(served):
    """One that holds the place of a peer, as behind the same NAT, is not that peer."""
    a, b = served
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with socket.create_connection(a.address.places[0], timeout=5) as sock:
        as_client = Wire(sock, context, server_side=False)
        as_client.shake()
        a.number += 1
        a.say(
            words.Punch(
                attempt=a.number,
                peer=b.node,
                places=(sock.getsockname(),),
                server=False,
                certificate=b.address.certificate,
                token=bytes(32),
                timeout_s=2.0,
            )
        )
        server, _, _ = make_contexts()
        as_server = Wire(sock, server, server_side=True)
        with contextlib.suppress(ssl.SSLError, OSError, EOFError):
            as_server.shake()
            as_server.write(frames.HELLO)
        assert a.hear(words.Reached).why, "it became a lane"
    assert a.count("wrong_certificates") == 1
