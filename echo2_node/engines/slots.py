"""A key-value cache with one slot per running sequence, behind transformers' `Cache` interface.

Sequences of different lengths share a batch without padding: each row keeps its own length, new
rows join behind the last, and a row that leaves is replaced by the last one. Rotary positions are
applied before keys are stored, so where a key lies does not matter; the mask says who sees whom.
Used by `torch_engine` alone.

Shapes: S slots, B rows in use, H key-value heads, T capacity in tokens, C columns, D head size.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache

_CAPACITY_STEP_TOKENS = 64


class SlotCache(Cache):  # type: ignore[misc]
    """Keys and values [S, H, T, D] per layer; T grows by doubling up to what is needed."""

    def __init__(self, slots: int) -> None:
        super().__init__(layers=[])
        self._slots = slots
        self._capacity = 0
        self._keys: list[torch.Tensor | None] = []
        self._values: list[torch.Tensor | None] = []
        self._rows = slice(0, 0)
        self._columns = slice(0, 0)
        self._index: tuple[torch.Tensor, torch.Tensor] | None = None
        self._length = 0

    def aim_prefill(self, first_row: int, rows: int, offset: int, columns: int) -> None:
        """The next forward writes [offset, offset + columns) of these rows and sees up to there."""
        self._rows = slice(first_row, first_row + rows)
        self._columns = slice(offset, offset + columns)
        self._index = None
        self._see(offset + columns)

    def aim_decode(self, rows_B: torch.Tensor, positions_B: torch.Tensor, length: int) -> None:
        """The next forward writes one token for each of the first B rows, and sees `length`."""
        self._rows = slice(0, rows_B.shape[0])
        self._index = (rows_B, positions_B)
        self._see(length)

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *_: Any,
        **__: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store [B, H, C, D] where aimed and return what the rows may see, [B, H, length, D]."""
        keys = self._buffer(self._keys, layer_idx, key_states)
        values = self._buffer(self._values, layer_idx, value_states)
        if self._index is None:
            keys[self._rows, :, self._columns] = key_states
            values[self._rows, :, self._columns] = value_states
        else:
            rows_B, positions_B = self._index
            keys[rows_B, :, positions_B] = key_states[:, :, 0]
            values[rows_B, :, positions_B] = value_states[:, :, 0]
        return keys[self._rows, :, : self._length], values[self._rows, :, : self._length]

    def copy_row(self, source: int, targets: list[int], length: int) -> None:
        """Give `targets` the first `length` tokens of row `source`."""
        for buffers in (self._keys, self._values):
            for buffer in buffers:
                if buffer is not None:
                    for target in targets:
                        buffer[target, :, :length] = buffer[source, :, :length]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Unused by a forward that is given positions and masks; here for the interface."""
        return self._length

    def _see(self, length: int) -> None:
        self._length = length
        if length <= self._capacity:
            return
        wanted = max(length, 2 * self._capacity)
        self._capacity = -(-wanted // _CAPACITY_STEP_TOKENS) * _CAPACITY_STEP_TOKENS
        for buffers in (self._keys, self._values):
            for layer, old in enumerate(buffers):
                if old is not None:
                    grown = self._empty(old)
                    grown[:, :, : old.shape[2]] = old
                    buffers[layer] = grown

    def _empty(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros, not garbage: a masked NaN would still poison the sum it is weighted out of."""
        shape = (self._slots, like.shape[1], self._capacity, like.shape[3])
        return torch.zeros(shape, dtype=like.dtype, device=like.device)

    def _buffer(
        self, buffers: list[torch.Tensor | None], layer: int, states: torch.Tensor
    ) -> torch.Tensor:
        while len(buffers) <= layer:
            buffers.append(None)
        buffer = buffers[layer]
        if buffer is None:
            buffer = buffers[layer] = self._empty(states)
        return buffer
