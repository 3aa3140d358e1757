"""What all requests of a benchmark came to, under the names that the field uses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich import box
from rich.table import Table

from foredraft.bench.serving.figures import CountSource, Failure, RequestFigures
from foredraft.errors import ConfigError, shown

TIMES = ("ttft", "tpot", "itl", "e2el")
_GOODPUT_TIMES = ("ttft", "tpot", "e2el")


@dataclass(frozen=True)
class Distribution:
    """Of times in milliseconds; std is that of the numbers themselves, not an estimate. percentiles: by their names."""

    mean: float
    median: float
    std: float
    percentiles: Mapping[str, float]

    @classmethod
    def of(cls, seconds: Sequence[float], percentiles: Sequence[float]) -> Distribution | None:
        """Of times in seconds; None if there are none."""
        if not seconds:
            return None
        times = 1e3 * np.asarray(seconds, dtype=np.float64)
        found = {percentile_name(each): float(np.percentile(times, each)) for each in percentiles}
        return cls(float(times.mean()), float(np.median(times)), float(times.std()), found)


@dataclass(frozen=True)
class Summary:
    """Figures of a run that took `duration` seconds. Tokens and times are those of requests that did not fail.

    times: for TTFT, TPOT, ITL and E2EL; None where no request has one. ITL is the gap between chunks, and a chunk has
    tokens_per_chunk tokens on average. num_unknown_prompts: requests whose prompt tokens nobody counted.
    peak_output_throughput: tokens in the best whole second; None for a run of less than one.
    goodput: requests a second that kept all the limits, None without limits. counted_by: requests by how their tokens
    were counted. failures: by kind, how many and an example.
    """

    duration: float
    completed: int
    total_input_tokens: int
    total_cached_tokens: int | None
    total_output_tokens: int
    num_unknown_prompts: int
    tokens_per_chunk: float | None
    max_concurrent_requests: int
    peak_output_throughput: int | None
    goodput: float | None
    times: Mapping[str, Distribution | None]
    percentiles: tuple[float, ...]
    counted_by: Mapping[CountSource, int]
    failures: Mapping[str, tuple[int, Failure]]

    @classmethod
    def of(
        cls,
        figures: Sequence[RequestFigures],
        duration: float,
        percentiles: Sequence[float],
        goodput: Mapping[str, float] | None = None,
    ) -> Summary:
        """goodput: the most milliseconds of ttft, tpot and e2el that a good request takes."""
        good = [each for each in figures if each.failure is None]
        ttfts = [each.ttft for each in good if each.ttft is not None]
        tpots = [each.tpot for each in good if each.tpot is not None]
        gaps = [gap for each in good for gap in each.itl]
        e2els = [each.e2el for each in good if each.arrivals]
        all_times = dict(zip(TIMES, (ttfts, tpots, gaps, e2els)))
        num_tokens = sum(each.num_tokens for each in good)
        num_chunks = sum(len(each.arrivals) for each in good)
        cached = [each.num_cached_tokens for each in good if each.num_cached_tokens is not None]
        kept = sum(_keeps(each, goodput) for each in good) if goodput else None
        return cls(
            duration=duration,
            completed=len(good),
            total_input_tokens=sum(each.num_prompt_tokens or 0 for each in good),
            total_cached_tokens=sum(cached) if cached else None,
            total_output_tokens=num_tokens,
            num_unknown_prompts=sum(each.num_prompt_tokens is None for each in good),
            tokens_per_chunk=num_tokens / num_chunks if num_chunks else None,
            max_concurrent_requests=_most_open(figures),
            peak_output_throughput=_peak(good, duration),
            goodput=None if kept is None else _per_second(kept, duration),
            times={name: Distribution.of(times, percentiles) for name, times in all_times.items()},
            percentiles=tuple(percentiles),
            counted_by=Counter(each.counted_by for each in good),
            failures=_failures(figures),
        )

    @property
    def failed(self) -> int:
        return sum(number for number, _ in self.failures.values())

    @property
    def request_throughput(self) -> float | None:
        return _per_second(self.completed, self.duration)

    @property
    def output_throughput(self) -> float | None:
        return _per_second(self.total_output_tokens, self.duration)

    @property
    def total_token_throughput(self) -> float | None:
        return _per_second(self.total_input_tokens + self.total_output_tokens, self.duration)

    def notes(self) -> list[str]:
        """What a reader of the figures must know; nothing if all is as it should be."""
        notes = []
        if uncounted := self.counted_by.get("chunks", 0):
            notes.append(
                f"{uncounted} of {self.completed} answers came without usage: their tokens are counted by chunks, "
                f"too few where a chunk has several"
            )
        if self.num_unknown_prompts:
            notes.append(f"the prompt tokens of {self.num_unknown_prompts} requests are unknown, and not in the totals")
        if (number := self.tokens_per_chunk) is not None and number > 1.005:
            notes.append(f"ITL is the gap between chunks, which had {number:.2f} tokens each; TPOT is per token")
        if self.failed:
            notes.append(f"{self.failed} of {self.completed + self.failed} requests FAILED:")
            notes += [f"  {number} x {kind}: {one.message}" for kind, (number, one) in self.failures.items()]
        return notes

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with the keys that the field uses; times in milliseconds."""
        record: dict[str, Any] = {
            "duration": self.duration,
            "completed": self.completed,
            "failed": self.failed,
            "total_input_tokens": self.total_input_tokens,
            "total_cached_tokens": self.total_cached_tokens,
            "total_output_tokens": self.total_output_tokens,
            "num_unknown_prompts": self.num_unknown_prompts,
            "request_throughput": self.request_throughput,
            "request_goodput": self.goodput,
            "output_throughput": self.output_throughput,
            "max_output_tokens_per_s": self.peak_output_throughput,
            "total_token_throughput": self.total_token_throughput,
            "max_concurrent_requests": self.max_concurrent_requests,
            "tokens_per_chunk": self.tokens_per_chunk,
            "tokens_counted_by": dict(self.counted_by),
        }
        for name, times in self.times.items():
            record |= {f"{kind}_{name}_ms": times and getattr(times, kind) for kind in ("mean", "median", "std")}
            names = map(percentile_name, self.percentiles)
            record |= {f"{each.lower()}_{name}_ms": times and times.percentiles[each] for each in names}
        failures = {kind: {"count": number, "example": one.message} for kind, (number, one) in self.failures.items()}
        return record | {"failures": failures}

    def tables(self) -> tuple[Table, Table]:
        """Totals, and times; both are Markdown as well."""
        totals = Table("figure", box=box.MARKDOWN)
        totals.add_column("", justify="right")
        for label, value, form in (
            ("Successful requests", self.completed, "d"),
            ("Failed requests", self.failed, "d"),
            ("Benchmark duration (s)", self.duration, ".2f"),
            ("Total input tokens", self.total_input_tokens, "d"),
            ("Cached input tokens", self.total_cached_tokens, "d"),
            ("Total generated tokens", self.total_output_tokens, "d"),
            ("Request throughput (req/s)", self.request_throughput, ".2f"),
            ("Request goodput (req/s)", self.goodput, ".2f"),
            ("Output token throughput (tok/s)", self.output_throughput, ".2f"),
            ("Peak output token throughput (tok/s)", self.peak_output_throughput, "d"),
            ("Peak concurrent requests", self.max_concurrent_requests, "d"),
            ("Total token throughput (tok/s)", self.total_token_throughput, ".2f"),
            ("Tokens per chunk", self.tokens_per_chunk, ".2f"),
        ):
            totals.add_row(label, "-" if value is None else format(value, form))
        return totals, self._times_table()

    def _times_table(self) -> Table:
        table = Table("time (ms)", box=box.MARKDOWN)
        names = [percentile_name(each) for each in self.percentiles]
        for heading in ("mean", "median", "std", *names):
            table.add_column(heading, justify="right")
        for name, times in self.times.items():
            cells = [] if times is None else [times.mean, times.median, times.std, *times.percentiles.values()]
            table.add_row(name.upper(), *(f"{cell:.2f}" for cell in cells) if cells else "-" * (3 + len(names)))
        return table


