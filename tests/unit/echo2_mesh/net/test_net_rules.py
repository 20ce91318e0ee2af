"""The small rules of `net`: addresses, keys and frames. No socket is opened."""

from __future__ import annotations

import logging
from collections import Counter
from typing import Any

import pytest
import trio
from multiaddr import Multiaddr

from echo2_mesh import limits
from echo2_mesh.errors import LocalError, PeerError, UsageError
from echo2_mesh.identity import Identity
from echo2_mesh.net import guards, host, streams
from echo2_mesh.net.connections import dialable, peer_of, reason_of
from echo2_mesh.net.discovery import KEY_PREFIX, LocalFinds, key_of
from echo2_mesh.net.libp2p_carrier import split_bootstrap


class Direct:
    """Stands for a connection that no relay carries."""

    def get_remote_address(self) -> tuple[str, int]:
        return "192.0.2.1", 4001


class Relayed:
    """Stands for a connection over a relay: there is no address behind it."""

    def get_remote_address(self) -> None:
        return None


class Pipe:
    """A stream that gives back what was written to it, a few bytes at a time."""

    muxed_conn: Direct | Relayed = Direct()

    def __init__(self, incoming: bytes = b"", step_bytes: int = 3) -> None:
        self.incoming = bytearray(incoming)
        self.step_bytes = step_bytes
        self.reads_bytes: list[int] = []

    async def write(self, data: bytes) -> None:
        await trio.lowlevel.checkpoint()
        self.incoming += data

    async def read(self, size_bytes: int) -> bytes:
        await trio.lowlevel.checkpoint()
        self.reads_bytes.append(size_bytes)
        taken = bytes(self.incoming[: min(size_bytes, self.step_bytes)])
        del self.incoming[: len(taken)]
        return taken


@pytest.mark.parametrize(
    "text", ["", "127.0.0.1:4001", "/ip4/1.2.3.4/udp/1", "/ip4/1.2.3.4", "/ip4/999.1.1.1/tcp/1"]
)
def test_what_is_no_tcp_multiaddress_is_a_usage_error_with_an_example(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        host.parse_address(text)
    assert "/ip4/0.0.0.0/tcp/4001" in caught.value.hint


def test_a_peers_claims_are_filtered_before_anything_is_dialled() -> None:
    node = Identity.generate().node
    good = "/ip4/192.0.2.1/tcp/4001"
    claims = (
        f"{good}/p2p/{node}",
        "/ip4/192.0.2.1/udp/1/quic-v1",
        "rubbish",
        f"/ip4/192.0.2.2/tcp/1/p2p/{node}/p2p-circuit",
        "/dns4/" + "a" * 300 + "/tcp/1",
    )
    assert [str(place) for place in dialable(claims)][:1] == [good]
    assert len(dialable(claims)) <= 2
    assert len(dialable([good] * 100)) == limits.ADDRESSES_MAX


def test_the_wildcard_address_is_never_advertised() -> None:
    told = host.advertised([Multiaddr("/ip4/0.0.0.0/tcp/4001")], ())
    assert told
    assert all("0.0.0.0" not in text and text.endswith("/tcp/4001") for text in told)


def test_announced_addresses_replace_the_listening_ones() -> None:
    announced = ("/dns4/home.example/tcp/9",)
    assert host.advertised([Multiaddr("/ip4/127.0.0.1/tcp/1")], announced) == announced


def test_a_loopback_listener_advertises_loopback() -> None:
    told = host.advertised([Multiaddr("/ip4/127.0.0.1/tcp/1")], ())
    assert told == ("/ip4/127.0.0.1/tcp/1",)


def test_bootstrap_addresses_are_grouped_by_node() -> None:
    node = Identity.generate().node
    grouped = split_bootstrap(
        (f"/ip4/192.0.2.1/tcp/1/p2p/{node}", f"/ip4/192.0.2.2/tcp/2/p2p/{node}")
    )
    assert grouped == ((node, ("/ip4/192.0.2.1/tcp/1", "/ip4/192.0.2.2/tcp/2")),)


@pytest.mark.parametrize("text", ["/ip4/192.0.2.1/tcp/1", "/ip4/192.0.2.1/tcp/1/p2p/nobody"])
def test_a_bootstrap_address_without_a_node_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError):
        split_bootstrap((text,))


def test_a_string_that_is_no_node_id_is_a_peer_error() -> None:
    with pytest.raises(PeerError):
        peer_of("not a node")  # type: ignore[arg-type]


def test_another_version_of_the_library_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    host.check_installation()
    monkeypatch.setattr("importlib.metadata.version", lambda name: "0.9.0")
    with pytest.raises(LocalError, match=r"0\.9\.0"):
        host.check_installation()


