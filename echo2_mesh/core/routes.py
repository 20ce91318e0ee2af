"""The cheapest way to a version: the full chunks that are missing, or a chain of patches.

Pure. `net.following` asks for a route once it has read a manifest, tells `core.fetch` what the
route wants, and lets `Rebuild` say which data chunks can be made as patches arrive. A route is a
hope: whatever is made from it is hashed, and what does not hash right is fetched whole.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

import msgspec

from echo2_mesh.core.holdings import blobs_of, needed_of
from echo2_mesh.wire.messages import ChunkRef, Manifest
from echo2_mesh.wire.types import Digest


class Base(msgspec.Struct, frozen=True, kw_only=True):
    """A version that a patch may start from: its data chunks, and which of them are here."""

    state_digest: Digest
    chunks: tuple[ChunkRef, ...]
    here: frozenset[int]


class Route(msgspec.Struct, frozen=True, kw_only=True):
    """What to fetch, and what to make of it.

    Attributes:
        wanted: blob indices (`core.holdings.blobs_of`) that are to be fetched.
        size_bytes: of `wanted`, each distinct blob once.
        patches: the chain, as indices into the manifest's patches, oldest first; empty where the
            missing chunks are fetched whole.
        base: what the chain starts from; None without a chain.
        needs: data chunk index -> blob indices of the patch chunks that rewrite it, oldest first;
            only data chunks that are missing, changed along the chain, and lie in the base.
    """

    wanted: frozenset[int]
    size_bytes: int
    patches: tuple[int, ...] = ()
    base: Base | None = None
    needs: dict[int, tuple[int, ...]] = {}


def cheapest(manifest: Manifest, bases: Sequence[Base], held: frozenset[int]) -> Route:
    """The route of fewest bytes to `manifest` from what is here.

    Args:
        bases: versions whose data lies here, wholly or in part.
        held: indices of the manifest's blobs that are here already, patches included.

    The patches form a graph from weights to weights, directed in time, so one pass over them in
    the order of their versions finds the cheapest chain from each base. An edge costs the bytes
    of those of its chunks that touch a data chunk that is missing and can be made from the base.
    """
    data = range(len(manifest.chunks))
    missing = frozenset(data) - held
    first_file = len(manifest.chunks)
    first_patch = needed_of(manifest)
    absent_files = frozenset(range(first_file, first_patch)) - held
    best = _whole(manifest, missing, absent_files)
    best_key = (best.size_bytes, 0)
    for base in bases:
        if not _cut_alike(base, manifest):
            continue
        makeable = missing & base.here
        chain = _chain(manifest, base, makeable, held, first_patch)
        if not makeable or chain is None:
            continue
        route = _along(manifest, base, chain, missing, held, absent_files, first_patch)
        if (key := (route.size_bytes, len(chain))) < best_key:
            best, best_key = route, key
    return best


def _whole(manifest: Manifest, missing: frozenset[int], files: frozenset[int]) -> Route:
    wanted = missing | files
    return Route(wanted=wanted, size_bytes=_size_bytes(blobs_of(manifest), wanted))


def _along(
    manifest: Manifest,
    base: Base,
    chain: tuple[int, ...],
    missing: frozenset[int],
    held: frozenset[int],
    files: frozenset[int],
    first_patch: int,
) -> Route:
    """The route over `chain`; what no patch gives (or the base lacks) is wanted whole."""
    starts = _first_blobs(manifest, first_patch)
    needs: dict[int, tuple[int, ...]] = {}
    for place in chain:
        for offset, chunk in enumerate(manifest.patches[place].chunks):
            for index in range(chunk.first, chunk.first + chunk.count):
                if index in missing and index in base.here:
                    needs[index] = (*needs.get(index, ()), starts[place] + offset)
    patches = frozenset(blob for blobs in needs.values() for blob in blobs) - held
    wanted = (missing - needs.keys()) | files | patches
    return Route(
        wanted=wanted,
        size_bytes=_size_bytes(blobs_of(manifest), wanted),
        patches=chain,
        base=base,
        needs=needs,
    )


def _chain(
    manifest: Manifest,
    base: Base,
    makeable: frozenset[int],
    held: frozenset[int],
    first_patch: int,
) -> tuple[int, ...] | None:
    """The patches from `base` to the manifest's weights that cost the fewest bytes."""
    touched = [0, *accumulate(int(i in makeable) for i in range(len(manifest.chunks)))]
    starts = _first_blobs(manifest, first_patch)
    ways: dict[Digest, tuple[int, tuple[int, ...]]] = {base.state_digest: (0, ())}
    order = sorted(range(len(manifest.patches)), key=lambda i: manifest.patches[i].version)
    for place in order:
        patch = manifest.patches[place]
        way = ways.get(patch.base_digest)
        if way is None:
            continue
        cost = way[0] + sum(
            chunk.ref.size_bytes
            for offset, chunk in enumerate(patch.chunks)
            if touched[chunk.first + chunk.count] > touched[chunk.first]
            and starts[place] + offset not in held
        )
        known = ways.get(patch.state_digest)
        if known is None or (cost, len(way[1]) + 1) < (known[0], len(known[1])):
            ways[patch.state_digest] = (cost, (*way[1], place))
    way = ways.get(manifest.state_digest)
    return way[1] if way is not None and way[1] else None


def _cut_alike(base: Base, manifest: Manifest) -> bool:
    return [ref.size_bytes for ref in base.chunks] == [ref.size_bytes for ref in manifest.chunks]


def _first_blobs(manifest: Manifest, first_patch: int) -> list[int]:
    """The blob index of each patch's first chunk."""
    counts = (len(patch.chunks) for patch in manifest.patches)
    return list(accumulate(counts, initial=first_patch))


def _size_bytes(refs: Sequence[ChunkRef], wanted: Iterable[int]) -> int:
    distinct = {refs[index].digest: refs[index].size_bytes for index in wanted}
    return sum(distinct.values())


class Rebuild:
    """Which data chunks a route can make, as its patch chunks arrive. A book, no decision.

    Args:
        route: with a chain.
        held: blob indices that are here already.
    """

    def __init__(self, route: Route, held: frozenset[int]) -> None:
        self.route = route
        self.unmade = set(route.needs)
        """Data chunks that were promised by the route and are not here yet."""
        self._lacking: dict[int, int] = {}
        self._users: dict[int, list[int]] = {}
        for index, blobs in route.needs.items():
            absent = {blob for blob in blobs if blob not in held}
            self._lacking[index] = len(absent)
            for blob in absent:
                self._users.setdefault(blob, []).append(index)

    def makeable(self) -> tuple[int, ...]:
        """Data chunks whose patches are all here, at the beginning."""
        return tuple(index for index, count in self._lacking.items() if not count)

    def arrived(self, blob: int) -> tuple[int, ...]:
        """Blob `blob` is here now: the data chunks that can be made since."""
        freed = []
        for index in self._users.pop(blob, ()):
            self._lacking[index] -= 1
            if not self._lacking[index] and index in self.unmade:
                freed.append(index)
        return tuple(freed)

    def settled(self, indices: Iterable[int]) -> None:
        """These are made, or wanted whole: no longer expected of the route."""
        self.unmade.difference_update(indices)
