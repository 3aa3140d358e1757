"""The head's best token, in Triton's interpreter and in torch, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft.kernels.torch import matmul as reference
from foredraft.kernels.triton import matmul
from foredraft.kernels.triton.matmul_config import MatmulConfig

CONFIG = MatmulConfig(block_n=16, block_k=32, num_warps=2, num_stages=3)
IN_PARTS = replace(CONFIG, block_k=64, num_parts=2)
VALUES = (0.0, -0.0, 1.0, -1.0, 3e38, -3e38, float("inf"), -float("inf"), float("nan"))


def both(hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    return matmul.argmax_head(hidden, weight, bias, config=CONFIG), reference.argmax_head(hidden, weight, bias)


@pytest.mark.parametrize("num_rows", [1, 2, 5, 9, 16, 17, 64])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_best_token_is_that_of_the_exact_logits(dtype: torch.dtype, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    hidden = torch.randn(num_rows, 40, generator=generator).to(dtype)
    weight = torch.randn(137, 40, generator=generator).to(dtype)
    bias = torch.randn(137, generator=generator).to(dtype)
    for added in (None, bias):
        exact = hidden.double() @ weight.double().T + (0.0 if added is None else added.double())
        largest = exact.max(dim=-1).values
        fused, composed = both(hidden, weight, added)
        assert fused.dtype == composed.dtype == torch.int64
        # The kernel compares sums in float32, torch compares them rounded to the dtype.
        for ids, error in ((fused, 1e-6), (composed, torch.finfo(dtype).eps)):
            found = exact.gather(1, ids[:, None])[:, 0]
            assert (found >= largest - 40 * error * largest.abs()).all()
        assert (exact.gather(1, fused[:, None])[:, 0] == largest).float().mean() > 0.9


def test_the_lowest_id_wins_a_tie_within_a_tile_and_between_tiles() -> None:
    weight = torch.zeros(100, 8)
    weight[:, 0] = -1.0
    for tied in ([5, 7], [99, 40], [16, 15], [0, 99], [33, 34, 97]):
        logits = weight.clone()
        logits[tied, 0] = 2.0
        for ids in both(torch.eye(3, 8)[:1], logits):
            assert ids.tolist() == [min(tied)]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_all_logits_equal() -> None:
    for value in VALUES:
        hidden, weight = torch.tensor([[1.0], [1.0]]), torch.full((50, 1), value)
        for ids in both(hidden, weight):
            assert ids.tolist() == [0, 0]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@settings(max_examples=60)
@given(st.lists(st.sampled_from(VALUES), min_size=1, max_size=40))
def test_special_values_are_ordered_as_torch_orders_them(values: list[float]) -> None:
    """A NaN comes before infinity, the zeros are equal, minus infinity is still a token."""
    logits = torch.tensor(values)
    fused, composed = both(torch.ones(1, 1), logits[:, None])
    assert fused.tolist() == composed.tolist() == [int(torch.argmax(logits + 0.0))]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_a_poisoned_row_disturbs_no_other() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 33, generator=generator), torch.randn(77, 33, generator=generator)
    clean = matmul.argmax_head(hidden, weight, config=CONFIG)
    hidden[4] = float("nan")
    poisoned = matmul.argmax_head(hidden, weight, config=CONFIG)
    assert poisoned[4] == 0
    clean[4] = 0
    assert torch.equal(poisoned, clean)


def test_more_tiles_than_a_pass_of_the_second_kernel_takes() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(2, 16, generator=generator), torch.randn(16 * 1026, 16, generator=generator)
    weight[-1] = 10 * hidden[1]
    fused, composed = both(hidden, weight)
    assert fused.tolist() == composed.tolist()
    assert fused[1] == 16 * 1026 - 1


def test_rows_after_the_last_token_never_win() -> None:
    generator = torch.Generator().manual_seed(2)
    for _ in range(8):  # the last token is the best one, and its tile has places for eleven more
        hidden = torch.randn(9, 40, generator=generator)
        weight = torch.cat([torch.randn(20, 40, generator=generator), hidden.sum(0, keepdim=True) * 10])
        assert (matmul.argmax_head(hidden, weight, config=CONFIG) <= 20).all()


def test_the_columns_in_parts() -> None:
    generator = torch.Generator().manual_seed(3)
    hidden, weight = torch.randn(9, 100, generator=generator), torch.randn(70, 100, generator=generator)
    ids = matmul.argmax_head(hidden, weight, config=IN_PARTS)
    assert torch.equal(ids, (hidden.double() @ weight.double().T).argmax(-1))


def test_a_part_of_a_larger_vocabulary() -> None:
    generator = torch.Generator().manual_seed(1)
    hidden, weight = torch.randn(5, 48, generator=generator), torch.randn(90, 48, generator=generator)
    weight[70:] *= 100.0
    fused, composed = both(hidden, weight[:60])
    assert torch.equal(fused, composed)
    assert fused.max() < 60
