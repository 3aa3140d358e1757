"""RMSNorm in Triton: a program for each row, which it reads once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_NUMBERS_A_WARP = 256  # of 16 bits: the widest load, 16 bytes, by each thread
_MAX_WARPS = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `foredraft.kernels.ops.Kernels`."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(x, None, weight, y, None, eps)
    return y


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `foredraft.kernels.ops.Kernels`."""
    assert residual.shape == x.shape
    assert residual.stride(-1) == 1
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    total = torch.empty_like(y)
    _launch(x, residual, weight, y, total, eps)
    return y, total


def join_rms_norms(x: Tensor, y: Tensor, x_weight: Tensor, y_weight: Tensor, eps: float) -> Tensor:
    """See `foredraft.kernels.ops.Kernels`."""
    num_rows, width = x.shape
    assert y.shape == x.shape
    assert x.stride(-1) == y.stride(-1) == 1
    assert x_weight.is_contiguous()
    assert y_weight.is_contiguous()
    joined = torch.empty(num_rows, 2 * width, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(width)
    _join_rms_norms_kernel[(num_rows, 2)](
        x,
        y,
        x_weight,
        y_weight,
        joined,
        x.stride(0),
        y.stride(0),
        eps,
        width=width,
        block=block,
        num_warps=_warps(block),
    )
    return joined


def _warps(block: int) -> int:
    return min(max(block // _NUMBERS_A_WARP, 1), _MAX_WARPS)


def _launch(x: Tensor, residual: Tensor | None, weight: Tensor, y: Tensor, total: Tensor | None, eps: float) -> None:
    num_rows, width = x.shape
    assert x.stride(-1) == 1
    assert weight.shape == (width,)
    assert weight.is_contiguous()
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(num_rows,)](
        x,
        residual,
        weight,
        y,
        total,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        width=width,
        block=block,
        num_warps=_warps(block),
    )


@triton.jit  # type: ignore[untyped-decorator]
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    residual_ptr: tl.tensor | None,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    total_ptr: tl.tensor | None,
    x_stride: int,
    residual_stride: int,
    eps: float,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, block)
    inside = column < width
    weight = tl.load(weight_ptr + column, inside, 0.0)
    x = tl.load(x_ptr + row * x_stride + column, inside, 0.0)
    wide = x.to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * residual_stride + column, inside, 0.0)
        total = (wide + residual.to(tl.float32)).to(x.dtype)
        tl.store(total_ptr + row * width + column, total, inside)
        wide = total.to(tl.float32)
    tl.store(y_ptr + row * width + column, _normed(wide, weight, eps, width), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _join_rms_norms_kernel(
    x_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_weight_ptr: tl.tensor,
    y_weight_ptr: tl.tensor,
    joined_ptr: tl.tensor,
    x_stride: int,
    y_stride: int,
    eps: float,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row, half = tl.program_id(0).to(tl.int64), tl.program_id(1)
    column = tl.arange(0, block)
    inside = column < width
    if half == 0:
        rows, weights = x_ptr + row * x_stride, x_weight_ptr
    else:
        rows, weights = y_ptr + row * y_stride, y_weight_ptr
    weight = tl.load(weights + column, inside, 0.0)
    wide = tl.load(rows + column, inside, 0.0).to(tl.float32)
    tl.store(joined_ptr + (row * 2 + half) * width + column, _normed(wide, weight, eps, width), inside)


@triton.jit  # type: ignore[untyped-decorator]
def _normed(wide: tl.tensor, weight: tl.tensor, eps: float, width: tl.constexpr) -> tl.tensor:
    """A row, rounded to the type of the weight before it is multiplied by it."""
    normed = (wide * tl.rsqrt(tl.sum(wide * wide) / width + eps)).to(weight.dtype)
    return (normed.to(tl.float32) * weight.to(tl.float32)).to(weight.dtype)
