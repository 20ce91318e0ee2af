import json
import os
import subprocess
import sys

import pytest

from echo2_mesh.errors import UsageError
from echo2_node.learner.modelfolder import check_model_folder
from echo2_node.learner.tensorfile import Entry, write_tensors


@pytest.fixture
def folder(tmp_path):
    """A legal folder without any model behind it: headers are all that is read."""
    path = tmp_path / "model"
    path.mkdir()
    config = {"architectures": ["Qwen3ForCausalLM"], "vocab_size": 64}
    (path / "config.json").write_text(json.dumps(config))
    (path / "tokenizer.json").write_text("{}")
    entry = Entry(name="w", dtype="BF16", shape=(4, 8), read=lambda: memoryview(bytes(64)))
    with (path / "model.safetensors").open("wb") as file:
        write_tensors(file, [entry])
    return path


def test_a_legal_folder_says_what_it_holds(folder):
    found = check_model_folder(folder)
    assert found.architecture == "Qwen3ForCausalLM"
    assert (found.parameters, found.vocabulary, found.dtypes) == (32, 64, ("BF16",))


def test_sharded_weights_are_all_looked_at(folder):
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    index = {"weight_map": {"w": "model-1.safetensors", "v": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(UsageError, match=r"lacks the weight file model-2\.safetensors"):
        check_model_folder(folder)


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: os.rename(f, f.with_name("away")), "no model folder"),
        (lambda f: (f / "config.json").unlink(), r"has no config\.json"),
        (lambda f: (f / "config.json").write_text("{"), r"config\.json is not JSON"),
        (lambda f: (f / "config.json").write_text("{}"), "not a causal language model"),
        (
            lambda f: (f / "config.json").write_text('{"architectures": ["BertModel"]}'),
            "BertModel, not a causal",
        ),
        (lambda f: (f / "tokenizer.json").unlink(), r"has no tokenizer\.json"),
        (lambda f: (f / "model.safetensors").unlink(), r"has no model\.safetensors"),
        (lambda f: os.truncate(f / "model.safetensors", 100), r"model\.safetensors is damaged"),
        (lambda f: os.truncate(f / "model.safetensors", 5), r"model\.safetensors is damaged"),
        (lambda f: (f / "model.safetensors").write_bytes(b"x" * 99), "is damaged"),
    ],
)
def test_a_folder_that_cannot_be_trained_is_refused_in_one_sentence(folder, harm, message):
    harm(folder)
    with pytest.raises(UsageError, match=message) as refusal:
        check_model_folder(folder)
    assert refusal.value.hint


def test_checking_a_folder_loads_nothing_heavy():
    program = (
        "import sys, echo2_node.learner.modelfolder, echo2_node.learner.checkpoints, "
        "echo2_node.learner.trainer_process, echo2_node.learner.starter; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
