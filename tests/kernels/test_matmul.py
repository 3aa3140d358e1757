"""Products of few rows, in Triton's interpreter and in torch, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from foredraft.kernels.torch import matmul as reference
from foredraft.kernels.triton import matmul
from foredraft.kernels.triton.matmul_config import MatmulConfig, default_config, padded_rows

CONFIG = MatmulConfig(block_n=16, block_k=32, num_warps=2, num_stages=3)
IN_PARTS = replace(CONFIG, block_k=64, num_parts=2)
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NUM_ROWS = [1, 2, 5, 9, 16, 17, 64]


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape) + seed)).to(dtype)


def rounding(dtype: torch.dtype) -> float:
    """The largest relative error of a rounding to `dtype`. Triton's interpreter cuts off what bfloat16 cannot hold."""
    return torch.finfo(dtype).eps / (1 if dtype == torch.bfloat16 else 2)


def assert_rounded_once(y: Tensor, x: Tensor, weight: Tensor, exact: Tensor) -> None:
    """y is `exact` but for a rounding to its dtype, and for sums in float32."""
    sums = 2e-6 * (x.double().abs() @ weight.double().abs().T)
    assert ((y.double() - exact).abs() <= sums + 1.01 * rounding(y.dtype) * exact.abs()).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_linear_is_the_exact_product_rounded_once(num_rows: int, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, 64, dtype=dtype), random(48, 64, dtype=dtype)
    exact = x.double() @ weight.double().T
    for y in (
        matmul.linear(x, weight, config=CONFIG),
        matmul.linear(x, weight, config=IN_PARTS),
        reference.linear(x, weight),
    ):
        assert y.dtype == dtype
        assert_rounded_once(y, x, weight, exact)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (16, 32), (17, 33), (50, 100), (15, 31)])
@pytest.mark.parametrize("config", [CONFIG, IN_PARTS])
def test_sizes_need_not_fit_the_tiles(config: MatmulConfig, n: int, k: int) -> None:
    x, weight = random(5, k), random(n, k)
    assert_rounded_once(matmul.linear(x, weight, config=config), x, weight, x.double() @ weight.double().T)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_and_residual_are_added(dtype: torch.dtype) -> None:
    x, weight, bias = random(9, 64, dtype=dtype), random(40, 64, dtype=dtype), random(40, dtype=dtype)
    residual = random(9, 40, dtype=dtype, seed=1)
    product = x.double() @ weight.double().T + bias.double()
    exact = product + residual.double()
    tolerance = 1e-5 + rounding(dtype) * (product.abs() + exact.abs())
    for y in (matmul.linear(x, weight, bias, residual, config=CONFIG), reference.linear(x, weight, bias, residual)):
        assert y.dtype == dtype
        assert ((y.double() - exact).abs() <= 1.01 * tolerance).all()
    if dtype != torch.bfloat16:  # which the interpreter rounds otherwise than torch
        without = matmul.linear(x, weight, bias, config=CONFIG)
        assert torch.equal(residual + without, matmul.linear(x, weight, bias, residual, config=CONFIG))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_rows", [1, 9, 17])
def test_gated_linear_pairs_each_row_of_the_gate_with_its_row_of_up(num_rows: int, dtype: torch.dtype) -> None:
    x, weight = random(num_rows, 40, dtype=dtype), random(2 * 21, 40, dtype=dtype)
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    exact = torch.nn.functional.silu(gate) * up
    scale = exact.abs() + gate.abs() + up.abs()
    fused = matmul.gated_linear(x, weight, config=CONFIG)
    assert fused.shape == (num_rows, 21)
    assert ((fused.double() - exact).abs() <= 1e-5 * (1 + scale) + 1.01 * rounding(dtype) * exact.abs()).all()
    in_turn = reference.gated_linear(x, weight)
    assert ((in_turn.double() - exact).abs() <= 1e-5 * (1 + scale) + 4 * torch.finfo(dtype).eps * scale**2).all()


def test_the_rows_of_x_and_of_the_residual_may_lie_apart() -> None:
    wide, weight = random(9, 200), random(24, 64)
    x, residual = wide[:, 10:74], wide[:, 100:124]
    alone = matmul.linear(x.contiguous(), weight, None, residual.contiguous(), config=CONFIG)
    assert torch.equal(matmul.linear(x, weight, None, residual, config=CONFIG), alone)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("config", [CONFIG, IN_PARTS])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_in_a_row_depends_on_the_other_rows(dtype: torch.dtype, config: MatmulConfig) -> None:
    x, weight = random(16, 70, dtype=dtype), random(36, 70, dtype=dtype)
    x[3] = float("nan")
    x[7] = float("inf")
    linear, gated = matmul.linear(x, weight, config=config), matmul.gated_linear(x, weight, config=config)
    for row in range(16):
        alone = x[row : row + 1]
        torch.testing.assert_close(
            matmul.linear(alone, weight, config=config)[0], linear[row], rtol=0, atol=0, equal_nan=True
        )
        torch.testing.assert_close(
            matmul.gated_linear(alone, weight, config=config)[0], gated[row], rtol=0, atol=0, equal_nan=True
        )
    assert linear[3].isnan().all()
    assert linear[[0, 1, 2, 4, 15]].isfinite().all()


@pytest.mark.parametrize("config", [CONFIG, IN_PARTS])
def test_what_lies_behind_the_last_row_and_column_is_not_read(config: MatmulConfig) -> None:
    x, weight = torch.full((32, 64), float("nan"))[:5, :40], torch.full((32, 64), float("nan"))[:20, :40]
    x.copy_(random(5, 40))
    weight.copy_(random(20, 40))
    expected = matmul.linear(x.contiguous(), weight.contiguous(), config=config)
    assert torch.equal(matmul.linear(x, weight, config=config), expected)
    assert expected.isfinite().all()


def test_without_a_config_torch_takes_over_where_tensor_cores_do_not_help() -> None:
    weight = random(32, 48)
    for x in (random(0, 48), random(3, 48), random(65, 48)):
        assert torch.equal(
            matmul.linear(x, weight, residual=x[:, :32]), reference.linear(x, weight, residual=x[:, :32])
        )
    few, many = random(3, 48).bfloat16(), random(65, 48).bfloat16()
    assert torch.equal(matmul.linear(many, weight.bfloat16()), reference.linear(many, weight.bfloat16()))
    chosen = default_config(3, 32, 48, torch.bfloat16)
    assert torch.equal(matmul.linear(few, weight.bfloat16()), matmul.linear(few, weight.bfloat16(), config=chosen))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("n", "k"), [(6144, 4096), (28672, 4096), (4096, 14336), (128256, 4096), (960, 576), (576, 1536), (7, 9)]
)
def test_the_tiles_of_a_default_fit_a_multiprocessor(n: int, k: int, dtype: torch.dtype) -> None:
    for num_rows in (1, 16, 17, 64):
        config = default_config(num_rows, n, k, dtype)
        if config is None:  # torch is faster
            continue
        assert config == default_config(padded_rows(num_rows), n, k, dtype)
        tile_bytes = (config.block_n + padded_rows(num_rows)) * config.block_k * 2
        assert tile_bytes * config.num_stages <= 227 << 10
        assert config.block_n % 16 == 0
        assert config.num_parts in {1, config.num_warps}


def test_no_default_for_float32_or_many_rows() -> None:
    assert default_config(1, 4096, 4096, torch.float32) is None
    assert default_config(65, 4096, 4096, torch.bfloat16) is None
    assert default_config(0, 4096, 4096, torch.bfloat16) is None
