"""A full disk pauses, in words, and only so long."""

import pytest
import trio

from echo2_mesh.errors import DiskFull, LocalError
from echo2_node.learner.patience import Patience
from tests.actor_kit import run_sync_inline


class Store:
    def __init__(self):
        self.trims = 0

    def trim(self):
        self.trims += 1


def failing(times, error=None):
    left = [times]

    async def call():
        await trio.lowlevel.checkpoint()
        if left[0]:
            left[0] -= 1
            raise error or DiskFull("The disk of x is full.", "Free space there.")
        return "done"

    return call


@pytest.fixture
def patience(monkeypatch):
    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync_inline)
    return Patience(Store(), 60.0)


async def test_it_makes_room_and_tries_again(autojump_clock, patience):
    begin_s = trio.current_time()
    assert await patience.run(failing(3)) == "done"
    assert trio.current_time() - begin_s == pytest.approx(15.0)
    assert patience._store.trims == 3
    assert patience.last_error == ""


async def test_what_it_waits_for_is_told(autojump_clock, patience):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(patience.run, failing(3))
        await trio.sleep(1)
        assert patience.last_error == "The disk of x is full. Free space there."


async def test_it_has_an_end(autojump_clock, patience):
    with pytest.raises(DiskFull):
        await patience.run(failing(1000))
    assert trio.current_time() < 100


async def test_a_run_that_is_being_stopped_waits_no_longer(autojump_clock, patience):
    async with trio.open_nursery() as nursery:

        async def wait():
            with pytest.raises(DiskFull):
                await patience.run(failing(1000))
            assert trio.current_time() - began_s == pytest.approx(10.0)
            assert patience.last_error == ""

        began_s = trio.current_time()
        nursery.start_soon(wait)
        await trio.sleep(7)
        assert patience.last_error
        patience.stop()


async def test_what_one_call_waits_for_is_told_though_another_got_through(autojump_clock, patience):
    async with trio.open_nursery() as nursery:
        nursery.start_soon(patience.run, failing(3))
        await trio.sleep(1)
        assert await patience.run(failing(0)) == "done"
        assert patience.last_error == "The disk of x is full. Free space there."
    assert patience.last_error == ""


async def test_other_failures_are_not_its_business(autojump_clock, patience):
    with pytest.raises(LocalError, match="died"):
        await patience.run(failing(1, LocalError("The trainer died.")))
