"""From the `[task]` table of a run to a task, and the digest that says two hosts mean the same.

A task is a frozen struct whose fields are its arguments, so bounds are in their types and the
canonical JSON follows from the value. Adding a task is one file and one line in `TASKS`. Pure;
called by the learner at start and by actors when they read a manifest.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

import blake3
import msgspec

from echo2_mesh.errors import UsageError
from echo2_mesh.wire.messages import TaskSpec
from echo2_mesh.wire.types import Digest
from echo2_node.tasks.countdown import Countdown
from echo2_node.tasks.protocol import Task
from echo2_node.tasks.sort_digits import SortDigits

TASKS: dict[str, type[Any]] = {kind.task_id: kind for kind in (Countdown, SortDigits)}

_DOMAIN = b"echo2 task\x00"


def make_task(task_id: str, args: Mapping[str, Any]) -> Task:
    """The task of that name with these arguments; the rest take their defaults.

    Raises:
        UsageError: unknown task, unknown argument (both with the nearest known one), or a value
            out of its bounds.
    """
    kind = TASKS.get(task_id)
    if kind is None:
        raise UsageError(f"There is no task '{task_id[:64]}'.", _nearest(task_id, TASKS))
    known = kind.__struct_fields__
    for name in args:
        if name not in known:
            raise UsageError(
                f"The task '{task_id}' has no argument '{name[:64]}'.", _nearest(name, known)
            )
    try:
        task: Task = msgspec.convert(dict(args), kind)
    except msgspec.ValidationError as error:
        problem, _, at = str(error).partition(" - at ")
        name = at.strip("`").removeprefix("$.") or "the arguments"
        raise UsageError(
            f"The task '{task_id}' refuses {name}: {problem[:1].lower()}{problem[1:]}.",
            "Change it in the [task] table of the run file.",
        ) from error
    return task


def task_args_json(task: Task) -> str:
    """Every argument, defaults included, as canonical JSON: sorted keys, no spaces."""
    return msgspec.json.encode(msgspec.to_builtins(task), order="sorted").decode()


def task_digest(task: Task) -> Digest:
    """BLAKE3 over id, version and canonical arguments, each length-prefixed."""
    parts = [_DOMAIN]
    for field in (task.task_id, str(task.version), task_args_json(task)):
        raw = field.encode()
        parts += [len(raw).to_bytes(4, "big"), raw]
    return Digest(blake3.blake3(b"".join(parts)).digest())


def task_spec(task: Task) -> TaskSpec:
    """What a manifest says of the task."""
    return TaskSpec(task_id=task.task_id, args_json=task_args_json(task), digest=task_digest(task))


def task_of(spec: TaskSpec) -> Task:
    """The task a manifest names, made on this host.

    Raises:
        UsageError: this program has no such task, or another version of it.
    """
    try:
        args = msgspec.json.decode(spec.args_json, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise UsageError(
            f"The run's arguments for the task '{spec.task_id[:64]}' are not JSON: {error}.",
            "The learner must publish again.",
        ) from error
    task = make_task(spec.task_id, args)
    if task_digest(task) != spec.digest:
        raise UsageError(
            f"The run means another '{spec.task_id}' than this program (version {task.version}).",
            "Install the same release of echo2 as the learner.",
        )
    return task


def _nearest(name: str, known: Mapping[str, object] | tuple[str, ...]) -> str:
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"Did you mean '{near[0]}'?"
    return f"Known here: {', '.join(known) or 'none'}."
