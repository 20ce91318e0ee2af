"""A run's folder: started once, resumed only where there is something to resume, kept private."""

import os
import stat

import pytest

from echo2_mesh.errors import LocalError, UsageError
from echo2_mesh.identity import Identity
from echo2_mesh.wire.types import Digest, PolicyVersion
from echo2_node.learner.ledger import Ledger
from echo2_node.learner.place import Place
from echo2_node.scheduler.records import VersionPublished

IDENTITY = Identity(b"\x03" * 32)


def begun(folder):
    place = Place(folder, resume=False, name="demo")
    place.ledger.touch()
    return place


def test_a_second_start_is_refused_and_says_how_to_continue(tmp_path):
    begun(tmp_path / "run")
    with pytest.raises(UsageError, match="already a run 'demo'") as caught:
        Place(tmp_path / "run", resume=False, name="demo")
    assert "--resume" in caught.value.hint
    Place(tmp_path / "run", resume=True, name="demo")


def test_there_must_be_something_to_resume(tmp_path):
    with pytest.raises(UsageError, match="no run to resume"):
        Place(tmp_path / "run", resume=True, name="demo")
    assert not (tmp_path / "run").exists()


def test_the_run_id_is_made_once_and_begins_with_the_name(tmp_path):
    first = begun(tmp_path).run_id(IDENTITY)
    assert first.startswith("demo-")
    assert Place(tmp_path, resume=True, name="demo").run_id(IDENTITY) == first
    other = Place(tmp_path / "other", resume=False, name="demo").run_id(IDENTITY)
    assert other != first, "two runs of one name are two runs"


def test_the_secret_is_made_once_and_readable_by_its_owner_alone(tmp_path):
    place = begun(tmp_path)
    secret = place.secret()
    assert len(secret) == 24
    assert Place(tmp_path, resume=True, name="demo").secret() == secret
    mode = stat.S_IMODE((tmp_path / "secret").stat().st_mode)
    assert mode & 0o077 == 0


def test_a_file_is_replaced_whole_or_not_at_all(tmp_path, monkeypatch):
    place = begun(tmp_path)
    place.write("run.toml", "old")

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdopen", full)
    with pytest.raises(LocalError, match=r"run\.toml cannot be written"):
        place.write("run.toml", "new")
    monkeypatch.undo()
    assert (tmp_path / "run.toml").read_text() == "old"
    assert not list(tmp_path.glob("*.part"))


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(LocalError, match="state folder"):
        Place(tmp_path / "file" / "run", resume=False, name="demo")


def test_a_start_that_failed_before_anything_happened_can_be_started_again(tmp_path):
    place = Place(tmp_path, resume=False, name="demo")
    with (
        pytest.raises(LocalError, match="no GPU"),
        Ledger.open(place.ledger) as ledger,
        place.forgotten_if_nothing_happened(ledger),
    ):
        raise LocalError("no GPU")
    Place(tmp_path, resume=False, name="demo")


def test_a_run_that_published_something_is_kept_whatever_happens(tmp_path):
    place = Place(tmp_path, resume=False, name="demo")
    published = VersionPublished(version=PolicyVersion(0), manifest=Digest(bytes(32)))
    with Ledger.open(place.ledger) as ledger:
        ledger.apply([published], {})
        with (
            pytest.raises(LocalError, match="disk"),
            place.forgotten_if_nothing_happened(ledger),
        ):
            raise LocalError("disk")
    with pytest.raises(UsageError, match="already a run"):
        Place(tmp_path, resume=False, name="demo")
