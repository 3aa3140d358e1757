"""The arithmetic of a decode step between the forward passes, in Triton: one launch for each function.

A program takes one lane. Lanes of nobody share a slot, so none of them writes to the state.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.kernels import decode_state
from foredraft.kernels.decode_state import DecodeState, DraftWindow, PassRows, TargetRows

_NOBODY = tl.constexpr(decode_state.NOBODY)
_BROKEN = tl.constexpr(decode_state.BROKEN)
_RESERVED_SLOT = tl.constexpr(decode_state.RESERVED_SLOT)
_NUM_TOKENS = tl.constexpr(decode_state.NUM_TOKENS)
_NUM_DRAFTS = tl.constexpr(decode_state.NUM_DRAFTS)
_CYCLE_DEPTH = tl.constexpr(decode_state.CYCLE_DEPTH)
_MAX_TOTAL = tl.constexpr(decode_state.MAX_TOTAL)
_ORIGIN = tl.constexpr(decode_state.ORIGIN)
_EXACT = tl.constexpr(decode_state.EXACT)
_RING_MASK = tl.constexpr(decode_state.RING_SIZE - 1)


class _Lanes(NamedTuple):
    """What every kernel gets of the state, and the slot of each lane."""

    slots: Tensor
    ints: Tensor
    tables: Tensor
    num_columns: int
    num_slots: int
    num_blocks: int
    num_modules: int
    num_positions: int


def target_rows(state: DecodeState, lanes: Tensor, num_rows: int) -> TargetRows:
    """See `foredraft.kernels.torch.decode`."""
    num_lanes, num_groups = len(lanes), len(state.tables)
    rows = TargetRows(
        token_ids=lanes.new_empty(num_lanes * num_rows),
        positions=lanes.new_empty(num_lanes * num_rows),
        slots=lanes.new_empty(num_groups, num_lanes * num_rows),
        drafts=lanes.new_empty(num_lanes, num_rows - 1),
        first_rows=lanes.new_empty(num_lanes, dtype=torch.int32),
        num_rows=lanes.new_empty(num_lanes, dtype=torch.int32),
        flat_rows=lanes.new_empty(num_lanes, dtype=torch.int32),
    )
    padded = triton.next_power_of_2(num_rows)
    _target_rows_kernel[(num_lanes,)](
        _lanes(state, lanes), rows, num_rows, num_groups, state.block_size, padded, num_warps=1
    )
    return rows


def commit_tokens(state: DecodeState, lanes: Tensor, emitted: Tensor, row_sums: Tensor) -> None:
    """See `foredraft.kernels.torch.decode`."""
    _commit(state, lanes, None, emitted, emitted, row_sums)


def commit_greedy(
    state: DecodeState, lanes: Tensor, drafts: Tensor, own: Tensor, emitted: Tensor, row_sums: Tensor
) -> None:
    """See `foredraft.kernels.torch.decode`."""
    assert drafts.is_contiguous()
    assert own.is_contiguous()
    _commit(state, lanes, drafts, own, emitted, row_sums)


def _commit(
    state: DecodeState, lanes: Tensor, drafts: Tensor | None, ids: Tensor, emitted: Tensor, row_sums: Tensor
) -> None:
    assert emitted.is_contiguous()
    assert row_sums.is_contiguous()
    num_rows = emitted.shape[1]
    padded, padded_modules = triton.next_power_of_2(num_rows), _padded_modules(state)
    _commit_kernel[(len(lanes),)](
        _lanes(state, lanes), drafts, ids, emitted, row_sums, num_rows, padded, padded_modules, num_warps=1
    )


def draft_window(
    state: DecodeState, lanes: Tensor, depths: Tensor, size: int, max_depth: int, hidden_group: int
) -> DraftWindow:
    """See `foredraft.kernels.torch.decode`."""
    assert depths.is_contiguous()
    num_lanes = len(lanes)
    num_drafts, starts, hidden_slots = (lanes.new_empty(count) for count in (num_lanes, num_lanes, num_lanes * size))
    window = DraftWindow(num_drafts, starts, hidden_slots, size)
    padded = triton.next_power_of_2(size)
    _draft_window_kernel[(num_lanes,)](
        _lanes(state, lanes), depths, window, max_depth, hidden_group, state.block_size, padded, num_warps=1
    )
    return window


def pass_rows(state: DecodeState, lanes: Tensor, window: DraftWindow, index: int, group: int) -> PassRows:
    """See `foredraft.kernels.torch.decode`."""
    num_lanes, is_further = len(lanes), index >= state.num_modules
    width = 1 if is_further else window.size
    rows = PassRows(
        token_ids=lanes.new_empty(num_lanes * width),
        positions=lanes.new_empty(num_lanes * width),
        slots=lanes.new_empty(num_lanes * width),
        first_rows=lanes.new_empty(num_lanes, dtype=torch.int32),
        num_rows=lanes.new_empty(num_lanes, dtype=torch.int32),
        flat_rows=lanes.new_empty(num_lanes, dtype=torch.int32),
        origins=lanes.new_empty(num_lanes, dtype=torch.int32),
    )
    padded = triton.next_power_of_2(width)
    _pass_rows_kernel[(num_lanes,)](
        _lanes(state, lanes), window, rows, index, group, width, is_further, state.block_size, padded, num_warps=1
    )
    return rows


def record_draft(
    state: DecodeState, lanes: Tensor, window: DraftWindow, index: int, chosen: Tensor, drafts: Tensor
) -> None:
    """See `foredraft.kernels.torch.decode`."""
    assert chosen.is_contiguous()
    assert drafts.is_contiguous()
    _record_draft_kernel[(len(lanes),)](
        _lanes(state, lanes), window.num_drafts, index, chosen, drafts, drafts.shape[1], num_warps=1
    )


def finish_window(state: DecodeState, lanes: Tensor, window: DraftWindow) -> None:
    """See `foredraft.kernels.torch.decode`."""
    _finish_window_kernel[(len(lanes),)](_lanes(state, lanes), window.num_drafts, _padded_modules(state), num_warps=1)


def _lanes(state: DecodeState, lanes: Tensor) -> _Lanes:
    assert state.ints.is_contiguous()
    assert state.tables.is_contiguous()
    assert lanes.is_contiguous()
    sizes = state.ints.shape[1], *state.tables.shape[1:], state.num_modules, state.num_positions
    return _Lanes(lanes, state.ints, state.tables, *sizes)


def _padded_modules(state: DecodeState) -> int:
    padded: int = triton.next_power_of_2(max(1, state.num_modules))
    return padded


@triton.jit(do_not_specialize=["width"])  # type: ignore[untyped-decorator]
def _target_rows_kernel(
    lanes: _Lanes,
    to: TargetRows,
    width: int,
    num_groups: tl.constexpr,
    block_size: tl.constexpr,
    padded: tl.constexpr,
) -> None:
    lane = tl.program_id(0)
    slot, ints = _request(lanes)
    n = tl.load(ints + _NUM_TOKENS)
    num_drafts = tl.load(ints + _NUM_DRAFTS)
    column = tl.arange(0, padded)
    inside = column < width
    rows = n - 1 + column
    is_row = inside & (column <= num_drafts) & (n < tl.load(ints + _MAX_TOTAL))
    tokens = _tokens(lanes, ints, rows, inside)
    at = lane * width + column
    tl.store(to.token_ids + at, tokens, inside)
    tl.store(to.positions + at, _clamped(lanes, rows), inside)
    for group in tl.static_range(num_groups):
        tl.store(
            to.slots + group * tl.num_programs(0) * width + at,
            _slots(lanes, slot, group, rows, is_row, block_size),
            inside,
        )
    tl.store(to.drafts + at - lane - 1, tl.where(is_row, tokens, -1), inside & (column > 0))
    tl.store(to.first_rows + lane, n - 1)
    tl.store(to.num_rows + lane, tl.sum(is_row.to(tl.int32), 0))
    tl.store(to.flat_rows + lane, lane * width)


@triton.jit(do_not_specialize=["width"])  # type: ignore[untyped-decorator]
def _commit_kernel(
    lanes: _Lanes,
    drafts_ptr: tl.tensor | None,
    ids_ptr: tl.tensor,
    emitted_ptr: tl.tensor,
    row_sums_ptr: tl.tensor,
    width: int,
    padded: tl.constexpr,
    padded_modules: tl.constexpr,
) -> None:
    """The ids are those emitted, or, where there are drafts, the target's own. They may be where they are emitted."""
    lane = tl.program_id(0)
    slot, ints = _request(lanes)
    n = tl.load(ints + _NUM_TOKENS)
    depth = tl.load(ints + _CYCLE_DEPTH)
    is_active = n < tl.load(ints + _MAX_TOTAL)
    column = tl.arange(0, padded)
    inside = column < width
    at = lane * width + column
    ids = tl.load(ids_ptr + at, inside, -1)
    if drafts_ptr is not None:
        drafts = tl.load(drafts_ptr + at - lane, column < width - 1, -1)
        num_matches = tl.min(tl.where((drafts != ids) | (column >= width - 1), column, padded), 0)
        ids = tl.where(column <= num_matches, ids, -1)
    sums = tl.load(row_sums_ptr + at, inside & (ids >= 0), 0.0)
    is_broken = is_active & (tl.max(((sums != sums) | (tl.abs(sums) == float("inf"))).to(tl.int32), 0) > 0)
    is_active = is_active & (is_broken == 0)
    ids = tl.where(is_active, ids, -1)
    tl.store(emitted_ptr + at, tl.where(is_broken & (column == 0), _BROKEN, ids), inside)
    if slot != _NOBODY:
        num_emitted = tl.sum((ids >= 0).to(tl.int64), 0)
        tl.debug_barrier()  # what is read above is written below, maybe by other threads
        _store_tokens(lanes, ints, n + column, ids, ids >= 0)
        _raise_exact(lanes, ints, tl.where(is_active, depth, 0), n - 1, n + num_emitted - 1, padded_modules)
        tl.store(ints + _NUM_TOKENS, n + num_emitted)
        tl.store(ints + _NUM_DRAFTS, 0)
        tl.store(ints + _CYCLE_DEPTH, 0)


