"""The bulk process of a node that serves badly: an instrument of tests, kept out of the product.

Started by `forest_node` in place of `echo2_mesh.bulk.worker`. What the file `fault` beside the
store says holds from then on: "" serves well, "lie" flips a bit in every chunk sent, "stall" takes
asks and never answers. How often it lied is kept in `lies.json`. Fetching stays honest.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from echo2_mesh.bulk import worker
from echo2_mesh.bulk.lane import Lane

CHUNK_BYTES_MIN = 16 * 1024
"""Smaller answers (manifests) are honest: a fault shall hit the data."""
FAULT_FILE, LIES_FILE = "fault", "lies.json"


def install(folder: Path) -> None:
    """Come between the hub and the lanes."""
    honest = Lane.supply
    counts = {"lies": 0, "lie_bytes": 0, "stalled": 0}

    def supply(lane: Lane, number: int, view: memoryview) -> None:
        try:
            kind = (folder / FAULT_FILE).read_text()
        except OSError:
            kind = ""
        if not kind or len(view) < CHUNK_BYTES_MIN or not lane.waits(number):
            honest(lane, number, view)
            return
        if kind == "stall":
            counts["stalled"] += 1
        else:
            counts["lies"] += 1
            counts["lie_bytes"] += len(view)
            wrong = bytearray(view)
            wrong[-1] ^= 0x40
            honest(lane, number, memoryview(wrong))
        part = folder / (LIES_FILE + ".part")
        part.write_text(json.dumps(counts))
        part.replace(folder / LIES_FILE)

    Lane.supply = supply  # type: ignore[method-assign]


if __name__ == "__main__":
    install(Path(sys.argv[1]).parent)
    worker.main()
