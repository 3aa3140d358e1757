"""The activation of a gated MLP against transformers' own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from foredraft.kernels.ops import Kernels, kernels_named

# Of float32, within a few last bits. Of bfloat16, the interpreter truncates where a GPU rounds: some of its bits more.
TOLERANCE = {torch.float32: 5e-7, torch.float16: 2e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)


@pytest.fixture(params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Both sets: that of Triton on a GPU if there is one, and otherwise in its interpreter."""
    on_gpu = request.param == "triton" and torch.cuda.is_available()
    if request.param == "triton":
        pytest.importorskip("triton")
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"), torch.inference_mode():
        yield kernels_named(request.param)


def llama_activation(gate_up: Tensor) -> Tensor:
    mlp = LlamaMLP(LlamaConfig(hidden_size=8, intermediate_size=8, num_attention_heads=1))  # type: ignore[no-untyped-call]
    gate, up = gate_up.tensor_split(2, dim=1)
    activated: Tensor = mlp.act_fn(gate) * up
    return activated


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_rows", "width"), [(1, 1536), (9, 96), (3, 40), (2, 1025), (0, 64)])
def test_it_is_that_of_llama(kernels: Kernels, num_rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = 4 * torch.randn(num_rows, 2 * width, dtype=dtype)
    theirs, tolerance = llama_activation(gate_up), TOLERANCE[dtype]
    torch.testing.assert_close(kernels.silu_and_mul(gate_up), theirs, rtol=tolerance, atol=tolerance)


def test_silu_is_rounded_before_the_product(kernels: Kernels) -> None:
    # Rounded once only, one in four would differ.
    gate_up = torch.randn(8, 2 * 576, dtype=torch.float16)
    assert (kernels.silu_and_mul(gate_up) == llama_activation(gate_up)).float().mean() > 0.99


@pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")  # by numpy, in the interpreter
def test_large_numbers_on_both_sides(kernels: Kernels) -> None:
    gate = torch.tensor([[-200.0, -90.0, 0.0, 90.0, 200.0]])
    ours = kernels.silu_and_mul(torch.cat((gate, torch.full_like(gate, 2.0)), dim=1))
    torch.testing.assert_close(ours, torch.tensor([[0.0, 0.0, 0.0, 180.0, 400.0]]), rtol=0, atol=1e-30)


def test_rows_may_lie_apart(kernels: Kernels) -> None:
    gate_up = torch.randn(5, 300)[:, 7:207]
    ours = kernels.silu_and_mul(gate_up)
    torch.testing.assert_close(ours, llama_activation(gate_up), rtol=5e-7, atol=5e-7)