@triton.jit(do_not_specialize=["max_depth", "group"])  # type: ignore[untyped-decorator]
def _draft_window_kernel(
    lanes: _Lanes,
    depths_ptr: tl.tensor,
    to: DraftWindow,
    max_depth: int,
    group: int,
    block_size: tl.constexpr,
    padded: tl.constexpr,
) -> None:
    lane = tl.program_id(0)
    slot, ints = _request(lanes)
    n = tl.load(ints + _NUM_TOKENS)
    room = tl.load(ints + _MAX_TOTAL) - n - 1
    num_drafts = tl.minimum(tl.maximum(tl.minimum(tl.load(depths_ptr + lane), room), 0), max_depth)
    start = tl.load(ints + _EXACT - 1 + tl.minimum(tl.maximum(num_drafts, 1), lanes.num_modules))
    column = tl.arange(0, padded)
    inside = column < to.size
    rows = n - 1 - to.size + column
    is_row = inside & (rows >= start) & (num_drafts > 0)
    tl.store(to.num_drafts + lane, num_drafts)
    tl.store(to.starts + lane, start)
    slots = _slots(lanes, slot, group, rows, is_row, block_size)
    tl.store(to.hidden_slots + lane * to.size + column, slots, inside)


@triton.jit(do_not_specialize=["index", "group", "width"])  # type: ignore[untyped-decorator]
def _pass_rows_kernel(
    lanes: _Lanes,
    window: DraftWindow,
    to: PassRows,
    index: int,
    group: int,
    width: int,
    is_further: tl.constexpr,
    block_size: tl.constexpr,
    padded: tl.constexpr,
) -> None:
    lane = tl.program_id(0)
    slot, ints = _request(lanes)
    end = tl.load(ints + _NUM_TOKENS) - 1
    column = tl.arange(0, padded)
    inside = column < width
    is_row = inside & (tl.load(window.num_drafts + lane) > index)
    if is_further:
        end += index
        rows = end - width + column
        inputs = rows + 1
        is_stored = is_row
    else:
        rows = end - width + column
        inputs = rows + index + 1
        is_row &= rows >= tl.load(window.starts + lane)
        is_stored = is_row & (rows >= tl.load(ints + _EXACT + index))
    num_rows = tl.sum(is_row.to(tl.int32), 0)
    at = lane * width + column
    tl.store(to.token_ids + at, _tokens(lanes, ints, inputs, inside), inside)
    tl.store(to.positions + at, _clamped(lanes, inputs), inside)
    tl.store(to.slots + at, _slots(lanes, slot, group, rows, is_stored, block_size), inside)
    tl.store(to.first_rows + lane, end - num_rows)
    tl.store(to.num_rows + lane, num_rows)
    tl.store(to.flat_rows + lane, (lane + 1) * width - num_rows)
    tl.store(to.origins + lane, tl.load(ints + _ORIGIN))


