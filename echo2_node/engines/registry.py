"""Engine names to loaders; nothing is imported until an engine is asked for by name.

Called by `engines.worker` in the child, and by the command line to refuse a typo early.
"""

from __future__ import annotations

import difflib
import importlib

import msgspec

from echo2_mesh.errors import UsageError
from echo2_node.engines.protocol import Engine

_MODULES = {
    "torch": "echo2_node.engines.torch_engine",
    "vllm": "echo2_node.engines.vllm_engine",
    "fake": "echo2_node.engines.fake",
}
ENGINE_NAMES = tuple(_MODULES)


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a loader gets. Plain values: they travel to the child on a pipe."""

    model_folder: str
    """config.json, generation_config.json and the tokenizer; no weights are read from it."""
    store_dir: str
    """The chunk store that `install` reads; opened read-only."""
    device: str = "auto"
    dtype: str = "auto"
    threads: int = 0
    sequences_max: int = 64


def check_engine_name(name: str) -> str:
    """`name`, if there is such an engine.

    Raises:
        UsageError: there is none; names the nearest.
    """
    if name in _MODULES:
        return name
    near = difflib.get_close_matches(name, _MODULES, n=1)
    raise UsageError(
        f"There is no engine '{name}'.",
        f"Did you mean '{near[0]}'?" if near else f"Engines: {', '.join(_MODULES)}.",
    )


def load_engine(name: str, settings: EngineSettings) -> Engine:
    """Import and build an engine; it has no weights until the first `install`.

    Raises:
        UsageError: no such engine, not installable here, or the model does not fit it.
        LocalError: this host cannot run it.
    """
    module = importlib.import_module(_MODULES[check_engine_name(name)])
    engine: Engine = module.load(settings)
    return engine
