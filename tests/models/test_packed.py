"""Packed linear layers: the same numbers up to rounding, and nothing of the model lost."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_glm4_moe, tiny_llama
from torch import nn

from foredraft import LLM, SamplingParams
from foredraft.errors import ConfigError
from foredraft.models.packed import PackedLinear, can_pack, pack, padded_rows
from foredraft.models.target import TargetModel

DTYPES = [torch.float32, torch.bfloat16]
PROMPTS = [[1, 5, 9, 13], [2], [3, 4] * 9]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 2, 9, 40])
def test_products_equal_those_of_the_plain_layer(dtype: torch.dtype, has_bias: bool, num_rows: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 40, bias=has_bias, dtype=dtype)
    if not can_pack(linear.weight):
        pytest.skip("this processor has no such products")
    x = torch.randn(num_rows, 96, dtype=dtype)
    with torch.inference_mode():
        exact = torch.nn.functional.linear(
            x.double(), linear.weight.double(), None if linear.bias is None else linear.bias.double()
        )
        found, nested = PackedLinear(linear)(x), PackedLinear(linear)(x[None])
    tolerance = 1e-5 if dtype == torch.float32 else 1e-2
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), exact, atol=tolerance, rtol=tolerance)
    assert torch.equal(nested[0], found)


def test_the_plain_weight_stays_what_it_was() -> None:
    linear = nn.Linear(8, 8)
    before = linear.weight.detach().clone()
    packed = pack(linear)
    assert isinstance(packed, PackedLinear)
    assert packed.weight is linear.weight
    assert torch.equal(linear.weight, before)


def test_other_layers_stay_as_they_are() -> None:
    class Other(nn.Linear):
        pass

    for layer in (Other(8, 8), nn.Identity(), nn.Linear(8, 8, dtype=torch.float64)):
        assert pack(layer) is layer


def packed_layers(llm: LLM) -> int:
    """How many layers of target and modules run packed, its head too."""
    target, drafter = llm.engine.runner.target, llm.engine.runner._drafter
    assert isinstance(target, TargetModel)
    layers: list[object] = [target._head]
    fused = [target.fused, drafter.modules._fused if drafter is not None else None]
    for part in (one for one in fused if one is not None):
        layers += [
            getattr(layer, name, None) for layer in part._layers for name in ("qkv", "output", "gate_up", "down")
        ]
        layers += getattr(part, "_projections", [])
    return sum(isinstance(layer, PackedLinear) for layer in layers)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_packed_model_writes_what_the_plain_one_writes(tmp_path: Path, dtype: str) -> None:
    path = tiny_llama(tmp_path / "model", num_modules=3)
    outputs = []
    for is_packed in (True, False):
        llm = LLM(path, dtype=dtype, num_blocks=100, num_speculative_tokens=3, pack_weights=is_packed)
        params = [SamplingParams(max_tokens=16, ignore_eos=True, num_speculative_tokens=k) for k in (0, 3, 2)]
        outputs.append([output.token_ids for output in llm.generate(PROMPTS, params)])
        num_layers = 4 * llm.loaded.target.config.num_hidden_layers + 5 * 3 + 1
        assert packed_layers(llm) == (num_layers if is_packed else 0)
    if dtype == "float32":
        assert outputs[0] == outputs[1]


def test_experts_stay_plain_within_packed_layers(tmp_path: Path) -> None:
    path = tiny_glm4_moe(tmp_path / "model")
    outputs = []
    for is_packed in (True, False):
        llm = LLM(path, dtype="float32", num_blocks=100, num_speculative_tokens=1, pack_weights=is_packed)
        assert (packed_layers(llm) > 0) is is_packed
        outputs.append([one.token_ids for one in llm.generate(PROMPTS, SamplingParams(max_tokens=12, ignore_eos=True))])
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("settings", [{"execution": "reference"}, {"quantization": "int8"}])
def test_what_is_not_fused_or_in_8_bits_is_not_packed(tmp_path: Path, settings: dict[str, str]) -> None:
    path = tiny_llama(tmp_path / "model", num_modules=2)
    assert packed_layers(LLM(path, dtype="float32", num_blocks=50, **settings)) == 0


def test_it_is_true_or_false(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pack_weights must be true or false"):
        LLM(tiny_llama(tmp_path / "model"), pack_weights="yes")


@pytest.mark.parametrize("num_rows", [33, 100, 513])
def test_many_rows_are_padded_to_few_sizes(num_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each number of rows costs a compiled product that stays in memory; the padding reaches no row."""
    linear = nn.Linear(24, 16)
    packed, x = PackedLinear(linear), torch.randn(num_rows, 24)
    seen: list[int] = []
    right = packed._multiply

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        seen.append(len(rows))
        return right(rows)

    monkeypatch.setattr(packed, "_multiply", multiply)
    with torch.inference_mode():
        torch.testing.assert_close(packed(x), linear(x))
        assert packed(x[None]).shape == (1, num_rows, 16)
    assert seen == [padded_rows(num_rows)] * 2
    assert len({padded_rows(count) for count in range(1, 4097)}) < 80
    assert all(count <= padded_rows(count) < 1.6 * count for count in range(1, 4097) if count > 32)
