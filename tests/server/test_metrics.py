"""What a scrape shows, after scripted snapshots and times of requests."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from threading import Event, Thread
from typing import get_args

import pytest
from prometheus_client import Metric, openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from foredraft import __version__
from foredraft.engine.observation import ChoiceTimes, EngineSnapshot, Observer
from foredraft.server.metrics import REJECTION_REASONS, Metrics, RejectionReason
from foredraft.statistics import EngineStats, SpeculationStats
from foredraft.stopping import FinishReason

OPENMETRICS = "application/openmetrics-text; version=1.0.0"
# What Prometheus 2 and 3 send.
PROMETHEUS_2 = (
    f"{OPENMETRICS},application/openmetrics-text;version=0.0.1;q=0.75,text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    f"{OPENMETRICS};escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
LABEL = ("model_name", "tiny")
Labels = frozenset[tuple[str, str]]


def families(metrics: Metrics, accept: str = "") -> list[Metric]:
    body, content_type = metrics.exposition(accept)
    is_open = content_type.startswith("application/openmetrics-text")
    return list((parse_openmetrics if is_open else parse_text)(body.decode()))


def samples(metrics: Metrics, accept: str = "") -> dict[tuple[str, Labels], float]:
    """Foredraft's own samples by name, without the prefix, and labels, without the model's name."""
    found: dict[tuple[str, Labels], float] = {}
    for family in families(metrics, accept):
        for sample in family.samples:
            if not sample.name.startswith("foredraft:"):
                continue
            labels = frozenset(sample.labels.items()) - {LABEL}
            key = sample.name.removeprefix("foredraft:"), labels
            assert key not in found
            found[key] = sample.value
    return found


def value(metrics: Metrics, name: str, **labels: str) -> float:
    return samples(metrics)[name, frozenset(labels.items())]


def snapshot() -> EngineSnapshot:
    """Three cycles with four drafts, of which 4, 2 and 0 were accepted, and two plain ones. One draft was left over."""
    speculation = SpeculationStats(num_rebuilt_rows=7, num_proposed_tokens=13)
    for num_drafts, num_accepted in ((4, 4), (4, 2), (4, 0), (0, 0), (0, 0)):
        speculation.observe(num_drafts, num_accepted)
    stats = EngineStats(
        speculation=speculation,
        num_steps=9,
        num_requests=2,
        num_prompt_tokens=30,
        num_generated_tokens=11,
        num_preemptions=1,
        num_queried_tokens=28,
        num_cached_tokens=16,
        target_seconds=1.5,
        verification_seconds=0.25,
        drafting_seconds=0.5,
        host_seconds=0.125,
    )
    return EngineSnapshot(num_running=3, num_waiting=2, cache_usage=0.75, stats=stats)


def choice(finish_reason: FinishReason = FinishReason.STOP) -> ChoiceTimes:
    return ChoiceTimes(
        arrival=100.0,
        started=100.5,
        first_token=102.0,
        last_token=106.0,
        ended=106.5,
        num_prompt_tokens=30,
        num_generated_tokens=9,
        finish_reason=finish_reason,
    )


EXPECTED = {
    "num_requests_running": 3,
    "num_requests_waiting": 2,
    "kv_cache_usage_perc": 0.75,
    "engine_steps_total": 9,
    "prompt_tokens_total": 30,
    "generation_tokens_total": 11,
    "prefix_cache_queries_total": 28,
    "prefix_cache_hits_total": 16,
    "num_preemptions_total": 1,
    "target_seconds_total": 1.5,
    "draft_seconds_total": 0.5,
    "verification_seconds_total": 0.25,
    "host_seconds_total": 0.125,
    "spec_decode_num_drafts_total": 3,
    "spec_decode_num_draft_tokens_total": 13,
    "spec_decode_num_verified_tokens_total": 12,
    "spec_decode_num_accepted_tokens_total": 6,
    "spec_decode_num_rebuilt_rows_total": 7,
}


@pytest.mark.parametrize("accept", ["", PROMETHEUS_2, PROMETHEUS_3])
def test_totals_are_those_of_the_latest_snapshot(accept: str) -> None:
    metrics = Metrics("tiny", num_positions=5)
    metrics.observe_step(EngineSnapshot(num_running=1, num_waiting=9, cache_usage=1.0, stats=EngineStats(num_steps=4)))
    metrics.observe_step(snapshot())
    found = samples(metrics, accept)
    assert {name: found[name, frozenset()] for name in EXPECTED} == EXPECTED

    def by(name: str, label: str) -> list[float]:
        values = {dict(labels)[label]: value for (one, labels), value in found.items() if one == name}
        return [values.pop(str(index)) for index in range(len(values))]

    assert by("spec_decode_num_draft_tokens_per_pos_total", "position") == [3, 3, 3, 3, 0]
    assert by("spec_decode_num_accepted_tokens_per_pos_total", "position") == [2, 2, 1, 1, 0]
    assert by("spec_decode_depth_total", "depth") == [2, 0, 0, 0, 3, 0]


def test_positions_can_be_announced_later() -> None:
    metrics = Metrics("tiny")
    metrics.announce(num_positions=2)
    assert value(metrics, "spec_decode_num_accepted_tokens_per_pos_total", position="1") == 0
    assert value(metrics, "spec_decode_depth_total", depth="2") == 0


def test_deeper_positions_than_announced_are_shown() -> None:
    metrics = Metrics("tiny", num_positions=1)
    metrics.observe_step(snapshot())
    assert value(metrics, "spec_decode_num_accepted_tokens_per_pos_total", position="3") == 1
    assert value(metrics, "spec_decode_depth_total", depth="4") == 3


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_everything_is_there_and_zero_before_the_first_step(accept: str) -> None:
    metrics = Metrics("tiny", num_positions=2)
    at_start = samples(metrics, accept)
    assert at_start.pop(("build_info", frozenset({("version", __version__)}))) == 1
    assert set(at_start.values()) == {0}
    metrics.observe_step(snapshot())
    metrics.observe_gap(0.25, 3)
    metrics.observe_end(choice())
    metrics.observe_rejected("invalid")
    later = samples(metrics, accept).keys() - at_start.keys()
    # Only positions and depths beyond those announced may be new.
    assert {name for name, labels in later if not {"position", "depth"} & {label for label, _ in labels}} == {
        "build_info"
    }
    assert {text for _, labels in later for label, text in labels if label == "position"} == {"2", "3"}


DURATIONS = {
    "time_to_first_token_seconds": 2.0,
    "request_time_per_output_token_seconds": 0.5,
    "e2e_request_latency_seconds": 6.5,
    "request_queue_time_seconds": 0.5,
    "request_prefill_time_seconds": 1.5,
    "request_decode_time_seconds": 4.0,
    "request_prompt_tokens": 30,
    "request_generation_tokens": 9,
}


@pytest.mark.parametrize("accept", ["", OPENMETRICS])
def test_times_of_a_choice(accept: str) -> None:
    metrics = Metrics("tiny")
    metrics.observe_end(choice())
    found = samples(metrics, accept)
    for name, expected in DURATIONS.items():
        assert found[f"{name}_sum", frozenset()] == expected, name
        assert found[f"{name}_count", frozenset()] == 1, name
        for (one, labels), num_below in found.items():
            if one == f"{name}_bucket":
                assert num_below == (expected <= float(dict(labels)["le"])), (name, labels)


def test_a_choice_has_only_the_times_of_what_happened_to_it() -> None:
    never_ran = replace(choice(), started=None, first_token=None, last_token=None, num_generated_tokens=0)
    no_token = replace(never_ran, started=100.5)
    one_token = replace(choice(), last_token=102.0, num_generated_tokens=1)
    further = replace(choice(), num_prompt_tokens=0)
    counts = {}
    for times in (never_ran, no_token, one_token, further):
        metrics = Metrics("tiny")
        metrics.observe_end(times)
        counts[times] = {name for name in DURATIONS if value(metrics, f"{name}_count") == 1}
    ended = {"e2e_request_latency_seconds", "request_prompt_tokens", "request_generation_tokens"}
    assert counts[never_ran] == ended
    assert counts[no_token] == {*ended, "request_queue_time_seconds"}
    assert counts[one_token] == DURATIONS.keys() - {"request_time_per_output_token_seconds"}
    assert counts[further] == DURATIONS.keys() - {"request_prompt_tokens"}


def test_a_gap_counts_once_however_many_tokens_it_brought() -> None:
    metrics = Metrics("tiny")
    for seconds, num_tokens in ((0.25, 1), (0.5, 5), (1000.0, 2)):
        metrics.observe_gap(seconds, num_tokens)
    assert value(metrics, "inter_token_latency_seconds_count") == 3
    assert value(metrics, "inter_token_latency_seconds_sum") == 1000.75
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.2") == 0
    assert value(metrics, "inter_token_latency_seconds_bucket", le="0.5") == 2
    assert value(metrics, "inter_token_latency_seconds_bucket", le="80.0") == 2
    assert value(metrics, "inter_token_latency_seconds_bucket", le="+Inf") == 3


def test_ends_and_refusals_are_counted_by_their_reason() -> None:
    metrics = Metrics("tiny")
    for times, reason in enumerate(FinishReason, start=1):
        for _ in range(times):
            metrics.observe_end(choice(reason))
    assert get_args(RejectionReason) == REJECTION_REASONS
    for times, refusal in enumerate(REJECTION_REASONS, start=1):
        for _ in range(times):
            metrics.observe_rejected(refusal)
    ended = [value(metrics, "request_success_total", finished_reason=reason) for reason in FinishReason]
    assert ended == [1, 2, 3, 4]
    assert [value(metrics, "requests_rejected_total", reason=refusal) for refusal in REJECTION_REASONS] == [1, 2, 3]


def test_two_in_one_process_are_apart() -> None:
    one, two = Metrics("tiny"), Metrics("tiny")
    one.observe_end(choice())
    one.observe_step(snapshot())
    assert value(one, "request_success_total", finished_reason="stop") == 1
    assert value(two, "request_success_total", finished_reason="stop") == 0
    assert value(two, "engine_steps_total") == 0


def test_the_process_is_shown() -> None:
    names = {sample.name for family in families(Metrics("tiny")) for sample in family.samples}
    assert {"python_info", "python_gc_collections_total"} <= names
    if sys.platform == "linux":
        assert {"process_resident_memory_bytes", "process_cpu_seconds_total"} <= names
        assert {"process_start_time_seconds", "process_open_fds"} <= names


@pytest.mark.parametrize("name", ['a "quoted" \\ model\nof two lines', "modèle", "bytes \udcff"])
def test_any_model_name_can_be_shown(name: str) -> None:
    for accept in ("", OPENMETRICS):
        body, _ = Metrics(name).exposition(accept)
        assert body.decode()
        (family,) = (one for one in families(Metrics(name), accept) if one.name == "foredraft:num_requests_running")
        assert family.samples[0].labels == {"model_name": name.replace("\udcff", "?")}


@pytest.mark.parametrize(
    ("accept", "is_open"),
    [
        ("", False),
        ("*/*", False),
        ("text/html, */*;q=0.1", False),
        ("text/plain", False),
        (OPENMETRICS, True),
        ("Application/OpenMetrics-Text", True),
        (PROMETHEUS_2, True),
        (PROMETHEUS_3, True),
        ("text/plain;q=0.9, application/openmetrics-text;q=0.8", False),
        ("application/openmetrics-text;q=0", False),
        ("application/openmetrics-text;q=much", False),
        ("application/openmetrics-text;version=abc", True),
        ("application/openmetrics-text;escaping=dots;version=9", True),
        (",;,=;q=", False),
    ],
)
def test_the_format_is_the_one_asked_for(accept: str, is_open: bool) -> None:
    body, content_type = Metrics("tiny").exposition(accept)
    expected = openmetrics.exposition.CONTENT_TYPE_LATEST if is_open else "text/plain; version=0.0.4; charset=utf-8"
    assert content_type == expected
    assert body.endswith(b"# EOF\n") == is_open
    assert b"\nforedraft:engine_steps_total{" in body


def history() -> Iterator[EngineSnapshot]:
    """Snapshots in each of which all totals are the same."""
    for total in count(1):
        speculation = SpeculationStats(num_drafts=total, num_rebuilt_rows=total, num_proposed_tokens=total)
        yield EngineSnapshot(total, total, 0.5, EngineStats(speculation=speculation, num_steps=total))


@pytest.fixture
def threads_alternate() -> Iterator[None]:
    """Threads take turns after a microsecond, so that what is not safe goes wrong soon."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("threads_alternate")
