"""The head of int8 rows: what it computes, and that both kinds of kernels agree."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from foredraft.kernels.torch import int8_head as on_torch
from foredraft.kernels.triton import int8_head as on_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
KINDS = pytest.mark.parametrize("kernels", [on_torch, on_triton], ids=["torch", "triton"])


def make_head(num_tokens: int, size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weight [N, K] int8, scales [N], bias [N]."""
    generator = torch.Generator().manual_seed(num_tokens + size)
    weight, scales = on_torch.int8_rows(torch.randn(num_tokens, size, generator=generator))
    return weight.to(DEVICE), scales.to(DEVICE), torch.randn(num_tokens, generator=generator).to(DEVICE)


def states(num_rows: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(num_rows, size, generator=torch.Generator().manual_seed(num_rows)).to(DEVICE, dtype)


@KINDS
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("num_rows", "num_tokens", "size"), [(1, 64, 128), (3, 100, 40), (20, 17, 200), (70, 130, 16)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_logits(
    kernels: ModuleType, dtype: torch.dtype, num_rows: int, num_tokens: int, size: int, has_bias: bool
) -> None:
    weight, scales, bias = make_head(num_tokens, size)
    hidden = states(num_rows, size, dtype)
    logits = kernels.int8_logits(hidden, weight, scales, bias if has_bias else None)
    expected = hidden.double() @ weight.double().T * scales.double() + (bias.double() if has_bias else 0)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)


@KINDS
@pytest.mark.parametrize("num_rows", [0, 1, 5, 70])
@pytest.mark.parametrize("num_tokens", [1, 64, 1000])
def test_the_highest_logit(kernels: ModuleType, num_rows: int, num_tokens: int) -> None:
    weight, scales, bias = make_head(num_tokens, 48)
    hidden = states(num_rows, 48)
    expected = kernels.int8_logits(hidden, weight, scales, bias).argmax(dim=-1)
    apart = torch.cat([hidden, hidden + 1], dim=-1)[:, :48]  # rows of a larger tensor
    assert torch.equal(kernels.int8_argmax(apart, weight, scales, bias), expected)
    ids = kernels.int8_argmax(hidden, weight, scales, bias)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, expected)


@KINDS
@pytest.mark.parametrize("places", [(3, 5), (10, 70, 140), (63, 64), (140, 149)])
def test_the_lowest_index_on_a_tie(kernels: ModuleType, places: tuple[int, ...]) -> None:
    weight, scales, _ = make_head(150, 32)
    weight[list(places)], scales[list(places)] = 127, 1.0
    hidden = torch.ones(2, 32, device=DEVICE)
    assert kernels.int8_argmax(hidden, weight, scales).tolist() == [places[0]] * 2


@KINDS
def test_a_row_of_nan_harms_no_other(kernels: ModuleType) -> None:
    weight, scales, bias = make_head(100, 32)
    hidden = states(4, 32)
    expected = kernels.int8_argmax(hidden, weight, scales, bias)
    hidden[1] = torch.nan
    ids = kernels.int8_argmax(hidden, weight, scales, bias)
    assert torch.equal(ids[[0, 2, 3]], expected[[0, 2, 3]])
    assert 0 <= int(ids[1]) < 100


def test_rows_are_rounded_to_the_nearest_of_255_steps() -> None:
    weight = torch.randn(9000, 8, generator=torch.Generator().manual_seed(0)) * torch.rand(9000, 1)
    weight[4321] = 0.0
    rounded, scales = on_torch.int8_rows(weight)
    assert torch.equal(rounded.abs().amax(dim=1) == 127, weight.abs().amax(dim=1) > 0)
    assert not rounded[4321].any()
    assert bool(((rounded * scales[:, None] - weight).abs() <= scales[:, None] * 0.5001).all())
