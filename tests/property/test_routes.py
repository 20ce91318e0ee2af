"""Whatever a node holds, its route ends in exactly the version, and no cheaper chain exists."""

from hypothesis import given, settings
from hypothesis import strategies as st

from echo2_mesh.core.holdings import blobs_of, needed_of
from echo2_mesh.core.routes import Rebuild, cheapest
from tests.route_kit import History

CHUNKS = 6


@st.composite
def situations(draw):
    indices = st.frozensets(st.integers(0, CHUNKS - 1))
    changes = draw(st.lists(indices, min_size=1, max_size=6))
    history = History(
        CHUNKS,
        changes,
        spans=draw(st.integers(1, 4)),
        skips=draw(st.sampled_from([(), (2,), (2, 4)])),
        patch_bytes=draw(st.integers(1, 700)),
    )
    newest = len(changes)
    gone = draw(st.frozensets(st.integers(0, 30)))
    patches = tuple(p for i, p in enumerate(history.patches) if i not in gone)
    manifest = history.manifest(newest, patches)
    bases = {
        version: draw(indices) if draw(st.booleans()) else frozenset(range(CHUNKS))
        for version in draw(st.frozensets(st.integers(0, newest), max_size=3))
    }
    blobs = blobs_of(manifest)
    # Held: whatever a base shares with the newest version, and some blobs by chance.
    here = {history.refs(version)[i].digest for version, own in bases.items() for i in own}
    lucky = draw(st.frozensets(st.integers(0, max(0, len(blobs) - 1))))
    here |= {blobs[i].digest for i in lucky}
    held = frozenset(i for i, ref in enumerate(blobs) if ref.digest in here)
    own_bases = tuple(
        history.base(
            version,
            {i for i in range(CHUNKS) if history.refs(version)[i].digest in here},
        )
        for version in bases
    )
    return history, manifest, own_bases, held


@given(situations())
def test_fetching_what_is_wanted_and_making_what_is_promised_completes_the_version(situation):
    history, manifest, bases, held = situation
    route = cheapest(manifest, bases, held)
    needed = range(needed_of(manifest))
    assert not route.wanted & held
    assert set(needed) <= held | route.wanted | route.needs.keys()
    starts = {}
    blob = needed_of(manifest)
    for place, patch in enumerate(manifest.patches):
        for chunk in patch.chunks:
            starts[blob] = (place, chunk)
            blob += 1
    for index, blobs in route.needs.items():
        assert index in route.base.here
        assert set(blobs) <= held | route.wanted
        state = next(v for v, s in enumerate(history.states) if s == state_of(history, route.base))
        content = history.states[state][index]
        for blob in blobs:
            place, chunk = starts[blob]
            assert chunk.first <= index < chunk.first + chunk.count
            content = history.states[manifest.patches[place].version][index]
        assert content == history.states[-1][index]
        places = [starts[blob][0] for blob in blobs]
        assert places == [place for place in route.patches if place in places]


def state_of(history, base):
    return next(
        state
        for version, state in enumerate(history.states)
        if history.state_digest(version) == base.state_digest
    )


@given(situations())
@settings(max_examples=50)
def test_no_chain_from_any_base_costs_less(situation):
    _, manifest, bases, held = situation
    route = cheapest(manifest, bases, held)
    refs = blobs_of(manifest)
    files = set(range(len(manifest.chunks), needed_of(manifest))) - held
    missing = set(range(len(manifest.chunks))) - held
    costs = [sum(refs[i].size_bytes for i in missing | files)]
    for base in bases:
        for chain in chains(manifest, base.state_digest, manifest.state_digest):
            costs.append(cost_of(manifest, refs, base, chain, missing, files, held))
    assert route.size_bytes == min(costs)


def chains(manifest, start, end, path=()):
    if start == end and path:
        yield path
    for place, patch in enumerate(manifest.patches):
        later = not path or manifest.patches[path[-1]].version <= patch.base
        if patch.base_digest == start and later:
            yield from chains(manifest, patch.state_digest, end, (*path, place))


def cost_of(manifest, refs, base, chain, missing, files, held):
    blob = needed_of(manifest)
    wanted = set(files)
    made = set()
    for place, patch in enumerate(manifest.patches):
        for chunk in patch.chunks:
            touched = set(range(chunk.first, chunk.first + chunk.count)) & missing & base.here
            if place in chain and touched:
                made |= touched
                wanted.add(blob)
            blob += 1
    wanted |= missing - made
    return sum(refs[i].size_bytes for i in wanted - held)


@given(situations(), st.randoms())
@settings(max_examples=50)
def test_every_promised_chunk_becomes_makeable_once_in_whatever_order_patches_come(situation, rng):
    _, manifest, bases, held = situation
    route = cheapest(manifest, bases, held)
    rebuild = Rebuild(route, held)
    order = sorted(route.wanted)
    rng.shuffle(order)
    freed = list(rebuild.makeable())
    for blob in order:
        freed += rebuild.arrived(blob)
    assert sorted(freed) == sorted(route.needs)
