"""The seed forest: who gets which chunk from whom, planned by everybody alike from what is known.

The chunks of a version are dealt out to stripes. Each stripe is a tree over all nodes below the
learner, and a node forwards in one stripe at most: striped, interior-disjoint trees (Castro et al.,
SplitStream, 2003), here with fan-outs and stripe widths in proportion to uplinks. A pure function
of the seats; every node computes it for itself, so equal seats give equal plans. Called by
`core.fetch`, which pins one plan for each version and goes around nodes that fail.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from statistics import median
from zlib import crc32

import msgspec

from echo2_mesh.wire.types import NodeId, Reach

HOMES_ONLY_MAX = 16
"""Up to so many forwarding nodes each has a stripe of its own and sends it to all the others."""
STRIPES_TRIED = (8, 9, 7, 10, 6)
"""Numbers of stripes in larger fleets, in order of preference: 4 to 10 are equally good."""
GOOD_SHARE = 0.98
"""A plan that reaches this share of the mean uplink is not improved on."""
SLOW_SHARE = 1 / 3
SLOW_TOTAL_SHARE = 0.05
"""With less uplink than the first share of the mean a node only receives, as long as all such
nodes have less than the second share of the total: what it would add is less than what the chunks
that wait for it would cost."""
SLOW_DOWNLINK_SHARE = 1 / 2
ALIKE_SHARE = 0.2
"""Uplinks this close to the median count as the median: measurements of equal lines differ, and
plans of nodes that see different figures must not."""
STEPS_PER_OCTAVE = 4
"""Other uplinks are rounded down to so many steps for each doubling."""
DEALS_PER_STRIPE = 64
"""The sequence in which chunks are dealt out repeats after so many for each stripe."""
ALTERNATES_TRIED = 8
_GOLDEN = 0x9E3779B1
_STRIDE = 7919
_UNKNOWN = 1.0


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """A node that takes part, as far as planning goes. Rates are 0 where nobody knows them."""

    node: NodeId
    uplink_bytes_per_s: float = 0.0
    downlink_bytes_per_s: float = 0.0
    reach: Reach = Reach.UNKNOWN


class Stripe:
    """One tree: nodes by number (`Forest.nodes`), each with the number of its parent.

    Args:
        order: every node, parents before children; the first is the home.
        fanouts: how many children each of `order` has; zeros at the end may be left out.
        rate: chunk bytes per second that its narrowest node can pass on.
    """

    def __init__(self, order: Sequence[int], fanouts: Sequence[int], rate: float) -> None:
        self.rate = rate
        self.home = order[0]
        self.parents = [-1] * len(order)
        self.children: dict[int, Sequence[int]] = {}
        self.depth = 1
        """Hops from the learner to the farthest node."""
        depths = [0] * len(order)
        depths[self.home] = 1
        first = 1
        for node, fanout in zip(order, fanouts, strict=False):
            if not fanout:
                break
            mine = order[first : first + fanout]
            first += fanout
            self.children[node] = mine
            for child in mine:
                self.parents[child] = node
                depths[child] = depths[node] + 1
        assert first >= len(order), "somebody has no parent"
        self.depth = max(depths)


class Forest:
    """The plan of one set of seats.

    Attributes:
        nodes: every seat but the learner's, in the order of their names.
        uplinks: what each counts for, in bytes per second, or in shares where nobody knows.
        stripes: the trees; `deals[i % len(deals)]` is the stripe of chunk i.
        rate: chunk bytes per second of the whole plan, in the unit of `uplinks`; infinite for a
            single node.
        measured: the rates are bytes per second.
    """

    def __init__(
        self,
        learner: NodeId,
        nodes: tuple[NodeId, ...],
        uplinks: tuple[float, ...],
        stripes: tuple[Stripe, ...],
        *,
        measured: bool,
    ) -> None:
        self.learner = learner
        self.nodes = nodes
        self.uplinks = uplinks
        self.stripes = stripes
        self.measured = measured
        self.rate = sum(stripe.rate for stripe in stripes)
        self._narrowest = min((stripe.rate for stripe in stripes), default=math.inf)
        self.shares = _shares([stripe.rate for stripe in stripes])
        self.deals = _deal(self.shares)
        self._numbers = {node: number for number, node in enumerate(nodes)}
        self._hashes = [crc32(node.encode()) for node in nodes]
        self._inner = sorted(
            {node for stripe in stripes for node in (stripe.home, *stripe.children)}
        )
        self._forwarding = {nodes[number] for number in self._inner}

    def __contains__(self, node: NodeId) -> bool:
        return node in self._numbers

    def forwards(self, node: NodeId) -> bool:
        """It passes chunks on by this plan; the others are slow, or behind a relay."""
        return node in self._forwarding

    @property
    def depth(self) -> int:
        """Hops from the learner to the farthest node of any stripe."""
        return max((stripe.depth for stripe in self.stripes), default=0)

    def hop_s(self, size_bytes: int) -> float | None:
        """Seconds that a chunk takes from one level to the next; None where rates are unknown."""
        if not self.measured or not self.stripes:
            return None
        return size_bytes / self._narrowest

    def stripe_of(self, index: int) -> int:
        """The stripe of chunk `index`; any integer has one."""
        return self.deals[index % len(self.deals)]

    def parent_of(self, node: NodeId, index: int) -> NodeId:
        """From whom `node` gets chunk `index` while everybody is well."""
        parent = self.stripes[self.stripe_of(index)].parents[self._numbers[node]]
        return self.learner if parent < 0 else self.nodes[parent]

    def children_of(self, node: NodeId, index: int) -> tuple[NodeId, ...]:
        """Who gets chunk `index` from `node` while everybody is well."""
        stripe = self.stripes[self.stripe_of(index)]
        if node == self.learner:
            return (self.nodes[stripe.home],)
        return tuple(self.nodes[child] for child in stripe.children.get(self._numbers[node], ()))

    def source_of(self, node: NodeId, index: int, well: Callable[[NodeId], bool]) -> NodeId:
        """From whom `node` gets chunk `index` when only those are left that `well` says.

        A loss moves nobody but the children of who was lost. They ask forwarding nodes all over
        the tree, each another one for each chunk, that do not themselves depend on a lost one.
        Where all do, since the home is lost, its children share its place: each chunk has one heir
        among them, who asks the learner, and the others ask the heir. Nobody waits in a circle:
        whom a node asks does not depend on it, or comes before it in one order for that chunk.
        """
        stripe = self.stripes[self.stripe_of(index)]
        place = me = self._numbers[node]
        parent = stripe.parents[me]
        if parent < 0 or well(self.nodes[parent]):
            return self.learner if parent < 0 else self.nodes[parent]
        begin = (index * _GOLDEN ^ self._hashes[me]) * _GOLDEN >> 7
        for step in range(ALTERNATES_TRIED):
            other = self._inner[(begin + step * _STRIDE) % len(self._inner)]
            if other != me and self._sound(stripe, other, me, well):
                return self.nodes[other]
        while (parent := stripe.parents[place]) >= 0:
            if well(self.nodes[parent]):
                return self.nodes[parent]
            heir = self._heir(stripe, parent, index, well, me)
            if heir != me:
                return self.nodes[heir]
            place = parent
        return self.learner

    def alternate_of(self, index: int, well: Callable[[NodeId], bool]) -> NodeId | None:
        """Who gets chunk `index` from the learner when it does not come by the plan.

        Highest random weight of name and chunk alone (Thaler and Ravishankar 1998): nodes that
        plan from different figures, and may wait for one another, still agree on this.
        """
        key = (index + 1) * _GOLDEN & 0xFFFFFFFF
        ranked = ((_mixed(self._hashes[at] ^ key), at) for at in self._inner)
        best = max(((r, at) for r, at in ranked if well(self.nodes[at])), default=None)
        return None if best is None else self.nodes[best[1]]

    def _sound(self, stripe: Stripe, at: int, me: int, well: Callable[[NodeId], bool]) -> bool:
        """Neither `at` nor anybody above it is lost, or is `me`."""
        while at >= 0:
            if at == me or not well(self.nodes[at]):
                return False
            at = stripe.parents[at]
        return True

    def _heir(
        self, stripe: Stripe, place: int, index: int, well: Callable[[NodeId], bool], me: int
    ) -> int:
        """Who stands in for the lost node of `place`; the asker `me` is one who could."""
        found = self._occupant(stripe, place, index, well, me)
        assert found is not None
        return found

    def _occupant(
        self, stripe: Stripe, place: int, index: int, well: Callable[[NodeId], bool], me: int
    ) -> int | None:
        if place == me or well(self.nodes[place]):
            return place
        children = stripe.children.get(place, ())
        if not children:
            return None
        begin = ((index + 1) * _GOLDEN & 0xFFFFFFFF) * len(children) >> 32
        ranked = [*children[begin:], *children[:begin]]
        ranked.sort(key=lambda child: self.nodes[child] not in self._forwarding)
        heirs = (self._occupant(stripe, child, index, well, me) for child in ranked)
        return next((heir for heir in heirs if heir is not None), None)


@lru_cache(maxsize=4)
def plan(seats: tuple[Seat, ...], learner: NodeId) -> Forest:
    """The forest over `seats`; the learner's own seat, if it is there, is its root.

    The learner feeds the home of every stripe: one copy in all. Relayed and slow nodes only
    receive. An unknown uplink counts as the median of the known ones. Equal seats in any order
    give equal plans.
    """
    actors = sorted(
        {seat.node: seat for seat in seats if seat.node != learner}.values(),
        key=lambda seat: seat.node,
    )
    nodes = tuple(seat.node for seat in actors)
    uplinks, measured = _uplinks(actors)
    if not actors:
        return Forest(learner, (), (), (), measured=False)
    hashes = [crc32(node.encode()) for node in nodes]
    inner = sorted(_forwarding(actors, uplinks), key=lambda i: (-uplinks[i], hashes[i], nodes[i]))
    everybody = sorted(range(len(nodes)), key=lambda i: (hashes[i], nodes[i]))
    stripes = []
    for number, (group, fanouts) in enumerate(_groups(inner, uplinks, len(nodes))):
        busy = [(k, i) for k, i in zip(fanouts, group, strict=True) if k]
        busy.sort(key=lambda pair: -pair[0])
        if not busy:
            busy = [(0, group[0])]
        taken = {i for _, i in busy}
        turn = number * len(everybody) // max(1, len(inner))
        rest = [i for i in everybody[turn:] + everybody[:turn] if i not in taken]
        rate = min((uplinks[i] / k for k, i in busy if k), default=math.inf)
        stripes.append(Stripe([i for _, i in busy] + rest, [k for k, _ in busy], rate))
    return Forest(learner, nodes, uplinks, tuple(stripes), measured=measured)


def _uplinks(actors: Sequence[Seat]) -> tuple[tuple[float, ...], bool]:
    """What each uplink counts for, and whether any was measured."""
    known = [seat.uplink_bytes_per_s for seat in actors if seat.uplink_bytes_per_s > 0.0]
    if not known:
        return (_UNKNOWN,) * len(actors), False
    middle = median(known)

    def counted(uplink: float) -> float:
        if uplink <= 0.0 or abs(uplink - middle) <= ALIKE_SHARE * middle:
            return middle
        steps = math.floor(math.log2(uplink / middle) * STEPS_PER_OCTAVE + 1e-9)
        return float(middle * 2.0 ** (steps / STEPS_PER_OCTAVE))

    return tuple(counted(seat.uplink_bytes_per_s) for seat in actors), True


def _forwarding(actors: Sequence[Seat], uplinks: Sequence[float]) -> list[int]:
    """The numbers of those who pass chunks on; all, if nobody is fit to."""
    able = [i for i, seat in enumerate(actors) if seat.reach is not Reach.RELAYED]
    downlinks = [s.downlink_bytes_per_s for s in actors if s.downlink_bytes_per_s > 0.0]
    if downlinks:
        least = SLOW_DOWNLINK_SHARE * median(downlinks)
        able = [i for i in able if not 0.0 < actors[i].downlink_bytes_per_s < least]
    if not able:
        return list(range(len(actors)))
    # The mean that a byte sees: many slow nodes do not make a slow node worth waiting for.
    total = sum(uplinks[i] for i in able)
    slow = SLOW_SHARE * sum(uplinks[i] ** 2 for i in able) / total
    spare = SLOW_TOTAL_SHARE * total
    able.sort(key=lambda i: uplinks[i])
    for position, i in enumerate(able):
        spare -= uplinks[i]
        if spare < 0.0 or uplinks[i] >= slow:
            return able[position:]
    return able


def _groups(
    inner: Sequence[int], uplinks: Sequence[float], count: int
) -> list[tuple[list[int], list[int]]]:
    """(nodes, fan-outs) of every stripe: each has places for all but its home.

    Nodes of like uplink share a stripe, or the slowest of each would hold up the others; `inner`
    is cut into runs, so that a newcomer moves only the nodes at the cuts.
    """
    slots = count - 1
    if len(inner) <= HOMES_ONLY_MAX:
        return [([i], [slots]) for i in inner]
    best: list[tuple[list[int], list[int]]] = []
    best_rate = 0.0
    enough = GOOD_SHARE * sum(uplinks[i] for i in inner) / count
    for stripes in STRIPES_TRIED:
        cuts = [len(inner) * stripe // stripes for stripe in range(stripes + 1)]
        groups = [list(inner[begin:end]) for begin, end in pairwise(cuts)]
        found = [(group, _fanouts([uplinks[i] for i in group], slots)) for group in groups]
        rate = sum(
            min(uplinks[i] / k for i, k in zip(group, fanouts, strict=True) if k)
            for group, fanouts in found
        )
        if rate > best_rate:
            best, best_rate = found, rate
        if rate >= enough:
            break
    return best


def _fanouts(uplinks: Sequence[float], slots: int) -> list[int]:
    """`slots` children dealt out so that the most loaded node is loaded as little as can be.

    Jefferson's method: the next one goes to whoever then still has the most uplink for each.
    """
    total = sum(uplinks)
    fanouts = [int(slots * uplink / total) for uplink in uplinks]
    heap = [(-uplinks[i] / (k + 1), i) for i, k in enumerate(fanouts)]
    heapq.heapify(heap)
    for _ in range(slots - sum(fanouts)):
        _, i = heap[0]
        fanouts[i] += 1
        heapq.heapreplace(heap, (-uplinks[i] / (fanouts[i] + 1), i))
    return fanouts


def _shares(rates: Sequence[float]) -> tuple[float, ...]:
    if any(math.isinf(rate) for rate in rates):
        return (1.0 / len(rates),) * len(rates)
    return tuple(rate / sum(rates) for rate in rates)


def _deal(shares: Sequence[float]) -> tuple[int, ...]:
    """The stripes in the order in which chunks are dealt out, each spread as evenly as can be."""
    if not shares:
        return (0,)
    length = DEALS_PER_STRIPE * len(shares)
    edges = [round(length * edge) for edge in accumulate(shares)]
    counts = [edge - before for edge, before in zip(edges, [0, *edges], strict=False)]
    turns = [
        ((turn + 0.5) / count, stripe)
        for stripe, count in enumerate(counts)
        for turn in range(count)
    ]
    return tuple(stripe for _, stripe in sorted(turns))


def _mixed(value: int) -> int:
    """32 bits well mixed: the finaliser of MurmurHash3."""
    value = ((value ^ value >> 16) * 0x85EBCA6B) & 0xFFFFFFFF
    value = ((value ^ value >> 13) * 0xC2B2AE35) & 0xFFFFFFFF
    return value ^ value >> 16


def lower_bound_s(
    size_bytes: float, learner_uplink: float, uplinks: Sequence[float], downlinks: Sequence[float]
) -> float:
    """Seconds that no scheme can beat until the last of the nodes has `size_bytes`.

    Fluid bound (Mundinger et al. 2008; Kumar and Ross 2006):
    `max(S / u0, S / min d, N S / (u0 + sum u))`.
    """
    return max(
        size_bytes / learner_uplink,
        size_bytes / min(downlinks),
        len(uplinks) * size_bytes / (learner_uplink + sum(uplinks)),
    )