@triton.jit(do_not_specialize=["index", "width"])  # type: ignore[untyped-decorator]
def _record_draft_kernel(
    lanes: _Lanes, num_drafts_ptr: tl.tensor, index: int, chosen_ptr: tl.tensor, drafts_ptr: tl.tensor, width: int
) -> None:
    lane = tl.program_id(0)
    slot, ints = _request(lanes)
    is_made = tl.load(num_drafts_ptr + lane) > index
    chosen = tl.load(chosen_ptr + lane)
    _store_tokens(lanes, ints, tl.load(ints + _NUM_TOKENS) + index, chosen, is_made & (slot != _NOBODY))
    tl.store(drafts_ptr + lane * width + index, tl.where(is_made, chosen, -1))


@triton.jit  # type: ignore[untyped-decorator]
def _finish_window_kernel(lanes: _Lanes, num_drafts_ptr: tl.tensor, padded_modules: tl.constexpr) -> None:
    slot, ints = _request(lanes)
    if slot != _NOBODY:
        n = tl.load(ints + _NUM_TOKENS)
        num_drafts = tl.load(num_drafts_ptr + tl.program_id(0))
        num_passes = tl.minimum(num_drafts, lanes.num_modules)
        _raise_exact(lanes, ints, num_passes, n - 1, n, padded_modules)
        tl.store(ints + _NUM_DRAFTS, num_drafts)
        tl.store(ints + _CYCLE_DEPTH, num_passes)


