"""What the server tells Prometheus: the state and the totals of the engine, and the times of requests."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from threading import Lock
from typing import Literal, NamedTuple

from prometheus_client import CollectorRegistry, GCCollector, PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.openmetrics import exposition as openmetrics
from prometheus_client.registry import Collector

from foredraft import __version__
from foredraft.engine.observation import ChoiceTimes, EngineSnapshot
from foredraft.statistics import EngineStats
from foredraft.stopping import FinishReason

PREFIX = "foredraft:"
RejectionReason = Literal["queue_full", "invalid", "unavailable"]
REJECTION_REASONS: tuple[RejectionReason, ...] = ("queue_full", "invalid", "unavailable")


class Gauge(NamedTuple):
    """A number that goes up and down, read from the latest snapshot."""

    name: str
    documentation: str
    read: Callable[[EngineSnapshot], float]


class Counter(NamedTuple):
    """A total since the start, read from the statistics of the latest snapshot. Its name goes without `_total`."""

    name: str
    documentation: str
    read: Callable[[EngineStats], float]


class Breakdown(NamedTuple):
    """A counter for each index that `label` may have: 0, 1, 2, ... Its name goes without `_total`."""

    name: str
    documentation: str
    label: str
    read: Callable[[EngineStats], Sequence[int]]


class Distribution(NamedTuple):
    """A histogram: the upper bounds of its buckets, in the unit of what is observed."""

    name: str
    documentation: str
    bounds: tuple[float, ...]


GAUGES = (
    Gauge("num_requests_running", "Choices of requests that hold cache blocks and run.", lambda s: s.num_running),
    Gauge("num_requests_waiting", "Choices of requests that wait for a place in a step.", lambda s: s.num_waiting),
    Gauge(
        "kv_cache_usage_perc",
        "Share of the cache blocks that requests hold, from 0 to 1, of the group that is fullest.",
        lambda s: s.cache_usage,
    ),
)
COUNTERS = (
    Counter("engine_steps", "Steps of the engine.", lambda s: s.num_steps),
    Counter("prompt_tokens", "Prompt tokens of the requests handed in, once a request.", lambda s: s.num_prompt_tokens),
    Counter("generation_tokens", "Tokens committed, of all choices.", lambda s: s.num_generated_tokens),
    Counter(
        "prefix_cache_queries",
        "Prompt tokens that were looked up in the prefix cache when a choice started.",
        lambda s: s.num_queried_tokens,
    ),
    Counter(
        "prefix_cache_hits",
        "Prompt tokens looked up whose rows were in the prefix cache.",
        lambda s: s.num_cached_tokens,
    ),
    Counter(
        "num_preemptions",
        "Times that a choice lost its blocks to another and waited again.",
        lambda s: s.num_preemptions,
    ),
    Counter("target_seconds", "Seconds in forwards of the target model.", lambda s: s.target_seconds),
    Counter("draft_seconds", "Seconds in drafting: the passes of the modules.", lambda s: s.drafting_seconds),
    Counter(
        "verification_seconds",
        "Seconds in verification: sampling, and deciding on drafts.",
        lambda s: s.verification_seconds,
    ),
    Counter("host_seconds", "Seconds of steps in none of the other parts: planning, text.", lambda s: s.host_seconds),
    Counter("spec_decode_num_drafts", "Verifications of at least one draft token.", lambda s: s.speculation.num_drafts),
    Counter(
        "spec_decode_num_draft_tokens",
        "Draft tokens made, with those never verified because the choice ended first.",
        lambda s: s.speculation.num_proposed_tokens,
    ),
    Counter(
        "spec_decode_num_verified_tokens",
        "Draft tokens that the target has verified, accepted or not.",
        lambda s: s.speculation.num_drafted_tokens,
    ),
    Counter(
        "spec_decode_num_accepted_tokens",
        "Draft tokens accepted and committed.",
        lambda s: s.speculation.num_accepted_tokens,
    ),
    Counter(
        "spec_decode_num_rebuilt_rows",
        "Module rows computed late or again, after a rejection or a spell at a smaller depth.",
        lambda s: s.speculation.num_rebuilt_rows,
    ),
)
BREAKDOWNS = (
    Breakdown(
        "spec_decode_num_draft_tokens_per_pos",
        "Draft tokens verified at each position, from 0: depth 1.",
        "position",
        lambda s: s.speculation.drafted_by_depth,
    ),
    Breakdown(
        "spec_decode_num_accepted_tokens_per_pos",
        "Draft tokens accepted at each position, from 0: depth 1.",
        "position",
        lambda s: s.speculation.accepted_by_depth,
    ),
    Breakdown(
        "spec_decode_depth",
        "Cycles with exactly that number of draft tokens; 0 is plain decoding and each choice's first token.",
        "depth",
        lambda s: s.speculation.cycles_by_depth,
    ),
)

# Bounds as dashboards know them, with finer ones below: a small model answers in a millisecond.
_WAITS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_GAPS = (
    *(0.001, 0.0025, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75),
    *(1, 2.5, 5, 7.5, 10, 20, 40, 80),
)
_SPANS = (
    *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60),
    *(120, 240, 480, 960, 1920, 7680),
)
_SIZES = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
DISTRIBUTIONS = (
    Distribution("time_to_first_token_seconds", "Seconds from a choice's arrival to its first token.", _WAITS),
    Distribution(
        "inter_token_latency_seconds",
        "Seconds from the tokens that a step gave a choice to those that the next one gave it.",
        _GAPS,
    ),
    Distribution(
        "request_time_per_output_token_seconds",
        "Seconds from a choice's first to its last token, divided by the tokens after the first.",
        _GAPS,
    ),
    Distribution("e2e_request_latency_seconds", "Seconds from a choice's arrival to its end.", _SPANS),
    Distribution("request_queue_time_seconds", "Seconds from a choice's arrival to its first step.", _WAITS),
    Distribution("request_prefill_time_seconds", "Seconds from a choice's first step to its first token.", _SPANS),
    Distribution("request_decode_time_seconds", "Seconds from a choice's first to its last token.", _SPANS),
    Distribution("request_prompt_tokens", "Prompt tokens of each request that has ended.", _SIZES),
    Distribution("request_generation_tokens", "Tokens of each choice that has ended.", _SIZES),
)


class Metrics:
    """Watches an engine and answers scrapes, from any thread. An `Observer`; nothing in it is global.

    num_positions: draft positions that are shown from the start, at 0; deeper ones appear when they occur.
    """

    def __init__(self, model_name: str, num_positions: int = 0) -> None:
        # A path on the command line may hold bytes that are no UTF-8, which the exposition has to be.
        name = model_name.encode(errors="replace").decode()
        self._collector = _EngineCollector(name, num_positions)
        self._registry = CollectorRegistry()
        self._registry.register(self._collector)
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def announce(self, num_positions: int) -> None:
        """Show so many draft positions, at 0 if nothing was drafted there: once the model is loaded, it is known."""
        self._collector.num_positions = num_positions

    def observe_step(self, snapshot: EngineSnapshot) -> None:
        """Show `snapshot` from now on."""
        self._collector.snapshot = snapshot

    def observe_gap(self, seconds: float, num_tokens: int) -> None:
        """Count one gap between two steps' tokens, however many came after it: they came together."""
        self._collector.count({"inter_token_latency_seconds": seconds})

    def observe_end(self, times: ChoiceTimes) -> None:
        """Count a choice that has ended, and such of its times as it has."""
        self._collector.count(_durations(times), ended=times.finish_reason)

    def observe_rejected(self, reason: RejectionReason) -> None:
        """Count a request that was refused before the engine saw it."""
        self._collector.count({}, rejected=reason)

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics, and the content type: OpenMetrics if the Accept header prefers it, else Prometheus text."""
        # Not the client library's choose_encoder: it makes the colon of our names an underscore for OpenMetrics, and
        # fails on a version that is no number.
        if _prefers_openmetrics(accept):
            body: bytes = openmetrics.generate_latest(self._registry, openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
            return body, openmetrics.CONTENT_TYPE_LATEST
        return generate_latest(self._registry), CONTENT_TYPE_PLAIN_0_0_4


class _Histogram:
    """Counts of one distribution. The client library's own depends on an environment variable of its own."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def copy(self) -> tuple[list[int], float]:
        return self._counts.copy(), self._sum

    def buckets(self, counts: list[int]) -> list[tuple[str, float]]:
        """The upper bounds, as text, with the number of values that are not above them."""
        found: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*(str(float(bound)) for bound in self._bounds), "+Inf"), counts):
            total += count
            found.append((bound, float(total)))
        return found


