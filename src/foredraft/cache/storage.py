"""The tensors behind the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class KVShape:
    """What one attention layer stores for a row; how many query heads share a key head; how far back it looks.

    window None: to the start of the sequence.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    fold: int = 1

    @property
    def width(self) -> int:
        """Numbers stored for a row."""
        return self.num_kv_heads * (self.key_dim + self.value_dim)


@dataclass(frozen=True)
class LayerKV:
    """Paged keys and values of one layer: a row per slot, heads side by side.

    key [num_slots, num_kv_heads * key_dim], value [num_slots, num_kv_heads * value_dim].
    """

    key: Tensor
    value: Tensor
    num_kv_heads: int


@dataclass(frozen=True)
class CacheLayout:
    """What one row of each group holds."""

    target: tuple[KVShape, ...]
    modules: tuple[KVShape, ...]
    hidden_size: int
    dtype: torch.dtype

    @property
    def target_bytes_per_token(self) -> int:
        """The target's keys and values and h0."""
        return (sum(shape.width for shape in self.target) + self.hidden_size) * self.dtype.itemsize

    @property
    def module_bytes_per_token(self) -> int:
        """The keys and values of all modules."""
        return sum(shape.width for shape in self.modules) * self.dtype.itemsize

    @property
    def bytes_per_token(self) -> int:
        return self.target_bytes_per_token + self.module_bytes_per_token


class CacheStorage:
    """Paged rows of every layer. Slot b * block_size + r is row r of block b; slot 0 lies in the reserved block.

    hidden [num_slots, hidden_size] is h0, the target's hidden state that module 1 reads.
    """

    def __init__(self, layout: CacheLayout, num_blocks: int, block_size: int, device: torch.device) -> None:
        self.layout = layout
        self.block_size = block_size
        self.num_slots = num_blocks * block_size
        self.target = self._allocate(layout.target, device)
        self.modules = self._allocate(layout.modules, device)
        self.hidden = self._rows(layout.hidden_size, device)

    def _allocate(self, shapes: Sequence[KVShape], device: torch.device) -> tuple[LayerKV, ...]:
        return tuple(
            LayerKV(
                self._rows(shape.num_kv_heads * shape.key_dim, device),
                self._rows(shape.num_kv_heads * shape.value_dim, device),
                shape.num_kv_heads,
            )
            for shape in shapes
        )

    def _rows(self, width: int, device: torch.device) -> Tensor:
        """A row per slot. None is read before it is written, so a CPU gives memory to blocks that are used only."""
        return torch.empty(self.num_slots, width, dtype=self.layout.dtype, device=device)

    def slots(self, blocks: Sequence[int], num_rows: int) -> Tensor:
        """Slots of rows 0..num_rows-1 of a request that holds `blocks`, int64 [num_rows] on the CPU."""
        table = torch.tensor(blocks, dtype=torch.int64).unsqueeze(1) * self.block_size
        return (table + torch.arange(self.block_size)).flatten()[:num_rows]

    @property
    def num_bytes(self) -> int:
        tensors = [self.hidden, *(t for kv in (*self.target, *self.modules) for t in (kv.key, kv.value))]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