@triton.jit  # type: ignore[untyped-decorator]
def _request(lanes: _Lanes) -> tuple[tl.tensor, tl.tensor]:
    """The slot of this program's lane, and where its numbers are."""
    slot = tl.load(lanes.slots + tl.program_id(0))
    return slot, lanes.ints + slot * lanes.num_columns


@triton.jit  # type: ignore[untyped-decorator]
def _tokens(lanes: _Lanes, ints: tl.tensor, positions: tl.tensor, inside: tl.tensor) -> tl.tensor:
    return tl.load(ints + _EXACT + lanes.num_modules + (positions & _RING_MASK), inside, 0)


@triton.jit  # type: ignore[untyped-decorator]
def _store_tokens(lanes: _Lanes, ints: tl.tensor, positions: tl.tensor, tokens: tl.tensor, which: tl.tensor) -> None:
    tl.store(ints + _EXACT + lanes.num_modules + (positions & _RING_MASK), tokens, which)


@triton.jit  # type: ignore[untyped-decorator]
def _clamped(lanes: _Lanes, positions: tl.tensor) -> tl.tensor:
    return tl.minimum(tl.maximum(positions, 0), lanes.num_positions - 1)


@triton.jit  # type: ignore[untyped-decorator]
def _slots(
    lanes: _Lanes, slot: tl.tensor, group: int, rows: tl.tensor, is_used: tl.tensor, block_size: tl.constexpr
) -> tl.tensor:
    """Where rows lie in a cache group; the reserved slot where they are not used, as those before row 0 never are."""
    table = lanes.tables + (group * lanes.num_slots + slot) * lanes.num_blocks
    block = tl.load(table + tl.minimum(rows // block_size, lanes.num_blocks - 1), is_used, 0).to(tl.int64)
    return tl.where(is_used, block * block_size + rows % block_size, _RESERVED_SLOT)


@triton.jit  # type: ignore[untyped-decorator]
def _raise_exact(
    lanes: _Lanes, ints: tl.tensor, depth: tl.tensor, end: tl.tensor, num_known: tl.tensor, padded: tl.constexpr
) -> None:
    """E_k of modules k = 1 .. depth becomes min(end, num_known - k), if that is more."""
    k = 1 + tl.arange(0, padded)
    has_run = (k <= depth) & (k <= lanes.num_modules)
    at = ints + _EXACT - 1 + k
    tl.store(at, tl.maximum(tl.load(at, has_run, 0), tl.minimum(end, num_known - k)), has_run)
