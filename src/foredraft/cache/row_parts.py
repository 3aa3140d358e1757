"""The tensors behind a cache, each under a name that does not depend on how groups and blocks are laid out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.cache.groups import CacheGroup, Owner
from foredraft.cache.storage import CacheStorage

HIDDEN = "h0"


@dataclass(frozen=True)
class RowPart:
    """What one tensor of a cache holds of a sequence.

    name: "h0", or layer and kind, as in "target.3.key" and "module.1.input.conv". group: its cache group. tensor: rows
    [num_slots, width], or states [num_blocks, ...]. window: how far back its layers look; None: to the start. module:
    number from 0, None for the target's. is_state: it has no row for every token.
    """

    name: str
    group: int
    tensor: Tensor
    window: int | None
    module: int | None = None
    is_state: bool = False

    @property
    def is_replayed(self) -> bool:
        """Whether `window` is longer, by the most drafts of a step, than the layer itself looks back."""
        return ".replayed." in self.name

    def read(self, places: Tensor) -> Tensor:
        """A copy of the rows at these slots, or of the states in these blocks, contiguous on the CPU."""
        return self.tensor.index_select(0, places.to(self.tensor.device)).cpu()

    def write(self, places: Tensor, rows: Tensor) -> None:
        """Put rows into these slots, or states into these blocks."""
        device = self.tensor.device
        self.tensor.index_copy_(0, places.to(device), rows.to(device))

    @property
    def row_shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype


def parts_of(storage: CacheStorage) -> tuple[RowPart, ...]:
    """All that a storage holds, by group. Layers that keep nothing have no part."""
    parts: list[RowPart] = []
    for number, group in enumerate(storage.layout.groups):
        parts += _kept_rows(storage, number, group)
        if number == storage.layout.hidden_group:
            parts.append(RowPart(HIDDEN, number, storage.hidden, group.window))
        for state in group.states:
            name = f"target.{state.layer}.state"
            parts.append(RowPart(name, number, storage.states[state.layer], None, is_state=True))
    return tuple(part for part in parts if part.tensor[:1].numel())


def _kept_rows(storage: CacheStorage, number: int, group: CacheGroup) -> list[RowPart]:
    is_target = group.owner is Owner.TARGET
    layers = storage.target if is_target else storage.modules
    inputs = storage.target_inputs if is_target else storage.module_inputs
    owner = "target" if is_target else "module"
    parts = []
    for layer, shape in zip(group.layers, group.shapes):
        kinds = {"latent": layers[layer].key}
        if not shape.is_latent:
            kinds = {"key": layers[layer].key, "value": layers[layer].value}
        for kind, tensor in kinds.items():
            name = f"{owner}.{layer}.{kind}"
            parts.append(RowPart(name, number, tensor, group.window, None if is_target else layer))
    for one in group.inputs:
        kind = "replayed" if one.is_replayed else "input"
        rows = inputs[one.layer, one.name].rows
        name = f"{owner}.{one.layer}.{kind}.{one.name}"
        parts.append(RowPart(name, number, rows, group.window, None if is_target else one.layer))
    return parts
