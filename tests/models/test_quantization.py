"""Linear layers in int8: rows that do not disturb each other, in a layer and through the engine; what stays float."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_glm4_moe, tiny_llama, tiny_qwen2, tiny_qwen3
from torch import Tensor, nn
from torch.nn import functional as F

from foredraft import LLM, SamplingParams
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError
from foredraft.models.fingerprint import fingerprint
from foredraft.models.loader import LoadedModel, load_checkpoint
from foredraft.models.quantization import Int8Linear, attention_dtype, quantize_linear_layers

pytestmark = pytest.mark.skipif(
    torch.backends.quantized.engine not in ("x86", "fbgemm"), reason="torch has no int8 products for this processor"
)
SHAPES = [(960, 576), (576, 576), (192, 96), (33, 65), (1, 7)]
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [2, 7, 1, 8], [1] * 30, [*range(40, 61)]]
SETTINGS: dict[str, Any] = {"quantization": "int8", "device": "cpu", "num_blocks": 128, "block_size": 4}


def layer_of(shape: tuple[int, int], *, has_bias: bool = False, seed: int = 0) -> tuple[Int8Linear, nn.Linear]:
    """A layer in int8, and the one that it was made of."""
    generator = torch.Generator().manual_seed(seed)
    linear = nn.Linear(shape[1], shape[0], bias=has_bias).requires_grad_(False)
    linear.weight.copy_(torch.randn(shape, generator=generator) / shape[1] ** 0.5)
    if has_bias:
        linear.bias.copy_(torch.randn(shape[0], generator=generator))
    return Int8Linear(linear.weight, linear.bias), linear


def rows_of(count: int, width: int, seed: int = 1) -> Tensor:
    """Rows whose sizes differ by orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, width, generator=generator) * 10 ** (4 * torch.rand(count, 1, generator=generator) - 2)


# -- one layer -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_is_bit_for_bit_what_it_is_alone(shape: tuple[int, int], has_bias: bool) -> None:
    layer, _ = layer_of(shape, has_bias=has_bias)
    x = rows_of(40, shape[1])
    together = layer(x)
    for row in range(len(x)):
        assert torch.equal(layer(x[row : row + 1]), together[row : row + 1])
    assert torch.equal(layer(x[None]), together[None])
    assert layer(x[:0]).shape == (0, shape[0])


@settings(max_examples=30, deadline=None)
@given(order=st.permutations(range(12)), count=st.integers(1, 12))
def test_a_row_does_not_depend_on_its_company(order: list[int], count: int) -> None:
    layer, _ = layer_of((96, 160), has_bias=True)
    x = rows_of(12, 160)
    chosen = torch.tensor(order[:count])
    assert torch.equal(layer(x[chosen]), layer(x)[chosen])


def test_a_row_does_not_depend_on_the_number_of_threads() -> None:
    layer, _ = layer_of((960, 576), has_bias=True)
    x = rows_of(65, 576)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = layer(x)
        torch.set_num_threads(2)
        assert torch.equal(layer(x), alone)
    finally:
        torch.set_num_threads(threads)


def test_torchs_own_dynamic_layer_would_not_do() -> None:
    """The reason for the class: the layer of torch has one scale for the whole batch."""
    layer, _ = layer_of((96, 160))
    x = rows_of(12, 160)
    dynamic: Any = torch.ops.quantized.linear_dynamic
    assert not torch.equal(dynamic(x, layer._packed, False)[:1], dynamic(x[:1], layer._packed, False))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_layer_is_close_to_the_one_it_was_made_of(shape: tuple[int, int]) -> None:
    layer, linear = layer_of(shape, has_bias=True)
    x = rows_of(40, shape[1])
    weight = linear.weight.double()
    largest_error = weight.abs().amax(1) / 254  # half a step of a weight, and half a step of an activation
    step = x.double().abs().amax(1, keepdim=True) / (2 * layer._levels)
    bound = x.double().abs().sum(1, keepdim=True) * largest_error + step * (
        weight.abs().sum(1) + shape[1] * largest_error
    )
    expected = F.linear(x.double(), weight, linear.bias.double())
    assert ((layer(x) - expected).abs() <= bound * 1.001 + 1e-6).all()
    assert (layer(x) - expected).norm() < 0.02 * expected.norm()


