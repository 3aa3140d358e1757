"""RMSNorm against transformers' own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from foredraft.kernels.ops import Kernels, kernels_named

# Of float32, within a few last bits. Of bfloat16, the interpreter truncates where a GPU rounds: some of its bits more.
TOLERANCE = {torch.float32: 5e-7, torch.float16: 2e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
EPS = 1e-5


@pytest.fixture(params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Both sets: that of Triton on a GPU if there is one, and otherwise in its interpreter."""
    on_gpu = request.param == "triton" and torch.cuda.is_available()
    if request.param == "triton":
        pytest.importorskip("triton")
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"), torch.inference_mode():
        yield kernels_named(request.param)


def llama_norm(width: int, dtype: torch.dtype) -> LlamaRMSNorm:
    norm = LlamaRMSNorm(width, EPS).to(dtype)
    norm.weight.copy_(torch.rand(width) + 0.5)
    return norm


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[theirs.dtype], atol=TOLERANCE[theirs.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 576), (9, 96), (3, 40), (2, 2048), (2, 5000), (0, 64)])
def test_rows_are_normed_as_llama_norms_them(kernels: Kernels, num_rows: int, width: int, dtype: torch.dtype) -> None:
    norm, x = llama_norm(width, dtype), 3 * torch.randn(num_rows, width, dtype=dtype)
    assert_close(kernels.rms_norm(x, norm.weight, EPS), norm(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 576), (9, 96), (3, 40), (0, 64)])
def test_two_norms_lie_side_by_side(kernels: Kernels, num_rows: int, width: int, dtype: torch.dtype) -> None:
    norms, rows = [llama_norm(width, dtype) for _ in range(2)], torch.randn(2, num_rows, width, dtype=dtype)
    joined = kernels.join_rms_norms(rows[0], rows[1], norms[0].weight, norms[1].weight, EPS)
    assert_close(joined, torch.cat([norms[0](rows[0]), norms[1](rows[1])], dim=-1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 576), (9, 96), (3, 40), (0, 64)])
def test_the_residual_is_added_before_the_norm(kernels: Kernels, num_rows: int, width: int, dtype: torch.dtype) -> None:
    norm = llama_norm(width, dtype)
    x, residual = torch.randn(2, num_rows, width, dtype=dtype)
    before = x.clone(), residual.clone()
    y, total = kernels.add_rms_norm(x, residual, norm.weight, EPS)
    assert_close(total, x + residual)
    assert_close(y, norm(x + residual))
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


def test_numbers_are_rounded_before_the_weight(kernels: Kernels) -> None:
    # Rounded once only, one in four would differ.
    norm, x = llama_norm(576, torch.float16), torch.randn(8, 576, dtype=torch.float16)
    assert (kernels.rms_norm(x, norm.weight, EPS) == norm(x)).float().mean() > 0.99
    assert (kernels.add_rms_norm(x, x, norm.weight, EPS)[0] == norm(x + x)).float().mean() > 0.99


def test_eps_counts_in_small_rows(kernels: Kernels) -> None:
    norm, x = llama_norm(64, torch.float32), 1e-3 * torch.randn(2, 64)
    assert_close(kernels.rms_norm(x, norm.weight, EPS), norm(x))


def test_rows_may_lie_apart(kernels: Kernels) -> None:
    norm, wide = llama_norm(96, torch.float32), torch.randn(5, 300)
    x, residual = wide[:, 7:103], wide[:, 200:296]
    assert_close(kernels.rms_norm(x, norm.weight, EPS), norm(x))
    assert_close(kernels.add_rms_norm(x, residual, norm.weight, EPS)[0], norm(x + residual))
