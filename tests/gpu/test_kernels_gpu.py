"""The small Triton kernels on a CUDA device, at real sizes: they round as torch does, and run in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from foredraft.kernels.ops import Kernels, kernels_named

pytestmark = pytest.mark.gpu

LAST_BIT = {torch.float32: 2**-23, torch.float16: 2**-10, torch.bfloat16: 2**-7}
DTYPES = list(LAST_BIT)
ROWS = [1, 9, 144, 1152]
NUM_POSITIONS, NUM_SLOTS = 1000, 4096
EPS = 1e-5


@dataclass(frozen=True)
class Heads:
    """How many heads there are, how wide, and whether they are normed."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    are_normed: bool = False


ALL_HEADS = [
    Heads(9, 3, 64, 64),
    Heads(32, 8, 128, 128),
    Heads(32, 8, 128, 128, are_normed=True),
    Heads(48, 4, 192, 64),
    Heads(16, 2, 256, 64, are_normed=True),
]


@pytest.fixture(autouse=True)
def on_gpu() -> Iterator[None]:
    """All tensors are made there."""
    torch.manual_seed(0)
    with torch.device("cuda"), torch.inference_mode():
        yield


def assert_rounded_alike(ours: Tensor, theirs: Tensor) -> None:
    """In float32 to a few last bits, which depend on the order of sums. In 16 bits a sum that differs so turns the
    rounding of a few numbers in a thousand."""
    is_short = theirs.dtype != torch.float32
    tolerance = (2 if is_short else 8) * LAST_BIT[theirs.dtype]
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=1e-6 if is_short else tolerance)
    if is_short:
        assert (ours == theirs).float().mean() > 0.99


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [40, 576, 2048, 4096, 8192])
@pytest.mark.parametrize("num_rows", ROWS)
def test_norms(num_rows: int, width: int, dtype: torch.dtype) -> None:
    ours, theirs = kernels_named("triton"), kernels_named("torch")
    x, residual = torch.randn(2, num_rows, width, dtype=dtype)
    weight = torch.rand(width).add(0.5).to(dtype)
    assert_rounded_alike(ours.rms_norm(x, weight, EPS), theirs.rms_norm(x, weight, EPS))
    (our_y, our_total), (y, total) = (each.add_rms_norm(x, residual, weight, EPS) for each in (ours, theirs))
    assert torch.equal(our_total, total)
    assert_rounded_alike(our_y, y)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [40, 1536, 14336])
@pytest.mark.parametrize("num_rows", ROWS)
def test_activation(num_rows: int, width: int, dtype: torch.dtype) -> None:
    gate_up = 2 * torch.randn(num_rows, 2 * width, dtype=dtype)
    assert_rounded_alike(*(kernels_named(name).silu_and_mul(gate_up) for name in ("triton", "torch")))


@dataclass(frozen=True)
class Rotation:
    """What a rotation reads and writes."""

    heads: Heads
    qkv: Tensor
    positions: Tensor
    cos: Tensor
    sin: Tensor
    norms: tuple[Tensor | None, Tensor | None]
    key_cache: Tensor
    value_cache: Tensor
    slots: Tensor

    @classmethod
    def random(cls, heads: Heads, num_rows: int, dtype: torch.dtype) -> Rotation:
        angles = torch.rand(NUM_POSITIONS, heads.rotary_dim // 2).mul(6).repeat(1, 2)
        weights = torch.rand(2, heads.head_dim).add(0.5).to(dtype)
        caches = torch.zeros(2, NUM_SLOTS, heads.num_kv_heads * heads.head_dim, dtype=dtype)
        return cls(
            heads,
            torch.randn(num_rows, (heads.num_heads + 2 * heads.num_kv_heads) * heads.head_dim, dtype=dtype),
            torch.randint(NUM_POSITIONS, (num_rows,)),
            angles.cos().to(dtype),
            angles.sin().to(dtype),
            (weights[0], weights[1]) if heads.are_normed else (None, None),
            caches[0],
            caches[1],
            torch.randperm(NUM_SLOTS)[:num_rows],
        )

    def run(self, kernels: Kernels) -> Tensor:
        self.key_cache.zero_()
        self.value_cache.zero_()
        caches, heads = (self.key_cache, self.value_cache), self.heads
        sizes = heads.num_heads, heads.num_kv_heads, heads.head_dim
        return kernels.rotate_and_store(
            self.qkv, self.positions, self.cos, self.sin, *caches, self.slots, *sizes, *self.norms, EPS
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", ALL_HEADS, ids=str)
@pytest.mark.parametrize("num_rows", ROWS)
def test_rotation(num_rows: int, heads: Heads, dtype: torch.dtype) -> None:
    rotation = Rotation.random(heads, num_rows, dtype)
    query = rotation.run(kernels_named("torch"))
    keys, values = rotation.key_cache.clone(), rotation.value_cache.clone()
    our_query = rotation.run(kernels_named("triton"))
    assert torch.equal(rotation.value_cache, values)
    for ours, theirs in ((our_query, query), (rotation.key_cache, keys)):
        if not heads.are_normed:
            assert torch.equal(ours, theirs)
            continue
        # A last bit of a normed head may weigh much in a difference of two products.
        torch.testing.assert_close(ours, theirs, rtol=0, atol=32 * LAST_BIT[dtype])
        if dtype != torch.float32:
            assert (ours == theirs).float().mean() > 0.98


def test_all_run_in_a_graph() -> None:
    kernels, dtype = kernels_named("triton"), torch.bfloat16
    x, residual, gate_up = torch.randn(9, 576), torch.randn(9, 576), torch.randn(9, 3072)
    weight, rotation = torch.rand(576), Rotation.random(Heads(9, 3, 64, 64), 9, dtype)

    def run() -> list[Tensor]:
        y, total = kernels.add_rms_norm(x, residual, weight, EPS)
        query = rotation.run(kernels)
        return [
            *(y, total, query, kernels.rms_norm(total, weight, EPS), kernels.silu_and_mul(gate_up)),
            *(rotation.key_cache, rotation.value_cache),
        ]

    captured, replay = capture(run)
    for tensor in (x, residual, gate_up, rotation.qkv):
        tensor.normal_()
    rotation.slots.copy_(torch.randperm(NUM_SLOTS)[:9])
    replay()
    replayed = [each.clone() for each in captured]
    for in_graph, eager in zip(replayed, run(), strict=True):
        assert torch.equal(in_graph, eager)


def capture(run: Callable[[], list[Tensor]]) -> tuple[list[Tensor], Callable[[], None]]:
    """The tensors of a graph of `run`, and what replays it."""
    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    return captured, graph.replay
