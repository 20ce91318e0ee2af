"""Is this folder a causal language model that can be trained? Asked before anything heavy loads.

Reads configuration and tensor headers with plain Python, so `learn --dry-run` and a learner with
a typo answer in milliseconds. It never loads a weight; `learner.models` does.
"""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import msgspec

from echo2_mesh.errors import LocalError, UsageError
from echo2_node.learner import tensorfile

TRAVELLING_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)
"""What goes with the weights wherever a folder is complete without them."""
_FOLDER_FORM = (
    "A model folder holds config.json, one or more *.safetensors files and tokenizer.json, "
    "as `save_pretrained` writes them."
)
_TINY = "`python -m echo2_node.learner.starter --help` makes a tiny one for a task."
_INDEX = "model.safetensors.index.json"


class ModelFolder(msgspec.Struct, frozen=True, kw_only=True):
    """What a legal folder says of itself."""

    path: Path
    architecture: str
    vocabulary: int
    parameters: int
    """Stored elements; tied tensors count once."""
    dtypes: tuple[str, ...]
    weight_files: tuple[Path, ...]


def check_model_folder(path: Path) -> ModelFolder:
    """Read a folder's configuration and tensor headers.

    Raises:
        UsageError: missing, not a causal language model, a weight or tokenizer file missing or
            truncated; one sentence with the file in it.
    """
    if not path.is_dir():
        raise UsageError(f"There is no model folder at {path}.", f"{_FOLDER_FORM} {_TINY}")
    config = _json(path / "config.json")
    architecture = _architecture(path, config)
    if not (path / "tokenizer.json").is_file():
        raise UsageError(
            f"The model folder {path} has no tokenizer.json.",
            "Save a fast tokenizer into it with `AutoTokenizer.from_pretrained(...)"
            ".save_pretrained(...)`.",
        )
    _json(path / "tokenizer.json")
    parameters, dtypes = 0, set()
    files = _weight_files(path)
    for file in files:
        try:
            header = tensorfile.read_header(file)
        except LocalError as error:
            raise UsageError(error.what, "Copy or download this file again.") from error
        for place in header.places.values():
            parameters += prod(place.shape)
            dtypes.add(place.dtype)
    if parameters == 0:
        raise UsageError(f"The weight files of {path} hold no tensor.", _FOLDER_FORM)
    text = config.get("text_config")
    vocabulary = config.get("vocab_size") or (text or {}).get("vocab_size") or 0
    return ModelFolder(
        path=path,
        architecture=architecture,
        vocabulary=int(vocabulary),
        parameters=parameters,
        dtypes=tuple(sorted(dtypes)),
        weight_files=files,
    )


def _architecture(path: Path, config: dict[str, Any]) -> str:
    names = config.get("architectures") or []
    architecture = str(names[0]) if names else ""
    if not architecture.endswith(("ForCausalLM", "LMHeadModel")):
        raise UsageError(
            f"The model in {path} is {architecture or 'of no named architecture'}, not a causal "
            "language model.",
            "Choose a folder whose config.json names an architecture ending in ForCausalLM.",
        )
    return architecture


def _weight_files(path: Path) -> tuple[Path, ...]:
    if (path / _INDEX).is_file():
        named = set(_json(path / _INDEX).get("weight_map", {}).values())
        files = tuple(sorted(path / str(name) for name in named))
    elif (path / "model.safetensors").is_file():
        files = (path / "model.safetensors",)
    else:
        files = ()
    if not files:
        raise UsageError(f"The model folder {path} has no model.safetensors.", _FOLDER_FORM)
    for file in files:
        if file.parent != path or not file.is_file():
            raise UsageError(
                f"The model folder {path} lacks the weight file {file.name}.",
                "Copy or download it again.",
            )
    return files


def _json(path: Path) -> dict[str, Any]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=dict[str, Any])
    except FileNotFoundError as error:
        raise UsageError(
            f"The model folder {path.parent} has no {path.name}.", _FOLDER_FORM
        ) from error
    except OSError as error:
        raise UsageError(f"The model file {path} cannot be read: {error}.") from error
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise UsageError(
            f"The model file {path} is not JSON: {error}.", "Copy or download it again."
        ) from error
