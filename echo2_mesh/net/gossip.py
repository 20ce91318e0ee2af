"""GossipSub 1.1 with every option written down: publish, and hear through a bounded queue.

It carries bytes by topic, promises neither order nor delivery, and never looks into a message:
signatures of pubsub itself are checked by the library, ours by the mesh. The carrier owns one
`Gossip`; each subscription is two tasks in the carrier's nursery, one that empties the library's
32-deep channel at once and one that runs the handler, so a slow handler costs messages, counted,
and never a connection.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from typing import Any

import trio
from libp2p.peer.id import ID
from libp2p.pubsub.gossipsub import PROTOCOL_ID_V11, GossipSub
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service import background_trio_service

from echo2_mesh import limits
from echo2_mesh.errors import Echo2Error, LocalError
from echo2_mesh.net import guards
from echo2_mesh.net.carrier import HearGossip

log = logging.getLogger("echo2.net")

HEARTBEAT_S = 1
"""The library's default is 120 s: its mesh would mend that rarely."""
DEGREE = 3
DEGREE_LOW = 2
DEGREE_HIGH = 4
"""Each edge of the mesh carries each message once, and each costs a host half a millisecond: at
twelve, thirteen idle nodes spent 1.6 cores on repeats. What a thin mesh loses is offered for
`GOSSIP_WINDOW_HEARTBEATS` to neighbours outside it."""
GOSSIP_WINDOW_HEARTBEATS = 6
"""A message is offered to peers outside the mesh for so long; a busy host misses some of them."""
INBOUND_RPC_BYTES_MAX = 1 * limits.MIB + 64 * limits.KIB
"""The sender splits at 1 MiB; several messages may share one RPC."""
SEEN_TTL_S = 120
assert guards.GOSSIP_TURNS < GOSSIP_WINDOW_HEARTBEATS
VALIDATORS_MAX = 8
PUBLISH_TIMEOUT_S = 5.0
SUBSCRIPTIONS_REPEAT_S = 15.0
"""The library says once per stream what it subscribes to, and forgets what a peer said when its
own stream to that peer breaks, though the peer's stream lives on and repeats nothing."""


class Gossip:
    """The pubsub service of one host. Open it with `open_gossip`."""

    def __init__(self, host: Any, topics: Sequence[str], counters: Counter[str]) -> None:
        self._counters = counters
        self._own_id = host.get_id().to_bytes()
        self.router = GossipSub(
            protocols=[PROTOCOL_ID_V11],
            degree=DEGREE,
            degree_low=DEGREE_LOW,
            degree_high=DEGREE_HIGH,
            direct_peers=None,
            time_to_live=60,
            gossip_window=GOSSIP_WINDOW_HEARTBEATS,
            gossip_history=2 * GOSSIP_WINDOW_HEARTBEATS,
            heartbeat_initial_delay=0.1,
            heartbeat_interval=HEARTBEAT_S,
            do_px=False,
            prune_back_off=60,
            unsubscribe_back_off=10,
            score_params=None,
            adaptive_gossip_enabled=False,
            spam_protection_enabled=False,  # counts per forwarder and drops without a word
            eclipse_protection_enabled=False,  # wants 3 addresses; many runs live on one host
        )
        self.pubsub = Pubsub(
            host,
            self.router,
            cache_size=None,
            seen_ttl=SEEN_TTL_S,
            strict_signing=True,
            max_concurrent_validator_count=VALIDATORS_MAX,
            max_subscriptions_per_rpc=64,
            max_subscriptions_per_peer=16,
            max_inbound_rpc_size=INBOUND_RPC_BYTES_MAX,
            allowed_topics=frozenset(topics),
        )
        # Sequence numbers start at the clock; whole seconds would repeat those of a restarted
        # node that sent more than one message a second, and repeats are dropped as seen.
        self.pubsub.counter = time.time_ns()
        guards.guard_gossip(self.router)

    async def publish(self, topic: str, data: bytes) -> None:
        """Send to the topic; a full queue somewhere drops it without a word.

        Raises:
            LocalError: `data` is above the gossip limit.
        """
        if len(data) > limits.GOSSIP_SIZE_BYTES_MAX:
            raise LocalError(
                f"A gossip message of {len(data)} bytes is above the limit of "
                f"{limits.GOSSIP_SIZE_BYTES_MAX}.",
                "Announce a digest instead and let peers pull the bytes.",
            )
        with trio.move_on_after(PUBLISH_TIMEOUT_S) as scope:
            await self.pubsub.publish(topic, data)
        self._counters["gossip_stuck" if scope.cancelled_caught else "gossip_published"] += 1

    async def subscribe(self, topic: str, hear: HearGossip, nursery: trio.Nursery) -> None:
        """Have `hear` called, one message at a time, from now until `nursery` ends."""
        subscription = await self.pubsub.subscribe(topic)
        enqueue, dequeue = trio.open_memory_channel[bytes](limits.GOSSIP_QUEUE_MESSAGES_MAX)
        nursery.start_soon(self._collect, subscription, enqueue)
        nursery.start_soon(self._deliver, dequeue, hear)

    async def _collect(self, subscription: Any, enqueue: trio.MemorySendChannel[bytes]) -> None:
        with contextlib.suppress(trio.EndOfChannel, trio.ClosedResourceError):
            while True:
                message = await subscription.get()
                if message.from_id == self._own_id:
                    continue
                if len(message.data) > limits.GOSSIP_SIZE_BYTES_MAX:
                    self._counters["gossip_oversized"] += 1
                    continue
                try:
                    enqueue.send_nowait(message.data)
                except trio.WouldBlock:
                    self._counters["gossip_dropped"] += 1

    async def _deliver(self, dequeue: trio.MemoryReceiveChannel[bytes], hear: HearGossip) -> None:
        async for data in dequeue:
            self._counters["gossip_heard"] += 1
            try:
                await hear(data)
            except Echo2Error as error:
                self._counters["gossip_refused"] += 1
                log.debug("gossip refused: %s", error)

    async def repeat_subscriptions(self) -> None:
        """Tell every peer again what this node listens to, until cancelled."""
        while True:
            await trio.sleep(SUBSCRIPTIONS_REPEAT_S)
            if self.pubsub.topic_ids:
                await self.pubsub.message_all_peers(
                    self.pubsub.get_hello_packet().SerializeToString()
                )

    def knows(self, peer: ID) -> bool:
        """True once a gossip stream to this peer is open."""
        return peer in self.pubsub.peers


@contextlib.asynccontextmanager
async def open_gossip(
    host: Any, topics: Sequence[str], counters: Counter[str]
) -> AsyncIterator[Gossip]:
    """Run the pubsub service of a running host for the length of the block."""
    gossip = Gossip(host, topics, counters)
    async with (
        background_trio_service(gossip.pubsub),
        background_trio_service(gossip.router),
    ):
        guards.guard_tasks(gossip.pubsub, counters)
        guards.guard_tasks(gossip.router, counters)
        await gossip.pubsub.wait_until_ready()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(gossip.repeat_subscriptions)
            yield gossip
            nursery.cancel_scope.cancel()
