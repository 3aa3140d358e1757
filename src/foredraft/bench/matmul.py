"""How near products of few rows come to the time that reading their weights takes: torch's and ours.

Run `python -m foredraft.bench.matmul` on a CUDA device; with `--tune` it searches for the best configurations.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor

from foredraft.bench.floor import copy_bandwidth
from foredraft.bench.matmul_shapes import (
    SHAPES,
    MatmulShape,
    RotatingWeights,
    captured,
    captured_products,
    seconds_in_turn,
)
from foredraft.bench.matmul_tuning import tune
from foredraft.kernels.triton.matmul_config import MatmulConfig, default_config, padded_rows

# The configurations that a search has found, by padded rows and the weight's size.
Tuned = Mapping[tuple[int, int, int], MatmulConfig]

ROWS = (1, 2, 4, 9, 16, 32, 64)
NUM_LAYERS = 32


@dataclass(frozen=True)
class MatmulTime:
    """Seconds of a call, or of all layers, by variant, and of reading the weights once."""

    name: str
    rows: int
    floor: float
    seconds: dict[str, float]

    def ratios(self) -> dict[str, float]:
        """How many times the floor each variant takes."""
        return {variant: seconds / self.floor for variant, seconds in self.seconds.items()}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"ratio_to_floor": self.ratios()}


def measure_products(
    shapes: Sequence[MatmulShape], rows: Sequence[int], bytes_per_second: float, tuned: Tuned
) -> list[MatmulTime]:
    """Time each product with weights that no cache holds; torch and ours take turns."""
    weights = RotatingWeights(shapes)
    times = []
    for shape in shapes:
        own = weights.of(shape)
        for count in rows:
            x = torch.randn(count, shape.k, dtype=torch.bfloat16, device="cuda")
            products = (shape.torch_product(), shape.product(_config(x, own[0], tuned)))
            graphs = [captured_products(product, x, own) for product in products]
            of_torch, ours = (seconds / len(own) for seconds in seconds_in_turn(graphs))
            floor = shape.num_bytes / bytes_per_second
            times.append(MatmulTime(shape.name, count, floor, {"torch": of_torch, "ours": ours}))
    return times


@dataclass(frozen=True)
class LayerWeights:
    """The four weights of a layer of Llama 3.1 8B."""

    qkv: Tensor
    output: Tensor
    gate_up: Tensor
    down: Tensor

    @classmethod
    def random(cls) -> LayerWeights:
        """In bfloat16, on the device."""
        return cls(*(_random(shape.n, shape.k) for shape in SHAPES[:4]))


def measure_layers(rows: Sequence[int], bytes_per_second: float, tuned: Tuned) -> list[MatmulTime]:
    """Time the products of all layers and of the head in one graph, each with a weight of its own.

    torch multiplies only: it is given neither an activation nor residuals to add. Ours does both. "early" is ours with
    programmatic dependent launch.
    """
    layers = [LayerWeights.random() for _ in range(NUM_LAYERS)]
    head = _random(SHAPES[5].n, SHAPES[5].k)
    num_bytes = NUM_LAYERS * sum(shape.num_bytes for shape in SHAPES[:4]) + SHAPES[5].num_bytes
    times = []
    for count in rows:
        x = torch.randn(count, SHAPES[0].k, dtype=torch.bfloat16, device="cuda")
        variants = {
            "torch": _torch_layers(x, layers, head),
            "ours": _our_layers(x, layers, head, tuned, early_launch=False),
            "early": _our_layers(x, layers, head, tuned, early_launch=True),
        }
        graphs = {}
        for name, run in variants.items():
            try:
                graphs[name] = captured(run)
            except Exception as error:  # not every device and version of Triton can launch early
                print(f"{name}, {count} rows: {type(error).__name__}: {error}", flush=True)
        seconds = dict(zip(graphs, seconds_in_turn(list(graphs.values()))))
        times.append(MatmulTime(f"8B, {NUM_LAYERS} layers and head", count, num_bytes / bytes_per_second, seconds))
    return times


def _torch_layers(x: Tensor, layers: Sequence[LayerWeights], head: Tensor) -> Callable[[], Tensor]:
    def run() -> Tensor:
        hidden = x
        for layer in layers:
            qkv = F.linear(hidden, layer.qkv)
            hidden = F.linear(qkv[:, : layer.output.shape[1]], layer.output)
            gate_up = F.linear(hidden, layer.gate_up)
            hidden = F.linear(gate_up[:, : layer.down.shape[1]], layer.down)
        return torch.argmax(F.linear(hidden, head), dim=-1)

    return run


def _our_layers(
    x: Tensor, layers: Sequence[LayerWeights], head: Tensor, tuned: Tuned, *, early_launch: bool
) -> Callable[[], Tensor]:
    from foredraft.kernels.triton import matmul

    def config(weight: Tensor) -> MatmulConfig | None:
        chosen = _config(x, weight, tuned)
        return chosen and replace(chosen, early_launch=early_launch)

    def run() -> Tensor:
        hidden = x
        for layer in layers:
            qkv = matmul.linear(hidden, layer.qkv, config=config(layer.qkv))
            attention = qkv[:, : layer.output.shape[1]]
            hidden = matmul.linear(attention, layer.output, residual=hidden, config=config(layer.output))
            inner = matmul.gated_linear(hidden, layer.gate_up, config=config(layer.gate_up))
            hidden = matmul.linear(inner, layer.down, residual=hidden, config=config(layer.down))
        return matmul.argmax_head(hidden, head, config=config(head))

    return run


def _config(x: Tensor, weight: Tensor, tuned: Tuned) -> MatmulConfig | None:
    n, k = weight.shape
    return tuned.get((padded_rows(len(x)), n, k)) or default_config(len(x), n, k, weight.dtype)


def _random(n: int, k: int) -> Tensor:
    return torch.randn(n, k, dtype=torch.bfloat16, device="cuda").mul_(0.5 / k**0.5)


def table(times: Sequence[MatmulTime]) -> Table:
    """Microseconds and multiples of the floor; Markdown as well."""
    variants = list(dict.fromkeys(variant for time in times for variant in time.seconds))
    result = Table("product", box=box.MARKDOWN)
    for heading in ("rows", "floor us", *(f"{v} us" for v in variants), *(f"{v} x floor" for v in variants)):
        result.add_column(heading, justify="right")
    for time in times:
        ratios = time.ratios()
        result.add_row(
            time.name,
            str(time.rows),
            f"{1e6 * time.floor:.2f}",
            *(f"{1e6 * time.seconds[v]:.2f}" if v in time.seconds else "" for v in variants),
            *(f"{ratios[v]:.2f}" if v in ratios else "" for v in variants),
        )
    return result


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m foredraft.bench.matmul", description=__doc__)
    parser.add_argument("--tune", action="store_true", help="search for the best configurations, and measure these")
    parser.add_argument("--only", choices=("products", "layers", "tune"), help="measure these alone")
    parser.add_argument("--match", default="", help="only products with this in their name")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--budget", type=float, default=240.0, help="seconds for the search")
    parser.add_argument("--output", type=Path, help="a JSON file for the figures")
    options = parser.parse_args()
    bytes_per_second = copy_bandwidth(torch.device("cuda"))
    print(f"{torch.cuda.get_device_name()}, copies at {bytes_per_second / 1e9:,.0f} GB/s", flush=True)
    shapes = [shape for shape in SHAPES if options.match in shape.name]
    figures: dict[str, Any] = {"device": torch.cuda.get_device_name(), "copy_bytes_per_second": bytes_per_second}

    def keep(name: str, results: Sequence[Any]) -> None:
        figures[name] = [result.to_dict() for result in results]
        if options.output:
            options.output.write_text(json.dumps(figures, indent=1), encoding="utf-8")

    console = Console(width=160)
    tuned: dict[tuple[int, int, int], MatmulConfig] = {}
    if options.tune or options.only == "tune":
        found = tune(shapes, options.rows, bytes_per_second, options.budget)
        tuned = {(best.rows, best.shape.n, best.shape.k): best.config for best in found}
        keep("tuned", found)
    if options.only in (None, "products"):
        products = measure_products(shapes, options.rows, bytes_per_second, tuned)
        keep("products", products)
        console.print(table(products))
    if options.only in (None, "layers"):
        layers = measure_layers(options.rows, bytes_per_second, tuned)
        keep("layers", layers)
        console.print(table(layers))


if __name__ == "__main__":
    main()
