"""What a row of the cache holds, and which layers' rows live and die together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch


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
    """

    owner: Owner
    layers: tuple[int, ...]
    shapes: tuple[KVShape, ...]
    retention: int | None
    hidden_size: int = 0

    @property
    def name(self) -> str:
        """What the group is called where people read it."""
        kinds = [self.owner.value] if self.layers else []
        kinds += ["h0"] if self.hidden_size else []
        return " and ".join(kinds) + ("" if self.retention is None else f", last {self.retention + 1} rows")

    @property
    def width(self) -> int:
        """Numbers stored for a row."""
        return sum(shape.width for shape in self.shapes) + self.hidden_size

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
        cls, target: Sequence[KVShape], modules: Sequence[KVShape], hidden_size: int, dtype: torch.dtype
    ) -> CacheLayout:
        """Group layers by owner and window. h0 lies with the target's full attention layers, where there are any."""
        groups = [*_by_window(Owner.TARGET, target), *_by_window(Owner.MODULES, modules)]
        if groups[0].retention is None:
            groups[0] = CacheGroup(Owner.TARGET, groups[0].layers, groups[0].shapes, None, hidden_size)
        else:
            groups.insert(0, CacheGroup(Owner.TARGET, (), (), _hidden_retention(modules), hidden_size))
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
        rows: list[int | None] = [0]
        for depth in range(1, len(self.modules) + 1):
            windows = [shape.window for shape in self.modules[:depth]]
            rows.append(None if None in windows else sum(window - 1 for window in windows if window) + depth)
        return tuple(rows)

    def bytes_per_token(self, number: int | None = None) -> int:
        """Bytes that one row of group `number` takes; None: of all groups together."""
        groups = self.groups if number is None else self.groups[number : number + 1]
        return sum(group.width for group in groups) * self.dtype.itemsize


def _by_window(owner: Owner, shapes: Sequence[KVShape]) -> list[CacheGroup]:
    """One group for each window that occurs, full attention first."""
    windows = sorted({shape.window for shape in shapes}, key=lambda window: (window is not None, window or 0))
    groups = []
    for window in windows:
        layers = tuple(layer for layer, shape in enumerate(shapes) if shape.window == window)
        retention = None if window is None else window - 1
        groups.append(CacheGroup(owner, layers, tuple(shapes[layer] for layer in layers), retention))
    return groups


def _hidden_retention(modules: Sequence[KVShape]) -> int | None:
    """How many rows of h0 a target with windows only keeps: enough to restart every module, and one for the head."""
    windows = [shape.window for shape in modules]
    if None in windows:
        return None
    return max(1, sum(window - 1 for window in windows if window) + len(windows))
