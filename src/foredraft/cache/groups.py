"""What a row of the cache holds, and which layers' rows live and die together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from math import prod

import torch


@dataclass(frozen=True)
class KVShape:
    """What one attention layer stores for a row; how many query heads share a key head; how far back it looks.

    window None: to the start of the sequence. is_latent: the value of a head is the first value_dim numbers of its
    key, which are stored once.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None
    fold: int = 1
    is_latent: bool = False

    @property
    def width(self) -> int:
        """Numbers stored for a row."""
        return self.num_kv_heads * (self.key_dim if self.is_latent else self.key_dim + self.value_dim)


@dataclass(frozen=True)
class InputShape:
    """What a layer keeps of a row for later rows beside keys and values: the input of a short convolution, say.

    layer: number of the target layer or of the module; name: which of its parts. width: numbers a row. window: how far
    back that part looks, its own row included; None: to the start of the sequence. is_replayed: a recurrent layer reads
    it again for the rows whose drafts were accepted, K at most.
    """

    layer: int
    name: str
    width: int
    window: int | None
    is_replayed: bool = False


@dataclass(frozen=True)
class StateShape:
    """The state of a recurrent layer after a row, in float32, whatever the model runs in."""

    layer: int
    sizes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return 4 * prod(self.sizes)


NO_KV = KVShape(0, 0, 0, None)
"""Of a layer that keeps no keys and values."""


@dataclass(frozen=True)
class StoredRows:
    """All that a target or its modules store for a row: `kv` of each layer or module, and what else some keep.

    states: of recurrent layers, not for every row. waits: on a GPU, something in a pass waits for the device.
    """

    kv: tuple[KVShape, ...] = ()
    inputs: tuple[InputShape, ...] = ()
    states: tuple[StateShape, ...] = ()
    waits: bool = False

    @property
    def windows(self) -> frozenset[int | None]:
        """How far back any part looks."""
        return frozenset(shape.window for shape in self.kv) | frozenset(shape.window for shape in self.inputs)

    def replaying(self, num_rows: int) -> StoredRows:
        """With inputs kept for so many more rows where a recurrent layer reads them again."""
        windows = (one.window if one.window is None else one.window + num_rows for one in self.inputs)
        inputs = (replace(one, window=window) if one.is_replayed else one for one, window in zip(self.inputs, windows))
        return replace(self, inputs=tuple(inputs))

    def reach(self, layer: int) -> int | None:
        """How many rows before its own a row of one layer depends on, at most; None: all."""
        own = [self.kv[layer].window]
        own += [shape.window for shape in self.inputs if shape.layer == layer]
        return None if None in own else sum(window - 1 for window in own if window)


class Owner(Enum):
    """Whose rows a group holds: the target's depend on the tokens up to their own, the modules' on some after it."""

    TARGET = "target"
    MODULES = "modules"


