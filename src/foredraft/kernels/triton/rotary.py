"""Rotary positions, and a row's place in the cache, in Triton: one launch for queries, keys and values."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS_A_PROGRAM = 1024


def rotate_and_store(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slots: Tensor,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """See `foredraft.kernels.ops.Kernels`."""
    assert all(tensor.stride(-1) == 1 for tensor in (qkv, positions, cos, sin, key_cache, value_cache, slots))
    assert cos.stride() == sin.stride()
    assert (q_norm is None) == (k_norm is None)
    num_rows, all_heads = qkv.shape[0], num_heads + 2 * num_kv_heads
    block = triton.next_power_of_2(head_dim)
    group = min(max(_NUMBERS_A_PROGRAM // block, 1), triton.next_power_of_2(all_heads))
    query = torch.empty((num_rows, num_heads, head_dim), dtype=qkv.dtype, device=qkv.device)
    _rotate_and_store_kernel[(num_rows, triton.cdiv(all_heads, group))](
        qkv,
        positions,
        cos,
        sin,
        query,
        key_cache,
        value_cache,
        slots,
        q_norm,
        k_norm,
        qkv.stride(0),
        cos.stride(0),
        key_cache.stride(0),
        value_cache.stride(0),
        eps,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rotary_dim=cos.shape[1],
        group=group,
        block=block,
        num_warps=4,
        enable_fp_fusion=False,  # both products of a rotation are rounded, as torch does
    )
    return query


@triton.jit  # type: ignore[untyped-decorator]
def _rotate_and_store_kernel(
    qkv_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    query_ptr: tl.tensor,
    key_ptr: tl.tensor,
    value_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_norm_ptr: tl.tensor | None,
    k_norm_ptr: tl.tensor | None,
    qkv_stride: int,
    angle_stride: int,
    key_stride: int,
    value_stride: int,
    eps: float,
    num_heads: tl.constexpr,
    num_kv_heads: tl.constexpr,
    head_dim: tl.constexpr,
    rotary_dim: tl.constexpr,
    group: tl.constexpr,
    block: tl.constexpr,
) -> None:
    """A program takes `group` heads of a row, whichever of queries, keys and values they are."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row)
    angle_at = tl.load(positions_ptr + row) * angle_stride
    head = tl.program_id(1) * group + tl.arange(0, group)[:, None]
    column = tl.arange(0, block)[None, :]
    inside = (head < num_heads + 2 * num_kv_heads) & (column < head_dim)
    is_query = head < num_heads
    is_value = head >= num_heads + num_kv_heads
    turns = column < rotary_dim
    is_first = column < rotary_dim // 2
    partner_column = tl.where(is_first, column + rotary_dim // 2, tl.where(turns, column - rotary_dim // 2, column))

    source = qkv_ptr + row * qkv_stride + head * head_dim
    raw = tl.load(source + column, inside, 0.0)
    partner = tl.load(source + partner_column, inside, 0.0).to(tl.float32)
    cos = tl.load(cos_ptr + angle_at + column, turns, 0.0).to(tl.float32)
    sin = tl.load(sin_ptr + angle_at + column, turns, 0.0).to(tl.float32)
    x = raw.to(tl.float32)
    if q_norm_ptr is not None:
        factor = tl.rsqrt(tl.sum(x * x, 1)[:, None] / head_dim + eps)
        weight = _head_norm_weight(q_norm_ptr, k_norm_ptr, is_query, column, head_dim)
        partner_weight = _head_norm_weight(q_norm_ptr, k_norm_ptr, is_query, partner_column, head_dim)
        x = _rounded(_rounded(x * factor, raw.dtype) * weight, raw.dtype)
        partner = _rounded(_rounded(partner * factor, raw.dtype) * partner_weight, raw.dtype)
    turned = _rounded(x * cos, raw.dtype) + _rounded(partner * tl.where(is_first, -sin, sin), raw.dtype)
    rotated = tl.where(turns, turned, x).to(raw.dtype)

    tl.store(query_ptr + row * (num_heads * head_dim) + head * head_dim + column, rotated, inside & is_query)
    to_key = key_ptr + slot * key_stride + (head - num_heads) * head_dim
    tl.store(to_key + column, rotated, inside & ~is_query & ~is_value)
    to_value = value_ptr + slot * value_stride + (head - num_heads - num_kv_heads) * head_dim
    tl.store(to_value + column, raw, inside & is_value)


@triton.jit  # type: ignore[untyped-decorator]
def _head_norm_weight(
    q_norm_ptr: tl.tensor, k_norm_ptr: tl.tensor, is_query: tl.tensor, column: tl.tensor, head_dim: tl.constexpr
) -> tl.tensor:
    of_queries = tl.load(q_norm_ptr + column, column < head_dim, 0.0)
    of_keys = tl.load(k_norm_ptr + column, column < head_dim, 0.0)
    return tl.where(is_query, of_queries, of_keys).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _rounded(x: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """To what torch would have stored."""
    return x.to(dtype).to(tl.float32)
