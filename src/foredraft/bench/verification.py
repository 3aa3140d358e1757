"""How many drafts the verification methods accept, side by side on the same prompts."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean, median, stdev
from typing import Any

from rich import box
from rich.table import Table

from foredraft import LLM, SamplingParams
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError, ForedraftError
from foredraft.statistics import SpeculationStats

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Estimate:
    """A mean over prompts and its standard error."""

    mean: float
    standard_error: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Estimate:
        """values: at least two."""
        return cls(fmean(values), stdev(values) / math.sqrt(len(values)))


@dataclass
class MethodResult:
    """Figures of one method: how the drafts for each prompt fared, over all seeds, and the speed of each batch."""

    name: str
    by_prompt: list[SpeculationStats] = field(default_factory=list)
    tokens_per_second: list[float] = field(default_factory=list)

    @property
    def lengths(self) -> list[float]:
        """The mean acceptance length of each prompt."""
        return [speculation.mean_acceptance_length for speculation in self.by_prompt]

    @property
    def total(self) -> SpeculationStats:
        total = SpeculationStats()
        for speculation in self.by_prompt:
            total.add(speculation)
        return total


@dataclass(frozen=True)
class VerificationResult:
    """Figures of all methods; the others are compared with the first, prompt by prompt."""

    methods: tuple[MethodResult, ...]

    def difference(self, method: MethodResult) -> Estimate:
        """Of the mean acceptance lengths of the same prompt with `method` and with the first one."""
        return Estimate.of([own - first for own, first in zip(method.lengths, self.methods[0].lengths)])

    def speed_ratio(self, method: MethodResult) -> float:
        """Of the median tokens per second."""
        return median(method.tokens_per_second) / median(self.methods[0].tokens_per_second)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"methods": [self._method_dict(method) for method in self.methods]}

    def _method_dict(self, method: MethodResult) -> dict[str, Any]:
        length, difference = Estimate.of(method.lengths), self.difference(method)
        return {
            "name": method.name,
            "mean_acceptance_length": length.mean,
            "standard_error": length.standard_error,
            "difference_to_first": difference.mean,
            "difference_standard_error": difference.standard_error,
            "median_tokens_per_second": median(method.tokens_per_second),
            "speed_ratio_to_first": self.speed_ratio(method),
            "lengths_by_prompt": method.lengths,
            "tokens_per_second": method.tokens_per_second,
            "all_prompts": method.total.to_dict(),
        }

    def table(self) -> Table:
        """A table that is Markdown as well; after each mean its standard error."""
        first = self.methods[0].name
        table = Table("verification", box=box.MARKDOWN)
        for heading in ("mean acceptance length", f"less that of {first}", "tokens/s", f"x {first}"):
            table.add_column(heading, justify="right")
        for method in self.methods:
            length, difference = Estimate.of(method.lengths), self.difference(method)
            is_first = method is self.methods[0]
            table.add_row(
                method.name,
                f"{length.mean:.3f} ± {length.standard_error:.3f}",
                "" if is_first else f"{difference.mean:+.3f} ± {difference.standard_error:.3f}",
                f"{median(method.tokens_per_second):.1f}",
                f"{self.speed_ratio(method):.2f}",
            )
        return table


def method_config(config: EngineConfig, method: str) -> EngineConfig:
    """The same engine with another method. Raises ConfigError if it is not known."""
    changes: dict[str, Any] = {"verification": method}
    if method != "lossy-typical":
        changes |= {"lossy_epsilon": None, "lossy_delta": None}
    return replace(config, **changes)


def measure_verification(
    llms: Mapping[str, LLM], batches: Iterable[list[list[int]]], params: SamplingParams, num_seeds: int
) -> VerificationResult:
    """Continue every prompt `num_seeds` times with each method, which take turns on each batch of prompts.

    llms: an engine for each method, alike but for that. The first prompt's seeds are params.seed and those after it;
    the next one's follow. Each method warms up on the first batch.
    """
    for name, llm in llms.items():
        if llm.engine.limits.max_depth == 0:
            raise ConfigError(f"verification={name} has nothing to verify: num_speculative_tokens is 0")
    results = [MethodResult(name) for name in llms]
    seed = params.seed or 0
    for index, batch in enumerate(batches):
        if index == 0:
            for llm in llms.values():
                llm.generate(batch, replace(params, max_tokens=WARM_UP_TOKENS, seed=seed))
                llm.reset_prefix_cache()
        prompts = [prompt for prompt in batch for _ in range(num_seeds)]
        each = [replace(params, seed=seed + offset) for offset in range(len(prompts))]
        seed += len(prompts)
        turns = list(zip(llms.values(), results))
        first = index % len(turns)
        for llm, result in (*turns[first:], *turns[:first]):
            _take_turn(llm, result, prompts, each, num_seeds)
    return VerificationResult(tuple(results))


def _take_turn(
    llm: LLM, result: MethodResult, prompts: list[list[int]], params: list[SamplingParams], num_seeds: int
) -> None:
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    for index, output in enumerate(outputs):
        if output.error is not None:
            raise ForedraftError(f"{result.name}: {output.error}")
        if index % num_seeds == 0:
            result.by_prompt.append(SpeculationStats())
        result.by_prompt[-1].add(output.stats)
    result.tokens_per_second.append(sum(len(output.token_ids) for output in outputs) / seconds)
