import json
import random
from typing import ClassVar

import msgspec
import pytest
import torch

from echo2_mesh.errors import UsageError
from echo2_node.learner import starter
from echo2_node.learner.modelfolder import check_model_folder
from echo2_node.learner.starter import StarterSettings, make_starter
from echo2_node.tasks.registry import make_task
from echo2_node.tokens import TokenCodec

QUICK = StarterSettings(hidden=32, layers=1, heads=2, intermediate=64, steps=4, batch=8)


def test_a_starter_is_made_once_for_the_same_settings_and_again_for_others(tmp_path):
    torch.set_num_threads(1)
    task = make_task("sort_digits", {})
    folder, steps = tmp_path / "tiny", []
    assert not make_starter(task, QUICK, folder, lambda step, *_: steps.append(step))
    assert steps == [1, 2, 3, 4]
    weights = (folder / "model.safetensors").read_bytes()
    assert make_starter(task, QUICK, folder)
    other = StarterSettings(hidden=32, layers=1, heads=2, intermediate=64, steps=5, batch=8)
    assert not make_starter(task, other, folder)
    assert (folder / "model.safetensors").read_bytes() != weights
    assert not make_starter(task, QUICK, folder)
    assert (folder / "model.safetensors").read_bytes() == weights, "same settings, same weights"
    assert [path.name for path in tmp_path.iterdir()] == ["tiny"]


def test_a_damaged_starter_is_made_again(tmp_path):
    task = make_task("sort_digits", {})
    make_starter(task, QUICK, tmp_path / "tiny")
    (tmp_path / "tiny" / "model.safetensors").write_bytes(b"cut")
    assert not make_starter(task, QUICK, tmp_path / "tiny")
    check_model_folder(tmp_path / "tiny")


def test_the_labels_are_the_answer_and_its_end_alone(tmp_path):
    task = make_task("sort_digits", {"digits": 3})
    make_starter(task, QUICK, tmp_path / "tiny")
    codec = TokenCodec.load(tmp_path / "tiny")
    ids_BT, labels_BT = starter._demonstrations(task, codec, range(2), random.Random(0), 1.0)
    answer = str(task.item(starter._PROMPT_SEED, 0).answer)
    chosen = labels_BT[0][labels_BT[0] != -100].tolist()
    assert codec.decode(torch.tensor(chosen, dtype=torch.int32).numpy().tobytes()) == answer
    assert chosen[-1] == 1
    assert ids_BT[0][4:].tolist() == chosen


def test_a_task_without_an_alphabet_is_refused(tmp_path):
    class Open(msgspec.Struct, frozen=True):
        task_id: ClassVar[str] = "open"
        version: ClassVar[int] = 1

        def alphabet(self):
            return None

    with pytest.raises(UsageError, match="no closed alphabet"):
        make_starter(Open(), QUICK, tmp_path / "tiny")


def test_the_command_tells_progress_and_errors_as_json_lines(tmp_path, capsys):
    settings = json.dumps({"hidden": 32, "layers": 1, "heads": 2, "steps": 2, "batch": 8})
    out = str(tmp_path / "tiny")
    code = starter.main(["--task", "sort_digits", "--out", out, "--settings", settings])
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert code == 0
    assert lines[0] == {"step": 0, "steps": 2}
    assert lines[-1]["folder"] == out
    assert starter.main(["--task", "sort_digit", "--out", out]) == UsageError.exit_code
    assert "no task" in json.loads(capsys.readouterr().out)["error"]


def test_a_person_at_a_terminal_reads_words():
    assert "step 3/300, loss 2.93" in starter._in_words({"step": 3, "steps": 300, "loss": 2.93})
    assert starter._in_words({"error": "No.", "hint": "Do so."}) == "error: No.\nDo so.\n"
    made = starter._in_words({"folder": "models/x", "cached": False, "seconds": 4.0})
    assert "models/x was made in 4.0 s" in made
