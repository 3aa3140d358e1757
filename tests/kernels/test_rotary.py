"""Rotary positions against transformers' own, and where keys and values are written."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention

from foredraft.kernels.ops import Kernels, kernels_named

# Of float32, within a few last bits. Of bfloat16, the interpreter truncates where a GPU rounds: some of its bits more.
TOLERANCE = {torch.float32: 5e-7, torch.float16: 2e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)
NUM_POSITIONS, NUM_SLOTS = 50, 20
EPS = 1e-6


@pytest.fixture(params=["torch", "triton"])
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    """Both sets: that of Triton on a GPU if there is one, and otherwise in its interpreter."""
    on_gpu = request.param == "triton" and torch.cuda.is_available()
    if request.param == "triton":
        pytest.importorskip("triton")
    torch.manual_seed(0)
    with torch.device("cuda" if on_gpu else "cpu"), torch.inference_mode():
        yield kernels_named(request.param)


@dataclass(frozen=True)
class Heads:
    """How many heads there are, how wide, and how much of each turns."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int


ALL_HEADS = [Heads(9, 3, 64, 64), Heads(4, 4, 40, 40), Heads(5, 1, 96, 32), Heads(2, 1, 80, 20), Heads(16, 4, 128, 128)]


class Rows:
    """Random rows with their positions and slots, and a cache in which rows of other layers lie between its own."""

    def __init__(self, heads: Heads, dtype: torch.dtype, num_rows: int = 4) -> None:
        self.heads = heads
        width = heads.num_kv_heads * heads.head_dim
        self.qkv = torch.randn(num_rows, heads.num_heads * heads.head_dim + 2 * width, dtype=dtype)
        self.positions = torch.randperm(NUM_POSITIONS)[:num_rows]
        self.slots = 1 + torch.randperm(NUM_SLOTS - 1)[:num_rows]
        self.cache = torch.randn(NUM_SLOTS, 3 * width, dtype=dtype)
        self.key_cache, self.value_cache = self.cache[:, :width], self.cache[:, width : 2 * width]
        rotary = LlamaRotaryEmbedding(LlamaConfig(head_dim=heads.rotary_dim, max_position_embeddings=NUM_POSITIONS))
        cos, sin = rotary(self.qkv, torch.arange(NUM_POSITIONS)[None])
        self.cos, self.sin = cos[0], sin[0]

    def run(self, kernels: Kernels, q_norm: Tensor | None = None, k_norm: Tensor | None = None) -> Tensor:
        angles, caches = (self.cos, self.sin), (self.key_cache, self.value_cache)
        sizes = self.heads.num_heads, self.heads.num_kv_heads, self.heads.head_dim
        return kernels.rotate_and_store(
            self.qkv, self.positions, *angles, *caches, self.slots, *sizes, q_norm, k_norm, EPS
        )

    def split(self) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, [T, heads, head_dim] each."""
        ends = self.heads.num_heads, self.heads.num_heads + self.heads.num_kv_heads
        num_all = ends[1] + self.heads.num_kv_heads
        query, key, value = self.qkv.view(len(self.qkv), num_all, self.heads.head_dim).tensor_split(ends, dim=1)
        return query, key, value

    def rotated(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
        """By transformers, [T, heads, head_dim] each."""
        turning, rest = zip(*(each.tensor_split([self.heads.rotary_dim], dim=-1) for each in (query, key)))
        turned = apply_rotary_pos_emb(*turning, self.cos[self.positions], self.sin[self.positions])
        query, key = (torch.cat(parts, dim=-1) for parts in zip(turned, rest))
        return query, key


def assert_close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[theirs.dtype], atol=TOLERANCE[theirs.dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", ALL_HEADS, ids=str)
def test_heads_turn_as_those_of_llama(kernels: Kernels, heads: Heads, dtype: torch.dtype) -> None:
    rows = Rows(heads, dtype)
    query, key, value = rows.split()
    query, key = rows.rotated(query, key)
    expected = rows.cache.clone()
    width = heads.num_kv_heads * heads.head_dim
    expected[rows.slots, : 2 * width] = torch.cat((key.flatten(1), value.flatten(1)), dim=1)
    assert_close(rows.run(kernels), query)
    assert_close(rows.cache, expected)
    untouched = [slot for slot in range(NUM_SLOTS) if slot not in rows.slots.tolist()]
    assert torch.equal(rows.cache[untouched], expected[untouched])
    assert torch.equal(rows.cache[:, width:], expected[:, width:])  # values, and what lies between


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", ALL_HEADS, ids=str)
def test_heads_are_normed_as_those_of_qwen3(kernels: Kernels, heads: Heads, dtype: torch.dtype) -> None:
    rows = Rows(heads, dtype)
    config = Qwen3Config(hidden_size=8, num_attention_heads=1, head_dim=heads.head_dim, rms_norm_eps=EPS)
    attention = Qwen3Attention(config, 0).to(dtype)
    for norm in (attention.q_norm, attention.k_norm):
        norm.weight.copy_(torch.rand(heads.head_dim) + 0.5)
    query, key, value = rows.split()
    query, key = rows.rotated(attention.q_norm(query), attention.k_norm(key))
    assert_close(rows.run(kernels, attention.q_norm.weight, attention.k_norm.weight), query)
    assert_close(rows.key_cache[rows.slots], key.flatten(1))
    assert torch.equal(rows.value_cache[rows.slots], value.flatten(1))


@pytest.mark.parametrize("heads", ALL_HEADS, ids=str)
def test_each_product_is_rounded(kernels: Kernels, heads: Heads) -> None:
    rows = Rows(heads, torch.float16)
    query, key = rows.rotated(*rows.split()[:2])
    assert torch.equal(rows.run(kernels), query)
    assert torch.equal(rows.key_cache[rows.slots], key.flatten(1))


def test_rows_may_lie_apart(kernels: Kernels) -> None:
    rows = Rows(Heads(4, 2, 40, 40), torch.float32)
    query, _ = rows.rotated(*rows.split()[:2])
    rows.qkv = torch.cat((torch.randn(4, 3), rows.qkv, torch.randn(4, 30)), dim=1)[:, 3:-30]
    assert_close(rows.run(kernels), query)


def test_rows_that_are_not_kept_share_the_reserved_slot(kernels: Kernels) -> None:
    rows = Rows(Heads(4, 2, 40, 40), torch.float32)
    query, key, value = rows.split()
    query, key = rows.rotated(query, key)
    rows.slots[[0, 2, 3]] = 0
    assert_close(rows.run(kernels), query)
    assert_close(rows.key_cache[rows.slots[1]], key[1].flatten())
    assert torch.equal(rows.value_cache[rows.slots[1]], value[1].flatten())


def test_no_rows(kernels: Kernels) -> None:
    rows = Rows(Heads(4, 2, 40, 40), torch.float32, num_rows=0)
    before = rows.cache.clone()
    assert rows.run(kernels).shape == (0, 4, 40)
    assert torch.equal(rows.cache, before)
