"""Matrix products of a layer, and the head's best token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """x times the transpose of `weight`, plus `bias`, plus `residual`.

    x [T, K], weight [N, K], bias [N], residual [T, N], all of one dtype. Returns [T, N].
    """
    y = F.linear(x, weight, bias)
    return y if residual is None else residual + y


def gated_linear(x: Tensor, weight: Tensor) -> Tensor:
    """silu(gate) * up of a gated MLP.

    x [T, K], weight [2 * I, K]: the gate's rows, then those of up. Returns [T, I].
    """
    gate, up = F.linear(x, weight).chunk(2, dim=-1)
    return F.silu(gate) * up


def argmax_head(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The token with the largest logit in each row: the lowest id on a tie, and the first NaN if there is one.

    hidden [T, H], weight [V, H], bias [V]. Returns int64 [T].
    """
    return torch.argmax(F.linear(hidden, weight, bias), dim=-1)
