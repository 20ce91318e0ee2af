#!/usr/bin/env python3
"""One node of libtorrent or lattica for `scripts/bench_transfer.py`, which starts and asks it.

Runs in whatever Python has those packages. JSON lines on standard input and output: `make` (a
source puts random blocks there), `join` (a receiver is told of them and of the others), `get` (it
fetches them all). Takes no part in anything but the loopback of its network namespace: discovery
of every kind is off.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

LATTICA_THREADS = 8
POLL_S = 0.01


class Node(Protocol):
    """What each library is asked for."""

    def hello(self) -> dict[str, Any]: ...
    def make(self, count: int, size: int) -> dict[str, Any]: ...
    def join(self, what: dict[str, Any], peers: list[Any]) -> dict[str, Any]: ...
    def get(self) -> dict[str, Any]: ...


class Torrent:
    """A libtorrent session: plain TCP, no uTP, no encryption (that is in its favour)."""

    def __init__(self, folder: Path, port: int) -> None:
        import libtorrent

        self.lib = libtorrent
        self.folder = folder
        self.port = port
        self.handle: Any = None
        self.session = libtorrent.session(
            {
                "listen_interfaces": f"127.0.0.1:{port}",
                "enable_dht": False,
                "enable_lsd": False,
                "enable_upnp": False,
                "enable_natpmp": False,
                "enable_outgoing_utp": False,
                "enable_incoming_utp": False,
                "allow_multiple_connections_per_ip": True,
                "out_enc_policy": 2,
                "in_enc_policy": 2,
                "unchoke_slots_limit": 64,
                "connection_speed": 200,
                "max_out_request_queue": 2000,
                "request_queue_time": 10,
                "send_buffer_watermark": 8 << 20,
                "send_buffer_watermark_factor": 200,
                "max_queued_disk_bytes": 64 << 20,
                "alert_mask": 0,
            }
        )

    def hello(self) -> dict[str, Any]:
        return {"peer": self.port}

    def make(self, count: int, size: int) -> dict[str, Any]:
        path = self.folder / "blob.bin"
        with path.open("wb") as file:
            for _ in range(count):
                file.write(os.urandom(size))
        torrent = self.folder / "blob.torrent"
        creator = self.lib.create_torrent(self.lib.list_files(str(path)), size)
        self.lib.set_piece_hashes(creator, str(self.folder))
        torrent.write_bytes(self.lib.bencode(creator.generate()))
        self._add(torrent, seed=True)
        return {"torrent": str(torrent), "bytes": count * size}

    def _add(self, torrent: Path, *, seed: bool) -> None:
        parameters = self.lib.load_torrent_file(str(torrent))
        parameters.save_path = str(self.folder)
        flags = self.lib.torrent_flags
        parameters.flags &= ~(flags.auto_managed | flags.paused)
        parameters.flags |= flags.disable_dht | flags.disable_lsd | flags.disable_pex
        if seed:
            parameters.flags |= flags.seed_mode
        self.handle = self.session.add_torrent(parameters)

    def join(self, what: dict[str, Any], peers: list[Any]) -> dict[str, Any]:
        self._add(Path(what["torrent"]), seed=False)
        self.peers = peers
        return {}

    def get(self) -> dict[str, Any]:
        for port in self.peers:
            self.handle.connect_peer(("127.0.0.1", port))
        while not self.handle.status().is_seeding:
            time.sleep(POLL_S)
        return {"bytes": self.handle.status().total_wanted_done}


class Lattica:
    """A lattica node: blocks by content id over TCP."""

    def __init__(self, folder: Path, port: int, boot: str) -> None:
        from lattica import Lattica as Builder

        self.address = f"/ip4/127.0.0.1/tcp/{port}"
        builder = (
            Builder.builder()
            .with_listen_addrs([self.address])
            .with_mdns(False)
            .with_upnp(False)
            .with_storage_path(str(folder / "storage"))
            .with_dht_db_path(str(folder / "dht"))
            .with_key_path(str(folder / "key"))
        )
        if boot:
            builder = builder.with_bootstraps([boot])
        self.node = builder.build()
        self.ids: list[str] = []

    def hello(self) -> dict[str, Any]:
        return {"peer": f"{self.address}/p2p/{self.node.peer_id()}"}

    def make(self, count: int, size: int) -> dict[str, Any]:
        return {"ids": [self.node.put_block(os.urandom(size)) for _ in range(count)]}

    def join(self, what: dict[str, Any], peers: list[Any]) -> dict[str, Any]:
        self.ids = list(what["ids"])
        random.shuffle(self.ids)
        return {}

    def get(self) -> dict[str, Any]:
        def one(block: str) -> int:
            for _ in range(20):
                try:
                    return len(self.node.get_block(block, timeout_secs=60)[1])
                except Exception:  # its own errors are plain ones
                    time.sleep(0.2)
            raise RuntimeError(f"block {block} does not come")

        with ThreadPoolExecutor(LATTICA_THREADS) as pool:
            return {"bytes": sum(pool.map(one, self.ids))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=("libtorrent", "lattica"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--boot", default="")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    node: Node
    if options.library == "libtorrent":
        node = Torrent(options.folder, options.port)
    else:
        node = Lattica(options.folder, options.port, options.boot)

    def say(document: dict[str, Any]) -> None:
        sys.stdout.write(json.dumps(document) + "\n")
        sys.stdout.flush()

    say(node.hello())
    for line in sys.stdin:
        ask = json.loads(line)
        verb = ask.pop("do")
        try:
            say(getattr(node, verb)(**ask))
        except Exception as error:
            say({"error": repr(error)[:300]})
    os._exit(0)


if __name__ == "__main__":
    main()
