"""What the small kernels cost on a GPU, beside torch and torch.compile: `python -m foredraft.bench.elementwise`."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from foredraft.kernels.ops import kernels_named

CALLS_A_GRAPH = 50
WARM_UP_CALLS = 3
REPLAYS = 20
NUM_POSITIONS, NUM_SLOTS = 2048, 16384
EPS = 1e-5
KERNELS = ("rms_norm", "add_rms_norm", "rotate_and_store", "silu_and_mul")


@dataclass(frozen=True)
class Sizes:
    """Of one decoder layer."""

    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


LAYERS = {576: Sizes(576, 1536, 9, 3, 64), 4096: Sizes(4096, 14336, 32, 8, 128)}
"""By hidden size: SmolLM2-135M and Llama-3.1-8B."""


@dataclass(frozen=True)
class Cost:
    """Microseconds a call of one kernel; compiled is None where it was not asked for."""

    kernel: str
    hidden: int
    num_rows: int
    triton: float
    torch: float
    compiled: float | None


def arguments(kernel: str, sizes: Sizes, num_rows: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Random arguments of a kernel, on the GPU."""

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, dtype=dtype, device="cuda")

    x, weight = random(num_rows, sizes.hidden), random(sizes.hidden)
    if kernel == "rms_norm":
        return x, weight, EPS
    if kernel == "add_rms_norm":
        return x, random(num_rows, sizes.hidden), weight, EPS
    if kernel == "silu_and_mul":
        return (random(num_rows, 2 * sizes.intermediate),)
    heads = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
    qkv = random(num_rows, (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head_dim)
    angles = random(NUM_POSITIONS, sizes.head_dim), random(NUM_POSITIONS, sizes.head_dim)
    caches = [random(NUM_SLOTS, sizes.num_kv_heads * sizes.head_dim) for _ in range(2)]
    positions = torch.randint(NUM_POSITIONS, (num_rows,), device="cuda")
    slots = torch.randperm(NUM_SLOTS, device="cuda")[:num_rows]
    return qkv, positions, *angles, *caches, slots, *heads


def microseconds_in_graph(call: Callable[[], object]) -> float:
    """Of one call, as the median over replays of a CUDA graph that holds many. What it takes to launch the graph is
    shared by them."""
    for _ in range(WARM_UP_CALLS):
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(CALLS_A_GRAPH):
            call()
    times = []
    for _ in range(WARM_UP_CALLS + REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1e3 * float(start.elapsed_time(end)) / CALLS_A_GRAPH)
    return median(times[WARM_UP_CALLS:])


def measure(
    hidden_sizes: Sequence[int], rows: Sequence[int], dtype: torch.dtype, with_compiled: bool
) -> Iterator[Cost]:
    """Each kernel at each hidden size (of `LAYERS`) and number of rows."""
    for kernel in KERNELS:
        ours, plain = (getattr(kernels_named(name), kernel) for name in ("triton", "torch"))
        for hidden in hidden_sizes:
            torch.compiler.reset()  # each size is compiled as if it were the only one
            compiled = torch.compile(plain, dynamic=False)
            for num_rows in rows:
                args = arguments(kernel, LAYERS[hidden], num_rows, dtype)
                ways = (ours, plain, compiled) if with_compiled else (ours, plain)
                times = [microseconds_in_graph(partial(way, *args)) for way in ways]
                yield Cost(kernel, hidden, num_rows, times[0], times[1], times[2] if with_compiled else None)


def table(costs: Sequence[Cost]) -> Table:
    """A table that is Markdown as well."""
    drawn = Table("kernel", box=box.MARKDOWN)
    for heading in ("hidden", "rows", "Triton, µs", "torch, µs", "compiled, µs", "torch / Triton", "compiled / Triton"):
        drawn.add_column(heading, justify="right")
    for cost in costs:
        drawn.add_row(
            cost.kernel,
            str(cost.hidden),
            str(cost.num_rows),
            f"{cost.triton:.2f}",
            f"{cost.torch:.2f}",
            "" if cost.compiled is None else f"{cost.compiled:.2f}",
            f"{cost.torch / cost.triton:.2f}",
            "" if cost.compiled is None else f"{cost.compiled / cost.triton:.2f}",
        )
    return drawn


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 9, 64, 144, 576])
    parser.add_argument("--hidden", type=int, nargs="+", default=list(LAYERS), choices=list(LAYERS))
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument(
        "--no-compiled", action="store_true", help="leave out torch.compile, which takes most of the time"
    )
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("this measures CUDA kernels, and there is no CUDA device")
    torch.manual_seed(0)
    with torch.inference_mode():
        costs = list(measure(options.hidden, options.rows, getattr(torch, options.dtype), not options.no_compiled))
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.dtype}")
    Console(width=120).print(table(costs))


if __name__ == "__main__":
    main()
