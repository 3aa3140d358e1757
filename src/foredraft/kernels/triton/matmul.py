"""Matrix products of few rows, as fast as the weights can be read, and the head's best token without its logits."""
# ruff: noqa: N803 -- constants of a kernel are in capitals

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from foredraft.kernels.triton.matmul_config import MatmulConfig, default_config, padded_rows


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    config: MatmulConfig | None = None,
) -> Tensor:
    """x times the transpose of `weight`, plus `bias`, plus `residual`.

    x [T, K], weight [N, K], bias [N], residual [T, N], all of one dtype; the last dimension of each is contiguous.
    Returns [T, N]. The sum is rounded to the dtype before the residual is added to it, as torch does. Where no `config`
    is given and none is known (see default_config) torch does it all.
    """
    config = config or default_config(len(x), weight.shape[0], weight.shape[1], weight.dtype)
    if config is None:
        y = F.linear(x, weight, bias)
        return y if residual is None else residual + y
    assert bias is None or bias.is_contiguous()
    assert residual is None or (residual.shape == (len(x), len(weight)) and residual.stride(1) == 1)
    n = len(weight)
    y = torch.empty((len(x), n), dtype=x.dtype, device=x.device)
    _linear_kernel[(triton.cdiv(n, config.block_n),)](
        *(x, weight, bias, residual, y),
        *(len(x), n, x.stride(0), weight.stride(0), 0 if residual is None else residual.stride(0)),
        **_constants(x, weight, config),
    )
    return y


def gated_linear(x: Tensor, weight: Tensor, *, config: MatmulConfig | None = None) -> Tensor:
    """silu(gate) * up of a gated MLP, rounded once.

    x [T, K], weight [2 * I, K]: the gate's rows, then those of up; the last dimension of each is contiguous. Returns
    [T, I]. Where no `config` is given and none is known, torch multiplies.
    """
    config = config or default_config(len(x), weight.shape[0], weight.shape[1], weight.dtype)
    if config is None:
        from foredraft.kernels.triton.activation import silu_and_mul

        return silu_and_mul(F.linear(x, weight))
    n = len(weight) // 2
    y = torch.empty((len(x), n), dtype=x.dtype, device=x.device)
    _gated_kernel[(triton.cdiv(2 * n, config.block_n),)](
        *(x, weight, y),
        *(len(x), n, x.stride(0), weight.stride(0)),
        **_constants(x, weight, config),
    )
    return y


def argmax_head(
    hidden: Tensor, weight: Tensor, bias: Tensor | None = None, *, config: MatmulConfig | None = None
) -> Tensor:
    """The token with the largest logit in each row: the lowest id on a tie, and the first NaN if there is one.

    hidden [T, H], weight [V, H], bias [V], all of one dtype; the last dimension of each is contiguous. Returns int64
    [T]. Logits are compared in float32, before they are rounded. Where no `config` is given and none is known, torch
    computes them, rounded to the dtype.
    """
    config = config or default_config(len(hidden), weight.shape[0], weight.shape[1], weight.dtype)
    if config is None:
        return torch.argmax(F.linear(hidden, weight, bias), dim=-1)
    assert bias is None or bias.is_contiguous()
    num_tiles = triton.cdiv(len(weight), config.block_n)
    best = torch.empty((len(hidden), num_tiles), dtype=torch.int64, device=hidden.device)
    ids = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    _best_of_tile_kernel[(num_tiles,)](
        *(hidden, weight, bias, best),
        *(len(hidden), len(weight), hidden.stride(0), weight.stride(0)),
        **_constants(hidden, weight, config),
    )
    _best_of_all_kernel[(len(hidden),)](best, ids, NUM_TILES=num_tiles, BLOCK=1024, num_warps=4)
    return ids


def _constants(x: Tensor, weight: Tensor, config: MatmulConfig) -> dict[str, int | bool]:
    """What the three products have in common, with the options of the launch."""
    assert x.shape[1] == weight.shape[1]
    assert x.stride(1) == weight.stride(1) == 1
    launch: dict[str, int | bool] = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    if config.early_launch:
        launch["launch_pdl"] = True
    return launch | {
        "BLOCK_T": padded_rows(len(x)),
        "BLOCK_N": config.block_n,
        "BLOCK_K": config.block_k,
        "NUM_PARTS": config.num_parts,
        "IN_FEATURES": weight.shape[1],
        "NUM_AHEAD": triton.next_power_of_2(config.num_stages - 1) if config.early_launch else 0,
        "WIDEN": x.device.type == "cpu",  # the dot of Triton's interpreter does not know bfloat16
    }