class _EngineCollector(Collector):
    """All metrics but those of the process. A scrape shows one snapshot, and whole observations."""

    def __init__(self, model_name: str, num_positions: int) -> None:
        self.snapshot = EngineSnapshot(num_running=0, num_waiting=0, cache_usage=0.0, stats=EngineStats())
        self._model_name = model_name
        self.num_positions = num_positions
        self._lock = Lock()  # held for a copy or a few additions
        self._histograms = {one.name: _Histogram(one.bounds) for one in DISTRIBUTIONS}
        self._ended = {str(reason): 0 for reason in FinishReason}
        self._rejected = {str(reason): 0 for reason in REJECTION_REASONS}

    def count(
        self, values: Mapping[str, float], ended: FinishReason | None = None, rejected: RejectionReason | None = None
    ) -> None:
        """Add values to their distributions, by name, and what ended or was refused."""
        with self._lock:
            for name, value in values.items():
                self._histograms[name].observe(value)
            if ended is not None:
                self._ended[ended] += 1
            if rejected is not None:
                self._rejected[rejected] += 1

    def describe(self) -> Iterable[Metric]:
        """The names, for the registry, which refuses what has them too."""
        return self.collect()

    def collect(self) -> Iterator[Metric]:
        """One family for each metric."""
        snapshot = self.snapshot
        with self._lock:
            copies = {name: histogram.copy() for name, histogram in self._histograms.items()}
            ended, rejected = self._ended.copy(), self._rejected.copy()
        yield InfoMetricFamily(f"{PREFIX}build", "The version of Foredraft.", {"version": __version__})
        for gauge in GAUGES:
            family = GaugeMetricFamily(PREFIX + gauge.name, gauge.documentation, labels=["model_name"])
            family.add_metric([self._model_name], gauge.read(snapshot))
            yield family
        for counter in COUNTERS:
            yield self._counter(counter.name, counter.documentation, [((), counter.read(snapshot.stats))])
        for breakdown in BREAKDOWNS:
            # Depths count from 0, plain decoding, so there is one more of them than of positions.
            least = self.num_positions + (breakdown.label == "depth")
            found = breakdown.read(snapshot.stats)
            totals = [*found, *[0] * (least - len(found))]
            values = [((str(index),), total) for index, total in enumerate(totals)]
            yield self._counter(breakdown.name, breakdown.documentation, values, breakdown.label)
        yield self._counter(
            "request_success",
            "Choices that have ended, by how: stop, length, abort or error.",
            [((reason,), total) for reason, total in ended.items()],
            "finished_reason",
        )
        yield self._counter(
            "requests_rejected",
            "Requests refused before the engine saw them: queue_full, invalid or unavailable.",
            [((reason,), total) for reason, total in rejected.items()],
            "reason",
        )
        for one in DISTRIBUTIONS:
            counts, total = copies[one.name]
            histogram = HistogramMetricFamily(PREFIX + one.name, one.documentation, labels=["model_name"])
            histogram.add_metric([self._model_name], self._histograms[one.name].buckets(counts), total)
            yield histogram

    def _counter(
        self, name: str, documentation: str, values: Iterable[tuple[tuple[str, ...], float]], *labels: str
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(PREFIX + name, documentation, labels=["model_name", *labels])
        for label_values, value in values:
            family.add_metric([self._model_name, *label_values], value)
        return family


def _durations(times: ChoiceTimes) -> dict[str, float]:
    """What each distribution gets from a choice that has ended."""
    values = {
        "e2e_request_latency_seconds": times.ended - times.arrival,
        "request_generation_tokens": float(times.num_generated_tokens),
    }
    if times.num_prompt_tokens:
        values["request_prompt_tokens"] = float(times.num_prompt_tokens)
    if times.started is not None:
        values["request_queue_time_seconds"] = times.started - times.arrival
    if times.first_token is None:
        return values
    values["time_to_first_token_seconds"] = times.first_token - times.arrival
    if times.started is not None:
        values["request_prefill_time_seconds"] = times.first_token - times.started
    if times.last_token is not None:
        decode = values["request_decode_time_seconds"] = times.last_token - times.first_token
        if times.num_generated_tokens > 1:
            values["request_time_per_output_token_seconds"] = decode / (times.num_generated_tokens - 1)
    return values


def _prefers_openmetrics(accept: str) -> bool:
    """Whether an Accept header names OpenMetrics with a higher weight than plain text, or with the same but first."""
    weights: dict[str, float] = {}
    for part in accept.lower().split(","):
        kind, *parameters = (word.strip() for word in part.split(";"))
        weight = 1.0
        for parameter in parameters:
            if parameter.startswith("q="):
                try:
                    weight = float(parameter[2:])
                except ValueError:
                    weight = 0.0
        if weight > weights.get(kind, 0.0):
            weights.pop(kind, None)
            weights[kind] = weight
    offered = [kind for kind in weights if kind in ("application/openmetrics-text", "text/plain")]
    return max(offered, key=weights.__getitem__, default="") == "application/openmetrics-text"