def test_scrapes_from_another_thread_show_one_step_each() -> None:
    metrics, is_over, faults = Metrics("tiny"), Event(), list[str]()
    observer: Observer = metrics
    scraped: list[float] = []

    def scrape() -> None:
        is_last = False
        while not is_last:
            is_last = is_over.is_set()
            found = samples(metrics)
            names = ("engine_steps_total", "num_requests_running", "spec_decode_num_rebuilt_rows_total")
            steps = {found[name, frozenset()] for name in names}
            if len(steps) != 1:
                faults.append(f"several steps in one scrape: {steps}")
            # Each choice of the script takes two seconds to its first token, and has a time of every kind.
            num_choices = found["time_to_first_token_seconds_count", frozenset()]
            is_whole = found["time_to_first_token_seconds_sum", frozenset()] == 2 * num_choices
            if not is_whole or {found[f"{name}_count", frozenset()] for name in DURATIONS} != {num_choices}:
                faults.append("a choice is counted in part")
            scraped.append(steps.pop())

    thread = Thread(target=scrape)
    thread.start()
    num_steps = 0
    for one in history():
        num_steps = one.num_running
        observer.observe_step(one)
        observer.observe_gap(0.01, 2)
        observer.observe_end(choice())
        if len(scraped) >= 20 or not thread.is_alive():
            break
    is_over.set()
    thread.join()
    assert not faults
    assert scraped == sorted(scraped)
    assert scraped[-1] == num_steps
    assert value(metrics, "request_success_total", finished_reason="stop") == num_steps
    assert value(metrics, "inter_token_latency_seconds_count") == num_steps


def test_observing_is_quick() -> None:
    """The engine waits for it at each step. The best of several rounds: another process may have the core."""
    metrics, one, rounds = Metrics("tiny"), snapshot(), []
    for _ in range(20):
        started = time.perf_counter()
        for _ in range(100):
            metrics.observe_step(one)
            metrics.observe_gap(0.02, 3)
        rounds.append((time.perf_counter() - started) / 100)
    assert min(rounds) < 50e-6