def test_an_internal_name_that_is_gone_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("libp2p.network.swarm.Swarm._handle_inbound_connection")
    with pytest.raises(LocalError, match="_handle_inbound_connection"):
        host.check_installation()


def test_the_librarys_loggers_are_silenced_one_by_one() -> None:
    logging.getLogger("libp2p.some.part").setLevel(logging.INFO)
    host.quiet_loggers()
    assert logging.getLogger("libp2p.some.part").level == logging.CRITICAL


def test_dht_keys_differ_by_name_and_never_parse_as_hex() -> None:
    assert key_of("a") != key_of("b")
    assert key_of("a").startswith(KEY_PREFIX)
    with pytest.raises(ValueError, match="hex"):
        bytes.fromhex(KEY_PREFIX.decode())


def test_local_finds_are_bounded_and_forget_who_left() -> None:
    finds = LocalFinds()
    for number in range(1000):
        finds.add_addrs(f"peer-{number}", ["/ip4/192.0.2.1/tcp/1"])
    assert len(finds.all()) < 1000
    finds.clear_addrs("peer-0")
    assert "peer-0" not in dict(finds.all())


def test_the_innermost_cause_is_reported_in_one_line() -> None:
    outer = RuntimeError("outer")
    outer.__cause__ = ExceptionGroup("two", [OSError("refused\nat length")])
    assert reason_of(outer) == "refused"


async def test_a_frame_survives_a_stream_that_gives_a_few_bytes_at_a_time() -> None:
    pipe = Pipe()
    await streams.write(pipe, streams.frame(b"hello world"))
    assert await streams.receive_frame(pipe, 100) == b"hello world"


async def test_a_frame_above_the_limit_is_refused_with_only_its_length_read() -> None:
    pipe = Pipe(streams.frame(bytes(50)), step_bytes=1000)
    with pytest.raises(PeerError, match="50 bytes"):
        await streams.receive_frame(pipe, 49)
    assert pipe.reads_bytes == [4]


async def test_a_long_frame_is_asked_for_in_bounded_pieces() -> None:
    pipe = Pipe(bytes(3 * limits.MIB), step_bytes=limits.MIB)
    assert len(await streams.read_exactly(pipe, 3 * limits.MIB)) == 3 * limits.MIB
    assert max(pipe.reads_bytes) <= limits.MIB


async def test_a_stream_that_ends_early_is_a_peer_error() -> None:
    with pytest.raises(PeerError, match="2 bytes early"):
        await streams.receive_frame(Pipe(streams.frame(b"abcde")[:-2]), 100)


@pytest.mark.parametrize("refusal", list(streams.Refusal))
async def test_each_refusal_arrives_as_a_sentence(refusal: streams.Refusal) -> None:
    pipe = Pipe()
    await streams.send_refusal(pipe, refusal)
    with pytest.raises(PeerError, match="The peer"):
        await streams.receive_frame(pipe, 100)


async def test_a_peer_that_does_not_speak_the_protocol_is_a_peer_error() -> None:
    pipe = Pipe(b"\x13/multistream/1.0.0\n\x03na\n")
    with pytest.raises(PeerError, match="does not speak /x/1"):
        await streams.wait_agreed(pipe, "/x/1")


@pytest.mark.parametrize(("connection", "patience"), [(Direct(), 1), (Relayed(), 4)])
async def test_a_write_that_nobody_takes_is_a_dead_connection(
    autojump_clock: object, connection: Direct | Relayed, patience: int
) -> None:
    class Full(Pipe):
        muxed_conn = connection

        async def write(self, data: bytes) -> None:
            await trio.sleep_forever()

    started_s = trio.current_time()
    with pytest.raises(streams.DeadConnection):
        await streams.write(Full(), b"x")
    assert trio.current_time() - started_s == pytest.approx(patience * streams.WRITE_TIMEOUT_S)


class _Service:
    """Stands for a running library service: its manager runs tasks in a nursery."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.manager = self
        self._nursery = nursery

    def run_task(self, async_fn: Any, *args: Any, daemon: bool = False) -> None:
        self._nursery.start_soon(async_fn, *args)


async def test_a_failing_task_of_a_guarded_service_ends_alone() -> None:
    async def fail() -> None:
        raise ValueError("hostile")

    counters: Counter[str] = Counter()
    async with trio.open_nursery() as nursery:
        service = _Service(nursery)
        guards.guard_tasks(service, counters)
        service.run_task(fail)
    assert counters["tasks_failed"] == 1
