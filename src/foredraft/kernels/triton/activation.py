"""The activation of a gated MLP in Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 1024


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `foredraft.kernels.ops.Kernels`."""
    assert gate_up.stride(-1) == 1
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    y = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    grid = (num_rows, triton.cdiv(width, _BLOCK))
    _silu_and_mul_kernel[grid](gate_up, y, gate_up.stride(0), width=width, block=_BLOCK, num_warps=4)
    return y


@triton.jit  # type: ignore[untyped-decorator]
def _silu_and_mul_kernel(
    gate_up_ptr: tl.tensor,
    y_ptr: tl.tensor,
    stride: int,
    width: tl.constexpr,
    block: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * block + tl.arange(0, block)
    inside = column < width
    gate = tl.load(gate_up_ptr + row * stride + column, inside, 0.0)
    up = tl.load(gate_up_ptr + row * stride + width + column, inside, 0.0)
    wide = gate.to(tl.float32)
    silu = tl.div_rn(wide, 1.0 + tl.exp(-wide)).to(gate.dtype)
    y = silu.to(tl.float32) * up.to(tl.float32)
    tl.store(y_ptr + row * width + column, y.to(gate.dtype), inside)
