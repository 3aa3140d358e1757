"""A head whose rows are int8 with one scale each: made for few rows of hidden states, where reading it is the cost."""
# ruff: noqa: N803 -- constants of a kernel are in capitals

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_N = 64
_BLOCK_K = 128
_MAX_BLOCK_T = 64


def int8_logits(hidden: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden [T, K] times each row of `weight` [N, K] int8, times its entry of `scales` [N] float32, plus `bias` [N].

    All are contiguous. Returns logits [T, N] float32.
    """
    logits = torch.empty(len(hidden), len(weight), dtype=torch.float32, device=hidden.device)
    _run_head(hidden, weight, scales, bias, logits, None)
    return logits


def int8_argmax(hidden: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """The index of each row's highest logit, the lowest on a tie; arguments as for `int8_logits`. Returns [T] int64.

    The logits are not written. A row of nan gets any index.
    """
    num_tiles = triton.cdiv(len(weight), _BLOCK_N)
    best = torch.empty(len(hidden), num_tiles, dtype=torch.float32, device=hidden.device)
    best_ids = torch.empty(len(hidden), num_tiles, dtype=torch.int32, device=hidden.device)
    ids = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    if len(hidden):
        _run_head(hidden, weight, scales, bias, best, best_ids)
        block = triton.next_power_of_2(num_tiles)
        _best_of_tiles_kernel[(len(hidden),)](best, best_ids, ids, num_tiles, len(weight), BLOCK=block)
    return ids


def _run_head(
    hidden: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None, values: Tensor, best_ids: Tensor | None
) -> None:
    num_rows, num_columns = len(hidden), len(weight)
    if not num_rows:
        return
    assert hidden.shape[1] == weight.shape[1]
    assert hidden.stride(1) == 1
    assert weight.is_contiguous()
    block_t = min(max(16, triton.next_power_of_2(num_rows)), _MAX_BLOCK_T)  # a dot has 16 rows at least
    _head_kernel[(triton.cdiv(num_columns, _BLOCK_N), triton.cdiv(num_rows, block_t))](
        *(hidden, weight, scales, bias, values, best_ids, num_rows, num_columns, hidden.stride(0)),
        IN_FEATURES=weight.shape[1],
        BLOCK_T=block_t,
        BLOCK_N=_BLOCK_N,
        BLOCK_K=_BLOCK_K,
        WIDEN=hidden.device.type == "cpu",  # the dot of Triton's interpreter does not know bfloat16
        num_warps=4,
        num_stages=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _head_kernel(
    hidden_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    bias_ptr: tl.tensor | None,
    values_ptr: tl.tensor,
    best_ids_ptr: tl.tensor | None,
    num_rows: int,
    num_columns: int,
    hidden_stride: int,
    IN_FEATURES: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """A tile of logits: written to `values` [num_rows, num_columns]. With `best_ids` [num_rows, num_tiles] only the
    highest of each row, to `values` of that shape, and its column."""
    tile = tl.program_id(0)
    rows = tl.program_id(1) * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < num_columns
    hidden_rows = hidden_ptr + rows.to(tl.int64)[:, None] * hidden_stride
    weight_rows = weight_ptr + columns.to(tl.int64)[None, :] * IN_FEATURES
    logits = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_K):
        places = start + tl.arange(0, BLOCK_K)
        is_place = places < IN_FEATURES
        x = tl.load(hidden_rows + places[None, :], mask=is_row[:, None] & is_place[None, :], other=0.0)
        w = tl.load(weight_rows + places[:, None], mask=is_place[:, None] & is_column[None, :], other=0)
        if WIDEN:
            x = x.to(tl.float32)
        # Integers up to 127 are exact in any type of hidden states.
        logits = tl.dot(x, w.to(x.dtype), logits, input_precision="ieee")
    logits *= tl.load(scales_ptr + columns, mask=is_column, other=0.0)[None, :]
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    if best_ids_ptr is None:
        where = values_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
        tl.store(where, logits, mask=is_row[:, None] & is_column[None, :])
    else:
        logits = tl.where(is_column[None, :], logits, float("-inf"))
        best, index = tl.max(logits, axis=1, return_indices=True, return_indices_tie_break_left=True)
        places = rows * tl.num_programs(0) + tile
        tl.store(values_ptr + places, best, mask=is_row)
        tl.store(best_ids_ptr + places, tile * BLOCK_N + index, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_tiles_kernel(
    best_ptr: tl.tensor,
    best_ids_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    num_tiles: int,
    num_columns: int,
    BLOCK: tl.constexpr,
) -> None:
    """Of the tiles of a row, in the order of their columns: what the first with the highest logit has found."""
    row, tiles = tl.program_id(0), tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * num_tiles + tiles, mask=tiles < num_tiles, other=float("-inf"))
    tile = tl.argmax(best, axis=0, tie_break_left=True)
    found = tl.load(best_ids_ptr + row * num_tiles + tl.minimum(tile, num_tiles - 1))
    # Of nan none is the highest, and padding may be found: no wild index there.
    tl.store(ids_ptr + row, tl.minimum(found, num_columns - 1).to(tl.int64))