def test_rows_that_hold_nothing_or_no_number_stay_what_they_are() -> None:
    layer, _ = layer_of((96, 160), has_bias=True)
    x = rows_of(6, 160)
    expected = layer(x)
    x[1], x[2, 5], x[3, 7], x[4] = 0, float("nan"), float("inf"), 1e-41
    y = layer(x)
    assert layer.bias is not None
    assert torch.equal(y[1], layer.bias)
    assert torch.allclose(y[4], layer.bias)
    assert not y[2:4].isfinite().any()
    assert torch.equal(y[[0, 5]], expected[[0, 5]])


def test_outputs_without_weights_are_zero() -> None:
    layer = Int8Linear(torch.zeros(4, 32))
    assert torch.equal(layer(rows_of(3, 32)), torch.zeros(3, 4))


@pytest.mark.parametrize("has_bias", [False, True])
def test_joined_layers_give_the_same_numbers(has_bias: bool) -> None:
    parts = [layer_of((size, 96), has_bias=has_bias, seed=size)[0] for size in (64, 32, 40)]
    x = rows_of(5, 96)
    together = Int8Linear.join(parts)
    assert torch.equal(together(x), torch.cat([part(x) for part in parts], dim=1))
    bias = None if together.bias is None else together.bias[:70]
    first = Int8Linear(together.weight[:70], bias, together.scale[:70])
    assert torch.equal(first(x), together(x)[:, :70])


def test_activations_have_fewer_levels_where_sums_of_two_products_overflow() -> None:
    """torch's products on a processor without VNNI, which this one is told to be."""
    script = (
        "import torch; from foredraft.models.quantization import Int8Linear\n"
        "layer = Int8Linear(torch.ones(8, 64)); print(layer._levels, layer(torch.ones(3, 64)).unique().tolist())"
    )
    environment = {**os.environ, "FBGEMM_ENABLE_INSTRUCTIONS": "AVX2", "PYTHONPATH": os.pathsep.join(sys.path)}
    run = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    levels, (result,) = int(run.stdout.split()[0]), eval(run.stdout.split(maxsplit=1)[1])
    assert levels == 63
    assert result == pytest.approx(64)


# -- a model ---------------------------------------------------------------------------------------------------------


def loaded(path: Path) -> LoadedModel:
    return load_checkpoint(path, dtype=torch.float32, device=torch.device("cpu"))


def test_linear_layers_become_int8_and_nothing_else(tmp_path: Path) -> None:
    model = loaded(tiny_llama(tmp_path, num_modules=2))
    before = {name for name, module in model.target.named_modules() if type(module) is nn.Linear}
    quantize_linear_layers(model.target, model.mtp)
    assert model.mtp is not None
    for whole in (model.target, model.mtp):
        assert not any(type(module) is nn.Linear for module in whole.modules())
    assert {name for name, module in model.target.named_modules() if isinstance(module, Int8Linear)} == before
    floats = {name for name, tensor in model.target.named_parameters() if tensor.dtype == torch.float32}
    assert {name for name in floats if not name.endswith("scale")} == {
        name for name, _ in model.target.named_parameters() if "norm" in name or "embed" in name
    }
    heads = [module for module in model.mtp.modules() if module is model.target.get_output_embeddings()]  # type: ignore[no-untyped-call]
    assert len(heads) == 1, "the modules' head is the target's"


def test_a_tied_head_is_a_copy_and_the_embedding_stays(tmp_path: Path) -> None:
    model = loaded(tiny_llama(tmp_path, num_modules=1, tie_word_embeddings=True))
    embedding: Any = model.target.get_input_embeddings()
    before = embedding.weight.clone()
    quantize_linear_layers(model.target, model.mtp)
    head: Any = model.target.get_output_embeddings()  # type: ignore[no-untyped-call]
    assert isinstance(head, Int8Linear)
    assert type(embedding) is nn.Embedding
    assert torch.equal(embedding.weight, before)
    assert (head.weight * head.scale[:, None] - before).abs().max() <= head.scale.max() / 2 * 1.001


def test_a_mixture_of_experts_is_refused_before_anything_is_changed(tmp_path: Path) -> None:
    """Its routers and stacked experts multiply in float32, where the rows of a batch disturb each other."""
    model = loaded(tiny_glm4_moe(tmp_path))
    before = [type(module) for module in model.target.modules()]
    with pytest.raises(ConfigError, match=r"quantization=int8 runs .*model\.layers\.1\.mlp\..* is a router or"):
        quantize_linear_layers(model.target, model.mtp)
    assert [type(module) for module in model.target.modules()] == before


@pytest.mark.parametrize("name", ["gate", "router", "shared_expert_gate"])
def test_a_router_that_is_a_linear_layer_is_refused(name: str) -> None:
    block = nn.ModuleDict({"mlp": nn.ModuleDict({name: nn.Linear(8, 4), "gate_proj": nn.Linear(8, 4)})})
    with pytest.raises(ConfigError, match=f"mlp.{name}.weight is a router"):
        quantize_linear_layers(block)


