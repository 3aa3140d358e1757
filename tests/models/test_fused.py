"""Layers in fused form: equal to transformers' own, made of its weights, and left alone where they would differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import (
    tiny_alternating,
    tiny_glm4_moe,
    tiny_llama,
    tiny_mistral,
    tiny_qwen2,
    tiny_qwen3,
    write_checkpoint,
)
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from foredraft.cache.groups import CacheLayout, StoredRows
from foredraft.cache.storage import CacheStorage
from foredraft.models import fused_model
from foredraft.models.attention import PagedAttention
from foredraft.models.loader import LoadedModel, load_checkpoint
from foredraft.models.mtp import MtpModules
from foredraft.models.row_layout import RowSpan, group_rows
from foredraft.models.target import TargetModel

CPU = torch.device("cpu")
NUM_ROWS, MAX_POSITIONS, BLOCK = 21, 64, 4
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}


def tiny(path: Path, model_type: str, num_modules: int = 0, **options: Any) -> Path:
    """A tiny checkpoint of any kind that transformers has."""
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 64,
        "max_position_embeddings": 256,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return write_checkpoint(path, AutoConfig.for_model(model_type, **(sizes | options)), num_modules)


BUILDERS: dict[str, Callable[[Path], Path]] = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "qwen2 sliding": partial(tiny_qwen2, sliding_window=8),
    "qwen3": tiny_qwen3,
    "mistral": tiny_mistral,
    "alternating": partial(tiny_alternating, sliding_window=8),
    "glm4_moe": tiny_glm4_moe,
    "mixtral": partial(tiny, model_type="mixtral", num_local_experts=4),
    "biases": partial(tiny, model_type="llama", attention_bias=True, mlp_bias=True),
    "another activation": partial(tiny, model_type="llama", hidden_act="gelu"),
    "one head of keys": partial(tiny, model_type="llama", num_key_value_heads=1, head_dim=16),
}
WITH_MODULES = ["llama", "qwen2", "qwen2 sliding", "qwen3", "mistral", "alternating", "glm4_moe"]


def load(path: Path, dtype: torch.dtype = torch.float32) -> LoadedModel:
    return load_checkpoint(path, dtype=dtype, device=CPU)


class Pass:
    """One pass over rows of two sequences, in a cache of their own."""

    def __init__(self, target: TargetModel, module_rows: StoredRows | None = None) -> None:
        self._layout = CacheLayout.build(target.stored, module_rows or StoredRows(), target.hidden_size, target.dtype)
        self._target = target
        generator = torch.Generator().manual_seed(0)
        self.token_ids = torch.randint(64, (NUM_ROWS + 5,), generator=generator)
        self.positions = torch.cat([torch.arange(NUM_ROWS), torch.arange(5)])

    def _paged(self, *, is_target: bool) -> PagedAttention:
        num_blocks = 16
        storage = CacheStorage(self._layout, [num_blocks] * len(self._layout.groups), BLOCK, CPU)
        first, second = BLOCK + torch.arange(NUM_ROWS), 8 * BLOCK + torch.arange(5)
        spans = [RowSpan(NUM_ROWS, NUM_ROWS, first), RowSpan(5, 5, second)]
        slots = torch.cat([first, second])
        groups = self._layout.group_of_layer if is_target else self._layout.group_of_module
        kv = storage.target if is_target else storage.modules
        return PagedAttention(kv, [group_rows(storage, group, slots, spans, CPU) for group in groups], BLOCK)

    @torch.inference_mode()
    def target(self) -> Tensor:
        return self._target.forward(self.token_ids, self.positions, self._paged(is_target=True))

    @torch.inference_mode()
    def module(self, modules: MtpModules, index: int) -> Tensor:
        hidden = torch.randn(len(self.token_ids), self._target.hidden_size, generator=torch.Generator().manual_seed(1))
        paged = self._paged(is_target=False)
        return modules.forward(index, self.token_ids, self.positions, hidden.to(self._target.dtype), paged)


def assert_close(own: Tensor, reference: Tensor) -> None:
    """By row, relative to its length."""
    assert own.dtype == reference.dtype
    difference = (own.double() - reference.double()).norm(dim=-1)
    assert bool((difference <= TOLERANCE[own.dtype] * reference.double().norm(dim=-1)).all())


@pytest.mark.parametrize("kind", BUILDERS)
def test_a_target_computes_what_transformers_does(tmp_path: Path, kind: str) -> None:
    BUILDERS[kind](tmp_path)
    target = TargetModel(load(tmp_path).target)
    target.fuse(MAX_POSITIONS)
    assert target.fused is not None
    rows = Pass(target)
    own = rows.target()
    eager = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").model
    for part in (slice(0, NUM_ROWS), slice(NUM_ROWS, None)):
        with torch.inference_mode():
            expected = eager(rows.token_ids[part][None], use_cache=False).last_hidden_state[0]
        assert_close(own[part], expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("kind", WITH_MODULES)
def test_modules_compute_what_transformers_does(tmp_path: Path, kind: str, dtype: torch.dtype) -> None:
    loaded = load(BUILDERS[kind](tmp_path), dtype)
    target, modules = TargetModel(loaded.target), MtpModules(loaded.mtp)  # type: ignore[arg-type]
    rows = Pass(target, modules.stored)
    expected = [rows.module(modules, index) for index in range(modules.num_modules)]
    expected_target = rows.target()
    target.fuse(MAX_POSITIONS)
    assert target.fused is not None
    modules.fuse(target.fused)
    assert modules._fused is not None
    assert_close(rows.target(), expected_target)
    for index, reference in enumerate(expected):
        assert_close(rows.module(modules, index), reference)


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "glm4_moe"])
def test_weights_stay_where_they_were(tmp_path: Path, kind: str) -> None:
    """The same names and numbers; they are held once, so that a change of one is a change of both."""
    loaded = load(BUILDERS[kind](tmp_path))
    before = {name: tensor.clone() for name, tensor in loaded.target.state_dict().items()}
    target = TargetModel(loaded.target)
    target.fuse(MAX_POSITIONS)
    assert target.fused is not None
    after = loaded.target.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    rows = Pass(target)
    unchanged = rows.target()
    with torch.no_grad():
        for name, parameter in loaded.target.named_parameters():
            if name.endswith((".k_proj.weight", ".v_proj.weight", ".up_proj.weight", ".q_proj.bias")):
                parameter.mul_(1.5)
    fused = rows.target()
    target.fused = None
    assert_close(fused, rows.target())
    assert not torch.allclose(fused, unchanged, rtol=1e-2)


def test_fusing_twice_changes_nothing(tmp_path: Path) -> None:
    """As where several engines are built over one checkpoint."""
    loaded = load(tiny_llama(tmp_path))
    assert loaded.mtp is not None
    targets, modules = [TargetModel(loaded.target) for _ in range(2)], [MtpModules(loaded.mtp) for _ in range(2)]
    expected = Pass(targets[0]).target()
    for target, some in zip(targets, modules):
        target.fuse(MAX_POSITIONS)
        assert target.fused is not None
        some.fuse(target.fused)
        assert some._fused is not None
    rows = [Pass(target, some.stored) for target, some in zip(targets, modules)]
    for one in rows:
        assert_close(one.target(), expected)
    assert torch.equal(*(one.module(some, 1) for one, some in zip(rows, modules)))


# -- what is left alone ----------------------------------------------------------------------------------------------


def altered(layer: Any, how: str) -> None:
    """Make a decoder layer of transformers compute something that its parts do not tell."""
    forward, attention, norm = layer.forward, layer.self_attn, layer.input_layernorm
    if how == "a residual that counts more":
        layer.forward = lambda hidden, *args, **kwargs: forward(hidden, *args, **kwargs) + 0.02 * hidden
    elif how == "a gate on the attention":
        attend = attention.forward
        attention.forward = lambda *args, **kwargs: tuple(
            0.9 * x if x is not None else x for x in attend(*args, **kwargs)
        )
    elif how == "a norm around one":
        plain = norm.forward
        norm.forward = lambda hidden: plain(hidden) + 0.1 * hidden
    elif how == "another scale":  # of which the fused form knows, and then it is no other
        attention.scaling *= 2
    elif how == "a parameter more":
        norm.register_parameter("bias", torch.nn.Parameter(torch.zeros(32)))
    elif how == "a part more":
        layer.extra = torch.nn.Identity()
    else:
        attention.q_proj = torch.nn.utils.parametrizations.weight_norm(attention.q_proj)


ALTERATIONS = [
    "a residual that counts more",
    "a gate on the attention",
    "a norm around one",
    "a parameter more",
    "a part more",
    "a projection of another kind",
]


@pytest.mark.parametrize("how", ALTERATIONS)
def test_a_target_that_computes_something_else_is_left_alone(tmp_path: Path, how: str) -> None:
    loaded = load(tiny_llama(tmp_path))
    decoder: Any = loaded.target.model
    altered(decoder.layers[1], how)
    target = TargetModel(loaded.target)
    expected = Pass(target).target()
    target.fuse(MAX_POSITIONS)
    assert target.fused is None
    assert torch.equal(Pass(target).target(), expected)


@pytest.mark.parametrize("how", ALTERATIONS)
def test_modules_that_compute_something_else_are_left_alone(tmp_path: Path, how: str) -> None:
    """All of them, where the last is of another kind; the target is not concerned."""
    loaded = load(tiny_llama(tmp_path))
    assert loaded.mtp is not None
    altered(loaded.mtp.layers[2].mtp_block, how)
    target, modules = TargetModel(loaded.target), MtpModules(loaded.mtp)
    rows = Pass(target, modules.stored)
    expected = [rows.module(modules, index) for index in range(3)]
    target.fuse(MAX_POSITIONS)
    assert target.fused is not None
    modules.fuse(target.fused)
    assert modules._fused is None
    assert all(torch.equal(rows.module(modules, index), one) for index, one in enumerate(expected))


def test_another_scale_of_the_attention_is_known(tmp_path: Path) -> None:
    loaded = load(tiny_llama(tmp_path))
    decoder: Any = loaded.target.model
    altered(decoder.layers[0], "another scale")
    target = TargetModel(loaded.target)
    expected = Pass(target).target()
    target.fuse(MAX_POSITIONS)
    assert target.fused is not None
    assert_close(Pass(target).target(), expected)


@pytest.mark.parametrize(
    ("model_type", "options"),
    [
        ("granite", {"residual_multiplier": 0.5, "embedding_multiplier": 3.0}),
        ("gemma", {"head_dim": 8}),
        ("olmo2", {}),
    ],
)
def test_other_kinds_of_decoders_are_left_alone(tmp_path: Path, model_type: str, options: dict[str, Any]) -> None:
    tiny(tmp_path, model_type, **options)
    target = TargetModel(load(tmp_path).target)
    expected = Pass(target).target()
    target.fuse(MAX_POSITIONS)
    assert target.fused is None
    assert torch.equal(Pass(target).target(), expected)


def test_positions_beyond_the_largest_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_model, "MAX_TABLE_POSITIONS", 100)
    target = TargetModel(load(tiny_llama(tmp_path)).target)
    target.fuse(101)
    assert target.fused is None
    target.fuse(100)
    assert target.fused is not None
    assert target.fused.rotary.num_positions == 100
