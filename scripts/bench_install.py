#!/usr/bin/env python3
"""How long does generation stand still for a new version?

Makes a 135M-parameter model (SmolLM2's shape, random weights) in the published dtype and a chain
of versions that each move a share of the weights to a neighbouring value, as a reinforcement
learning step does. The torch engine on the CPU takes the first version whole, then `--versions` of
them by what differs while nothing runs, and as many while it generates `--sequences` sequences.
Beside it, in the same run, what there is without any of this: the folder of that version read
again with `from_pretrained`, in the engine's dtype. The bars compare that with the pause, idle and
generating; that only what differs was written, and that at the end the weights are those of the
folder, bit for bit, are bars too. Progress on standard error, one JSON object as the last line of
standard output; exits 0 whether or not a bar is met.

  scripts/bench_install.py [--share 0.01] [--versions 5] [--threads 1] [--sequences 4]
"""

from __future__ import annotations

import argparse
import copy
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("ECHO2_VENV") or ROOT / ".venv") / "bin" / "python"
if Path(sys.prefix) != PYTHON.parents[1] and PYTHON.exists():
    os.execv(PYTHON, [str(PYTHON), *sys.argv])

import blake3  # noqa: E402
import numpy as np  # noqa: E402
import torch  # noqa: E402
from bars import at_least, at_most, emit, ratio  # noqa: E402
from transformers import AutoModelForCausalLM, LlamaConfig  # noqa: E402

from echo2_mesh import limits  # noqa: E402
from echo2_mesh.chunks import ChunkStore  # noqa: E402
from echo2_mesh.identity import Identity  # noqa: E402
from echo2_mesh.wire.codec import seal  # noqa: E402
from echo2_mesh.wire.messages import (  # noqa: E402
    Manifest,
    Probe,
    Sampling,
    TaskSpec,
    TensorSpan,
)
from echo2_mesh.wire.types import ChunkKind, Digest, PolicyVersion  # noqa: E402
from echo2_node.engines.protocol import GenerationRequest, InstallReport  # noqa: E402
from echo2_node.engines.registry import EngineSettings, load_engine  # noqa: E402
from echo2_node.engines.torch_engine import TorchEngine  # noqa: E402
from echo2_node.tokens import build_character_tokenizer  # noqa: E402

SHAPE: dict[str, Any] = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "initializer_range": 0.04,
}
PROBE_TOKENS = 32
PROMPT_TOKENS = 64
RATIO_MIN = 10.0


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


