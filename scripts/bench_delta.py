#!/usr/bin/env python3
"""How small and how fast is a lossless patch between two optimiser steps?

Makes a model with the shapes of a 135-million-parameter Llama (or reads a folder), trains it for
some steps with real Adam on noisy gradients over float32 masters, and takes one more step at each
learning rate. Rounded to BF16, cut into data chunks as the learner cuts them, each step is encoded
by this codec in both modes (fast: the default; small: with classes of small weights) and, in the
same run, by the encodings of others and against the entropy of the change. Speeds are bytes of
full weights per second of one thread's processor time, best of fifteen. Every chunk is decoded
and compared, and so are adversarial bit patterns. Progress on standard error; one JSON object as
the last line of standard output; exits 0 whether or not a bar is met.

  scripts/bench_delta.py [--model FOLDER] [--layers 30] [--rates 3e-7,1e-6,3e-6,1e-5]
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PYTHON = Path(os.environ.get("ECHO2_VENV") or ROOT / ".venv") / "bin" / "python"
if Path(sys.prefix) != PYTHON.parents[1] and PYTHON.exists():
    os.execv(PYTHON, [str(PYTHON), *sys.argv])
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
import zstandard  # noqa: E402
from bars import Bar, at_least, at_most, emit, ratio  # noqa: E402

from echo2_mesh.delta.codec import (  # noqa: E402
    CLASSES_FAST,
    CLASSES_SMALL,
    Slice,
    apply_chunk,
    encode_chunk,
)

MIB = 1024 * 1024
BAR_RATE = "1e-6"
BLOCK_ITEMS = 1 << 18
BETA_1, BETA_2 = np.float32(0.9), np.float32(0.999)
SIGNAL = np.float32(0.3)
"""Standard deviation of the persistent part of a gradient; that of its noise is one."""
REPEATS = 15
TIMED_CHUNKS = 24
MODES = {"fast": CLASSES_FAST, "small": CLASSES_SMALL}


def say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def llama_shapes(layers: int) -> Iterator[tuple[tuple[int, ...], float]]:
    """(shape, standard deviation of the weights); 30 layers make 134.5 million parameters."""
    yield (49152, 576), 0.05
    for layer in range(layers):
        scale = 0.03 + 0.02 * layer / layers
        yield from (((576, 576), scale), ((192, 576), scale), ((192, 576), scale))
        yield from (((576, 576), scale), ((1536, 576), scale), ((1536, 576), scale))
        yield from (((576, 1536), scale), ((576,), 0.0), ((576,), 0.0))
    yield (576,), 0.0


def random_weights(layers: int, seed: int) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    rng = np.random.default_rng(seed)
    for shape, scale in llama_shapes(layers):
        count = int(np.prod(shape))
        weights = rng.standard_normal(count, dtype=np.float32)
        yield shape, weights * np.float32(scale or 0.1) + np.float32(0.0 if scale else 1.0)


def folder_weights(folder: Path) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    from safetensors import safe_open

    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor = file.get_tensor(name).float()
                yield tuple(tensor.shape), tensor.numpy().ravel().copy()


def bf16(weights: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even."""
    bits = weights.view(np.uint32)
    return ((bits + np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))) >> 16).astype("<u2")


class Trained:
    """The rounded weights before one more step, and after it at each rate, all in a row."""

    def __init__(
        self,
        weights: Iterator[tuple[tuple[int, ...], np.ndarray]],
        rates: list[str],
        *,
        warm_up: int,
        seed: int,
    ) -> None:
        self.rng = np.random.default_rng(seed)
        self.pool = self.rng.standard_normal(1 << 23, dtype=np.float32)
        self.warm_up = warm_up
        self.shapes: list[tuple[int, ...]] = []
        before: list[np.ndarray] = []
        after: dict[str, list[np.ndarray]] = {rate: [] for rate in rates}
        for shape, tensor in weights:
            self.shapes.append(shape)
            for start in range(0, len(tensor), BLOCK_ITEMS):
                block = tensor[start : start + BLOCK_ITEMS]
                update = self._train(block)
                before.append(bf16(block))
                for rate in rates:
                    after[rate].append(bf16(block - np.float32(rate) * update))
        self.before = np.concatenate(before)
        self.after = {rate: np.concatenate(blocks) for rate, blocks in after.items()}

    def _noise(self, count: int) -> np.ndarray:
        start = int(self.rng.integers(0, len(self.pool) - count + 1))
        return self.pool[start : start + count]

    def _train(self, weights: np.ndarray) -> np.ndarray:
        """Warm up in place at 1e-6; returns the next update at a rate of one."""
        count = len(weights)
        signal = SIGNAL * self._noise(count)
        first, second = np.zeros(count, np.float32), np.zeros(count, np.float32)
        update = first
        for step in range(1, self.warm_up + 2):
            gradient = signal + self._noise(count)
            first = BETA_1 * first + (1 - BETA_1) * gradient
            second = BETA_2 * second + (1 - BETA_2) * gradient * gradient
            update = first / (1 - BETA_1**step)
            update /= np.sqrt(second / (1 - BETA_2**step)) + np.float32(1e-8)
            if step <= self.warm_up:
                weights -= np.float32(1e-6) * update
        return update


