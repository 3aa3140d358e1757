"""A head whose rows are int8 with one scale each, in plain torch: half the memory of bfloat16, a quarter of float32."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

_ROWS_AT_ONCE = 4096
"""Rows of a head that are expanded at once: on a CPU they stay in its cache."""


def int8_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round each row of `weight` [N, K] to int8, symmetrically: row = int8 * scale, where the largest becomes 127.

    Returns int8 [N, K] and scales [N] float32.
    """
    rounded = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(len(weight), dtype=torch.float32, device=weight.device)
    for start in range(0, len(weight), _ROWS_AT_ONCE):  # no second head in float32
        rows = weight[start : start + _ROWS_AT_ONCE].float()
        largest = rows.abs().amax(dim=1)
        scale = torch.where(largest > 0, largest / 127, 1.0)  # a row of zeros stays one
        rounded[start : start + _ROWS_AT_ONCE] = (rows / scale[:, None]).round()
        scales[start : start + _ROWS_AT_ONCE] = scale
    return rounded, scales


def int8_logits(hidden: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """hidden [T, K] times each row of `weight` [N, K] int8, times its entry of `scales` [N] float32, plus `bias` [N].

    Returns logits [T, N] float32.
    """
    hidden = hidden.float()
    blocks = range(0, len(weight), _ROWS_AT_ONCE)
    products = [F.linear(hidden, weight[start : start + _ROWS_AT_ONCE].float()) for start in blocks]
    logits = torch.cat(products, dim=1).mul_(scales)
    return logits if bias is None else logits.add_(bias)


def int8_argmax(hidden: Tensor, weight: Tensor, scales: Tensor, bias: Tensor | None = None) -> Tensor:
    """The index of each row's highest logit, the lowest on a tie; arguments as for `int8_logits`. Returns [T] int64."""
    return int8_logits(hidden, weight, scales, bias).argmax(dim=-1)
