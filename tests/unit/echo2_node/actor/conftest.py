"""Blocking work of actors runs in place: these tests have a virtual clock."""

import pytest
import trio

from tests.actor_kit import run_sync_inline


@pytest.fixture(autouse=True)
def _no_threads(monkeypatch):
    monkeypatch.setattr(trio.to_thread, "run_sync", run_sync_inline)
