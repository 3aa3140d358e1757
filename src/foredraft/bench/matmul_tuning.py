"""The search for the best tiles of each product."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import torch

from foredraft.bench.matmul_shapes import MatmulShape, RotatingWeights, captured_products, seconds_in_turn
from foredraft.kernels.triton.matmul_config import MatmulConfig, padded_rows

SHARED_BYTES = 227 << 10  # of a multiprocessor, for one program
MAX_COMPILED_ROWS = 2048  # of the weight: a kernel does not depend on how many there are

# block_n, block_k, num_warps, num_stages, num_parts
GRID = (
    (16, 128, 4, 6, 4),
    (16, 256, 4, 5, 4),
    (16, 512, 4, 3, 4),
    (16, 512, 4, 4, 4),
    (16, 512, 8, 4, 8),
    (16, 1024, 8, 3, 8),
    (32, 128, 4, 6, 4),
    (32, 256, 4, 4, 4),
    (32, 256, 4, 6, 4),
    (32, 256, 4, 6, 1),
    (32, 512, 8, 3, 8),
    (32, 512, 8, 4, 8),
    (64, 64, 4, 8, 1),
    (64, 128, 4, 4, 1),
    (64, 128, 4, 6, 1),
    (64, 256, 4, 3, 1),
    (64, 256, 4, 4, 4),
    (128, 64, 4, 4, 1),
    (128, 64, 4, 6, 1),
    (128, 128, 4, 3, 1),
    (128, 128, 8, 4, 1),
)
# Rows of x, for each padded number of them, with which configurations are compared: of 16, a token with eight drafts.
COMPARED_ROWS = {16: 9, 32: 32, 64: 64}


@dataclass(frozen=True)
class TunedMatmul:
    """The best configuration for a shape and a number of padded rows, in seconds a call; `torch` is torch's time."""

    shape: MatmulShape
    rows: int
    config: MatmulConfig
    seconds: float
    torch: float
    floor: float

    @property
    def line(self) -> str:
        """An entry of the table of configurations: None where torch is faster."""
        c = self.config
        tiles = f"MatmulConfig({c.block_n}, {c.block_k}, {c.num_warps}, {c.num_stages}, {c.num_parts})"
        chosen = tiles if self.seconds <= self.torch else "None"
        ratios = f"{self.seconds / self.floor:.2f} x floor, torch {self.torch / self.floor:.2f}"
        return f"    ({self.rows}, {self.shape.n}, {self.shape.k}): {chosen},  # {ratios}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def candidates(shape: MatmulShape, rows: int) -> list[MatmulConfig]:
    """The configurations that fit a multiprocessor and make sense for `rows` padded rows."""
    configs = [MatmulConfig(*numbers) for numbers in GRID]
    return [
        config
        for config in configs
        if 2 * (config.block_n + rows) * config.block_k * config.num_stages <= SHARED_BYTES
        and 2 * config.block_n >= rows
        and config.block_k <= shape.k
    ]


def tune(
    shapes: Sequence[MatmulShape], rows: Sequence[int], bytes_per_second: float, budget: float
) -> list[TunedMatmul]:
    """The best configuration of each shape and number of rows, as far as `budget` seconds go."""
    deadline = time.monotonic() + budget
    buckets = sorted({padded_rows(count) for count in rows})
    jobs = [(shape, bucket, config) for bucket in buckets for shape in shapes for config in candidates(shape, bucket)]
    compile_all(jobs)
    weights = RotatingWeights(shapes)
    tuned: list[TunedMatmul] = []
    for bucket in buckets:
        for shape in shapes:
            if time.monotonic() > deadline:
                print("no time is left for the rest", flush=True)
                return tuned
            tuned.append(_best(shape, bucket, weights, shape.num_bytes / bytes_per_second))
            print(tuned[-1].line, flush=True)
    return tuned


def _best(shape: MatmulShape, rows: int, weights: RotatingWeights, floor: float) -> TunedMatmul:
    own = weights.of(shape)
    x = torch.randn(COMPARED_ROWS[rows], shape.k, dtype=torch.bfloat16, device="cuda")
    (of_torch,) = seconds_in_turn([captured_products(shape.torch_product(), x, own)])
    times: dict[MatmulConfig, float] = {}
    for config in candidates(shape, rows):
        try:
            (times[config],) = seconds_in_turn([captured_products(shape.product(config), x, own)], num_repeats=5)
        except Exception as error:  # too large for the device, mostly: the reason is printed, others may do
            print(f"{shape.name}, {rows} rows, {config}: {type(error).__name__}: {error}", flush=True)
    best = min(times, key=times.__getitem__)
    return TunedMatmul(shape, rows, best, times[best] / len(own), of_torch / len(own), floor)


def compile_all(jobs: Iterable[tuple[MatmulShape, int, MatmulConfig]]) -> None:
    """Compile kernels in several processes; Triton's cache on disk hands them to this one."""
    unique = {(shape.kind, shape.k, rows, config): (shape, rows, config) for shape, rows, config in jobs}
    num_workers = max(1, (os.cpu_count() or 2) - 1)
    context = multiprocessing.get_context("spawn")
    started = time.monotonic()
    with ProcessPoolExecutor(num_workers, mp_context=context) as pool:
        failed = sum(not compiled for compiled in pool.map(_compile, unique.values(), chunksize=4))
    print(f"{len(unique)} kernels compiled in {time.monotonic() - started:.0f} s, {failed} failed", flush=True)


def _compile(job: tuple[MatmulShape, int, MatmulConfig]) -> bool:
    shape, rows, config = job
    x = torch.zeros(rows, shape.k, dtype=torch.bfloat16, device="cuda")
    weight = torch.zeros(min(shape.n, MAX_COMPILED_ROWS), shape.k, dtype=torch.bfloat16, device="cuda")
    try:
        shape.product(config)(x, weight)
    except Exception:  # it is tried again, and told about, when it is timed
        return False
    return True
