"""The tensors behind the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.cache.groups import CacheLayout, KVShape, Owner

InputName = tuple[int, str]
"""The number of a target layer or a module, and which of its parts."""


@dataclass(frozen=True)
class LayerKV:
    """Paged keys and values of one layer: a row per slot, heads side by side.

    key [num_slots, num_kv_heads * key_dim], value [num_slots, num_kv_heads * value_dim]: a view of the key, if latent.
    """

    key: Tensor
    value: Tensor
    num_kv_heads: int


@dataclass(frozen=True)
class StoredInput:
    """What one part of a layer keeps of each row, rows [num_slots, width], in blocks of cache group `group`."""

    rows: Tensor
    group: int


class CacheStorage:
    """Paged rows of every layer. Slot b * block_size + r is row r of block b; slot 0 lies in the reserved block.

    num_blocks: for each group of the layout. target and modules: one entry a layer or module; target_inputs and
    module_inputs: what layers keep beside keys and values.
    hidden [num_slots, hidden_size] is h0, the target's hidden state that module 1 and the head read. states: of
    recurrent layers by number, float32, one a block of their group: [num_blocks, ...].
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
        self.target_inputs = self._inputs(Owner.TARGET)
        self.module_inputs = self._inputs(Owner.MODULES)
        self.hidden = self._rows(layout.hidden_group, layout.hidden_size)
        self.states = self._states()

    def _layers(self, shapes: Sequence[KVShape], groups: Sequence[int]) -> tuple[LayerKV, ...]:
        return tuple(self._layer(shape, group) for shape, group in zip(shapes, groups))

    def _layer(self, shape: KVShape, group: int) -> LayerKV:
        heads = shape.num_kv_heads
        key = self._rows(group, heads * shape.key_dim)
        value = key[:, : shape.value_dim] if shape.is_latent else self._rows(group, heads * shape.value_dim)
        return LayerKV(key, value, heads)

    def _inputs(self, owner: Owner) -> dict[InputName, StoredInput]:
        groups = [(number, group) for number, group in enumerate(self.layout.groups) if group.owner is owner]
        return {
            (shape.layer, shape.name): StoredInput(self._rows(number, shape.width), number)
            for number, group in groups
            for shape in group.inputs
        }

    def _rows(self, group: int, width: int) -> Tensor:
        """A row per slot. None is read before it is written, so a CPU gives memory to blocks that are used only."""
        num_slots = self.num_blocks[group] * self.block_size
        return torch.empty(num_slots, width, dtype=self.layout.dtype, device=self._device, pin_memory=self._pin)

    def _states(self) -> dict[int, Tensor]:
        number = self.layout.state_group
        if number is None:
            return {}
        count, device, pin = self.num_blocks[number], self._device, self._pin
        return {
            state.layer: torch.empty((count, *state.sizes), dtype=torch.float32, device=device, pin_memory=pin)
            for state in self.layout.groups[number].states
        }

    def slots(self, blocks: Sequence[int], num_rows: int) -> Tensor:
        """Slots of rows 0..num_rows-1 of a request that holds `blocks`, int64 [num_rows] on the CPU."""
        table = torch.tensor(blocks, dtype=torch.int64).unsqueeze(1) * self.block_size
        return (table + torch.arange(self.block_size)).flatten()[:num_rows]

    def block(self, group: int, block: int) -> tuple[Tensor, ...]:
        """Views of all that one block holds, [block_size, width] each, in an order that depends on the layout only.

        Of a group of states: those of each layer, [1, ...].
        """
        if self.layout.groups[group].states:
            return tuple(states[block : block + 1] for states in self.states.values())
        rows = slice(block * self.block_size, (block + 1) * self.block_size)
        return tuple(tensor[rows] for tensor in self._tensors(group))

    def _tensors(self, group: int) -> list[Tensor]:
        layout, own = self.layout, self.layout.groups[group]
        is_target = own.owner is Owner.TARGET
        layers, inputs = (self.target, self.target_inputs) if is_target else (self.modules, self.module_inputs)
        tensors = [
            tensor
            for layer, shape in zip(own.layers, own.shapes)
            for tensor in ((layers[layer].key,) if shape.is_latent else (layers[layer].key, layers[layer].value))
        ]
        tensors += [inputs[shape.layer, shape.name].rows for shape in own.inputs]
        return [*tensors, self.hidden] if group == layout.hidden_group else tensors

    @property
    def num_bytes(self) -> int:
        tensors = [tensor for group in range(len(self.layout.groups)) for tensor in self._tensors(group)]
        tensors += self.states.values()
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
