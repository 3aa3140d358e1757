"""Attention over paged rows, in Triton.

One kernel serves decode and prefill. A program takes one key head of one lane, a tile of the lane's query rows and one
split of their keys; the query heads that share the key head are folded into the rows of the tile, so that every key is
read once for all of them. A second kernel adds the splits up, where there are several. How many there are follows from
shapes alone, what each of them covers from the lengths on the device: a captured graph serves all lengths.
"""

# ruff: noqa: N803

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from foredraft.kernels.lanes import MAX_HEAD_DIM, Lanes
from foredraft.kernels.torch.attention import paged_attention as torch_attention

_LOG2_E = math.log2(math.e)
_MAX_SPLITS = 64


@dataclass(frozen=True)
class Tiling:
    """How the work is cut: folded query rows and keys of a tile (powers of two, from 16 on), splits of the keys, warps
    of a program, and stages of its pipeline."""

    block_m: int
    block_n: int
    num_splits: int
    num_warps: int
    num_stages: int


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lanes: Lanes,
    block_size: int,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """See `foredraft.kernels.ops.Kernels`; never waits for the device. Sums are float32, caches in the query's dtype.

    No query row lies before its lane's origin. Rows outside all lanes are not written. With sinks, with chosen keys or
    with heads that are too large for the kernel it is torch's, which does wait.
    """
    if sinks is not None or chosen is not None or query.shape[2] > MAX_HEAD_DIM:
        return torch_attention(query, key_cache, value_cache, lanes, block_size, scale, window, bias, sinks, chosen)
    num_kv_heads = key_cache.shape[1] // query.shape[2]
    tiling = choose_tiling(query, num_kv_heads, value_cache.shape[1] // num_kv_heads, lanes, block_size)
    return attend_in_tiles(query, key_cache, value_cache, lanes, block_size, scale, window, bias, tiling)


def choose_tiling(query: Tensor, num_kv_heads: int, value_dim: int, lanes: Lanes, block_size: int) -> Tiling:
    """A tiling by shapes and dtype alone.

    Tiles fit the registers and the shared memory of a multiprocessor. The keys are split where lanes, heads and rows
    leave multiprocessors idle, and tiles of keys are smaller then, so that short sequences are shared out as well.
    """
    _, num_heads, head_dim = query.shape
    width = max(_padded(head_dim), _padded(value_dim))
    is_half = query.element_size() == 2
    folded_rows = lanes.max_num_rows * (num_heads // num_kv_heads)
    most_rows = (16384 if is_half else 4096) // width
    block_m = max(16, min(128, most_rows, triton.next_power_of_2(folded_rows)))
    num_tiles = triton.cdiv(folded_rows, block_m)
    programs = max(1, lanes.num_rows.shape[0] * num_kv_heads * num_tiles)
    # One tile of rows waits for memory, and several programs hide that; with more of them splitting costs traffic.
    wanted = (4 if num_tiles == 1 else 1) * _num_multiprocessors(query.device) // programs
    wanted = min(wanted, _MAX_SPLITS)
    tile_bytes = 32768 if is_half and wanted <= 1 else 16384
    row_bytes = (_padded(head_dim) + _padded(value_dim)) * query.element_size()
    block_n = max(16, min(64, _power_of_2(tile_bytes // row_bytes)))
    most_splits = triton.cdiv(lanes.block_tables.shape[1] * block_size, block_n)
    return Tiling(
        block_m=block_m,
        block_n=block_n,
        num_splits=_power_of_2(max(1, min(wanted, most_splits))),
        num_warps=8 if block_m == 128 or block_m * width > (8192 if is_half else 1024) else 4,
        num_stages=5 if is_half else 3,  # keys wait for the table of blocks: half of the stages are its own
    )


def attend_in_tiles(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lanes: Lanes,
    block_size: int,
    scale: float,
    window: int | None,
    bias: Tensor | None,
    tiling: Tiling,
) -> Tensor:
    """`paged_attention` with a given tiling; any number of splits will do."""
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads = key_cache.shape[1] // head_dim
    value_dim = value_cache.shape[1] // num_kv_heads
    fold, num_lanes, num_splits = num_heads // num_kv_heads, lanes.num_rows.shape[0], tiling.num_splits
    output = query.new_empty(num_rows, num_heads, value_dim)
    num_tiles = triton.cdiv(lanes.max_num_rows * fold, tiling.block_m)
    if num_lanes * num_tiles == 0:
        return output
    sums = maxima = totals = None
    if num_splits > 1:
        sums = query.new_empty(num_rows, num_heads, num_splits, value_dim, dtype=torch.float32)
        maxima = query.new_empty(num_rows, num_heads, num_splits, dtype=torch.float32)
        totals = torch.empty_like(maxima)
    _attend_kernel[num_kv_heads, num_tiles * num_splits, num_lanes](
        query,
        key_cache,
        value_cache,
        bias,
        lanes.block_tables,
        lanes.first_rows,
        lanes.num_rows,
        lanes.flat_rows,
        lanes.origins,
        output,
        sums,
        maxima,
        totals,
        scale * _LOG2_E,
        query.stride(0),
        query.stride(1),
        key_cache.stride(0),
        value_cache.stride(0),
        0 if bias is None else bias.stride(0),
        0 if bias is None else bias.stride(1),
        0 if bias is None else bias.shape[2],
        lanes.block_tables.stride(0),
        num_splits,
        WINDOW=window or 0,
        FOLD=fold,
        HEAD_DIM=head_dim,
        VALUE_DIM=value_dim,
        BLOCK_SIZE=block_size,
        BLOCK_M=tiling.block_m,
        BLOCK_N=tiling.block_n,
        BLOCK_D=_padded(head_dim),
        BLOCK_V=_padded(value_dim),
        num_warps=tiling.num_warps,
        num_stages=tiling.num_stages,
    )
    if num_splits > 1:
        _combine_kernel[num_heads, lanes.max_num_rows, num_lanes](
            sums,
            maxima,
            totals,
            lanes.num_rows,
            lanes.flat_rows,
            output,
            num_splits,
            VALUE_DIM=value_dim,
            BLOCK_S=triton.next_power_of_2(num_splits),
            BLOCK_V=_padded(value_dim),
            num_warps=8 if num_splits * value_dim > 8192 else 4,
        )
    return output


def _padded(dim: int) -> int:
    """The width of a tile for heads of this size: a product of tiles needs 16 columns or more."""
    return max(16, int(triton.next_power_of_2(dim)))


def _power_of_2(number: int) -> int:
    """The largest one that is no larger than `number`."""
    return 1 << number.bit_length() - 1


def _num_multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 1


@triton.jit  # type: ignore[untyped-decorator]
def _attend_kernel(
    query_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    bias_ptr: tl.tensor | None,
    block_tables_ptr: tl.tensor,
    first_rows_ptr: tl.tensor,
    num_rows_ptr: tl.tensor,
    flat_rows_ptr: tl.tensor,
    origins_ptr: tl.tensor,
    output_ptr: tl.tensor,
    sums_ptr: tl.tensor | None,
    maxima_ptr: tl.tensor | None,
    totals_ptr: tl.tensor | None,
    scale: float,
    query_stride: int,
    query_head_stride: int,
    key_stride: int,
    value_stride: int,
    bias_stride: int,
    bias_head_stride: int,
    extent: int,
    table_stride: int,
    num_splits: int,
    WINDOW: tl.constexpr,
    FOLD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """The softmax of a tile of query rows over a split of their keys, in powers of two: scale has log2(e) in it."""
    kv_head, lane = tl.program_id(0), tl.program_id(2)
    split = tl.program_id(1) % num_splits
    # The last tiles have the most keys, so they start first.
    tile = (tl.num_programs(1) - 1 - tl.program_id(1)) // num_splits
    count = tl.load(num_rows_ptr + lane)
    if tile * BLOCK_M >= count * FOLD:
        return

    folded = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = folded // FOLD
    head = kv_head * FOLD + folded % FOLD
    is_row = row < count
    flat_row = (tl.load(flat_rows_ptr + lane) + row).to(tl.int64)
    first_row = tl.load(first_rows_ptr + lane)
    sequence_row = first_row + row

    # The keys that a row of the tile sees, of which this split takes its share in whole tiles of keys.
    begin = tl.load(origins_ptr + lane)
    if WINDOW:
        begin = tl.maximum(begin, first_row + tile * BLOCK_M // FOLD - (WINDOW - 1))
    end = first_row + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // FOLD, count - 1) + 1
    share = tl.cdiv(tl.cdiv(end - begin, BLOCK_N), num_splits) * BLOCK_N
    begin += split * share
    end = tl.minimum(begin + share, end)

    in_head, in_value = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_V)
    is_head, is_value = (in_head < HEAD_DIM)[None, :], (in_value < VALUE_DIM)[None, :]
    query_rows = query_ptr + flat_row * query_stride + head * query_head_stride
    queries = tl.load(query_rows[:, None] + in_head[None, :], mask=is_row[:, None] & is_head, other=0.0)
    keys_ptr += kv_head * HEAD_DIM
    values_ptr += kv_head * VALUE_DIM
    block_tables_ptr += lane.to(tl.int64) * table_stride

    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sum_values = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for start in range(begin, end, BLOCK_N):
        key_row = start + tl.arange(0, BLOCK_N)
        is_key = key_row < end
        block = tl.load(block_tables_ptr + key_row // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + key_row % BLOCK_SIZE
        # What is masked is loaded as 0: a weight of 0 would not keep a NaN out.
        key = tl.load(
            keys_ptr + (slot * key_stride)[:, None] + in_head[None, :], mask=is_key[:, None] & is_head, other=0.0
        )
        scores = tl.dot(queries, tl.trans(key), input_precision="ieee") * scale
        distance = sequence_row[:, None] - key_row[None, :]
        visible = (distance >= 0) & is_key[None, :]
        if WINDOW:
            visible &= distance < WINDOW
        if bias_ptr is not None:
            bias_rows = bias_ptr + flat_row * bias_stride + head * bias_head_stride
            is_biased = visible & is_row[:, None] & (distance < extent)
            added = tl.load(bias_rows[:, None] + distance, mask=is_biased, other=0.0)
            scores += added.to(tl.float32) * 1.4426950408889634
        scores = tl.where(visible, scores, float("-inf"))

        new_maximum = tl.maximum(maximum, tl.max(scores, 1))
        shift = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)  # a row may see nothing of this tile
        weights = tl.exp2(scores - shift[:, None])
        rescale = tl.exp2(maximum - shift)
        maximum = new_maximum
        total = total * rescale + tl.sum(weights, 1)
        value_rows = values_ptr + (slot * value_stride)[:, None]
        value = tl.load(value_rows + in_value[None, :], mask=is_key[:, None] & is_value, other=0.0)
        sum_values = sum_values * rescale[:, None]
        sum_values = tl.dot(weights.to(value.dtype), value, sum_values, input_precision="ieee")

    head_row = flat_row * (tl.num_programs(0) * FOLD) + head
    if sums_ptr is not None:
        part = head_row * num_splits + split
        tl.store(maxima_ptr + part, maximum, mask=is_row)
        tl.store(totals_ptr + part, total, mask=is_row)
        has_keys = is_row & (total > 0.0)
        parts = sums_ptr + (part * VALUE_DIM)[:, None] + in_value[None, :]
        tl.store(parts, sum_values, mask=has_keys[:, None] & is_value)
    else:
        result = sum_values / tl.where(total > 0.0, total, 1.0)[:, None]
        outputs = output_ptr + (head_row * VALUE_DIM)[:, None] + in_value[None, :]
        tl.store(outputs, result, mask=is_row[:, None] & is_value)


@triton.jit  # type: ignore[untyped-decorator]
def _combine_kernel(
    sums_ptr: tl.tensor | None,
    maxima_ptr: tl.tensor | None,
    totals_ptr: tl.tensor | None,
    num_rows_ptr: tl.tensor,
    flat_rows_ptr: tl.tensor,
    output_ptr: tl.tensor,
    num_splits: int,
    VALUE_DIM: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_V: tl.constexpr,
) -> None:
    """One head of one query row: its splits, each of which has its own maximum, added up. Those without keys are not
    read."""
    head, row, lane = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    if row >= tl.load(num_rows_ptr + lane):
        return
    flat_row = (tl.load(flat_rows_ptr + lane) + row).to(tl.int64)
    head_row = flat_row * tl.num_programs(0) + head
    split, in_value = tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_V)
    part = head_row * num_splits + split
    is_value = in_value < VALUE_DIM
    maximum = tl.load(maxima_ptr + part, mask=split < num_splits, other=float("-inf"))
    has_keys = maximum > float("-inf")
    total = tl.load(totals_ptr + part, mask=has_keys, other=0.0)
    parts = sums_ptr + (part * VALUE_DIM)[:, None] + in_value[None, :]
    sum_values = tl.load(parts, mask=has_keys[:, None] & is_value[None, :], other=0.0)
    weights = tl.where(has_keys, tl.exp2(maximum - tl.max(maximum, 0)), 0.0)
    whole = tl.sum(total * weights, 0)
    result = tl.sum(sum_values * weights[:, None], 0) / tl.where(whole > 0.0, whole, 1.0)
    tl.store(output_ptr + head_row * VALUE_DIM + in_value, result, mask=is_value)