@triton.jit  # type: ignore[untyped-decorator]
def _prefetch(
    weight_ptr: tl.tensor,
    rows: tl.tensor,
    weight_stride: int,
    BLOCK_K: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    NUM_AHEAD: tl.constexpr,
) -> None:
    """Bring the first NUM_AHEAD tiles of the weight into the L2 cache, one address for each line of 128 bytes."""
    step: tl.constexpr = 1024 // weight_ptr.dtype.element_ty.primitive_bitwidth
    columns = tl.minimum(tl.arange(0, BLOCK_K * NUM_AHEAD // step) * step, IN_FEATURES - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [weight_ptr + rows.to(tl.int64)[:, None] * weight_stride + columns[None, :]],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit  # type: ignore[untyped-decorator]
def _product(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    rows: tl.tensor,
    num_rows: int,
    x_stride: int,
    weight_stride: int,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    NUM_AHEAD: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tensor:
    """The weight's `rows` [BLOCK_N] times all rows of x: float32 [BLOCK_N, BLOCK_T].

    The weight is the left operand: tiles of the tensor cores are 16 or 64 high but only 8 wide, so few rows of x fill
    them best. Rows that x does not have are zeros, and each row is a column of its own, so that nothing leaks.
    """
    if NUM_AHEAD > 0:
        gdc_launch_dependents()
        _prefetch(weight_ptr, rows, weight_stride, BLOCK_K, IN_FEATURES, NUM_AHEAD)
        gdc_wait()
    if NUM_PARTS > 1:
        return _product_in_parts(
            *(x_ptr, weight_ptr, rows, num_rows, x_stride, weight_stride),
            *(BLOCK_T, BLOCK_N, BLOCK_K, NUM_PARTS, IN_FEATURES, WIDEN),
        )
    tokens = tl.arange(0, BLOCK_T)
    columns = tl.arange(0, BLOCK_K)
    weights = weight_ptr + rows.to(tl.int64)[:, None] * weight_stride + columns[None, :]
    inputs = x_ptr + tokens[None, :] * x_stride + columns[:, None]
    is_row = tokens[None, :] < num_rows
    total = tl.zeros((BLOCK_N, BLOCK_T), tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_K):
        if IN_FEATURES % BLOCK_K == 0:
            left = tl.load(weights + start, eviction_policy="evict_first")
            right = tl.load(inputs + start, mask=is_row, other=0.0)
        else:
            is_column = columns < IN_FEATURES - start
            left = tl.load(weights + start, mask=is_column[None, :], other=0.0, eviction_policy="evict_first")
            right = tl.load(inputs + start, mask=is_row & is_column[:, None], other=0.0)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        total = tl.dot(left, right, total, input_precision="ieee")
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _product_in_parts(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    rows: tl.tensor,
    num_rows: int,
    x_stride: int,
    weight_stride: int,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    WIDEN: tl.constexpr,
) -> tl.tensor:
    """The same, with a batched product of NUM_PARTS parts of a tile's columns, added up at the end.

    Each warp has a part to itself. Where a tile is only one or two of the tensor cores' high, warps would otherwise
    read the same numbers from shared memory, and each would wait for its one sum again and again.
    """
    width: tl.constexpr = BLOCK_K // NUM_PARTS
    tokens = tl.arange(0, BLOCK_T)[None, None, :]
    firsts = tl.arange(0, NUM_PARTS)[:, None, None] * width
    left_columns = firsts + tl.arange(0, width)[None, None, :]
    right_columns = firsts + tl.arange(0, width)[None, :, None]
    weights = weight_ptr + rows.to(tl.int64)[None, :, None] * weight_stride + left_columns
    inputs = x_ptr + tokens * x_stride + right_columns
    totals = tl.zeros((NUM_PARTS, BLOCK_N, BLOCK_T), tl.float32)
    for start in range(0, IN_FEATURES, BLOCK_K):
        if IN_FEATURES % BLOCK_K == 0:
            left = tl.load(weights + start, eviction_policy="evict_first")
            right = tl.load(inputs + start, mask=tokens < num_rows, other=0.0)
        else:
            is_left, is_right = left_columns < IN_FEATURES - start, right_columns < IN_FEATURES - start
            left = tl.load(weights + start, mask=is_left, other=0.0, eviction_policy="evict_first")
            right = tl.load(inputs + start, mask=(tokens < num_rows) & is_right, other=0.0)
        if WIDEN:
            left, right = left.to(tl.float32), right.to(tl.float32)
        totals = tl.dot(left, right, totals, input_precision="ieee")
    return tl.sum(totals, 0)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor | None,
    residual_ptr: tl.tensor | None,
    y_ptr: tl.tensor,
    num_rows: int,
    out_features: int,
    x_stride: int,
    weight_stride: int,
    residual_stride: int,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    NUM_AHEAD: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(outputs, out_features - 1)
    total = _product(
        *(x_ptr, weight_ptr, rows, num_rows, x_stride, weight_stride),
        *(BLOCK_T, BLOCK_N, BLOCK_K, NUM_PARTS, IN_FEATURES, NUM_AHEAD, WIDEN),
    )
    if bias_ptr is not None:
        total += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    tokens = tl.arange(0, BLOCK_T)
    exists = (tokens[None, :] < num_rows) & (outputs[:, None] < out_features)
    result = total.to(y_ptr.dtype.element_ty)
    if residual_ptr is not None:
        added = tl.load(residual_ptr + tokens[None, :] * residual_stride + outputs[:, None], mask=exists, other=0.0)
        result = (added.to(tl.float32) + result.to(tl.float32)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + tokens[None, :] * out_features + outputs[:, None], result, mask=exists)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _gated_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    num_rows: int,
    out_features: int,
    x_stride: int,
    weight_stride: int,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    NUM_AHEAD: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    # A tile's rows take turns: one of the gate, the same one of up.
    index = tl.arange(0, BLOCK_N)
    rows = tl.minimum(tl.program_id(0) * (BLOCK_N // 2) + index // 2, out_features - 1) + index % 2 * out_features
    total = _product(
        *(x_ptr, weight_ptr, rows, num_rows, x_stride, weight_stride),
        *(BLOCK_T, BLOCK_N, BLOCK_K, NUM_PARTS, IN_FEATURES, NUM_AHEAD, WIDEN),
    )
    gate, up = tl.split(total.reshape(BLOCK_N // 2, 2, BLOCK_T).permute(0, 2, 1))
    result = gate / (1.0 + tl.exp(-gate)) * up
    tokens = tl.arange(0, BLOCK_T)
    outputs = tl.program_id(0) * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    exists = (tokens[None, :] < num_rows) & (outputs[:, None] < out_features)
    tl.store(y_ptr + tokens[None, :] * out_features + outputs[:, None], result.to(y_ptr.dtype.element_ty), mask=exists)


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _best_of_tile_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor | None,
    best_ptr: tl.tensor,
    num_rows: int,
    out_features: int,
    x_stride: int,
    weight_stride: int,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    IN_FEATURES: tl.constexpr,
    NUM_AHEAD: tl.constexpr,
    WIDEN: tl.constexpr,
) -> None:
    """best [T, tiles]: of the tile's logits the largest and its id in one number, so that the larger number wins."""
    ids = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.minimum(ids, out_features - 1)
    logits = _product(
        *(x_ptr, weight_ptr, rows, num_rows, x_stride, weight_stride),
        *(BLOCK_T, BLOCK_N, BLOCK_K, NUM_PARTS, IN_FEATURES, NUM_AHEAD, WIDEN),
    )
    if bias_ptr is not None:
        logits += tl.load(bias_ptr + rows).to(tl.float32)[:, None]
    # As integers, the bits of floats are in order once the negative ones are turned round. A NaN comes after infinity.
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)
    order = tl.where(logits != logits, 0x7FFFFFFF, bits ^ ((bits >> 31) & 0x7FFFFFFF))
    # Below it the id, inverted: the lowest one wins a tie.
    candidates = (order.to(tl.int64) << 32) | (0x7FFFFFFF - ids).to(tl.int64)[:, None]
    candidates = tl.where(ids[:, None] < out_features, candidates, -(2**63))
    tokens = tl.arange(0, BLOCK_T)
    num_tiles = tl.num_programs(0)
    tl.store(best_ptr + tokens * num_tiles + tl.program_id(0), tl.max(candidates, axis=0), mask=tokens < num_rows)


@triton.jit  # type: ignore[untyped-decorator]
def _best_of_all_kernel(best_ptr: tl.tensor, ids_ptr: tl.tensor, NUM_TILES: tl.constexpr, BLOCK: tl.constexpr) -> None:
    row = tl.program_id(0)
    offsets = tl.arange(0, BLOCK)
    largest = tl.full((BLOCK,), -(2**63), tl.int64)
    for start in range(0, NUM_TILES, BLOCK):
        tile = tl.load(best_ptr + row * NUM_TILES + start + offsets, mask=offsets < NUM_TILES - start, other=-(2**63))
        largest = tl.maximum(largest, tile)
    tl.store(ids_ptr + row, 0x7FFFFFFF - (tl.max(largest, axis=0) & 0x7FFFFFFF))