def cut(shapes: list[tuple[int, ...]], chunk_size_bytes: int) -> list[tuple[int, list[Slice]]]:
    """(first byte, slices) of each data chunk: at tensors' borders, large tensors sliced."""
    chunks: list[tuple[int, list[Slice]]] = []
    at = 0
    held: list[Slice] = []
    for shape in shapes:
        size = 2 * int(np.prod(shape))
        if held and sum(part.size_bytes for part in held) + size > chunk_size_bytes:
            chunks.append((at, held))
            at, held = at + sum(part.size_bytes for part in held), []
        if size <= chunk_size_bytes:
            held = [*held, Slice(size, 2)]
            continue
        for start in range(0, size, chunk_size_bytes):
            part = Slice(min(chunk_size_bytes, size - start), 2)
            chunks.append((at, [part]))
            at += part.size_bytes
    return [*chunks, (at, held)] if held else chunks


def ours(
    before: np.ndarray, after: np.ndarray, chunks: list[tuple[int, list[Slice]]], classes: int
) -> dict[str, float]:
    """Size of all chunks, exactness of all, speed on some."""
    base, new = before.view(np.uint8), after.view(np.uint8)
    size = wrong = 0
    encode_s, apply_s, timed = [], [], 0
    every = max(1, len(chunks) // TIMED_CHUNKS)
    for index, (start, slices) in enumerate(chunks):
        stop = start + sum(part.size_bytes for part in slices)
        # Copies: data chunks are files of their own.
        old, fresh = base[start:stop].copy(), new[start:stop].copy()
        encode_times, apply_times = [], []
        measured = index % every == 0
        for _ in range(REPEATS if measured else 1):
            marks = [time.thread_time()]
            encoded = encode_chunk(old, fresh, slices, classes=classes)
            marks.append(time.thread_time())
            rebuilt = apply_chunk(old, encoded)
            marks.append(time.thread_time())
            encode_times.append(marks[1] - marks[0])
            apply_times.append(marks[2] - marks[1])
        size += len(encoded)
        wrong += not np.array_equal(rebuilt, fresh)
        if measured:
            timed += stop - start
            encode_s.append(encode_times)
            apply_s.append(apply_times)

    def speed(times: list[list[float]], pick: Any) -> float:
        return round(timed / sum(float(pick(row)) for row in times) / 1e9, 2)

    return {
        "size_bytes": size,
        "wrong_chunks": wrong,
        "encode_gb_per_s": speed(encode_s, min),
        "encode_median_gb_per_s": speed(encode_s, np.median),
        "apply_gb_per_s": speed(apply_s, min),
        "apply_median_gb_per_s": speed(apply_s, np.median),
    }


def packed(*parts: np.ndarray) -> int:
    joined = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts])
    return len(zstandard.ZstdCompressor(level=1).compress(joined.data))


def others(before: np.ndarray, after: np.ndarray, shapes: list[tuple[int, ...]]) -> dict[str, int]:
    """Bytes that others' encodings of the same change take."""
    changed = np.flatnonzero(before != after)
    sizes = {"index32_value16": 6 * len(changed), "rows_columns_zstd1": 0, "xor_zstd1": 0}
    start = 0
    for shape in shapes:
        stop = start + int(np.prod(shape))
        first, last = np.searchsorted(changed, [start, stop])
        places = changed[first:last] - start
        # PULSE's layout: row steps in a byte, columns (steps inside a row) and values in two.
        row, column = np.divmod(places, shape[-1] if len(shape) > 1 else stop - start)
        row_step, column_step = np.diff(row, prepend=0), np.diff(column, prepend=0)
        sizes["rows_columns_zstd1"] += packed(
            np.minimum(row_step, 255).astype(np.uint8),
            np.where(row_step > 0, column, column_step).astype(np.uint16),
            after[changed[first:last]],
        )
        sizes["xor_zstd1"] += packed(before[start:stop] ^ after[start:stop])
        start = stop
    return sizes


def entropy_bound(before: np.ndarray, after: np.ndarray) -> float:
    """Bytes for positions and steps if only the old exponent of each item is known."""
    exponents = (before >> 7) & 0xFF
    changed = np.flatnonzero(before != after)
    old, new = before[changed].astype(np.int64), after[changed].astype(np.int64)
    steps = np.where(new & 0x8000, -(new & 0x7FFF), new) - np.where(
        old & 0x8000, -(old & 0x7FFF), old
    )
    members = np.bincount(exponents, minlength=256)
    hits = np.bincount(exponents[changed], minlength=256)
    bits = 0.0
    for exponent in np.flatnonzero(hits):
        n, k = int(members[exponent]), int(hits[exponent])
        share = np.array([k / n, 1 - k / n])
        share = share[share > 0]
        bits -= n * float((share * np.log2(share)).sum())
        counts = np.unique(steps[exponents[changed] == exponent], return_counts=True)[1]
        bits -= float((counts * np.log2(counts / k)).sum())
    return bits / 8


