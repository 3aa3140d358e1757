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
        num_warps=min(max(block // _NUMBERS_A_WARP, 1), _MAX_WARPS),
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
    normed = (wide * tl.rsqrt(tl.sum(wide * wide) / width + eps)).to(x.dtype)
    y = normed.to(tl.float32) * weight.to(tl.float32)
    tl.store(y_ptr + row * width + column, y.to(x.dtype), inside)