@dataclass(frozen=True)
class CacheGroup:
    """Layers whose rows are kept equally long: one pool of blocks, and one block table for each request.

    layers: numbers of target layers or of modules (0 is the one of depth 1), `shapes` what each stores for a row;
    hidden_size: width of h0, where it is stored with this group, else 0.
    retention: how many rows before the next one to compute are still needed; None: all.
    inputs: what layers keep beside keys and values. states: of recurrent layers, which are a group of their own: a
    block covers `span` times the rows of others, and holds the state after the last of them, or, while it is the last
    block of a request, after some row in it.
    """

    owner: Owner
    layers: tuple[int, ...]
    shapes: tuple[KVShape, ...]
    retention: int | None
    hidden_size: int = 0
    inputs: tuple[InputShape, ...] = ()
    states: tuple[StateShape, ...] = ()
    span: int = 1

    @property
    def name(self) -> str:
        """What the group is called where people read it."""
        if self.states:
            return f"states of {self.owner.value}"
        kinds = [self.owner.value] if self.layers else []
        kinds += [f"inputs of {self.owner.value}"] if self.inputs else []
        kinds += ["h0"] if self.hidden_size else []
        return " and ".join(kinds) + ("" if self.retention is None else f", last {self.retention + 1} rows")

    @property
    def width(self) -> int:
        """Numbers stored for a row."""
        inputs = sum(shape.width for shape in self.inputs)
        return sum(shape.width for shape in self.shapes) + inputs + self.hidden_size

    def bytes_per_block(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of one block, where those of groups without states have block_size rows."""
        return self.width * dtype.itemsize * block_size + sum(state.num_bytes for state in self.states)

    @property
    def holds_layers(self) -> bool:
        """Whether anything but h0 is in it."""
        return bool(self.shapes or self.inputs)

    @property
    def window(self) -> int | None:
        """How far back its layers look, their own row included; None: to the start of the sequence."""
        return None if self.retention is None else self.retention + 1

    def first_kept_row(self, next_row: int) -> int:
        """The first row that must be there so that `next_row` can be computed.

        What a running request gives back and what a prefix hit must find follow from this one formula.
        """
        return 0 if self.retention is None else max(0, next_row - self.retention)


@dataclass(frozen=True)
class CacheLayout:
    """The groups of a model, target groups first, and where each layer, module and h0 lie."""

    groups: tuple[CacheGroup, ...]
    dtype: torch.dtype

    @classmethod
    def build(
        cls,
        target: StoredRows,
        modules: StoredRows,
        hidden_size: int,
        dtype: torch.dtype,
        max_depth: int = 0,
        state_span: int = 1,
    ) -> CacheLayout:
        """Group layers by owner and window. h0 lies with the target's full attention layers, where there are any.

        max_depth: the most draft tokens a step (K). state_span: how many blocks apart states of recurrent layers are
        kept.
        """
        target = target.replaying(max_depth)
        groups = [*_by_window(Owner.TARGET, target), *_by_window(Owner.MODULES, modules)]
        if groups[0].retention is None:
            groups[0] = replace(groups[0], hidden_size=hidden_size)
        else:
            groups.insert(0, CacheGroup(Owner.TARGET, (), (), _hidden_retention(modules), hidden_size))
        if target.states:  # the state that the next rows begin with lies up to K rows back
            groups.append(CacheGroup(Owner.TARGET, (), (), max_depth + 1, states=target.states, span=state_span))
        return cls(tuple(sorted(groups, key=lambda group: group.owner is Owner.MODULES)), dtype)

    @cached_property
    def target_groups(self) -> tuple[int, ...]:
        """Numbers of the groups that hold the target's rows; the first holds h0."""
        return tuple(number for number, group in enumerate(self.groups) if group.owner is Owner.TARGET)

    @cached_property
    def module_groups(self) -> tuple[int, ...]:
        """Numbers of the groups that hold the modules' rows."""
        return tuple(number for number, group in enumerate(self.groups) if group.owner is Owner.MODULES)

    @property
    def hidden_group(self) -> int:
        """Number of the group that holds h0."""
        return self.target_groups[0]

    @cached_property
    def group_of_layer(self) -> tuple[int, ...]:
        """For each target layer, the number of its group."""
        return self._places(self.target_groups)

    @cached_property
    def group_of_module(self) -> tuple[int, ...]:
        """For each module, the number of its group."""
        return self._places(self.module_groups)

    def _places(self, numbers: Sequence[int]) -> tuple[int, ...]:
        places = {layer: number for number in numbers for layer in self.groups[number].layers}
        return tuple(places[layer] for layer in range(len(places)))

    @cached_property
    def target(self) -> tuple[KVShape, ...]:
        """What each target layer stores for a row."""
        return tuple(self._shape(number, layer) for layer, number in enumerate(self.group_of_layer))

    @cached_property
    def modules(self) -> tuple[KVShape, ...]:
        """What each module stores for a row."""
        return tuple(self._shape(number, module) for module, number in enumerate(self.group_of_module))

    def _shape(self, number: int, layer: int) -> KVShape:
        group = self.groups[number]
        return group.shapes[group.layers.index(layer)]

    @cached_property
    def groups_of_module(self) -> tuple[tuple[int, ...], ...]:
        """For each module, the numbers of all groups that hold some of its rows; that of its keys is the first."""
        held = [
            [number for number in self.module_groups if any(one.layer == module for one in self.groups[number].inputs)]
            for module in range(len(self.group_of_module))
        ]
        return tuple(tuple(dict.fromkeys((own, *other))) for own, other in zip(self.group_of_module, held))

    @cached_property
    def has_inputs(self) -> bool:
        """Whether any layer keeps something beside keys and values."""
        return any(group.inputs for group in self.groups)

    @cached_property
    def state_group(self) -> int | None:
        """Number of the group that holds states of recurrent layers, where there are any."""
        return next((number for number, group in enumerate(self.groups) if group.states), None)

    def can_be_found(self, number: int, index: int, block_size: int) -> bool:
        """Whether a prefix hit can need block `index` of a group that has a block for each node of the index.

        Where there are states, a hit ends with one of them, and needs of a window only what lies before that.
        """
        if self.state_group is None:
            return True
        size = block_size * self.groups[self.state_group].span
        end = (index * block_size // size + 1) * size
        return number != self.state_group and self.groups[number].first_kept_row(end) // block_size <= index

    @cached_property
    def recurrent_groups(self) -> tuple[int, ...]:
        """Numbers of the groups that hold the states of recurrent layers, and the inputs that are replayed."""
        return tuple(
            number
            for number, group in enumerate(self.groups)
            if group.states or any(shape.is_replayed for shape in group.inputs)
        )

    def stored(self, owner: Owner) -> StoredRows:
        """What the target, or its modules, store for a row."""
        inputs = tuple(one for group in self.groups if group.owner is owner for one in group.inputs)
        return StoredRows(self.target if owner is Owner.TARGET else self.modules, inputs)

    @cached_property
    def has_windows(self) -> bool:
        """Whether any group gives rows back while a request runs."""
        return any(group.retention is not None for group in self.groups)

    @cached_property
    def has_module_windows(self) -> bool:
        """Whether modules give rows back while a request runs."""
        return any(self.groups[number].retention is not None for number in self.module_groups)

    @property
    def hidden_size(self) -> int:
        return self.groups[self.hidden_group].hidden_size

    @cached_property
    def rebuild_rows(self) -> tuple[int | None, ...]:
        """For each depth 0..K: how many rows of h0 before c are enough to compute modules 1..depth at row c - depth.

        A window of w rows reaches w - 1 rows further back at each module of the chain. None: all rows are needed.
        """
        stored = self.stored(Owner.MODULES)
        reaches = [stored.reach(module) for module in range(len(self.modules))]
        return (0, *(_reach_of_chain(reaches[: depth + 1]) for depth in range(len(reaches))))

    def bytes_per_token(self, number: int | None = None) -> int:
        """Bytes that one row of group `number` takes; None: of all groups together. States are no rows."""
        groups = self.groups if number is None else self.groups[number : number + 1]
        return sum(group.width for group in groups) * self.dtype.itemsize

    def bytes_per_block(self, number: int, block_size: int) -> int:
        """Bytes that one block of group `number` takes."""
        return self.groups[number].bytes_per_block(block_size, self.dtype)


def _by_window(owner: Owner, stored: StoredRows) -> list[CacheGroup]:
    """One group for each window that occurs, full attention first."""
    windows = sorted(stored.windows, key=lambda window: (window is not None, window or 0))
    groups = []
    for window in windows:
        layers = tuple(layer for layer, shape in enumerate(stored.kv) if shape.window == window)
        retention = None if window is None else window - 1
        shapes = tuple(stored.kv[layer] for layer in layers)
        inputs = tuple(shape for shape in stored.inputs if shape.window == window)
        groups.append(CacheGroup(owner, layers, shapes, retention, inputs=inputs))
    return groups


def _reach_of_chain(reaches: Sequence[int | None]) -> int | None:
    """How many rows of h0 before c modules that look back so far need, one after the other: one more at each depth."""
    return None if None in reaches else sum(reach for reach in reaches if reach) + len(reaches)


def _hidden_retention(modules: StoredRows) -> int | None:
    """How many rows of h0 a target with windows only keeps: enough to restart every module, and one for the head."""
    rows = _reach_of_chain([modules.reach(module) for module in range(len(modules.kv))])
    return None if rows is None else max(1, rows)
