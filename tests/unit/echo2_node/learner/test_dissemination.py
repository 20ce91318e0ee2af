"""Time to the first and to all actors, as heartbeats tell."""

from echo2_node.learner.dissemination import OPEN_MAX, Dissemination


def announce(book, version, now_s, **actors):
    book.announced(version, now_s, actors=actors, full_bytes=1000, patch_bytes=10)


def test_the_first_and_the_last_actor_are_timed():
    book = Dissemination()
    announce(book, 3, 100.0, a=2, b=2, c=None)
    assert book.seen({"a": 2, "b": 2, "c": None}, 100.5) == []
    assert book.seen({"a": 3, "b": 2, "c": None}, 101.0) == []
    assert book.seen({"a": 3, "b": 3, "c": None}, 102.0) == []
    (spread,) = book.seen({"a": 3, "b": 3, "c": 3}, 104.5)
    assert (spread.version, spread.actors) == (3, 3)
    assert (spread.first_s, spread.all_s) == (1.0, 4.5)
    assert (spread.full_bytes, spread.patch_bytes) == (1000, 10)
    assert list(book.recent) == [spread]
    assert book.seen({"a": 3, "b": 3, "c": 3}, 105.0) == []


def test_version_0_counts_once_it_runs():
    book = Dissemination()
    announce(book, 0, 0.0, a=None)
    assert book.seen({"a": None}, 1.0) == []
    assert book.seen({"a": 0}, 2.0)[0].all_s == 2.0


def test_who_jumps_to_a_newer_version_has_this_one_and_who_leaves_is_not_waited_for():
    book = Dissemination()
    announce(book, 1, 0.0, a=0, b=0)
    announce(book, 2, 1.0, a=0, b=0)
    first, second = book.seen({"a": 2}, 3.0)
    assert (first.version, first.all_s, first.actors) == (1, 3.0, 1)
    assert (second.version, second.all_s) == (2, 2.0)


def test_joiners_are_not_waited_for_and_nobody_there_is_no_measurement():
    book = Dissemination()
    announce(book, 1, 0.0)
    assert book.seen({"late": None}, 1.0) == []
    announce(book, 2, 2.0, a=1)
    assert book.seen({"a": 2, "late": None}, 3.0)[0].actors == 1


def test_versions_on_their_way_are_bounded():
    book = Dissemination()
    for version in range(3 * OPEN_MAX):
        announce(book, version, float(version), a=None)
    assert len(book.seen({"a": 100}, 99.0)) == OPEN_MAX
