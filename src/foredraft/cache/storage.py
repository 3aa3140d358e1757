"""The tensors behind the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.cache.groups import CacheLayout, KVShape


@dataclass(frozen=True)
class LayerKV:
    """Paged keys and values of one layer: a row per slot, heads side by side.

    key [num_slots, num_kv_heads * key_dim], value [num_slots, num_kv_heads * value_dim].
    """

    key: Tensor
    value: Tensor
    num_kv_heads: int


class CacheStorage:
    """Paged rows of every layer. Slot b * block_size + r is row r of block b; slot 0 lies in the reserved block.

    num_blocks: for each group of the layout. target and modules: one entry a layer or module.
    hidden [num_slots, hidden_size] is h0, the target's hidden state that module 1 and the head read.
    """

    def __init__(
        self,
        layout: CacheLayout,
        num_blocks: Sequence[int],
        block_size: int,
        device: torch.device,
        *,
        pin: bool = False,
    ) -> None:
        self.layout = layout
        self.block_size = block_size
        self.num_blocks = tuple(num_blocks)
        self._device = device
        self._pin = pin
        self.target = self._layers(layout.target, layout.group_of_layer)
        self.modules = self._layers(layout.modules, layout.group_of_module)
        self.hidden = self._rows(layout.hidden_group, layout.hidden_size)

    def _layers(self, shapes: Sequence[KVShape], groups: Sequence[int]) -> tuple[LayerKV, ...]:
        return tuple(
            LayerKV(
                self._rows(group, shape.num_kv_heads * shape.key_dim),
                self._rows(group, shape.num_kv_heads * shape.value_dim),
                shape.num_kv_heads,
            )
            for shape, group in zip(shapes, groups)
        )

    def _rows(self, group: int, width: int) -> Tensor:
        """A row per slot. None is read before it is written, so a CPU gives memory to blocks that are used only."""
        num_slots = self.num_blocks[group] * self.block_size
        return torch.empty(num_slots, width, dtype=self.layout.dtype, device=self._device, pin_memory=self._pin)

    def slots(self, blocks: Sequence[int], num_rows: int) -> Tensor:
        """Slots of rows 0..num_rows-1 of a request that holds `blocks`, int64 [num_rows] on the CPU."""
        table = torch.tensor(blocks, dtype=torch.int64).unsqueeze(1) * self.block_size
        return (table + torch.arange(self.block_size)).flatten()[:num_rows]

    def block(self, group: int, block: int) -> tuple[Tensor, ...]:
        """Views of all that one block holds, [block_size, width] each, in an order that depends on the layout only."""
        rows = slice(block * self.block_size, (block + 1) * self.block_size)
        return tuple(tensor[rows] for tensor in self._tensors(group))

    def _tensors(self, group: int) -> list[Tensor]:
        layout = self.layout
        layers = self.target if group in layout.target_groups else self.modules
        tensors = [t for layer in layout.groups[group].layers for t in (layers[layer].key, layers[layer].value)]
        return [*tensors, self.hidden] if group == layout.hidden_group else tensors

    @property
    def num_bytes(self) -> int:
        tensors = [tensor for group in range(len(self.layout.groups)) for tensor in self._tensors(group)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
