"""How near a step comes to the time that reading its weights and its cache takes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any

import torch
from rich import box
from rich.table import Table

from foredraft import LLM
from foredraft.bench.steady import Span, random_prompts, steady_batch, synchronize
from foredraft.bench.step_bytes import ModelBytes, StepBytes

COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 28}
NUM_COPIES = 10


@dataclass
class FloorCell:
    """A batch size at one depth: a span of steps for each repeat."""

    batch_size: int
    depth: int
    spans: list[Span] = field(default_factory=list)

    @property
    def seconds_per_cycle(self) -> float:
        return median(span.seconds_per_cycle for span in self.spans)

    @property
    def tokens_per_second(self) -> float:
        return median(span.tokens_per_second for span in self.spans)

    @property
    def tokens_per_cycle(self) -> float:
        return sum(span.num_tokens for span in self.spans) / sum(span.num_cycles for span in self.spans)

    @property
    def mean_context(self) -> float:
        return sum(span.mean_context for span in self.spans) / len(self.spans)


@dataclass(frozen=True)
class FloorResult:
    """Cells by batch size and, within it, by depth, and what they are measured against.

    copies: bandwidth in bytes a second, read and written, of a large copy before each repeat; marks: what makes the
    figures not those of the model's own output.
    """

    model: ModelBytes
    cells: tuple[FloorCell, ...]
    copies: list[float]
    marks: tuple[str, ...] = ()

    @property
    def measured(self) -> list[FloorCell]:
        """Those that have been run."""
        return [cell for cell in self.cells if cell.spans]

    @property
    def bandwidth(self) -> float:
        return median(self.copies)

    def step_bytes(self, cell: FloorCell) -> StepBytes:
        return self.model.step(cell.batch_size, cell.mean_context, cell.depth)

    def floor_seconds(self, cell: FloorCell) -> float:
        """The time that a copy of as many bytes takes."""
        return self.step_bytes(cell).total / self.bandwidth

    def ratio(self, cell: FloorCell) -> float:
        """How many times the floor a cycle takes."""
        return cell.seconds_per_cycle / self.floor_seconds(cell)

    def ratio_to_plain(self, cell: FloorCell) -> float | None:
        """How many times the tokens a second of depth 0 in the same batch; None where that was not run."""
        for other in self.measured:
            if other.batch_size == cell.batch_size and other.depth == 0:
                return cell.tokens_per_second / other.tokens_per_second
        return None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        parts = {"target": self.model.target, "head": self.model.head, "modules": self.model.modules}
        return {
            "marks": list(self.marks),
            "copy_bytes_per_second": self.bandwidth,
            "copies_bytes_per_second": self.copies,
            "model_bytes": parts | {"draft_head": self.model.draft_head},
            "cells": [self._cell_dict(cell) for cell in self.measured],
        }

    def _cell_dict(self, cell: FloorCell) -> dict[str, Any]:
        step = self.step_bytes(cell)
        return {
            "batch_size": cell.batch_size,
            "depth": cell.depth,
            "mean_context": cell.mean_context,
            "bytes": asdict(step) | {"total": step.total},
            "floor_ms": 1000 * self.floor_seconds(cell),
            "median_ms": 1000 * cell.seconds_per_cycle,
            "ratio_to_floor": self.ratio(cell),
            "tokens_per_cycle": cell.tokens_per_cycle,
            "median_tokens_per_second": cell.tokens_per_second,
            "ratio_to_depth_0": self.ratio_to_plain(cell),
            "spans": [asdict(span) for span in cell.spans],
        }

    def table(self) -> Table:
        """A table that is Markdown as well."""
        table = Table("batch", box=box.MARKDOWN)
        headings = ("depth", "MB weights", "MB drafting", "MB cache", "floor ms", "cycle ms", "x floor")
        for heading in (*headings, "tokens a cycle", "tokens/s", "x depth 0"):
            table.add_column(heading, justify="right")
        for cell in self.measured:
            step, to_plain = self.step_bytes(cell), self.ratio_to_plain(cell)
            sizes = (step.target + step.head, step.modules + step.draft_heads, step.target_kv + step.module_kv)
            table.add_row(
                str(cell.batch_size),
                str(cell.depth),
                *(f"{size / 1e6:,.1f}" for size in sizes),
                f"{1000 * self.floor_seconds(cell):.3f}",
                f"{1000 * cell.seconds_per_cycle:.3f}",
                f"{self.ratio(cell):.2f}",
                f"{cell.tokens_per_cycle:.2f}",
                f"{cell.tokens_per_second:,.1f}",
                "" if to_plain is None else f"{to_plain:.2f}",
            )
        return table

    def caption(self) -> str:
        """What the floor is, in words."""
        return f"floor: bytes at {self.bandwidth / 1e9:,.1f} GB/s, read and written by a large copy in the same run"


def copy_bandwidth(device: torch.device, num_bytes: int | None = None) -> float:
    """Bytes a second, read and written together, of copies of `num_bytes` (None: many) within the device's memory."""
    size = COPY_BYTES.get(device.type, COPY_BYTES["cpu"]) if num_bytes is None else num_bytes
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    destination = torch.empty_like(source)
    destination.copy_(source)
    synchronize(device)
    started = time.perf_counter()
    for _ in range(NUM_COPIES):
        destination.copy_(source)
    synchronize(device)
    return 2 * size * NUM_COPIES / (time.perf_counter() - started)


def measure_floor(
    llm: LLM,
    depths: Sequence[int],
    batch_sizes: Sequence[int],
    context: int,
    num_steps: int,
    repeats: Iterable[int],
    *,
    copy_bytes: int | None = None,
    on_span: Callable[[FloorResult], None] = lambda result: None,
) -> FloorResult:
    """Time `num_steps` steps of every batch size and depth, once for each repeat, the depths taking turns.

    Prompts are `context` random token ids, and none finds rows that another has cached. on_span is told what there is
    after each span. Raises ConfigError or ForedraftError, as `steady_batch` does.
    """
    model, copies = ModelBytes.of(llm), list[float]()
    cells = {(size, depth): FloorCell(size, depth) for size in batch_sizes for depth in depths}
    result = FloorResult(model, tuple(cells.values()), copies, llm.config.marks)
    for repeat in repeats:
        copies.append(copy_bandwidth(llm.device, copy_bytes))
        first = repeat % len(depths)
        for size in batch_sizes:
            prompts = random_prompts(llm, size, context, seed=repeat)
            for depth in (*depths[first:], *depths[:first]):
                salt = f"repeat {repeat}, batch {size}, depth {depth}"
                with steady_batch(llm, prompts, depth, salt) as batch:
                    cells[size, depth].spans.append(batch.run(num_steps))
                on_span(result)
    return result
