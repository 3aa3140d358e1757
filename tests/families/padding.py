"""The rule of a recurrent layer over requests of unequal numbers of rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def check_padding(layer: Any, seen: Tensor, sizes: tuple[int, ...]) -> None:
    """Rows that are none change neither the state nor the outputs of those before them, whatever they hold.

    seen: inputs of some requests, those of three earlier rows first, [B, 3 + L, width]. sizes: of a state.
    """
    batch, num_rows = len(seen), seen.shape[1] - 3
    counts = [max(1, num_rows - 2 * index) for index in range(batch)]
    states = torch.randn(batch, *sizes, generator=torch.Generator().manual_seed(1))
    is_real = torch.arange(num_rows) < torch.tensor(counts).unsqueeze(1)
    outputs, after = layer._rule(seen, is_real, states)
    for index, count in enumerate(counts):
        one = slice(index, index + 1)
        alone, wanted = layer._rule(seen[one, : 3 + count], is_real[one, :count], states[one])
        torch.testing.assert_close(outputs[one, :count], alone, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(after[one], wanted, atol=1e-4, rtol=1e-4)