class Versions:
    """A model in bfloat16, published again and again with a share of its weights moved."""

    def __init__(self, folder: Path, share: float) -> None:
        self.folder = folder / "model"
        self.store = ChunkStore(folder / "chunks")
        self.share = share
        self.moved = 0
        self._identity = Identity.generate()
        self._random = np.random.default_rng(5)
        torch.manual_seed(1)
        config = LlamaConfig(**SHAPE, architectures=["LlamaForCausalLM"])
        self.module = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
        self.module.tie_weights()
        self.parameters = sum(p.numel() for p in self.module.parameters())
        self.save()

    def save(self) -> None:
        """What `from_pretrained` reads, and the engine's config and tokenizer."""
        self.module.save_pretrained(self.folder)
        for name, data in build_character_tokenizer("0123456789").items():
            (self.folder / name).write_bytes(data)

    def step(self) -> None:
        """One step up or down in bfloat16 for `share` of all weights."""
        self.moved = 0
        for parameter in self.module.parameters():
            bits = parameter.data.view(torch.int16).view(-1)
            count = int(self._random.binomial(len(bits), self.share))
            places = torch.from_numpy(self._random.choice(len(bits), count, replace=False))
            steps = torch.from_numpy(self._random.choice([-1, 1], count)).short()
            # Below zero's pattern lie the NaNs.
            bits[places] += torch.where(bits[places] & 0x7FFF == 0, 1, steps).short()
            self.moved += count

    @torch.no_grad()
    def publish(self, version: int) -> Digest:
        """The module's weights as a version in the store, cut as a learner cuts them."""
        tensors, chunks, offset_bytes = [], [], 0
        whole = blake3.blake3()
        for name, parameter in self.module.named_parameters():
            data = parameter.data.view(torch.uint8).numpy().reshape(-1)
            tensors.append(
                TensorSpan(
                    name=name,
                    dtype="BF16",
                    shape=tuple(parameter.shape),
                    offset_bytes=offset_bytes,
                    size_bytes=data.nbytes,
                )
            )
            offset_bytes += data.nbytes
            whole.update(data.data)
            for start in range(0, data.nbytes, limits.CHUNK_SIZE_BYTES_DEFAULT):
                piece = data[start : start + limits.CHUNK_SIZE_BYTES_DEFAULT]
                chunks.append(self.store.add(ChunkKind.FULL, piece.data))
        ids = [(1 + 7919 * index) % SHAPE["vocab_size"] for index in range(PROBE_TOKENS)]
        exact = copy.deepcopy(self.module).float()
        logits = exact(torch.tensor([ids]), use_cache=False).logits[0, :-1]
        chosen = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        nothing = Digest(bytes(32))
        manifest = Manifest(
            run_id="bench-install",
            version=PolicyVersion(version),
            chunks=tuple(chunks),
            tensors=tuple(tensors),
            tied=(("lm_head.weight", "model.embed_tokens.weight"),),
            files=(),
            state_digest=Digest(whole.digest()),
            tokenizer_digest=nothing,
            template_digest=nothing,
            task=TaskSpec(task_id="none", args_json="{}", digest=nothing),
            probe=Probe(
                token_ids=np.array(ids, "<i4").tobytes(), logprobs=chosen.numpy().tobytes()
            ),
        )
        node, sign = self._identity.node, self._identity.sign
        sealed = seal(manifest, run_id="bench-install", sender=node, sign=sign)
        return self.store.add(ChunkKind.MANIFEST, sealed).digest


def open_engine(versions: Versions, threads: int) -> TorchEngine:
    settings = EngineSettings(
        model_folder=str(versions.folder),
        store_dir=str(versions.store.folder),
        device="cpu",
        dtype="float32",
        threads=threads,
        sequences_max=16,
    )
    engine = load_engine("torch", settings)
    assert isinstance(engine, TorchEngine)
    return engine


def submit(engine: TorchEngine, sequences: int) -> None:
    prompt = np.arange(2, 2 + PROMPT_TOKENS, dtype="<i4").tobytes()
    engine.submit(
        GenerationRequest(
            request_id=str(time.perf_counter_ns()),
            prompt_ids=prompt,
            indices=tuple(range(sequences)),
            sampling=Sampling(tokens_max=1500, seed=1),
        )
    )


def install_while_generating(
    engine: TorchEngine, digest: Digest, sequences: int
) -> tuple[InstallReport, float, float]:
    """(report, seconds of preparing, slowest token meanwhile over the usual one).

    As `engines.worker` does it: another thread prepares while tokens are decoded. With no
    `sequences` the engine is idle; otherwise they are running when the version is installed.
    """
    if sequences and not engine.busy():
        submit(engine, sequences)
    usual_s, meanwhile_s = [], []
    for _ in range(5 if sequences else 0):
        began_s = time.perf_counter()
        engine.step()
        usual_s.append(time.perf_counter() - began_s)
    began_s = time.perf_counter()
    thread = threading.Thread(target=engine.prepare, args=(digest,))
    thread.start()
    while sequences and thread.is_alive():
        step_s = time.perf_counter()
        engine.step()
        meanwhile_s.append(time.perf_counter() - step_s)
    thread.join()
    prepare_s = time.perf_counter() - began_s
    if sequences and not engine.busy():
        submit(engine, sequences)
        engine.step()
    report = engine.install(digest)
    slowest = max(meanwhile_s) / statistics.median(usual_s) if meanwhile_s else 1.0
    return report, prepare_s, slowest


