"""Throughput and latency of our engine in process, with the figures that a server is measured by."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rich import box
from rich.table import Table

from foredraft import LLM, SamplingParams
from foredraft.bench.serving.figures import Arrival, Failure, RequestFigures, duration_of
from foredraft.bench.serving.summary import Distribution, percentile_name
from foredraft.engine.engine import Engine
from foredraft.errors import ForedraftError, RequestError
from foredraft.request import Request
from foredraft.statistics import SpeculationStats
from foredraft.stopping import FinishReason

WARM_UP_TOKENS = 16


@dataclass
class _Running:
    index: int
    request: Request
    started: float
    arrivals: list[Arrival] = field(default_factory=list)

    def figures(self, ended: float) -> RequestFigures:
        request = self.request
        new = tuple(request.token_ids[len(request.prompt_token_ids) :])
        failure = None
        if request.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            failure = Failure("ended by the engine", request.error or str(request.finish_reason))
        return RequestFigures(
            started=self.started,
            ended=ended if failure is not None or not self.arrivals else self.arrivals[-1].time,
            arrivals=tuple(self.arrivals),
            num_tokens=len(new),
            num_prompt_tokens=len(request.prompt_token_ids),
            num_cached_tokens=request.num_cached_tokens or 0,
            counted_by="token_ids",
            token_ids=new,
            failure=failure,
            speculation=request.stats,
        )


def run_closed_loop(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams | Sequence[SamplingParams],
    concurrency: int | None = None,
    *,
    clock: Callable[[], float] = time.perf_counter,
    on_end: Callable[[], None] = lambda: None,
) -> list[RequestFigures]:
    """Run each prompt, at most `concurrency` in the engine at once (None: all); figures in the order of the prompts.

    A request starts when it is handed to the engine, as soon as an earlier one has ended. Its tokens arrive at the end
    of the step that commits them. One that the engine refuses or fails has a `failure`; the others are unharmed.
    params: for all, or one for each prompt, with n = 1. clock: seconds. Raises ForedraftError if the engine has other
    requests, and whatever ends the engine itself.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    if len(each) != len(prompts):
        raise RequestError(
            f"params has {len(each)} entries for {len(prompts)} prompts: give one for all or one for each"
        )
    if any(one.n != 1 for one in each):
        raise RequestError("params.n must be 1 in a closed loop")
    engine = llm.engine
    if engine.has_unfinished:
        raise ForedraftError("a closed loop needs an engine without other requests")
    waiting = deque(enumerate(zip(prompts, each)))
    running: dict[str, _Running] = {}
    figures: dict[int, RequestFigures] = {}
    try:
        while waiting or running:
            while waiting and (concurrency is None or len(running) < concurrency):
                index, (prompt, one) = waiting.popleft()
                added = _add(engine, index, prompt, one, clock)
                if isinstance(added, RequestFigures):
                    figures[index] = added
                    on_end()
                else:
                    running[added.request.request_id] = added
            if running:
                _step(engine, running, figures, clock, on_end)
    finally:
        for request_id in running:
            engine.abort(request_id)
    return [figures[index] for index in range(len(prompts))]


def _add(
    engine: Engine, index: int, prompt: Sequence[int], params: SamplingParams, clock: Callable[[], float]
) -> _Running | RequestFigures:
    started = clock()
    try:
        return _Running(index, engine.add_request(f"closed-loop-{index}", prompt, params), started)
    except RequestError as error:
        return RequestFigures(started, clock(), counted_by="token_ids", failure=Failure("refused", str(error)))


def _step(
    engine: Engine,
    running: dict[str, _Running],
    figures: dict[int, RequestFigures],
    clock: Callable[[], float],
    on_end: Callable[[], None],
) -> None:
    updates = engine.step()
    now = clock()
    for update in updates:
        if update.token_ids:
            running[update.request.request_id].arrivals.append(Arrival(now, len(update.token_ids)))
    for request_id in [key for key, each in running.items() if each.request.finish_reason is not None]:
        ended = running.pop(request_id)
        figures[ended.index] = ended.figures(now)
        on_end()


def warm_up(llm: LLM, prompts: Sequence[Sequence[int]], params: SamplingParams, concurrency: int | None) -> None:
    """Run the prompts for a few tokens each, with a salt of their own. Raises ForedraftError if one fails."""
    num_tokens = min(WARM_UP_TOKENS, params.max_tokens or WARM_UP_TOKENS)
    short = replace(params, max_tokens=num_tokens, min_tokens=0, cache_salt="warm-up")
    check(run_closed_loop(llm, prompts, short, concurrency))


def check(figures: Iterable[RequestFigures]) -> None:
    """Raise ForedraftError for the first request that failed."""
    for index, each in enumerate(figures):
        if each.failure is not None:
            raise ForedraftError(f"prompt {index}: {each.failure.kind}: {each.failure.message}")


def speculation_of(figures: Iterable[RequestFigures]) -> SpeculationStats:
    """How the drafts of all requests fared."""
    total = SpeculationStats()
    for each in figures:
        if each.speculation is not None:
            total.add(each.speculation)
    return total


@dataclass(frozen=True)
class LatencyResult:
    """The requests of each repeat of one batch, and the seconds that each took."""

    repeats: list[list[RequestFigures]]
    percentiles: tuple[float, ...]

    @property
    def seconds(self) -> list[float]:
        return [duration_of(repeat) for repeat in self.repeats]

    @property
    def figures(self) -> list[RequestFigures]:
        """Of all repeats."""
        return list(itertools.chain.from_iterable(self.repeats))

    @property
    def latency(self) -> Distribution:
        """Of the repeats, in milliseconds."""
        found = Distribution.of(self.seconds, self.percentiles)
        assert found is not None
        return found

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        latency = self.latency
        record = {f"{kind}_latency_ms": getattr(latency, kind) for kind in ("mean", "median", "std")}
        record |= {f"{name.lower()}_latency_ms": value for name, value in latency.percentiles.items()}
        return record | {"latency_seconds": self.seconds}

    def table(self) -> Table:
        """A line; Markdown as well."""
        table = Table("latency of a batch (ms)", box=box.MARKDOWN)
        for heading in ("mean", "median", "std", *map(percentile_name, self.percentiles)):
            table.add_column(heading, justify="right")
        latency = self.latency
        cells = (latency.mean, latency.median, latency.std, *latency.percentiles.values())
        table.add_row(f"{len(self.repeats)} repeats", *(f"{cell:.2f}" for cell in cells))
        return table


def measure_latency(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: Sequence[SamplingParams],
    repeats: Iterable[int],
    percentiles: Sequence[float],
    *,
    clock: Callable[[], float] = time.perf_counter,
) -> LatencyResult:
    """Run all prompts as one batch, once for each of `repeats` (one at least); none finds rows that another has cached.

    Raises ForedraftError if a request fails.
    """
    runs: list[list[RequestFigures]] = []
    for index in repeats:
        salted = [replace(one, cache_salt=f"repeat {index}") for one in params]
        figures = run_closed_loop(llm, prompts, salted, clock=clock)
        check(figures)
        runs.append(figures)
    return LatencyResult(runs, tuple(percentiles))
