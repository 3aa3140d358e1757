"""How a product of few rows with a weight is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

MAX_ROWS = 64
_MULTIPROCESSORS = 132  # of an H100 or H200


@dataclass(frozen=True)
class MatmulConfig:
    """The tiles of one kernel.

    A program reads `block_n` rows of the weight from end to end, `block_k` columns at a time; `num_stages` such tiles
    are on their way or in use. Columns are not shared out among programs: few rows and deep stages keep memory as busy,
    with no partial sums to write, and no result depends on who came first. Among warps they are, where `num_parts` is
    num_warps: meant for block_n below 64. With 1, warps share the rows instead, which suits wide tiles.
    early_launch: start while the kernel before still runs, fetch the first tiles, and only then wait for it
    (programmatic dependent launch, from compute capability 9.0 on). The kernel before may write all that this one reads
    but weight and bias.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int
    num_parts: int = 1
    early_launch: bool = False


# By padded rows, and rows and columns of the weight, as `python -m foredraft.bench.matmul --tune` finds them; None
# where torch is faster.
_TUNED: dict[tuple[int, int, int], MatmulConfig | None] = {  # on an H200
    (16, 6144, 4096): MatmulConfig(64, 128, 4, 6, 1),
    (16, 4096, 4096): MatmulConfig(64, 128, 4, 6, 1),
    (16, 28672, 4096): MatmulConfig(64, 128, 4, 4, 1),
    (16, 4096, 14336): MatmulConfig(32, 256, 4, 6, 4),
    (16, 4096, 8192): MatmulConfig(64, 128, 4, 6, 1),
    (16, 128256, 4096): MatmulConfig(128, 128, 4, 3, 1),
    (16, 960, 576): MatmulConfig(16, 256, 4, 5, 4),
    (16, 576, 576): MatmulConfig(16, 256, 4, 5, 4),
    (16, 3072, 576): MatmulConfig(64, 64, 4, 8, 1),
    (16, 576, 1536): MatmulConfig(16, 256, 4, 5, 4),
    (16, 576, 1152): MatmulConfig(16, 256, 4, 5, 4),
    (16, 49152, 576): MatmulConfig(128, 64, 4, 6, 1),
    (32, 6144, 4096): MatmulConfig(64, 128, 4, 6, 1),
    (32, 4096, 4096): MatmulConfig(64, 128, 4, 6, 1),
    (32, 28672, 4096): MatmulConfig(64, 128, 4, 4, 1),
    (32, 4096, 14336): None,
    (32, 4096, 8192): MatmulConfig(64, 128, 4, 6, 1),
    (32, 128256, 4096): MatmulConfig(64, 128, 4, 4, 1),
    (32, 960, 576): MatmulConfig(64, 64, 4, 8, 1),
    (32, 576, 576): MatmulConfig(64, 64, 4, 8, 1),
    (32, 3072, 576): MatmulConfig(64, 64, 4, 8, 1),
    (32, 576, 1536): MatmulConfig(16, 256, 4, 5, 4),
    (32, 576, 1152): MatmulConfig(16, 256, 4, 5, 4),
    (32, 49152, 576): MatmulConfig(128, 64, 4, 4, 1),
    (64, 6144, 4096): None,
    (64, 4096, 4096): None,
    (64, 28672, 4096): MatmulConfig(128, 128, 8, 4, 1),
    (64, 4096, 14336): None,
    (64, 4096, 8192): None,
    (64, 128256, 4096): MatmulConfig(128, 64, 4, 4, 1),
    (64, 960, 576): None,
    (64, 576, 576): None,
    (64, 3072, 576): MatmulConfig(64, 64, 4, 8, 1),
    (64, 576, 1536): None,
    (64, 576, 1152): None,
    (64, 49152, 576): MatmulConfig(128, 64, 4, 4, 1),
}


def padded_rows(num_rows: int) -> int:
    """Rows of x in a tile: 16, 32 or 64. Up to 16 rows, nothing in a row's result depends on how many there are."""
    return 16 if num_rows <= 16 else 32 if num_rows <= 32 else 64


def default_config(num_rows: int, n: int, k: int, dtype: torch.dtype) -> MatmulConfig | None:
    """The tiles for num_rows rows and a weight [n, k], or None where torch's own product is to be used.

    That is so for more than MAX_ROWS rows, and for float32, which tensor cores do not multiply exactly.
    """
    if dtype == torch.float32 or not 0 < num_rows <= MAX_ROWS:
        return None
    rows = padded_rows(num_rows)
    return _TUNED[rows, n, k] if (rows, n, k) in _TUNED else _untuned(rows, n, k)


def _untuned(rows: int, n: int, k: int) -> MatmulConfig:
    """All programs at work at once where the weight is small, and 64 KiB of it on their way to each multiprocessor."""
    if n < 4096:
        return MatmulConfig(block_n=16, block_k=256, num_warps=4, num_stages=4, num_parts=4)
    if rows == 16 and n < 16384:
        num_stages = 6 if n <= 32 * _MULTIPROCESSORS else 4
        return MatmulConfig(block_n=32, block_k=256, num_warps=4, num_stages=num_stages, num_parts=4)
    return MatmulConfig(block_n=128 if n >= 16384 else 64, block_k=64, num_warps=4, num_stages=6)
