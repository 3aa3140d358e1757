"""What a JSON schema does to an answer and to its speed, next to free text for the same prompts."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from foredraft import LLM, SamplingParams
from foredraft.bench.json_tasks import JsonTask
from foredraft.bench.steps import StepTime, time_decode_steps
from foredraft.errors import ConfigError, ForedraftError
from foredraft.outputs import RequestOutput
from foredraft.statistics import SpeculationStats
from foredraft.structured_output import StructuredOutput

WARM_UP_TOKENS = 4
MAX_STEPS = 32
"""How many steps of a batch are timed at most; it is over as soon as one of its requests is."""


@dataclass
class Side:
    """Answers of one kind at one depth: speeds by prompt, and how all drafts fared."""

    tokens_per_second: list[float] = field(default_factory=list)
    speculation: SpeculationStats = field(default_factory=SpeculationStats)

    @property
    def mean_acceptance_length(self) -> float | None:
        return self.speculation.mean_acceptance_length if self.speculation.num_drafts else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "median_tokens_per_second": median(self.tokens_per_second),
            "mean_acceptance_length": self.mean_acceptance_length,
            "tokens_per_second": self.tokens_per_second,
            "speculation": self.speculation.to_dict(),
        }


@dataclass
class DepthResult:
    """Figures at one depth: structured answers, free ones of the same lengths, and decode steps of batches."""

    depth: int
    structured: Side = field(default_factory=Side)
    free: Side = field(default_factory=Side)
    finish_reasons: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0
    num_valid: int = 0  # answers that are JSON and fit their schema
    num_masks: int = 0
    mask_seconds: float = 0.0
    free_steps: list[float] = field(default_factory=list)  # seconds, of a batch of free texts
    mixed_steps: list[float] = field(default_factory=list)  # half of the batch is structured

    @property
    def num_answers(self) -> int:
        return sum(self.finish_reasons.values())

    @property
    def speed_ratio(self) -> float:
        """How many times as fast structured answers are as free ones; of medians."""
        return median(self.structured.tokens_per_second) / median(self.free.tokens_per_second)

    @property
    def mask_microseconds(self) -> float:
        """For each row that a mask was made for, the following of its tokens included."""
        return 1e6 * self.mask_seconds / max(1, self.num_masks)

    @property
    def slowdown(self) -> float | None:
        """How many times as long a step takes if half of the batch is structured; of medians. None: not measured."""
        return median(self.mixed_steps) / median(self.free_steps) if self.mixed_steps and self.free_steps else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "depth": self.depth,
            "num_answers": self.num_answers,
            "num_tokens": self.num_tokens,
            "num_valid": self.num_valid,
            "finish_reasons": dict(self.finish_reasons),
            "speed_ratio_to_free": self.speed_ratio,
            "num_masks": self.num_masks,
            "mask_microseconds": self.mask_microseconds,
            "slowdown_of_free_text_in_mixed_batch": self.slowdown,
            "structured": self.structured.to_dict(),
            "free": self.free.to_dict(),
            "free_step_seconds": self.free_steps,
            "mixed_step_seconds": self.mixed_steps,
        }


@dataclass(frozen=True)
class StructuredResult:
    """Figures at all depths."""

    depths: tuple[DepthResult, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"depths": [result.to_dict() for result in self.depths]}

    def tables(self) -> dict[str, Table]:
        """Tables that are Markdown as well, by what they show."""
        answers = _table("K", "fit the schema", "ended by", "tokens", "us a mask")
        speeds = _table("K", "tokens/s", "free text", "x free text", "mean acceptance length", "free text")
        steps = _table("K", "ms a step, free text only", "half of it structured", "x free text only")
        for result in self.depths:
            depth, sides = str(result.depth), (result.structured, result.free)
            ends = ", ".join(f"{reason} {count}" for reason, count in result.finish_reasons.most_common())
            share = f"{result.num_valid} of {result.num_answers}"
            answers.add_row(depth, share, ends, str(result.num_tokens), f"{result.mask_microseconds:.1f}")
            lengths = [_cell(side.mean_acceptance_length, ".2f") for side in sides]
            speed = [f"{median(side.tokens_per_second):.1f}" for side in sides]
            speeds.add_row(depth, *speed, f"{result.speed_ratio:.2f}", *lengths)
            times = [1e3 * median(times) if times else None for times in (result.free_steps, result.mixed_steps)]
            steps.add_row(depth, *(_cell(each, ".2f") for each in times), _cell(result.slowdown, ".3f"))
        return {"Structured answers": answers, "Speed and drafts": speeds, "Decode steps of one batch": steps}


class SchemaCheck:
    """Whether a text is JSON that fits a schema, by the package jsonschema. Raises ConfigError if there is none."""

    def __init__(self) -> None:
        try:
            from jsonschema import Draft202012Validator  # type: ignore[import-untyped]
        except ImportError:
            raise ConfigError("answers are checked with the package jsonschema: pip install jsonschema") from None
        self._validator: Callable[[dict[str, Any]], Any] = Draft202012Validator

    def fits(self, text: str, schema: dict[str, Any]) -> bool:
        """Whether `text` is JSON as the schema describes it."""
        try:
            value = json.loads(text)
        except ValueError:
            return False
        return bool(self._validator(schema).is_valid(value))


class StructuredTrials:
    """Runs the tasks, structured and free, one by one and in batches.

    tasks, each with its prompt. params: those of all answers; max_tokens ends a structured one.
    """

    def __init__(self, llm: LLM, tasks: Sequence[tuple[JsonTask, list[int]]], params: SamplingParams) -> None:
        self._llm = llm
        self._tasks = tasks
        self._params = params
        self._check = SchemaCheck()
        self._num_runs = 0

    def warm_up(self) -> None:
        """Compile the schemas, which is not part of the figures."""
        params = [replace(self._structured(task, 0), max_tokens=WARM_UP_TOKENS) for task, _ in self._tasks]
        self._llm.generate([prompt for _, prompt in self._tasks], params)

    def answer(self, index: int, result: DepthResult) -> None:
        """Answer one task with its schema, and then with as many tokens of free text."""
        task, prompt = self._tasks[index]
        stats = self._llm.stats
        num_masks, mask_seconds = stats.num_masks, stats.mask_seconds
        output = self._run(prompt, self._structured(task, result.depth), result.structured)
        result.num_masks += stats.num_masks - num_masks
        result.mask_seconds += stats.mask_seconds - mask_seconds
        result.finish_reasons[output.finish_reason] += 1
        result.num_tokens += len(output.token_ids)
        result.num_valid += self._check.fits(output.text, task.schema)
        self._run(prompt, self._free(len(output.token_ids), result.depth), result.free)

    def time_batch(self, indices: Sequence[int], result: DepthResult) -> None:
        """Time steps of these tasks as one batch, all of them free, and every second one structured."""
        prompts = [self._tasks[index][1] for index in indices]
        all_free = [self._free(self._params.max_tokens, result.depth)] * len(prompts)
        mixed = list(all_free)
        mixed[::2] = [self._structured(self._tasks[index][0], result.depth) for index in indices[::2]]
        result.mixed_steps += _seconds(time_decode_steps(self._llm, prompts, mixed, MAX_STEPS))
        result.free_steps += _seconds(time_decode_steps(self._llm, prompts, all_free, MAX_STEPS))

    def _structured(self, task: JsonTask, depth: int) -> SamplingParams:
        structured = StructuredOutput(json_schema=task.schema)
        return replace(self._params, structured_output=structured, num_speculative_tokens=depth)

    def _free(self, num_tokens: int | None, depth: int) -> SamplingParams:
        return replace(self._params, max_tokens=num_tokens, ignore_eos=True, num_speculative_tokens=depth)

    def _run(self, prompt: list[int], params: SamplingParams, side: Side) -> RequestOutput:
        self._num_runs += 1
        salt = f"run {self._num_runs}"  # no run is to find what another has computed
        started = time.perf_counter()
        (output,) = self._llm.generate([prompt], replace(params, cache_salt=salt))
        seconds = time.perf_counter() - started
        if output.error is not None:
            raise ForedraftError(output.error)
        side.tokens_per_second.append(len(output.token_ids) / seconds)
        side.speculation.add(output.stats)
        return output


def measure_structured(
    llm: LLM,
    tasks: Sequence[tuple[JsonTask, list[int]]],
    params: SamplingParams,
    depths: Sequence[int],
    batch_size: int,
    turns: Iterable[int],
) -> StructuredResult:
    """Answer every task at every depth, structured and free in turn; then time batches of so many tasks.

    turns: the numbers of the tasks, from 0 on. Depths take turns on each task, in an order that rotates.
    """
    trials = StructuredTrials(llm, tasks, params)
    trials.warm_up()
    results = [DepthResult(depth) for depth in depths]
    for index in turns:
        for result in _rotated(results, index):
            trials.answer(index, result)
    for number, first in enumerate(range(0, len(tasks) - batch_size + 1, batch_size)):
        for result in _rotated(results, number):
            trials.time_batch(range(first, first + batch_size), result)
    return StructuredResult(tuple(results))


def _rotated(results: list[DepthResult], turn: int) -> list[DepthResult]:
    first = turn % len(results)
    return [*results[first:], *results[:first]]


def _seconds(steps: Iterable[StepTime]) -> list[float]:
    return [step.seconds for step in steps]


def _cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _table(*headings: str) -> Table:
    table = Table(box=box.MARKDOWN)
    for heading in headings:
        table.add_column(heading, justify="right")
    return table
