import msgspec
import pytest

from echo2_mesh.errors import UsageError
from echo2_node.tasks.registry import (
    TASKS,
    make_task,
    task_args_json,
    task_digest,
    task_of,
    task_spec,
)


def test_a_misspelt_task_names_the_nearest():
    with pytest.raises(UsageError, match="Did you mean 'sort_digits'"):
        make_task("sort-digits", {})
    with pytest.raises(UsageError, match="Known here: countdown, sort_digits"):
        make_task("zzz", {})


def test_a_misspelt_argument_names_the_nearest():
    with pytest.raises(UsageError, match=r"no argument 'digit'.*Did you mean 'digits'"):
        make_task("sort_digits", {"digit": 5})


@pytest.mark.parametrize("value", [0, 33, "six", None, 1.5])
def test_an_argument_out_of_bounds_is_named(value):
    with pytest.raises(UsageError, match="refuses digits"):
        make_task("sort_digits", {"digits": value})


def test_defaults_are_part_of_the_arguments():
    explicit, implicit = make_task("sort_digits", {"digits": 6}), make_task("sort_digits", {})
    assert task_args_json(implicit) == '{"digits":6}'
    assert task_digest(explicit) == task_digest(implicit)
    assert task_digest(make_task("sort_digits", {"digits": 5})) != task_digest(implicit)


def test_a_task_with_another_version_has_another_digest(monkeypatch):
    before = task_digest(make_task("sort_digits", {}))
    monkeypatch.setattr(TASKS["sort_digits"], "version", 2)
    assert task_digest(make_task("sort_digits", {})) != before


@pytest.mark.parametrize("task_id", sorted(TASKS))
def test_a_manifest_makes_the_same_task_elsewhere(task_id):
    task = make_task(task_id, {})
    assert task_of(task_spec(task)) == task


def test_a_manifest_of_another_release_is_refused():
    spec = task_spec(make_task("sort_digits", {}))
    with pytest.raises(UsageError, match="same release"):
        task_of(msgspec.structs.replace(spec, digest=bytes(32)))


@pytest.mark.parametrize("args_json", ["", "[]", "{", "[" * 5000, '{"digits": 6, "x": 1}'])
def test_a_manifest_with_bad_arguments_is_refused(args_json):
    spec = task_spec(make_task("sort_digits", {}))
    with pytest.raises(UsageError):
        task_of(msgspec.structs.replace(spec, args_json=args_json))
