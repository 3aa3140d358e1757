"""Rotary positions, and a row's place in the cache, in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


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
    """See `foredraft.kernels.ops.Kernels`. The result is a view: its rows may lie further apart than they are long."""
    width = (num_heads + num_kv_heads) * head_dim
    heads = qkv[:, :width].view(len(qkv), num_heads + num_kv_heads, head_dim)
    if q_norm is not None and k_norm is not None:
        heads = F.rms_norm(heads, (head_dim,), None, eps)
        heads[:, :num_heads].mul_(q_norm)
        heads[:, num_heads:].mul_(k_norm)
    rotated = _rotate(heads, cos.index_select(0, positions), sin.index_select(0, positions))
    key_cache.index_copy_(0, slots, rotated[:, num_heads:].flatten(1))
    value_cache.index_copy_(0, slots, qkv[:, width:])
    return rotated[:, :num_heads]


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [T, num_heads, head_dim] by the angles of their rows [T, R]; writes to sin."""
    rotary_dim = cos.shape[-1]
    half = rotary_dim // 2
    # rotate_half(x) * sin is roll(x) * (-sin of the first half, sin of the second): one call instead of a negation and
    # a concatenation of all heads.
    sin[:, :half].neg_()
    turning = heads if rotary_dim == heads.shape[-1] else heads[..., :rotary_dim]
    turned = (turning * cos.unsqueeze(1)).add_(turning.roll(half, -1).mul_(sin.unsqueeze(1)))
    return turned if turning is heads else torch.cat((turned, heads[..., rotary_dim:]), -1)
