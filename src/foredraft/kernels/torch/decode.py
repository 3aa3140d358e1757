"""The arithmetic of a decode step between the forward passes, in plain torch: rows, tokens, and which are exact.

The rules are those of `ExactRows`; here they act on one row of numbers for each request.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.kernels.decode_state import (
    BROKEN,
    CYCLE_DEPTH,
    EXACT,
    MAX_TOTAL,
    NUM_DRAFTS,
    NUM_TOKENS,
    ORIGIN,
    RESERVED_SLOT,
    RING_SIZE,
    DecodeState,
    DraftWindow,
    PassRows,
    TargetRows,
)


def target_rows(state: DecodeState, lanes: Tensor, num_rows: int) -> TargetRows:
    """The rows of the newest tokens and the pending drafts. lanes [B] int64: the slot of each lane; num_rows: R."""
    ints = state.ints.index_select(0, lanes)
    n, num_drafts = ints[:, NUM_TOKENS, None], ints[:, NUM_DRAFTS, None]
    columns = _arange(num_rows, ints)
    rows = n - 1 + columns
    is_row = (columns <= num_drafts) & (n < ints[:, MAX_TOTAL, None])
    tokens = _tokens(state, ints, rows)
    groups = range(len(state.tables))
    return TargetRows(
        token_ids=tokens.flatten(),
        positions=_clamped(state, rows),
        slots=torch.stack([_slots(state, lanes, group, rows, is_row).flatten() for group in groups]),
        drafts=tokens[:, 1:].masked_fill(~is_row[:, 1:], -1),
        first_rows=rows[:, 0].int(),
        num_rows=is_row.sum(dim=1, dtype=torch.int32),
        flat_rows=_arange(len(lanes), ints).int() * num_rows,
    )


def commit_tokens(state: DecodeState, lanes: Tensor, emitted: Tensor, row_sums: Tensor) -> None:
    """Take what was emitted: ids [B, R] int64, -1 padded, accepted drafts first; n and E_k rise (`after_verify`).

    A lane that is at its end has emitted nothing, whatever `emitted` says: that part is overwritten with -1. So has one
    where the row of an emitted token has a sum, row_sums [B, R] float32, that is not finite: it emits BROKEN.
    """
    ints = state.ints.index_select(0, lanes)
    n, exact, ring = ints[:, NUM_TOKENS], ints[:, EXACT : state.ring], ints[:, state.ring :]
    is_broken = (~row_sums.isfinite() & (emitted >= 0)).any(dim=1) & (n < ints[:, MAX_TOTAL])
    is_active = (n < ints[:, MAX_TOTAL]) & ~is_broken
    emitted.masked_fill_(~is_active[:, None], -1)
    num_accepted = (emitted >= 0).sum(dim=1) - 1
    index = (n[:, None] + _arange(emitted.shape[1], ints)) & (RING_SIZE - 1)
    ring.scatter_(1, index, torch.where(emitted >= 0, emitted, ring.gather(1, index)))
    depth = _arange(state.num_modules, ints) + 1
    covered = torch.minimum(n[:, None] - 1, (n + num_accepted)[:, None] - depth)
    is_raised = (depth <= ints[:, CYCLE_DEPTH, None]) & is_active[:, None] & (covered > exact)
    exact.copy_(torch.where(is_raised, covered, exact))
    n += num_accepted + 1
    ints[:, NUM_DRAFTS] = 0
    ints[:, CYCLE_DEPTH] = 0
    emitted[:, 0].masked_fill_(is_broken, BROKEN)
    state.ints.index_copy_(0, lanes, ints)


def commit_greedy(
    state: DecodeState, lanes: Tensor, drafts: Tensor, own: Tensor, emitted: Tensor, row_sums: Tensor
) -> None:
    """Accept drafts as far as they are the target's own choice, and one of those after them; then `commit_tokens`.

    drafts [B, R-1] int64, -1 padded; own [B, R] int64; emitted [B, R] int64 is written, -1 after the last token.
    """
    num_matches = (drafts == own[:, :-1]).cumprod(dim=1).sum(dim=1)
    emitted.copy_(own.masked_fill(_arange(own.shape[1], own) > num_matches[:, None], -1))
    commit_tokens(state, lanes, emitted, row_sums)


def draft_window(
    state: DecodeState, lanes: Tensor, depths: Tensor, size: int, max_depth: int, hidden_group: int
) -> DraftWindow:
    """The windows over which `depths` [B] int64 drafts are made, where sequences leave room for them; at most
    max_depth.

    size: W, no less than the rows of any window. hidden_group: the cache group of h0.
    """
    ints = state.ints.index_select(0, lanes)
    n = ints[:, NUM_TOKENS]
    num_drafts = torch.minimum(depths, ints[:, MAX_TOTAL] - n - 1).clamp(0, max_depth)
    deepest = EXACT - 1 + num_drafts.clamp(1, state.num_modules)
    starts = ints.gather(1, deepest[:, None]).squeeze(1)
    rows = (n - 1 - size)[:, None] + _arange(size, ints)
    is_row = (rows >= starts[:, None]) & (num_drafts > 0)[:, None]
    return DraftWindow(num_drafts, starts, _slots(state, lanes, hidden_group, rows, is_row).flatten(), size)


def pass_rows(state: DecodeState, lanes: Tensor, window: DraftWindow, index: int, group: int) -> PassRows:
    """The rows of pass number `index` (0-based), whose module lies in cache group `group`; earlier drafts are in place.

    Pass k is module k over the window, tokens and positions k further. Beyond the modules, a single one makes further
    drafts: one row, c + k - 2, with the draft before.
    """
    ints = state.ints.index_select(0, lanes)
    end, takes_part = ints[:, NUM_TOKENS, None] - 1, window.num_drafts[:, None] > index
    if index < state.num_modules:
        rows, offset = end - window.size + _arange(window.size, ints), index + 1
        is_row = (rows >= window.starts[:, None]) & takes_part
        slots = _slots(state, lanes, group, rows, is_row & (rows >= ints[:, EXACT + index, None]))
    else:
        rows, offset = end + index - 1, 1
        is_row = takes_part
        slots = _slots(state, lanes, group, rows, is_row)
    num_rows = is_row.sum(dim=1)
    return PassRows(
        token_ids=_tokens(state, ints, rows + offset).flatten(),
        positions=_clamped(state, rows + offset),
        slots=slots.flatten(),
        first_rows=(rows[:, -1] + 1 - num_rows).int(),
        num_rows=num_rows.int(),
        flat_rows=((_arange(len(lanes), ints) + 1) * rows.shape[1] - num_rows).int(),
        origins=ints[:, ORIGIN].int(),
    )


def record_draft(
    state: DecodeState, lanes: Tensor, window: DraftWindow, index: int, chosen: Tensor, drafts: Tensor
) -> None:
    """Put draft number `index`, chosen [B] int64, into the ring and into column `index` of drafts [B, D], -1 where a
    lane makes fewer."""
    ints = state.ints.index_select(0, lanes)
    is_made = window.num_drafts > index
    ring = ints[:, state.ring :]
    place = ((ints[:, NUM_TOKENS] + index) & (RING_SIZE - 1))[:, None]
    ring.scatter_(1, place, torch.where(is_made[:, None], chosen[:, None], ring.gather(1, place)))
    drafts[:, index] = torch.where(is_made, chosen, -1)
    state.ints.index_copy_(0, lanes, ints)


def finish_window(state: DecodeState, lanes: Tensor, window: DraftWindow) -> None:
    """All passes have run: the drafts are pending, and rows of committed tokens are exact (`after_draft`)."""
    ints = state.ints.index_select(0, lanes)
    n, exact = ints[:, NUM_TOKENS, None], ints[:, EXACT : state.ring]
    num_passes = window.num_drafts.clamp(max=state.num_modules)
    depth = _arange(state.num_modules, ints) + 1
    covered = torch.minimum(n - 1, n - depth)
    is_raised = (depth <= num_passes[:, None]) & (covered > exact)
    exact.copy_(torch.where(is_raised, covered, exact))
    ints[:, NUM_DRAFTS] = window.num_drafts
    ints[:, CYCLE_DEPTH] = num_passes
    state.ints.index_copy_(0, lanes, ints)


def _arange(count: int, like: Tensor) -> Tensor:
    return torch.arange(count, device=like.device)


def _tokens(state: DecodeState, ints: Tensor, positions: Tensor) -> Tensor:
    """Tokens at positions [B, R] of each lane."""
    return ints[:, state.ring :].gather(1, positions & (RING_SIZE - 1))


def _clamped(state: DecodeState, positions: Tensor) -> Tensor:
    return positions.clamp(0, state.num_positions - 1).flatten()


def _slots(state: DecodeState, lanes: Tensor, group: int, rows: Tensor, is_used: Tensor) -> Tensor:
    """The slots of rows [B, R] in a cache group; the reserved one where `is_used` is False."""
    table = state.tables[group].index_select(0, lanes)
    index = rows.div(state.block_size, rounding_mode="floor").clamp(0, table.shape[1] - 1)
    slots = table.gather(1, index).long() * state.block_size + rows % state.block_size
    return torch.where(is_used, slots, RESERVED_SLOT)
