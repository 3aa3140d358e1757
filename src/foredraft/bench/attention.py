"""How fast paged attention reads keys and values, and what else the installed torch has for it.

    python -m foredraft.bench.attention

Every figure is the time of one call, from a captured graph of NUM_CALLS of them, each with a cache of its own; a whole
graph of short sequences and few lanes still fits the GPU's L2 cache, so that its GB/s may be more than the memory's.
The peers get what they can take. All but one read contiguous keys and values of equal lengths, which a server has not:
gathering them from their blocks first would cost more than attention itself, and is not counted.
"""

from __future__ import annotations

import inspect
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.nn import functional as F

from foredraft.errors import ConfigError
from foredraft.kernels.lanes import Lanes

NUM_CALLS = 20
NUM_REPLAYS = 5
BLOCK_SIZE = 16
_PAGE_SIZE = 256  # of the kernels behind varlen_attn


@dataclass(frozen=True)
class AttentionShape:
    """`num_lanes` sequences of `num_keys` rows each, the last `num_rows` of which are queries; bfloat16."""

    num_kv_heads: int
    fold: int
    head_dim: int
    num_lanes: int
    num_rows: int
    num_keys: int

    @property
    def num_heads(self) -> int:
        return self.num_kv_heads * self.fold

    @property
    def kv_bytes(self) -> int:
        """Of all keys and values, each of which is read once at least."""
        return 2 * self.num_lanes * self.num_keys * self.num_kv_heads * self.head_dim * torch.bfloat16.itemsize

    def __str__(self) -> str:
        heads = f"{self.num_kv_heads} x {self.head_dim}, fold {self.fold}"
        return f"{heads}, {self.num_lanes} lanes, {self.num_rows} rows, {self.num_keys} keys"


SHAPES = (
    *(AttentionShape(8, 4, 128, lanes, rows, 1000) for rows in (1, 9) for lanes in (1, 8, 32, 128)),
    *(AttentionShape(3, 3, 64, lanes, rows, 300) for rows in (1, 9) for lanes in (1, 8, 32, 128)),
    AttentionShape(8, 4, 128, 1, 1024, 1024),
    AttentionShape(3, 3, 64, 1, 1024, 1024),
)


