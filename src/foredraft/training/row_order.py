"""Which rows of text a step trains on, and the seeds of its draws: functions of the step, with no state to lose."""

from __future__ import annotations

import random

import torch
from torch import Tensor


class RowOrder:
    """Passes over all rows, each in an order of its own."""

    def __init__(self, num_rows: int, batch_size: int, seed: int) -> None:
        self._num_rows, self._batch_size, self._seed = num_rows, batch_size, seed
        self._passes: dict[int, Tensor] = {}

    def rows(self, step: int, rank: int = 0, num_ranks: int = 1) -> Tensor:
        """Numbers of the rows of a step, the part of one of several processes."""
        first = step * self._batch_size
        places = range(first + rank, first + self._batch_size, num_ranks)
        return torch.stack([self._pass(place // self._num_rows)[place % self._num_rows] for place in places])

    def _pass(self, number: int) -> Tensor:
        if number not in self._passes:
            self._passes = {old: order for old, order in self._passes.items() if old == number - 1}
            generator = torch.Generator().manual_seed(seed_of(self._seed, "rows", number))
            self._passes[number] = torch.randperm(self._num_rows, generator=generator)
        return self._passes[number]


def seed_of(seed: int, *parts: object) -> int:
    """A seed that follows from a seed and what it is for."""
    return random.Random("/".join(map(str, (seed, *parts)))).getrandbits(62)
