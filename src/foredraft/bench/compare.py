"""Depths or verification methods side by side, each at several concurrencies, in one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from foredraft import LLM, SamplingParams
from foredraft.bench.offline import check, run_closed_loop, speculation_of, warm_up
from foredraft.bench.serving.figures import RequestFigures, duration_of
from foredraft.errors import ConfigError
from foredraft.statistics import SpeculationStats


@dataclass(frozen=True)
class CompareVariant:
    """An engine, and how many draft tokens a step it is asked for."""

    name: str
    llm: LLM
    depth: int


@dataclass
class Turn:
    """One pass over all prompts: tokens per second in all, and medians over requests in seconds (None: too short)."""

    tokens_per_second: float
    first_token_seconds: float
    seconds_per_token: float | None

    @classmethod
    def of(cls, figures: Sequence[RequestFigures]) -> Turn:
        """figures: those of one pass, none of which failed."""
        first_tokens = [each.ttft for each in figures if each.ttft is not None]
        paces = [each.tpot for each in figures if each.tpot is not None]
        speed = sum(each.num_tokens for each in figures) / duration_of(figures)
        return cls(speed, median(first_tokens), median(paces) if paces else None)


@dataclass
class Cell:
    """Figures of a variant at one concurrency: a turn for each round, and how the drafts of all turns fared.

    num_equal: how many outputs were those of the first turn of all, of num_compared that were compared.
    """

    name: str
    concurrency: int
    turns: list[Turn] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    num_equal: int = 0
    num_compared: int = 0

    def add(self, figures: Sequence[RequestFigures], reference: list[tuple[int, ...] | None] | None) -> None:
        """Count a turn. reference: the outputs of the first turn of all, noted here if it is empty."""
        self.turns.append(Turn.of(figures))
        self.speculation.add(speculation_of(figures))
        if reference is None:
            return
        outputs = [each.token_ids for each in figures]
        reference += outputs if not reference else ()
        self.num_equal += sum(own == first for own, first in zip(outputs, reference))
        self.num_compared += len(outputs)

    @property
    def tokens_per_second(self) -> float:
        return median(turn.tokens_per_second for turn in self.turns)

    @property
    def first_token_seconds(self) -> float:
        return median(turn.first_token_seconds for turn in self.turns)

    @property
    def seconds_per_token(self) -> float | None:
        known = [turn.seconds_per_token for turn in self.turns if turn.seconds_per_token is not None]
        return median(known) if known else None

    @property
    def mean_acceptance_length(self) -> float | None:
        return self.speculation.mean_acceptance_length if self.speculation.num_drafts else None


@dataclass(frozen=True)
class CompareResult:
    """Cells by concurrency and, within it, by variant; each is compared with the first variant's.

    marks: what makes the figures not those of the model's own output; empty if nothing does.
    """

    cells: tuple[Cell, ...]
    marks: tuple[str, ...] = ()

    def baseline(self, cell: Cell) -> Cell:
        """The first variant at the same concurrency."""
        return next(other for other in self.cells if other.concurrency == cell.concurrency)

    def ratio(self, cell: Cell) -> float:
        """How many times as fast as the first variant."""
        return cell.tokens_per_second / self.baseline(cell).tokens_per_second

    @property
    def variants(self) -> list[str]:
        return list(dict.fromkeys(cell.name for cell in self.cells))

    def speculation_of(self, name: str) -> SpeculationStats:
        """How a variant's drafts fared at all concurrencies together."""
        total = SpeculationStats()
        for cell in self.cells:
            if cell.name == name:
                total.add(cell.speculation)
        return total

    @property
    def equality(self) -> str:
        """Whether all outputs were equal, in words."""
        num_compared = sum(cell.num_compared for cell in self.cells)
        num_equal = sum(cell.num_equal for cell in self.cells)
        if not num_compared:
            return "Outputs were not compared: that takes greedy requests whose drafts are verified"
        if num_equal == num_compared:
            return f"All outputs identical: yes, {num_compared} of {num_compared}"
        return f"All outputs identical: NO, {num_equal} of {num_compared}"

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Times in seconds."""
        return {
            "marks": list(self.marks),
            "equality": self.equality,
            "cells": [self._cell_dict(cell) for cell in self.cells],
        }

    def _cell_dict(self, cell: Cell) -> dict[str, Any]:
        return {
            "variant": cell.name,
            "concurrency": cell.concurrency,
            "median_tokens_per_second": cell.tokens_per_second,
            "ratio_to_first": self.ratio(cell),
            "mean_acceptance_length": cell.mean_acceptance_length,
            "median_seconds_per_token": cell.seconds_per_token,
            "median_first_token_seconds": cell.first_token_seconds,
            "num_equal": cell.num_equal,
            "num_compared": cell.num_compared,
            "rounds": [vars(turn) for turn in cell.turns],
            "speculation": cell.speculation.to_dict(),
        }

    def table(self) -> Table:
        """A table that is Markdown as well. Times in milliseconds."""
        first = self.variants[0]
        table = Table("concurrency", box=box.MARKDOWN)
        table.add_column("variant")
        headings = ("tokens/s", f"x {first}", "change", "mean acceptance length", "TPOT ms", "TTFT ms", "identical")
        for heading in headings:
            table.add_column(heading, justify="right")
        for cell in self.cells:
            ratio, length, pace = self.ratio(cell), cell.mean_acceptance_length, cell.seconds_per_token
            table.add_row(
                str(cell.concurrency),
                cell.name,
                f"{cell.tokens_per_second:.1f}",
                f"{ratio:.2f}",
                "" if cell is self.baseline(cell) else f"{100 * (ratio - 1):+.0f} %",
                "" if length is None else f"{length:.2f}",
                "" if pace is None else f"{1000 * pace:.2f}",
                f"{1000 * cell.first_token_seconds:.1f}",
                f"{cell.num_equal} of {cell.num_compared}" if cell.num_compared else "",
            )
        return table


def check_concurrencies(concurrencies: Sequence[int], num_prompts: int, max_num_seqs: int) -> None:
    """Raise ConfigError for a concurrency that the prompts or the engine cannot reach."""
    for concurrency in concurrencies:
        if concurrency > num_prompts:
            raise ConfigError(f"concurrency {concurrency} needs as many prompts, not {num_prompts}")
        if concurrency > max_num_seqs:
            raise ConfigError(f"concurrency {concurrency} is more than max_num_seqs={max_num_seqs}")


def measure_compare(
    variants: Sequence[CompareVariant],
    prompts: Sequence[list[int]],
    params: SamplingParams,
    concurrencies: Sequence[int],
    rounds: Iterable[int],
) -> CompareResult:
    """Continue all prompts with every variant, in a closed loop at each concurrency, once for each round.

    In every round each variant takes its turn, in an order that rotates, so that a machine that slows down meanwhile
    slows all alike; no turn finds what another has cached. Prompt number i has the seed params.seed + i. Outputs are
    compared, if they are greedy and verified, with those of the first turn of all.
    """
    each = [replace(params, seed=(params.seed or 0) + index) for index in range(len(prompts))]
    is_compared = params.temperature == 0 and all(v.llm.config.synthetic_rates is None for v in variants)
    reference: list[tuple[int, ...] | None] | None = [] if is_compared else None
    cells = {(c, index): Cell(variant.name, c) for c in concurrencies for index, variant in enumerate(variants)}
    for number in rounds:
        for concurrency in concurrencies:
            if number == 0:
                for variant in variants:
                    short = replace(each[0], num_speculative_tokens=variant.depth)
                    warm_up(variant.llm, prompts[:concurrency], short, concurrency)
            first = number % len(variants)
            for index in (*range(first, len(variants)), *range(first)):
                salt = f"round {number}, concurrency {concurrency}, variant {index}"
                own = [replace(o, num_speculative_tokens=variants[index].depth, cache_salt=salt) for o in each]
                figures = run_closed_loop(variants[index].llm, prompts, own, concurrency)
                check(figures)
                cells[concurrency, index].add(figures, reference)
    return CompareResult(tuple(cells.values()), variants[0].llm.config.marks)
