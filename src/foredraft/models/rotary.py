"""Rotary embeddings by position: what a model's own module gives, computed once for all positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

MAX_TABLE_POSITIONS = 2**20


@dataclass(frozen=True)
class RotaryTable:
    """cos, sin [P, rotated size] in the model's dtype: row p turns queries and keys at position p."""

    cos: Tensor
    sin: Tensor

    @classmethod
    def of(cls, rotary: nn.Module, num_positions: int, like: Tensor) -> RotaryTable:
        """Ask a rotary module of transformers for positions 0..num_positions-1; like: a tensor of the model's dtype.

        The embeddings must not depend on the length of a sequence; checkpoints for which they do are refused.
        """
        positions = torch.arange(num_positions, device=like.device).unsqueeze(0)
        cos, sin = rotary(like, position_ids=positions)
        return cls(cos[0].to(like.dtype).contiguous(), sin[0].to(like.dtype).contiguous())

    @property
    def num_positions(self) -> int:
        return self.cos.shape[0]