def test_models_with_other_weights_have_other_fingerprints(tmp_path: Path) -> None:
    path, other = tiny_llama(tmp_path / "one"), tiny_llama(tmp_path / "two", seed=1)
    models = [loaded(path), loaded(path), loaded(path), loaded(other)]
    for model in models[1:]:
        quantize_linear_layers(model.target, model.mtp)
    for part in ("target", "mtp"):
        prints = [fingerprint(getattr(model, part)) for model in models]
        assert prints[1] == prints[2]
        assert len({prints[0], prints[1], prints[3]}) == 3


def test_attention_is_wide_for_a_model_with_int8_layers_only(tmp_path: Path) -> None:
    model = loaded(tiny_llama(tmp_path))
    assert attention_dtype(model.target) is None
    quantize_linear_layers(model.target)
    assert attention_dtype(model.target) is torch.float64


# -- the engine ------------------------------------------------------------------------------------------------------

KINDS: dict[str, Callable[[Path], Path]] = {
    "llama": lambda path: tiny_llama(path, num_modules=3, hidden_size=64, num_layers=3),
    "tied": lambda path: tiny_llama(path, num_modules=2, tie_word_embeddings=True),
    "qwen2 sliding": lambda path: tiny_qwen2(path, sliding_window=8),
    "qwen3": tiny_qwen3,
}


@pytest.mark.parametrize("kind", KINDS)
def test_output_is_the_targets_own_at_every_depth_batch_and_chunk(kind: str, tmp_path: Path) -> None:
    path = KINDS[kind](tmp_path)
    depth = LLM(path, **SETTINGS).engine.limits.max_depth
    params = SamplingParams(max_tokens=40, logprobs=0)

    def run(num_drafts: int, *, together: bool, **limits: Any) -> list[Any]:
        with LLM(path, num_speculative_tokens=num_drafts, **SETTINGS | limits) as llm:
            batches = [PROMPTS] if together else [[prompt] for prompt in PROMPTS]
            outputs = [output for batch in batches for output in llm.generate(batch, params)]
        return [(output.token_ids, [score.logprob for score in output.choices[0].logprobs or ()]) for output in outputs]

    alone = run(0, together=False)
    for num_drafts in range(depth + 1):
        # The log-probabilities too, to the last bit: what a layer rounds must not depend on the shape of a batch.
        assert run(num_drafts, together=True) == alone
        assert run(num_drafts, together=False, max_num_batched_tokens=8, max_num_seqs=2) == alone


def test_drafts_come_from_a_part_of_the_head(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path, num_modules=2)
    params = SamplingParams(max_tokens=20)
    expected = LLM(path, num_speculative_tokens=0, **SETTINGS).generate(PROMPTS, params)
    outputs = LLM(path, draft_vocab_size=16, **SETTINGS).generate(PROMPTS, params)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


def test_a_cache_on_disk_of_float_weights_is_not_used(tmp_path: Path) -> None:
    path, kept = tiny_llama(tmp_path / "model"), tmp_path / "kept"
    disk = SETTINGS | {"cache_dir": kept, "cpu_cache_gib": 0.01, "max_model_len": 60}
    prompt = [*range(2, 30)]

    def num_cached(quantization: str) -> int:
        with LLM(path, **disk | {"quantization": quantization}) as llm:
            return llm.generate([prompt], SamplingParams(max_tokens=4))[0].num_cached_tokens

    assert num_cached("none") == 0
    assert num_cached("int8") == 0
    assert num_cached("int8") > 0


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"quantization": "int4"}, "quantization must be one of none, int8, not 'int4'"),
        ({"quantization": None}, "quantization must be one of none, int8, not None"),
        ({"quantization": "int8", "dtype": "bfloat16"}, "needs dtype=float32.*, not bfloat16"),
    ],
)
def test_settings_that_do_not_fit_are_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**given)


def test_a_gpu_is_refused() -> None:
    EngineConfig(quantization="int8").check_device("cpu")
    EngineConfig().check_device("cuda")
    with pytest.raises(ConfigError, match="quantization=int8 runs on a CPU only, not on cuda"):
        EngineConfig(quantization="int8").check_device("cuda")


def test_a_processor_without_such_products_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.quantized, "engine", "onednn")
    with pytest.raises(ConfigError, match="needs an x86 processor with AVX2"):
        quantize_linear_layers(nn.Sequential(nn.Linear(4, 4)))