class AttentionInputs:
    """NUM_CALLS caches of one shape in blocks that lie at random, and one batch of queries [T, heads, head_dim]."""

    def __init__(self, shape: AttentionShape, device: torch.device) -> None:
        self.shape = shape
        num_lanes, num_rows = shape.num_lanes, shape.num_rows
        num_blocks = -(-shape.num_keys // BLOCK_SIZE)

        def numbers(*sizes: int) -> Tensor:
            return torch.randn(sizes, dtype=torch.bfloat16, device=device)

        def integers(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        self.query = numbers(num_lanes * num_rows, shape.num_heads, shape.head_dim)
        num_slots = (1 + num_lanes * num_blocks) * BLOCK_SIZE
        width = shape.num_kv_heads * shape.head_dim
        self.caches = [(numbers(num_slots, width), numbers(num_slots, width)) for _ in range(NUM_CALLS)]
        blocks = 1 + torch.randperm(num_lanes * num_blocks, device=device).to(torch.int32)
        self.lanes = Lanes(
            block_tables=blocks.view(num_lanes, num_blocks),
            first_rows=integers([shape.num_keys - num_rows] * num_lanes),
            num_rows=integers([num_rows] * num_lanes),
            flat_rows=integers(range(0, num_lanes * num_rows, num_rows)),
            origins=integers([0] * num_lanes),
            max_num_rows=num_rows,
        )

    def contiguous(self) -> list[tuple[Tensor, Tensor]]:
        """Keys and values [lanes, kv_heads, keys, head_dim] for each call."""
        shape = self.shape
        tables = self.lanes.block_tables.long().unsqueeze(2) * BLOCK_SIZE
        rows = torch.arange(BLOCK_SIZE, device=tables.device)
        slots = (tables + rows).flatten(1)[:, : shape.num_keys]

        def gathered(cache: Tensor) -> Tensor:
            rows = cache[slots].view(shape.num_lanes, shape.num_keys, shape.num_kv_heads, shape.head_dim)
            return rows.transpose(1, 2).contiguous()

        return [(gathered(keys), gathered(values)) for keys, values in self.caches]

    def queries(self) -> Tensor:
        """[lanes, heads, rows, head_dim]"""
        shape = self.shape
        return self.query.view(shape.num_lanes, shape.num_rows, shape.num_heads, -1).transpose(1, 2).contiguous()

    def rows(self, output: Tensor) -> Tensor:
        """An output [lanes, heads, rows, head_dim] in the order of the query."""
        return output.transpose(1, 2).flatten(0, 1)


_Event: Any = torch.cuda.Event  # without types
Call = Callable[[int], Tensor]
"""Attention over one of the NUM_CALLS caches; [T, heads, head_dim]."""


def _paged(inputs: AttentionInputs) -> Call:
    from foredraft.kernels.triton.attention import paged_attention

    scale = inputs.shape.head_dim**-0.5
    return lambda call: paged_attention(inputs.query, *inputs.caches[call], inputs.lanes, BLOCK_SIZE, scale)


def _sdpa(inputs: AttentionInputs) -> Call:
    """With one row, the query heads that share a key head are its rows: so it reads every key once, without a mask."""
    shape, caches, queries = inputs.shape, inputs.contiguous(), inputs.queries()
    if shape.num_rows == 1:
        folded = queries.view(shape.num_lanes, shape.num_kv_heads, shape.fold, shape.head_dim)
        return lambda call: F.scaled_dot_product_attention(folded, *caches[call]).reshape(inputs.query.shape)
    from torch.nn.attention.bias import causal_lower_right

    mask: Any = causal_lower_right(shape.num_rows, shape.num_keys)
    if shape.num_rows == shape.num_keys:
        return lambda call: inputs.rows(
            F.scaled_dot_product_attention(queries, *caches[call], is_causal=True, enable_gqa=True)
        )
    return lambda call: inputs.rows(
        F.scaled_dot_product_attention(queries, *caches[call], attn_mask=mask, enable_gqa=True)
    )


def _flex(inputs: AttentionInputs) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    shape, caches, queries = inputs.shape, inputs.contiguous(), inputs.queries()
    hidden = shape.num_keys - shape.num_rows

    def is_visible(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return key <= row + hidden

    device = str(inputs.query.device)
    mask = create_block_mask(is_visible, None, None, shape.num_rows, shape.num_keys, device=device)
    compiled: Any = torch.compile(flex_attention, dynamic=False)
    return lambda call: inputs.rows(compiled(queries, *caches[call], block_mask=mask, enable_gqa=True))


def _varlen(inputs: AttentionInputs) -> Call:
    from torch.nn.attention.varlen import varlen_attn

    shape = inputs.shape
    caches = [(_end_to_end(keys), _end_to_end(values)) for keys, values in inputs.contiguous()]
    lanes = torch.arange(shape.num_lanes + 1, dtype=torch.int32, device=inputs.query.device)
    query_starts, key_starts = lanes * shape.num_rows, lanes * shape.num_keys
    known = inspect.signature(varlen_attn).parameters  # they differ between releases of torch
    options: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        options["enable_gqa"] = True

    def attend(call: int) -> Tensor:
        output = varlen_attn(
            inputs.query, *caches[call], query_starts, key_starts, shape.num_rows, shape.num_keys, **options
        )
        assert isinstance(output, Tensor)
        return output

    return attend


def _varlen_paged(inputs: AttentionInputs) -> Call:
    """Over blocks of _PAGE_SIZE rows, one lane's after another's."""
    from torch.nn.attention.varlen import varlen_attn

    shape, device = inputs.shape, inputs.query.device
    num_pages = -(-shape.num_keys // _PAGE_SIZE)
    padding = (0, 0, 0, num_pages * _PAGE_SIZE - shape.num_keys)

    def pages(rows: Tensor) -> Tensor:
        return _end_to_end(F.pad(rows, padding)).view(-1, _PAGE_SIZE, shape.num_kv_heads, shape.head_dim)

    caches = [(pages(keys), pages(values)) for keys, values in inputs.contiguous()]
    starts = torch.arange(shape.num_lanes + 1, dtype=torch.int32, device=device) * shape.num_rows
    tables = torch.arange(shape.num_lanes * num_pages, dtype=torch.int32, device=device).view(shape.num_lanes, -1)
    lengths = torch.full((shape.num_lanes,), shape.num_keys, dtype=torch.int32, device=device)
    options: dict[str, Any] = {"enable_gqa": True, "seqused_k": lengths, "block_table": tables}

    def attend(call: int) -> Tensor:
        output = varlen_attn(
            inputs.query, *caches[call], starts, None, shape.num_rows, shape.num_keys, window_size=(-1, 0), **options
        )
        assert isinstance(output, Tensor)
        return output

    return attend


def _end_to_end(rows: Tensor) -> Tensor:
    """[lanes, kv_heads, keys, head_dim] -> [lanes * keys, kv_heads, head_dim]"""
    return rows.transpose(1, 2).flatten(0, 1).contiguous()


PEERS: dict[str, Callable[[AttentionInputs], Call]] = {
    "scaled_dot_product_attention, contiguous": _sdpa,
    "FlexAttention, contiguous": _flex,
    "varlen_attn, contiguous": _varlen,
    "varlen_attn, blocks of 256": _varlen_paged,
}


def measure_attention(device: torch.device, shapes: Sequence[AttentionShape] = SHAPES) -> list[dict[str, Any]]:
    """One entry for each shape and peer: microseconds a call, GB/s of keys and values, and the largest difference from
    Foredraft's output; or the reason why a peer cannot.

    Raises ConfigError if there is no such CUDA device.
    """
    if device.type != "cuda" or not torch.cuda.is_available():
        raise ConfigError(f"attention is measured on a CUDA device, and {device} is none that torch can use")
    return [result for shape in shapes for result in _measure_shape(AttentionInputs(shape, device))]


@torch.no_grad()
def _measure_shape(inputs: AttentionInputs) -> list[dict[str, Any]]:
    paged = _paged(inputs)
    expected = paged(0).float()
    results = [{"peer": "Foredraft, blocks of 16", **_figures(inputs.shape, paged)}]
    for name, prepare in PEERS.items():
        try:
            call = prepare(inputs)
            difference = float((call(0).float() - expected).abs().max())
            results.append({"peer": name, **_figures(inputs.shape, call), "difference": difference})
        except Exception as error:  # whatever stops a peer on this torch or this GPU is its result
            reason = str(error).strip().partition("\n")[0]
            results.append({"peer": name, "error": f"{type(error).__name__}: {reason}"})
        torch.compiler.reset()
    return [{"shape": str(inputs.shape), **result} for result in results]


def _figures(shape: AttentionShape, call: Call) -> dict[str, float]:
    microseconds = _microseconds(call)
    return {"microseconds": microseconds, "gb_per_second": shape.kv_bytes / microseconds / 1e3}


def _microseconds(call: Call) -> float:
    """Of one call, by the median of NUM_REPLAYS replays of a graph of NUM_CALLS."""
    call(0)  # compiles
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for index in range(NUM_CALLS):
            call(index)
    graph.replay()
    times = []
    for _ in range(NUM_REPLAYS):
        start, end = (_Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / NUM_CALLS)
    return float(statistics.median(times))


def attention_table(results: Sequence[dict[str, Any]]) -> Table:
    """A table that is Markdown as well."""
    table = Table("shape", "attention", box=box.MARKDOWN)
    for heading in ("µs", "GB/s", "difference"):
        table.add_column(heading, justify="right")
    for result in results:
        if "error" in result:
            cells = ["", "", str(result["error"])]
        else:
            difference = f"{result['difference']:.4f}" if "difference" in result else ""
            cells = [f"{result['microseconds']:.1f}", f"{result['gb_per_second']:.0f}", difference]
        table.add_row(result["shape"], result["peer"], *cells)
    return table


if __name__ == "__main__":
    Console(width=220).print(attention_table(measure_attention(torch.device("cuda"))))
