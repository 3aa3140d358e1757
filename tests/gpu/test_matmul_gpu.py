"""Products of few rows at the sizes of real models, against float64 on the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.kernels.triton import matmul
from foredraft.kernels.triton.matmul_config import MatmulConfig, default_config

pytestmark = pytest.mark.gpu

SIZES = [
    (6144, 4096),
    (4096, 4096),
    (4096, 14336),
    (960, 576),
    (576, 576),
    (576, 1536),
    (1000, 1000),
    (77, 130),
]
NUM_ROWS = [1, 2, 9, 16, 17, 32, 33, 64]
BFLOAT16, FLOAT16 = torch.bfloat16, torch.float16
SMALL = MatmulConfig(block_n=16, block_k=32, num_warps=4, num_stages=3)


def random(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """New numbers in each run; the seed is printed if a test fails."""
    generator = torch.Generator("cuda")
    print(f"seed {generator.seed()}")
    return torch.randn(shape, generator=generator, device="cuda").to(dtype)


def assert_near(y: Tensor, exact: Tensor, sums: Tensor, num_roundings: int = 1) -> None:
    """y is `exact` but for its roundings to the dtype, and errors of float32 in the sums of numbers of size `sums`."""
    rounding = 0.51 * num_roundings * torch.finfo(y.dtype).eps
    assert ((y.double() - exact).abs() <= rounding * exact.abs() + 1e-5 * sums).all()


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize(("n", "k", "dtype"), [*((n, k, BFLOAT16) for n, k in SIZES), (576, 576, FLOAT16)])
def test_linear_is_the_exact_product_rounded_once(n: int, k: int, dtype: torch.dtype, num_rows: int) -> None:
    x, weight = random(num_rows, k, dtype=dtype), random(n, k, dtype=dtype)
    exact = x.double() @ weight.double().T
    sums = x.double().abs() @ weight.double().abs().T
    assert_near(matmul.linear(x, weight), exact, sums)
    bias, residual = random(n, dtype=dtype), random(num_rows, n, dtype=dtype)
    added = exact + bias.double() + residual.double()
    without = added - residual.double()
    y = matmul.linear(x, weight, bias, residual)
    rounding = 0.51 * torch.finfo(dtype).eps * (without.abs() + added.abs())
    assert ((y.double() - added).abs() <= rounding * 1.01 + 1e-5 * sums).all()


@pytest.mark.parametrize("num_rows", [1, 5, 16, 17])
def test_float32_is_float32(num_rows: int) -> None:
    x, weight = random(num_rows, 577, dtype=torch.float32), random(301, 577, dtype=torch.float32)
    exact, sums = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
    for y in (matmul.linear(x, weight), matmul.linear(x, weight, config=SMALL)):
        assert ((y.double() - exact).abs() <= 1e-6 * sums).all()


@pytest.mark.parametrize("num_rows", [*NUM_ROWS, 65])
@pytest.mark.parametrize(
    ("inner", "k", "dtype"),
    [(14336, 4096, BFLOAT16), (1536, 576, BFLOAT16), (1536, 576, FLOAT16), (100, 99, BFLOAT16)],
)
def test_gated_linear_against_float64(inner: int, k: int, dtype: torch.dtype, num_rows: int) -> None:
    x, weight = random(num_rows, k, dtype=dtype), random(2 * inner, k, dtype=dtype) / k**0.5
    gate, up = (x.double() @ weight.double().T).chunk(2, dim=-1)
    exact = F.silu(gate) * up
    sums = 10 * (1 + gate.abs() + up.abs()) ** 2
    assert_near(matmul.gated_linear(x, weight), exact, sums, num_roundings=1 if num_rows <= 64 else 8)


@pytest.mark.parametrize("num_rows", [*NUM_ROWS, 65])
@pytest.mark.parametrize(
    ("vocabulary", "k", "dtype"),
    [(128256, 4096, BFLOAT16), (49152, 576, BFLOAT16), (49152, 576, FLOAT16), (1001, 257, BFLOAT16)],
)
def test_argmax_head_against_float64(vocabulary: int, k: int, dtype: torch.dtype, num_rows: int) -> None:
    hidden, weight = random(num_rows, k, dtype=dtype), random(vocabulary, k, dtype=dtype)
    exact = hidden.double() @ weight.double().T
    ids = matmul.argmax_head(hidden, weight)
    assert ids.dtype == torch.int64
    found, (largest, best) = exact.gather(1, ids[:, None])[:, 0], exact.max(dim=-1)
    # Above 64 rows torch compares logits rounded to the dtype.
    error = 1e-5 if num_rows <= 64 else torch.finfo(dtype).eps
    assert (found >= largest - error * largest.abs()).all()
    if num_rows <= 64:
        assert (ids == best).float().mean() > 0.9


def test_ties_and_nan_in_a_large_vocabulary() -> None:
    weight = random(128256, 256)
    hidden = random(9, 256)
    weight[[128255, 70000, 3000]] = 3 * hidden[2]
    hidden[5] = float("nan")
    ids = matmul.argmax_head(hidden, weight)
    assert ids[2] == 3000
    assert ids[5] == 0
    weight[[90000, 100]] = float("nan")
    assert matmul.argmax_head(hidden, weight).tolist() == [100, 100, 100, 100, 100, 0, 100, 100, 100]


@pytest.mark.parametrize(("n", "k"), [(4096, 14336), (576, 1536), (1000, 1000)])
def test_the_same_bits_in_each_run_and_for_each_number_of_rows(n: int, k: int) -> None:
    x, weight = random(16, k), random(2 * n, k)
    linear, gated, ids = matmul.linear(x, weight), matmul.gated_linear(x, weight), matmul.argmax_head(x, weight)
    for _ in range(20):
        assert torch.equal(matmul.linear(x, weight), linear)
        assert torch.equal(matmul.gated_linear(x, weight), gated)
        assert torch.equal(matmul.argmax_head(x, weight), ids)
    for count in (1, 2, 9, 15):
        assert torch.equal(matmul.linear(x[:count], weight), linear[:count])
        assert torch.equal(matmul.gated_linear(x[:count], weight), gated[:count])
        assert torch.equal(matmul.argmax_head(x[:count], weight), ids[:count])


@pytest.mark.parametrize("num_rows", [9, 30, 60])
def test_a_row_of_nan_disturbs_no_other(num_rows: int) -> None:
    x, weight = random(num_rows, 4096), random(6144, 4096)
    linear, gated, ids = matmul.linear(x, weight), matmul.gated_linear(x, weight), matmul.argmax_head(x, weight)
    x[4] = float("nan")
    others = torch.arange(num_rows, device="cuda") != 4
    assert torch.equal(matmul.linear(x, weight)[others], linear[others])
    assert torch.equal(matmul.gated_linear(x, weight)[others], gated[others])
    assert torch.equal(matmul.argmax_head(x, weight)[others], ids[others])
    assert matmul.linear(x, weight)[4].isnan().all()


@pytest.mark.parametrize("early_launch", [False, True])
def test_a_captured_graph_computes_a_chain_anew(early_launch: bool) -> None:
    """Each product reads what the one before wrote, from memory that is used over and over."""
    weights = [random(4096, 4096) / 64 for _ in range(12)]
    head, x = random(32000, 4096), random(9, 4096)
    chosen = default_config(9, 4096, 4096, torch.bfloat16)
    assert chosen is not None
    config = replace(chosen, early_launch=early_launch)

    def chain(config: MatmulConfig) -> Tensor:
        hidden = x
        for weight in weights:
            hidden = matmul.linear(hidden, weight, residual=hidden, config=config)
        return torch.cat([hidden.flatten(), matmul.argmax_head(hidden, head, config=config).to(hidden.dtype)])

    chain(config)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain(config)
    for _ in range(20):
        x.copy_(random(9, 4096))
        graph.replay()
        assert torch.equal(y, chain(chosen))
