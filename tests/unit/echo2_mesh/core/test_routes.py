"""Routes by example: what is fetched, and what is made of it."""

from echo2_mesh.core.holdings import blobs_of, needed_of
from echo2_mesh.core.routes import Rebuild, cheapest
from tests.route_kit import History, digest


def blob_digests(manifest, indices):
    return {blobs_of(manifest)[index].digest for index in indices}


def test_without_a_base_all_that_is_missing_is_fetched_whole():
    manifest = History(4, [{0, 1}, {2}]).manifest(2)
    route = cheapest(manifest, (), frozenset({0}))
    assert route.wanted == frozenset({1, 2, 3, 4})
    assert route.base is None
    assert route.size_bytes == 3 * 1000 + 20


def test_one_step_behind_only_the_last_patch_is_fetched():
    history = History(6, [{0, 1}, {2, 5}])
    manifest = history.manifest(2)
    same = frozenset({0, 1, 3, 4, 6})
    route = cheapest(manifest, (history.base(1),), same)
    assert blob_digests(manifest, route.wanted) == {
        digest("patch", 1, 2, 2),
        digest("patch", 1, 2, 5),
    }
    assert sorted(route.needs) == [2, 5]
    assert route.size_bytes == 20


def test_a_laggard_takes_the_chain_in_order_and_leaves_out_what_touches_nothing_missing():
    history = History(4, [{0}, {0, 3}, {0}])
    manifest = history.manifest(3)
    # Chunk 3 of the newest version is here already, so the second step's blob for it is not asked.
    route = cheapest(manifest, (history.base(0),), frozenset({1, 2, 3, 4}))
    assert [manifest.patches[place].base for place in route.patches] == [0, 1, 2]
    assert [blobs_of(manifest)[blob].digest for blob in route.needs[0]] == [
        digest("patch", 0, 1, 0),
        digest("patch", 1, 2, 0),
        digest("patch", 2, 3, 0),
    ]
    assert route.size_bytes == 30


def test_a_skip_is_taken_where_it_is_smaller_than_the_steps():
    history = History(4, [{0}, {0}, {0}, {0}], skips=(2, 4))
    manifest = history.manifest(4)
    route = cheapest(manifest, (history.base(0),), frozenset({1, 2, 3, 4}))
    assert [(p.base, p.version) for p in (manifest.patches[i] for i in route.patches)] == [(0, 4)]
    assert route.size_bytes == 10


def test_patches_that_are_here_cost_nothing():
    history = History(4, [{0}, {0}], skips=(2,))
    manifest = history.manifest(2)
    steps = {
        index
        for index, ref in enumerate(blobs_of(manifest))
        if ref.digest in {digest("patch", 0, 1, 0), digest("patch", 1, 2, 0)}
    }
    route = cheapest(manifest, (history.base(0),), frozenset({1, 2, 3, 4}) | steps)
    assert len(route.patches) == 2
    assert route.wanted == frozenset()


def test_the_whole_chunks_win_where_patches_are_larger():
    history = History(4, [{0}] * 5, patch_bytes=300)
    route = cheapest(history.manifest(5), (history.base(0),), frozenset({1, 2, 3, 4}))
    assert route.base is None
    assert route.wanted == frozenset({0})


def test_what_the_base_lost_is_fetched_whole_and_the_rest_is_patched():
    history = History(4, [{0, 1}], spans=1)
    route = cheapest(history.manifest(1), (history.base(0, here={1, 2, 3}),), frozenset({2, 3, 4}))
    assert sorted(route.needs) == [1]
    assert 0 in route.wanted
    assert 1 not in route.wanted


def test_a_base_of_another_cut_or_of_other_weights_is_left_alone():
    history = History(4, [{0}])
    longer = History(5, [{0}]).base(0)
    other = History(4, [{1}, {2}]).base(2)
    route = cheapest(history.manifest(1), (longer, other), frozenset({1, 2, 3, 4}))
    assert route.base is None


def test_a_chunk_that_no_patch_names_and_that_differs_all_the_same_is_fetched_whole():
    history = History(4, [{0, 3}], spans=1)
    patch = history.patches[0]
    short = type(patch)(
        base=patch.base,
        base_digest=patch.base_digest,
        version=patch.version,
        state_digest=patch.state_digest,
        chunks=patch.chunks[:1],
    )
    route = cheapest(
        history.manifest(1, patches=(short,)), (history.base(0),), frozenset({1, 2, 4})
    )
    assert sorted(route.needs) == [0]
    assert 3 in route.wanted


def test_a_chunk_is_makeable_when_its_last_patch_has_come():
    history = History(4, [{0, 1}, {1, 2}], spans=1)
    manifest = history.manifest(2)
    route = cheapest(manifest, (history.base(0),), frozenset({3, 4}))
    rebuild = Rebuild(route, frozenset({3, 4}))
    blob = {ref.digest: index for index, ref in enumerate(blobs_of(manifest))}
    assert rebuild.makeable() == ()
    assert rebuild.arrived(blob[digest("patch", 1, 2, 1)]) == ()
    assert rebuild.arrived(blob[digest("patch", 0, 1, 1)]) == (1,)
    assert rebuild.arrived(blob[digest("patch", 0, 1, 1)]) == ()
    assert rebuild.arrived(needed_of(manifest) + 99) == ()
    assert rebuild.arrived(blob[digest("patch", 0, 1, 0)]) == (0,)
    rebuild.settled((0, 1))
    assert rebuild.unmade == {2}
