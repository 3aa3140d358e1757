"""RMSNorm in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `foredraft.kernels.ops.Kernels`."""
    # The weight is not given to F.rms_norm, which would round once, after the product, where checkpoints expect twice.
    return weight * F.rms_norm(x, x.shape[-1:], None, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """See `foredraft.kernels.ops.Kernels`."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def join_rms_norms(x: Tensor, y: Tensor, x_weight: Tensor, y_weight: Tensor, eps: float) -> Tensor:
    """See `foredraft.kernels.ops.Kernels`."""
    return torch.cat([rms_norm(x, x_weight, eps), rms_norm(y, y_weight, eps)], dim=-1)
