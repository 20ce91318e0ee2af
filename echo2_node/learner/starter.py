"""Makes a tiny model for a task, here and now: random weights, a short warm-up on demonstrations.

For the demo and for tests: a Qwen3-architecture folder with one token a character, taught the
task's form by supervised steps on demonstrations most of which are wrong, so that reward starts
well below what reinforcement can reach. Cached by a digest of everything that decides the
weights. `python -m echo2_node.learner.starter --task sort_digits --out FOLDER` writes one JSON
object per line to stdout: progress, then `{"folder": ..., "cached": ...}`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import blake3
import msgspec

from echo2_mesh.errors import Echo2Error, LocalError, UsageError
from echo2_node.learner.modelfolder import check_model_folder
from echo2_node.tasks.protocol import Task
from echo2_node.tasks.registry import make_task, task_digest
from echo2_node.tokens import TokenCodec, build_character_tokenizer, unpack_ids

if TYPE_CHECKING:
    from torch import Tensor

FORMAT = 1
"""Raised when the same settings would give other weights."""
PROGRESS_INTERVAL_S = 0.25
_PAD, _EOS = 0, 1
_IGNORED = -100
_WARM_UP_SHARE = 0.1
_PROMPT_SEED = 1_000_003
"""Prompts of the warm-up come from another seed than any run's."""


class StarterSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that decides the weights."""

    hidden: int = 96
    layers: int = 3
    heads: int = 3
    kv_heads: int = 1
    head_dim: int = 32
    intermediate: int = 288
    positions_max: int = 128
    steps: int = 80
    batch: int = 128
    lr: float = 2e-3
    skill: float = 0.1
    """Share of demonstrations that are right."""
    seed: int = 0


TASK_SETTINGS: dict[str, dict[str, Any]] = {"countdown": {"steps": 300, "skill": 0.3}}
"""Where a task needs another warm-up than the default: the command starts from these."""

Progress = Callable[[int, int, float], None]
"""(step, steps, loss)."""


def starter_digest(task: Task, settings: StarterSettings) -> str:
    """Names a starter model: same digest, same weights on the same machine type."""
    whole = blake3.blake3(f"echo2 starter {FORMAT}\x00".encode() + task_digest(task))
    whole.update(msgspec.json.encode(settings, order="sorted"))
    return whole.hexdigest()[:16]


def make_starter(
    task: Task, settings: StarterSettings, folder: Path, progress: Progress = lambda *_: None
) -> bool:
    """Make the model in `folder` unless it is there already.

    Returns: True if it was there.

    Errors:
        UsageError: the task has no demonstrations or no closed alphabet.
        LocalError: the folder cannot be written.
    """
    stamp = folder / "starter.json"
    wanted = {"digest": starter_digest(task, settings)}
    try:
        if json.loads(stamp.read_text(encoding="utf-8")) == wanted:
            check_model_folder(folder)
            return True
    except (OSError, ValueError, UsageError):
        pass
    alphabet = task.alphabet()
    if alphabet is None:
        raise UsageError(
            f"The task '{task.task_id}' has no closed alphabet, so no tiny model can be made.",
            "Give a model folder of your own (model.path).",
        )
    partial = folder.with_name(f"{folder.name}.{os.getpid()}.partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        for name, data in build_character_tokenizer(alphabet).items():
            (partial / name).write_bytes(data)
        _train(task, settings, partial, progress)
        (partial / stamp.name).write_text(json.dumps(wanted), encoding="utf-8")
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    except OSError as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise LocalError(f"The starter model {folder} cannot be written: {error}.") from error
    return False


def _train(task: Task, settings: StarterSettings, folder: Path, progress: Progress) -> None:
    """Supervised warm-up on demonstrations; writes configuration and bfloat16 weights."""
    import torch

    codec = TokenCodec.load(folder)
    torch.manual_seed(settings.seed)
    model = _model(codec.vocabulary, settings)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    rng = random.Random(settings.seed)
    for step in range(settings.steps):
        rate = min(1.0, (step + 1) / (_WARM_UP_SHARE * settings.steps))
        for group in optimizer.param_groups:
            group["lr"] = settings.lr * rate
        first = step * settings.batch
        ids_BT, labels_BT = _demonstrations(
            task, codec, range(first, first + settings.batch), rng, settings.skill
        )
        logits_BTV = model(input_ids=ids_BT[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits_BTV.flatten(0, 1), labels_BT[:, 1:].flatten(), ignore_index=_IGNORED
        )
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        progress(step + 1, settings.steps, float(loss.detach()))
    model.to(torch.bfloat16).save_pretrained(folder)


def _model(vocabulary: int, settings: StarterSettings) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=vocabulary,
            hidden_size=settings.hidden,
            intermediate_size=settings.intermediate,
            num_hidden_layers=settings.layers,
            num_attention_heads=settings.heads,
            num_key_value_heads=settings.kv_heads,
            head_dim=settings.head_dim,
            max_position_embeddings=settings.positions_max,
            tie_word_embeddings=True,
            eos_token_id=_EOS,
            pad_token_id=_PAD,
            bos_token_id=None,
        )
    )


def _demonstrations(
    task: Task, codec: TokenCodec, indices: range, rng: random.Random, skill: float
) -> tuple[Tensor, Tensor]:
    """Token ids and labels, int64[B, T], padded on the right; labels only on the answer."""
    import torch

    rows: list[tuple[list[int], list[int]]] = []
    for index in indices:
        item = task.item(_PROMPT_SEED, index)
        answer = task.demonstration(item, rng, skill=skill)
        if answer is None:
            raise UsageError(
                f"The task '{task.task_id}' has no demonstrations, so no tiny model can be made.",
                "Give a model folder of your own (model.path).",
            )
        prompt_ids = unpack_ids(codec.encode_prompt(item.prompt))
        rows.append((prompt_ids, [*unpack_ids(codec.encode_prompt(answer)), _EOS]))
    width = max(len(prompt) + len(answer) for prompt, answer in rows)
    ids_BT = torch.full((len(rows), width), _PAD)
    labels_BT = torch.full((len(rows), width), _IGNORED)
    for row, (prompt_ids, answer_ids) in enumerate(rows):
        end = len(prompt_ids) + len(answer_ids)
        ids_BT[row, :end] = torch.tensor(prompt_ids + answer_ids)
        labels_BT[row, len(prompt_ids) : end] = torch.tensor(answer_ids)
    return ids_BT, labels_BT


def main(argv: Sequence[str] | None = None) -> int:
    """The command; exit codes as in `echo2_mesh.errors`."""
    parser = argparse.ArgumentParser(
        prog="python -m echo2_node.learner.starter",
        description="Make a tiny model for a task (cached).",
    )
    parser.add_argument("--task", required=True, help="task id, e.g. sort_digits")
    parser.add_argument(
        "--args", default="{}", help="the task's arguments as JSON, as in [task.args]"
    )
    parser.add_argument("--out", required=True, type=Path, help="model folder to make")
    parser.add_argument(
        "--settings",
        default="{}",
        help='of the model and its warm-up, as JSON, e.g. {"steps": 100}',
    )
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default 2)")
    chosen = parser.parse_args(argv)
    started_s = told_s = time.monotonic()

    def tell(step: int, steps: int, loss: float) -> None:
        nonlocal told_s
        if step == steps or time.monotonic() - told_s >= PROGRESS_INTERVAL_S:
            told_s = time.monotonic()
            _say({"step": step, "steps": steps, "loss": round(loss, 4)})

    try:
        task = make_task(chosen.task, msgspec.json.decode(chosen.args, type=dict[str, Any]))
        given = msgspec.json.decode(chosen.settings, type=dict[str, Any])
        settings = msgspec.convert(TASK_SETTINGS.get(chosen.task, {}) | given, StarterSettings)
        _say({"step": 0, "steps": settings.steps})
        _use_threads(chosen.threads)
        cached = make_starter(task, settings, chosen.out, tell)
    except Echo2Error as error:
        _say({"error": error.what, "hint": error.hint})
        return error.exit_code
    except msgspec.MsgspecError as error:
        _say({"error": f"The arguments are not legal: {error}.", "hint": ""})
        return UsageError.exit_code
    seconds = round(time.monotonic() - started_s, 2)
    _say({"folder": str(chosen.out), "cached": cached, "seconds": seconds})
    return 0


def _use_threads(count: int) -> None:
    os.environ["OMP_NUM_THREADS"] = str(max(1, count))
    # Threads that wait by spinning make a busy host many times slower.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    import torch

    torch.set_num_threads(max(1, count))


def _say(line: dict[str, object]) -> None:
    """One JSON line for a program that reads along, words for a person at a terminal."""
    sys.stdout.write(_in_words(line) if sys.stdout.isatty() else json.dumps(line) + "\n")
    sys.stdout.flush()


def _in_words(line: dict[str, object]) -> str:
    if "error" in line:
        return f"error: {line['error']}\n{line['hint']}\n"
    if "folder" in line:
        made = "was there already" if line["cached"] else f"was made in {line['seconds']} s"
        return f"\nThe model in {line['folder']} {made}.\n"
    loss = f", loss {line['loss']}" if "loss" in line else ""
    return f"\rwarm-up: step {line['step']}/{line['steps']}{loss}   "


if __name__ == "__main__":
    sys.exit(main())
