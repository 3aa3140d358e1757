"""Forward passes that the host lays out row by row, as CUDA graphs: prefill above all, whose launches cost a host more
than a small model's arithmetic costs the device.

What a pass computes is copied into tensors of fixed size and padded there. Padding rows belong to no lane: their keys
and values go to the reserved block, nobody attends to them, and their outputs are not returned.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.cache.storage import CacheStorage
from foredraft.kernels.lanes import Lanes
from foredraft.models.attention import PagedAttention
from foredraft.models.mtp import ModuleForward
from foredraft.models.row_layout import GroupRows
from foredraft.models.target import TargetForward
from foredraft.runner.resident.graphs import GraphCache
from foredraft.runner.resident.shape import padded

ROW_SIZES = (16, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Rows that a pass is padded to. With more of them the device takes longer than the host's launches."""
LARGEST_PASS_GRAPH = ROW_SIZES[-1]
LANE_SIZES = (1, 2, 4, 8, 16)

_Forward = Callable[[Tensor, Tensor, Tensor, PagedAttention], Tensor]


class _PassShape(NamedTuple):
    """name: the target, or a module. groups: for each layer, which of the pass's groups of rows is its own."""

    name: Hashable
    num_rows: int
    num_lanes: int
    groups: tuple[int, ...]


class PassGraphs:
    """Runs passes of the target and of modules from graphs, one for each padded shape.

    What a pass returns holds until the next one runs. Passes of more rows or lanes than the largest sizes run as they
    are. max_blocks: the most that a sequence can have in a cache group.
    """

    def __init__(self, graphs: GraphCache, storage: CacheStorage, max_blocks: int) -> None:
        layout, device = storage.layout, storage.hidden.device
        num_groups, most_rows, most_lanes = len(layout.groups), ROW_SIZES[-1], LANE_SIZES[-1]
        self._graphs = graphs
        self._rows = torch.zeros(2 + num_groups, most_rows, dtype=torch.int64, device=device)
        self._numbers = torch.zeros(num_groups, 4, most_lanes, dtype=torch.int32, device=device)
        self._tables = torch.zeros(num_groups, most_lanes, max_blocks, dtype=torch.int32, device=device)
        self._hidden = torch.zeros(most_rows, layout.hidden_size, dtype=layout.dtype, device=device)
        self._output = torch.zeros_like(self._hidden)

    def of_target(self, forward: TargetForward) -> TargetForward:
        """`forward` of a `TargetModel`, from graphs."""

        def run(token_ids: Tensor, positions: Tensor, paged: PagedAttention) -> Tensor:
            if paged.media is not None:
                return forward(token_ids, positions, paged)
            return self._run(
                "target", lambda ids, at, _, static: forward(ids, at, static), token_ids, positions, None, paged
            )

        return run

    def of_modules(self, forward: ModuleForward) -> ModuleForward:
        """`forward` of `MtpModules`, from graphs."""

        def run(module: int, token_ids: Tensor, positions: Tensor, hidden: Tensor, paged: PagedAttention) -> Tensor:
            if paged.media is not None:
                return forward(module, token_ids, positions, hidden, paged)
            return self._run(module, partial(forward, module), token_ids, positions, hidden, paged)

        return run

    def _run(
        self,
        name: Hashable,
        forward: _Forward,
        token_ids: Tensor,
        positions: Tensor,
        hidden: Tensor | None,
        paged: PagedAttention,
    ) -> Tensor:
        groups = list({id(rows): rows for rows in paged.rows}.values())
        lanes = [_lanes_of(rows) for rows in groups]
        num_rows, num_lanes = len(token_ids), len(lanes[0].num_rows)
        if num_rows > ROW_SIZES[-1] or num_lanes > LANE_SIZES[-1]:
            return forward(token_ids, positions, self._hidden if hidden is None else hidden, paged)
        numbers = {id(rows): number for number, rows in enumerate(groups)}
        members = tuple(numbers[id(rows)] for rows in paged.rows)
        shape = _PassShape(name, padded(num_rows, ROW_SIZES), padded(num_lanes, LANE_SIZES), members)
        self._fill(shape, torch.stack((token_ids, positions, *(rows.slots for rows in groups))), lanes, hidden)
        windows = [rows.window for rows in groups]
        self._graphs.run(shape, lambda: self._forward(shape, forward, windows, paged))
        return self._output[:num_rows]

    def _fill(self, shape: _PassShape, rows: Tensor, lanes: Sequence[Lanes], hidden: Tensor | None) -> None:
        """rows [2 + groups, T]. What is left of a row is the reserved slot, 0; of a lane, no rows."""
        count, num_rows = rows.shape
        self._rows[:count, :num_rows] = rows
        if num_rows < shape.num_rows:
            self._rows[:count, num_rows : shape.num_rows] = 0
        for group, one in enumerate(lanes):
            num_lanes, width = one.block_tables.shape
            self._tables[group, :num_lanes, :width] = one.block_tables
            numbers = torch.stack((one.first_rows, one.num_rows, one.flat_rows, one.origins))
            self._numbers[group, :, :num_lanes] = numbers
            if num_lanes < shape.num_lanes:
                self._numbers[group, :, num_lanes : shape.num_lanes] = 0
        if hidden is not None:
            self._hidden[:num_rows] = hidden

    def _forward(
        self, shape: _PassShape, forward: _Forward, windows: Sequence[int | None], paged: PagedAttention
    ) -> None:
        """The pass over the tensors of fixed size; paged: where the cache is."""
        token_ids, positions = self._rows[0, : shape.num_rows], self._rows[1, : shape.num_rows]
        groups = [self._group_rows(shape, group, window) for group, window in enumerate(windows)]
        static = PagedAttention(
            paged.kv, [groups[group] for group in shape.groups], paged.block_size, paged.kernels, paged.dtype
        )
        self._output[: shape.num_rows] = forward(token_ids, positions, self._hidden[: shape.num_rows], static)

    def _group_rows(self, shape: _PassShape, group: int, window: int | None) -> GroupRows:
        first_rows, num_rows, flat_rows, origins = self._numbers[group, :, : shape.num_lanes]
        tables = self._tables[group, : shape.num_lanes]
        lanes = Lanes(tables, first_rows, num_rows, flat_rows, origins, shape.num_rows)
        return GroupRows(self._rows[2 + group, : shape.num_rows], lanes, window)


def _lanes_of(rows: GroupRows) -> Lanes:
    assert isinstance(rows.attention, Lanes), "graphs are for kernels that read block tables"
    return rows.attention