def adversarial_mistakes() -> int:
    """Chunks of hostile bit patterns that do not come back exactly, or come back too large."""
    rng = np.random.default_rng(7)
    special = np.array(
        [0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC0, 0xFFFF, 0x7F81, 1, 0x8001, 0x7F, 0x80], np.uint16
    )
    mistakes = 0
    for count in (1, 2, 31, 63, 1000, 70_001, 1 << 19):
        for share in (0.0, 0.001, 0.01, 0.1, 0.24, 0.5, 1.0):
            for classes in MODES.values():
                old = rng.choice(special, count) if count % 2 else rng.integers(0, 1 << 16, count)
                old = old.astype(np.uint16)
                new = old.copy()
                hit = rng.random(count) < share
                new[hit] = rng.integers(0, 1 << 16, int(hit.sum()))
                for item_bytes in (1, 2, 4):
                    slices = [Slice(old.nbytes, item_bytes)]
                    encoded = encode_chunk(old, new, slices, classes=classes)
                    exact = apply_chunk(old, encoded).tobytes() == new.tobytes()
                    mistakes += not exact or len(encoded) > new.nbytes + 16
    return mistakes


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="a folder with .safetensors files")
    parser.add_argument("--layers", type=int, default=30, help="of the random model")
    parser.add_argument("--rates", default="3e-7,1e-6,3e-6,1e-5")
    parser.add_argument("--warm-up", type=int, default=12, help="steps of Adam before the measured")
    parser.add_argument("--chunk-mib", default="4,1", help="the bars use the first")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    rates = [BAR_RATE, *(r for r in options.rates.split(",") if r != BAR_RATE)]
    weights = (
        folder_weights(options.model)
        if options.model
        else random_weights(options.layers, options.seed)
    )
    started = time.perf_counter()
    trained = Trained(weights, rates, warm_up=options.warm_up, seed=options.seed)
    full = trained.before.nbytes
    say(f"{full / 1e9:.3f} GB of BF16 weights, made in {time.perf_counter() - started:.0f} s")
    mistakes = adversarial_mistakes()
    say(f"adversarial bit patterns: {mistakes} mistakes")
    results: dict[str, Any] = {}
    for rate in rates:
        results[rate] = measure(trained, rate, [int(m) for m in options.chunk_mib.split(",")])
        mistakes += results[rate]["wrong_chunks"]
    emit(
        "delta",
        bars_of(results[BAR_RATE], mistakes),
        full_bytes=full,
        rates=results,
        seconds=round(time.perf_counter() - started, 1),
    )
    return 0


def measure(trained: Trained, rate: str, chunk_mibs: list[int]) -> dict[str, Any]:
    before, after = trained.before, trained.after[rate]
    changed = int(np.count_nonzero(before != after))
    found: dict[str, Any] = {"changed": changed, "changed_share": changed / len(before)}
    found["bound"] = round(entropy_bound(before, after) / changed, 3)
    for name, size in others(before, after, trained.shapes).items():
        found[name] = round(size / changed, 3)
    say(
        f"lr {rate}: {100 * changed / len(before):.2f} % changed; bytes per changed weight: "
        f"bound {found['bound']}, index + value {found['index32_value16']}, PULSE's layout "
        f"{found['rows_columns_zstd1']}, XOR + zstd {found['xor_zstd1']}"
    )
    found["wrong_chunks"] = 0
    for chunk_mib in chunk_mibs:
        chunks = cut(trained.shapes, chunk_mib * MIB)
        for mode, classes in MODES.items():
            result = ours(before, after, chunks, classes)
            found["wrong_chunks"] += result.pop("wrong_chunks")
            result["bytes_per_changed"] = round(result["size_bytes"] / changed, 3)
            result["ratio"] = round(before.nbytes / result["size_bytes"], 1)
            name = mode if chunk_mib == chunk_mibs[0] else f"{mode}_{chunk_mib}mib"
            found[name] = result
            say(
                f"  {chunk_mib} MiB chunks, {mode}: {result['bytes_per_changed']} B per changed, "
                f"{result['ratio']}x, encode {result['encode_gb_per_s']} GB/s (median "
                f"{result['encode_median_gb_per_s']}), apply {result['apply_gb_per_s']} GB/s "
                f"(median {result['apply_median_gb_per_s']})"
            )
    return found


def bars_of(found: dict[str, Any], mistakes: int) -> list[Bar]:
    fast, small = found["fast"], found["small"]
    size = fast["bytes_per_changed"]
    pulse, xor = found["rows_columns_zstd1"], found["xor_zstd1"]
    return [
        at_most("mistakes", mistakes, 0, "chunks"),
        at_most("bytes_per_changed", size, 1.4, "bytes"),
        at_most("bytes_per_changed_small", small["bytes_per_changed"], 1.0, "bytes"),
        at_most("over_pulse", ratio(size, pulse), 1.0, "of its bytes"),
        at_most("over_xor_zstd1", ratio(size, xor), 1.0, "of its bytes"),
        at_least("encode", fast["encode_gb_per_s"], 2.0, "GB/s"),
        at_least("apply", fast["apply_gb_per_s"], 5.0, "GB/s"),
    ]


if __name__ == "__main__":
    sys.exit(main())
