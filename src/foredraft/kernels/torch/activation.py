"""The activation of a gated MLP in plain torch."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional as F


def silu_and_mul(gate_up: Tensor) -> Tensor:
    """See `foredraft.kernels.ops.Kernels`."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)
