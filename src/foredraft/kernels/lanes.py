"""Which rows of a pass belong to which request, for kernels."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

MAX_HEAD_DIM = 256
"""Of the Triton kernel of attention. With larger heads, with sinks or with chosen keys it is torch's, which waits."""


@dataclass(frozen=True)
class Lanes:
    """Rows of L requests in a flat batch, and where the rows of their sequences lie in the cache.

    All tensors are int32, on the device. block_tables [L, max_blocks]: entry b names the block of rows b * block_size
    and after; rows beyond what a request holds may be anything valid. A lane's `num_rows` [L] query rows (0: it takes
    no part) lie one after another in the flat batch from `flat_rows` [L] on; the first of them is row `first_rows` [L]
    of its sequence, the others follow it. No row before `origins` [L] has a key. max_num_rows: a bound of num_rows that
    the host knows.
    """

    block_tables: Tensor
    first_rows: Tensor
    num_rows: Tensor
    flat_rows: Tensor
    origins: Tensor
    max_num_rows: int