def reload_s(folder: Path) -> float:
    """Seconds of reading the folder again, as the engine holds it; the file is in the cache."""
    began_s = time.perf_counter()
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    return time.perf_counter() - began_s


def figures(reports: list[tuple[InstallReport, float, float]]) -> dict[str, Any]:
    def median(values: list[float]) -> float:
        return round(statistics.median(values), 5)

    return {
        "pause_s": median([report.pause_s for report, _, _ in reports]),
        "pause_s_min": round(min(report.pause_s for report, _, _ in reports), 5),
        "pause_s_max": round(max(report.pause_s for report, _, _ in reports), 5),
        "probe_s": median([report.probe_s for report, _, _ in reports]),
        "total_s": median([report.total_s for report, _, _ in reports]),
        "prepare_s": median([prepare_s for _, prepare_s, _ in reports]),
        "slowest_token_meanwhile": median([slowest for _, _, slowest in reports]),
        "changed": reports[-1][0].changed,
    }


def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    torch.set_num_threads(options.threads)
    versions = Versions(folder, options.share)
    say(f"{versions.parameters / 1e6:.1f} million parameters, {options.threads} threads")
    engine = open_engine(versions, options.threads)
    first, prepare_s, slowest = install_while_generating(engine, versions.publish(0), 0)
    result: dict[str, Any] = {"full": figures([(first, prepare_s, slowest)])}
    say(f"full install: {result['full']}")
    number, digest, seconds = 0, Digest(b""), [reload_s(versions.folder)]
    result["not_by_difference"] = 0
    for name, sequences in (("patch", 0), ("patch_generating", options.sequences)):
        reports = []
        for _ in range(options.versions):
            number += 1
            versions.step()
            digest = versions.publish(number)
            reports.append(install_while_generating(engine, digest, sequences))
            # Between the installs, so that a busy host treats both alike.
            seconds.append(reload_s(versions.folder))
            result["not_by_difference"] += reports[-1][0].changed != versions.moved
        result[name] = figures(reports)
        say(f"{name}, {sequences} sequences running: {result[name]}")
    versions.save()
    result["reload_s"] = {"median": statistics.median(seconds), "min": min(seconds)}
    say(f"reloading the folder: {result['reload_s']}")
    fresh = AutoModelForCausalLM.from_pretrained(versions.folder, dtype=torch.float32)
    installed = engine._model._module.state_dict()
    result["exact"] = all(
        torch.equal(tensor.view(torch.int32), installed[name].view(torch.int32))
        for name, tensor in fresh.state_dict().items()
    )
    return result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--share", type=float, default=0.01, help="weights that each version moves")
    parser.add_argument("--versions", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=4, help="running during half of them")
    options = parser.parse_args()
    if min(options.versions, options.sequences) < 1:
        parser.error("--versions and --sequences are 1 or more")
    with tempfile.TemporaryDirectory(prefix="echo2-bench-") as folder:
        result = measure(Path(folder), options)
    result["load_1_minute"] = round(os.getloadavg()[0], 1)
    result["memory_mib_max"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    # The best of several each: a busy host adds to both, and more to the longer one.
    reloading_s = result["reload_s"]["min"]
    idle = ratio(reloading_s, result["patch"]["pause_s_min"])
    generating = ratio(reloading_s, result["patch_generating"]["pause_s_min"])
    bars = [
        at_least("reload_over_pause_idle", idle, RATIO_MIN, "ratio"),
        at_least("reload_over_pause_generating", generating, RATIO_MIN, "ratio"),
        at_most("not_by_difference", result["not_by_difference"], 0, "installs"),
        at_least("exact", result["exact"], 1, "bool"),
    ]
    emit("install", bars, **result)


if __name__ == "__main__":
    main()
