"""Linear layers of a CPU whose weights lie as its products read them best."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

_ROWS = 16
"""Rows that the layout is chosen for: those of a verification. It measures best for one row as well."""


class PackedLinear(nn.Module):
    """A linear layer by oneDNN, with a copy of the weight in its own blocked layout.

    For few rows torch's own product (MKL's in float32) reads a weight at a half or a quarter of the bandwidth, and in
    float32 nine rows may cost twice as much as one; this one reads at nearly all of it, and more rows add little.

    linear: torch's plain layer in a dtype that `can_pack`; its weight [N, K] and bias stay what they are.
    """

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight
        self.bias = linear.bias
        known: Any = torch.ops.mkldnn  # which a torch without oneDNN does not have
        self._product: Any = known._linear_pointwise
        self._packed: Tensor = known._reorder_linear_weight(linear.weight.detach().contiguous(), _ROWS)

    def forward(self, x: Tensor) -> Tensor:
        """x [..., K] -> [..., N]"""
        num_rows = x.numel() // x.shape[-1]
        size = padded_rows(num_rows)
        if size > num_rows:
            flat = F.pad(x.reshape(num_rows, -1), (0, 0, 0, size - num_rows))
            return self._multiply(flat)[:num_rows].view(*x.shape[:-1], -1)
        return self._multiply(x)

    def _multiply(self, x: Tensor) -> Tensor:
        y: Tensor = self._product(x, self._packed, self.bias, "none", [], "")
        return y


def padded_rows(num_rows: int) -> int:
    """The rows that a product of so many is padded to: oneDNN compiles, and keeps, one for each number of rows."""
    step = 1 if num_rows <= 32 else 16 if num_rows <= 128 else 64 if num_rows <= 512 else 128
    return -(-num_rows // step) * step


def can_pack(weight: Tensor) -> bool:
    """Whether this torch, on this processor, has such products for a weight of this device and dtype."""
    known: Any = torch.ops.mkldnn
    if weight.device.type != "cpu" or not torch._C._has_mkldnn:
        return False
    if weight.dtype == torch.bfloat16:
        return bool(known._is_mkldnn_bf16_supported())
    if weight.dtype == torch.float16:
        return bool(known._is_mkldnn_fp16_supported())
    return weight.dtype == torch.float32


def pack(layer: nn.Module) -> nn.Module:
    """The packed form of a plain linear layer that has one; any other layer as it is."""
    return PackedLinear(layer) if type(layer) is nn.Linear and can_pack(layer.weight) else layer