def percentile_name(percentile: float) -> str:
    """As in P99 or P99.9."""
    return f"P{percentile:g}"


def parse_percentiles(text: str) -> tuple[float, ...]:
    """As in 50,90,99. Raises ConfigError."""
    try:
        found = tuple(dict.fromkeys(float(part) for part in text.split(",")))
    except ValueError:
        found = (math.nan,)
    if not all(0 <= each <= 100 for each in found):
        raise ConfigError(f"percentiles must be numbers from 0 to 100, as in 50,90,99, not {shown(text)}")
    return found


def parse_goodput(texts: Sequence[str]) -> dict[str, float]:
    """Limits in milliseconds, as in `ttft:500 tpot:50`. Raises ConfigError."""
    limits: dict[str, float] = {}
    for text in " ".join(texts).replace(",", " ").split():
        name, _, value = text.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = math.nan
        if name not in _GOODPUT_TIMES or not 0 < limit < math.inf:
            raise ConfigError(
                f"goodput must be limits in ms of {', '.join(_GOODPUT_TIMES)}, as in ttft:500, not {shown(text)}"
            )
        limits[name] = limit
    return limits


def _keeps(figures: RequestFigures, limits: Mapping[str, float] | None) -> bool:
    """A time that a request does not have (TPOT of one token) breaks no limit."""
    times = {name: getattr(figures, name) for name in limits or {}}
    return all(times[name] is None or 1e3 * times[name] <= limit for name, limit in (limits or {}).items())


def _per_second(number: float, duration: float) -> float | None:
    return number / duration if duration > 0 else None


def _peak(figures: Sequence[RequestFigures], duration: float) -> int | None:
    if duration < 1 or not figures:
        return None
    start = min(each.started for each in figures)
    seconds: Counter[int] = Counter()
    for each in figures:
        for time, number in each.timed_tokens:
            seconds[int(time - start)] += number  # type: ignore[assignment]  # a share may be a fraction
    return round(max(seconds.values(), default=0))


def _most_open(figures: Sequence[RequestFigures]) -> int:
    """How many requests were open at once, at most; one that begins when another ends is not beside it."""
    changes = sorted([(each.ended, -1) for each in figures] + [(each.started, 1) for each in figures])
    most = number = 0
    for _, change in changes:
        number += change
        most = max(most, number)
    return most


def _failures(figures: Sequence[RequestFigures]) -> dict[str, tuple[int, Failure]]:
    found: dict[str, tuple[int, Failure]] = {}
    for failure in (each.failure for each in figures if each.failure is not None):
        number, first = found.get(failure.kind, (0, failure))
        found[failure.kind] = (number + 1, first)
    return dict(sorted(found.items(), key=lambda entry: -entry[1][0]))
