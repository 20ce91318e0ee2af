"""Real `echo2-node` processes in one folder, and what a test asks of them.

`World.learn` and `World.join` start nodes; a `Node` is one process with its state folder: its
status document, metrics, log, and the ways to end it. Everything dies with the world. A node may
be started with a prefix (`ip netns exec NAME`), so that it runs on another host of `hosts.py`.
The starting model is written with numpy: no test waits for torch to make one.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tomli_w
from safetensors.numpy import save_file

from echo2_node.engines.fake import FAKE_VARIABLE
from echo2_node.tokens import build_character_tokenizer

DIGITS = "0123456789="
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
POLL_S = 0.02
START_TIMEOUT_S = 90.0
EXIT_TIMEOUT_S = 45.0
FAKE = {"step_s": 0.01, "skill_start": 0.6}
"""Slow enough that a run is still there when a test wants to disturb it."""


def write_small_model(
    folder: Path, *, hidden: int = 32, layers: int = 1, alphabet: str = DIGITS
) -> Path:
    """A random Qwen3-architecture causal LM of a few thousand parameters, float32."""
    vocabulary, head, heads = len(alphabet) + 2, 8, max(1, hidden // 8)
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "dtype": "float32",
    }
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> Any:
        return (rng.standard_normal(shape) * 0.08).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": matrix(vocabulary, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}."
        for name, shape in {
            "self_attn.q_proj": (heads * head, hidden),
            "self_attn.k_proj": (heads * head, hidden),
            "self_attn.v_proj": (heads * head, hidden),
            "self_attn.o_proj": (hidden, heads * head),
            "mlp.gate_proj": (2 * hidden, hidden),
            "mlp.up_proj": (2 * hidden, hidden),
            "mlp.down_proj": (hidden, 2 * hidden),
        }.items():
            tensors[f"{at}{name}.weight"] = matrix(*shape)
        for name, size in {
            "input_layernorm": hidden,
            "post_attention_layernorm": hidden,
            "self_attn.q_norm": head,
            "self_attn.k_norm": head,
        }.items():
            tensors[f"{at}{name}.weight"] = np.ones(size, np.float32)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 1}))
    for name, data in build_character_tokenizer(alphabet).items():
        (folder / name).write_bytes(data)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_run(path: Path, model: Path, **sections: Mapping[str, Any]) -> Path:
    """A run file for small, fast steps on loopback; `sections` win key by key."""
    settings: dict[str, dict[str, Any]] = {
        "run": {"name": "e2e", "seed": 1, "steps": 8},
        "model": {"path": str(model)},
        "task": {"id": "sort_digits"},
        "rollout": {
            "groups_per_step": 4,
            "group_size": 4,
            "tokens_max": 8,
            "lease_ttl_s": 20.0,
        },
        "staleness": {"limit_steps": 2},
        "learner": {"lr": 1e-4, "device": "cpu", "threads": 1, "checkpoint_every_steps": 4},
        "mesh": {"listen": [LOOPBACK], "mdns": False, "chunk_size_bytes": 8192},
    }
    for section, values in sections.items():
        settings.setdefault(section, {}).update(values)
    path.write_text(tomli_w.dumps(settings))
    return path


class Node:
    """One `echo2-node` process; started by `World`."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        state_dir: Path,
        log_path: Path,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.name, self.state_dir, self.log_path = name, state_dir, log_path
        variables = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
        variables.pop("ECHO2_STATE_DIR", None)
        command = [sys.executable, "-m", "echo2_node.cli", *map(str, arguments)]
        with log_path.open("ab") as log:
            self.process = subprocess.Popen(
                [*prefix, *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**variables, **(environment or {})},
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def node(self) -> str:
        """Its node id, once it has written a status document."""
        return str(self.status()["node"])

    def status(self) -> dict[str, Any]:
        """The status document, empty before there is one."""
        try:
            document: dict[str, Any] = json.loads((self.state_dir / "status.json").read_text())
        except (OSError, ValueError):
            return {}
        return document

    def own_row(self) -> dict[str, Any]:
        """What it says of itself in the members' table."""
        document = self.status()
        rows = [row for row in document.get("members", ()) if row["node"] == document["node"]]
        return dict(rows[0]) if rows else {}

    def metrics(self) -> list[dict[str, Any]]:
        """Whole lines of metrics.jsonl; a learner's without its events."""
        found = []
        with contextlib.suppress(OSError):
            for line in (self.state_dir / "metrics.jsonl").read_text().splitlines():
                with contextlib.suppress(ValueError):
                    found.append(json.loads(line))
        steps = [line for line in found if "step" in line]
        return steps or found

    def step(self) -> int:
        """The learner's last step by its metrics; 0 before the first."""
        return max((line["step"] for line in self.metrics()), default=0)

    def text(self) -> str:
        """Everything it has printed."""
        return self.log_path.read_text(errors="replace")

    def child(self, module: str) -> psutil.Process | None:
        """The living child process that runs `module`."""
        with contextlib.suppress(psutil.Error):
            for process in psutil.Process(self.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    zombie = process.status() == psutil.STATUS_ZOMBIE
                    if not zombie and module in process.cmdline():
                        return process
        return None

    def kill(self) -> None:
        """SIGKILL to the daemon alone, as a crash; waits until it is gone."""
        self.process.kill()
        self.process.wait(EXIT_TIMEOUT_S)

    def terminate(self) -> None:
        self.process.terminate()

    def wait_exit(self, timeout_s: float = EXIT_TIMEOUT_S) -> int:
        """Its exit code; fails the test with its last words if it does not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"{self.name} does not end in {timeout_s} s:\n{self.last_words()}")

    def last_words(self) -> str:
        return "\n".join(self.text().splitlines()[-25:])

    def query(self, statement: str, *arguments: object) -> list[tuple[Any, ...]]:
        """Rows of the learner's ledger, read beside the learner; empty before it exists."""
        path = self.state_dir / "ledger.sqlite"
        if not path.exists():
            return []
        with contextlib.closing(sqlite3.connect(path, timeout=5)) as books:
            try:
                return books.execute(statement, arguments).fetchall()
            except sqlite3.OperationalError:
                return []

    def clear_away(self) -> None:
        """SIGKILL to it and to whatever it started."""
        family = [psutil.Process(self.pid)] if psutil.pid_exists(self.pid) else []
        with contextlib.suppress(psutil.Error):
            family += family[0].children(recursive=True) if family else []
        if self.process.poll() is None or len(family) > 1:
            for member in family:
                with contextlib.suppress(psutil.Error):
                    member.kill()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)


class World:
    """A folder, a model in it, and the nodes of one run."""

    def __init__(self, folder: Path, **model: int) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.model = write_small_model(folder / "model", **model)
        self.nodes: list[Node] = []

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        prefix: Sequence[str] = (),
        environment: Mapping[str, str] | None = None,
    ) -> Node:
        """Start `echo2-node ARGUMENTS --state-dir FOLDER/NAME`."""
        state_dir = self.folder / name
        node = Node(
            name,
            [*arguments, "--state-dir", str(state_dir)],
            state_dir=state_dir,
            log_path=self.folder / f"{name}.log",
            prefix=prefix,
            environment=environment,
        )
        self.nodes.append(node)
        return node

    def learn(
        self,
        *overrides: str,
        name: str = "learner",
        resume: bool = False,
        prefix: Sequence[str] = (),
        wait: bool = True,
        **sections: Mapping[str, Any],
    ) -> Node:
        """A learner; returns when its ticket lies there and it is publishing or further."""
        run = self.folder / f"{name}.toml"
        if not resume or sections:
            write_run(run, self.model, **sections)
        ticket = self.folder / name / "ticket.txt"
        ticket.unlink(missing_ok=True)
        flags = ("--resume",) if resume else ()
        node = self.start(name, ["learn", str(run), *overrides, *flags], prefix=prefix)
        if wait:
            self.until(ticket.exists, "a ticket", timeout_s=START_TIMEOUT_S, alive=(node,))
        return node

    def join(
        self,
        learner: Node,
        name: str,
        *,
        listen: str = LOOPBACK,
        engine: str = "fake",
        fake: Mapping[str, Any] | None = None,
        prefix: Sequence[str] = (),
        options: Sequence[str] = (),
        ticket: Path | None = None,
    ) -> Node:
        """An actor of `learner`'s run; returns at once. `listen=""`: it only dials out."""
        ticket = ticket or learner.state_dir / "ticket.txt"
        arguments = ["join", str(ticket), "--name", name, "--engine", engine, "--no-mdns"]
        arguments += ["--device", "cpu", "--threads", "1", "--listen", listen, *options]
        environment = {FAKE_VARIABLE: json.dumps({**FAKE, **(fake or {})})}
        return self.start(name, arguments, prefix=prefix, environment=environment)

    def until(
        self,
        true: Callable[[], Any],
        what: str,
        *,
        timeout_s: float = 60.0,
        alive: Sequence[Node] = (),
        poll_s: float = POLL_S,
    ) -> Any:
        """Wait for a condition and return its value; fails with the logs where it never holds."""
        deadline_s = time.monotonic() + timeout_s
        while not (value := true()):
            for node in alive:
                if node.process.poll() is not None:
                    pytest.fail(f"{node.name} ended before {what}:\n{node.last_words()}")
            if time.monotonic() > deadline_s:
                words = "\n".join(f"--- {n.name}\n{n.last_words()}" for n in self.nodes)
                pytest.fail(f"waited {timeout_s} s for {what}\n{words}")
            time.sleep(poll_s)
        return value

    def verify(self, learner: Node) -> dict[str, Any]:
        """`echo2-node ledger verify`, as the document it prints; asserts that it passes."""
        done = run_cli("ledger", "verify", str(learner.state_dir), "--json")
        assert done.returncode == 0, done.stdout + done.stderr
        document: dict[str, Any] = json.loads(done.stdout)
        assert document["ok"], document["problems"]
        return document


def run_cli(
    *arguments: object, timeout_s: float = 60.0, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """`echo2-node ARGUMENTS` to its end."""
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **(environment or {})}
    variables.pop("ECHO2_STATE_DIR", None)
    return subprocess.run(
        [sys.executable, "-m", "echo2_node.cli", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout_s,
        env=variables,
    )


@contextlib.contextmanager
def open_world(folder: Path, **model: int) -> Iterator[World]:
    """A world whose processes are all gone when the block ends, however it ends.

    Args:
        model: `hidden` and `layers` of `write_small_model`.
    """
    world = World(folder, **model)
    try:
        yield world
    finally:
        for node in reversed(world.nodes):
            node.clear_away()
