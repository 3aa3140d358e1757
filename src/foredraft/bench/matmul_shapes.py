"""Products of a layer as they are timed: their sizes, the weights in turn, and CUDA graphs that take turns."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from foredraft.kernels.triton.matmul_config import MatmulConfig

NUM_REPEATS = 7
ROTATED_BYTES = 256 << 20  # several times what an L2 cache holds

Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class MatmulShape:
    """A product with a weight [n, k] in bfloat16: by itself, of a gate and up with their activation, or of a head."""

    name: str
    kind: Literal["linear", "gated", "head"]
    n: int
    k: int

    @property
    def num_bytes(self) -> int:
        return 2 * self.n * self.k

    def product(self, config: MatmulConfig | None = None) -> Product:
        """Ours, with the default configuration or another."""
        from foredraft.kernels.triton import matmul

        if self.kind == "gated":
            return lambda x, weight: matmul.gated_linear(x, weight, config=config)
        if self.kind == "head":
            return lambda x, weight: matmul.argmax_head(x, weight, config=config)
        return lambda x, weight: matmul.linear(x, weight, config=config)

    def torch_product(self) -> Product:
        """torch's, with the activation in a kernel of ours."""
        from foredraft.kernels.triton.activation import silu_and_mul

        if self.kind == "gated":
            return lambda x, weight: silu_and_mul(F.linear(x, weight))
        if self.kind == "head":
            return lambda x, weight: torch.argmax(F.linear(x, weight), dim=-1)
        return F.linear


# Of Llama 3.1 8B with an MTP module, and of SmolLM2 135M with one.
SHAPES = (
    MatmulShape("8B qkv", "linear", 6144, 4096),
    MatmulShape("8B output", "linear", 4096, 4096),
    MatmulShape("8B gate, up", "gated", 28672, 4096),
    MatmulShape("8B down", "linear", 4096, 14336),
    MatmulShape("8B eh_proj", "linear", 4096, 8192),
    MatmulShape("8B head", "head", 128256, 4096),
    MatmulShape("135M qkv", "linear", 960, 576),
    MatmulShape("135M output", "linear", 576, 576),
    MatmulShape("135M gate, up", "gated", 3072, 576),
    MatmulShape("135M down", "linear", 576, 1536),
    MatmulShape("135M eh_proj", "linear", 576, 1152),
    MatmulShape("135M head", "head", 49152, 576),
)


class RotatingWeights:
    """Weights of any shape, cut from one memory of random numbers, enough of them that no cache holds them all."""

    def __init__(self, shapes: Sequence[MatmulShape]) -> None:
        num_bytes = max(max(ROTATED_BYTES, 2 * shape.num_bytes) for shape in shapes)
        self._memory = torch.randn(num_bytes // 2, dtype=torch.bfloat16, device="cuda").mul_(0.02)

    def of(self, shape: MatmulShape) -> list[Tensor]:
        """At least two, in all at least ROTATED_BYTES but for the last one."""
        count = max(2, ROTATED_BYTES // shape.num_bytes)
        size = shape.n * shape.k
        return [self._memory[i * size : (i + 1) * size].view(shape.n, shape.k) for i in range(count)]


def captured(run: Callable[[], object]) -> torch.cuda.CUDAGraph:
    """A graph of what `run` launches. It has run before, so that nothing is compiled or set up in between."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    torch.cuda.synchronize()
    return graph


def captured_products(product: Product, x: Tensor, weights: Sequence[Tensor]) -> torch.cuda.CUDAGraph:
    """A graph of the product with each of the weights."""

    def run() -> None:
        for weight in weights:
            product(x, weight)

    product(x, weights[0])  # fails here, and not during the capture, if it cannot be launched
    return captured(run)


def seconds_in_turn(graphs: Sequence[torch.cuda.CUDAGraph], num_repeats: int = NUM_REPEATS) -> list[float]:
    """The median time of a replay of each graph; they take turns."""
    events = [[(_event(), _event()) for _ in graphs] for _ in range(num_repeats)]
    for turn in events:
        for graph, (start, end) in zip(graphs, turn):
            start.record()
            graph.replay()
            end.record()
    torch.cuda.synchronize()
    return [median(turn[i][0].elapsed_time(turn[i][1]) / 1000 for turn in events) for i in range(len(graphs))]


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
