"""All figures of a benchmark, from requests whose every time is known."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from rich.console import Console

from foredraft.bench.serving.figures import Arrival, Failure, RequestFigures, duration_of
from foredraft.bench.serving.summary import Distribution, Summary, parse_goodput, parse_percentiles
from foredraft.errors import ConfigError


def request(started: float, *arrivals: tuple[float, int | None], num_tokens: int | None = None) -> RequestFigures:
    total = sum(number or 0 for _, number in arrivals) if num_tokens is None else num_tokens
    return RequestFigures(
        started,
        arrivals[-1][0],
        tuple(Arrival(*arrival) for arrival in arrivals),
        total,
        num_prompt_tokens=10,
    )


FIGURES = [
    request(0.0, (0.5, 1), (1.0, 3), (2.5, 4)),  # TTFT 0.5, TPOT 2 / 7, gaps 0.5 and 1.5
    request(1.0, (1.2, 1)),  # one token: no TPOT
    request(2.5, (3.0, None), (4.0, None), num_tokens=6),  # chunks that do not say: 3 tokens each
]


def failed(kind: str, message: str, at: float) -> RequestFigures:
    return RequestFigures(0.0, at, failure=Failure(kind, message), num_tokens=99, num_prompt_tokens=99)


def test_totals_and_throughput() -> None:
    summary = Summary.of([*FIGURES, failed("HTTP 500", "oops", 3.0)], 4.0, (50.0,))
    assert (summary.completed, summary.failed) == (3, 1)
    assert (summary.total_input_tokens, summary.total_output_tokens) == (30, 15)
    assert (summary.request_throughput, summary.output_throughput) == (0.75, 3.75)
    assert summary.total_token_throughput == 11.25
    assert summary.tokens_per_chunk == 15 / 6
    assert summary.peak_output_throughput == 4  # 3 at 1.0 and 1 at 1.2; 4 at 2.5
    assert summary.max_concurrent_requests == 3  # the first, the second and the one that failed
    assert duration_of(FIGURES) == 4.0


def test_times_are_in_milliseconds_and_of_all_requests() -> None:
    summary = Summary.of(FIGURES, 4.0, (0.0, 50.0, 99.0))
    times = {
        "ttft": [0.5, 0.2, 0.5],
        "tpot": [2 / 7, 1 / 5],
        "itl": [0.5, 1.5, 1.0],
        "e2el": [2.5, 0.2, 1.5],
    }
    for name, seconds in times.items():
        found = summary.times[name]
        assert found is not None
        milliseconds = 1e3 * np.array(seconds)
        expected = [milliseconds.mean(), np.median(milliseconds), milliseconds.std()]
        assert [found.mean, found.median, found.std] == pytest.approx(expected)
        assert list(found.percentiles) == ["P0", "P50", "P99"]
        assert found.percentiles["P0"] == pytest.approx(milliseconds.min())
        assert found.percentiles["P99"] == pytest.approx(np.percentile(milliseconds, 99))


def test_the_record_has_the_keys_of_the_field_and_is_json() -> None:
    record = json.loads(json.dumps(Summary.of(FIGURES, 4.0, (99.0,)).to_dict(), allow_nan=False))
    assert record["completed"] == 3
    assert record["mean_ttft_ms"] == pytest.approx(400)
    assert record["std_itl_ms"] == pytest.approx(1e3 * np.std([0.5, 1.5, 1.0]))
    assert {f"p99_{name}_ms" for name in ("ttft", "tpot", "itl", "e2el")} <= set(record)
    assert {"request_throughput", "output_throughput", "total_token_throughput"} <= set(record)
    assert record["failures"] == {}


@pytest.mark.parametrize("figures", [[], [failed("timeout", "no word", 2.0)]])
def test_nothing_that_succeeded_divides_nothing(figures: list[RequestFigures]) -> None:
    for duration in (0.0, 2.0):
        summary = Summary.of(figures, duration, (99.0,), {"ttft": 1.0})
        record = json.loads(json.dumps(summary.to_dict(), allow_nan=False))
        assert record["mean_tpot_ms"] is None
        assert record["p99_itl_ms"] is None
        assert record["tokens_per_chunk"] is None
        assert record["output_throughput"] == (None if duration == 0 else 0)
        for table in summary.tables():
            assert table.row_count > 0


def test_a_run_of_less_than_a_second_has_no_best_second() -> None:
    assert Summary.of(FIGURES[:1], 0.5, ()).peak_output_throughput is None


def test_goodput_counts_requests_that_keep_all_limits() -> None:
    def good(limits: dict[str, float]) -> float | None:
        return Summary.of([*FIGURES, failed("x", "x", 1.0)], 2.0, (), limits).goodput

    assert good({}) is None
    assert good({"ttft": 500}) == 1.5
    assert good({"ttft": 499}) == 0.5
    assert good({"ttft": 500, "tpot": 250}) == 1.0  # one token has no TPOT that could be too long
    assert good({"e2el": 1500.0}) == 1.0


def test_failures_are_counted_by_kind_the_commonest_first_with_an_example() -> None:
    failures = [failed("timeout", "a", 1.0), failed("HTTP 429", "full", 1.0), failed("HTTP 429", "still full", 1.0)]
    summary = Summary.of([*FIGURES, *failures], 4.0, ())
    assert summary.to_dict()["failures"] == {
        "HTTP 429": {"count": 2, "example": "full"},
        "timeout": {"count": 1, "example": "a"},
    }
    assert list(summary.failures) == ["HTTP 429", "timeout"]
    assert summary.notes()[-3:] == ["3 of 6 requests FAILED:", "  2 x HTTP 429: full", "  1 x timeout: a"]


def test_what_a_reader_must_know_is_said() -> None:
    uncounted = RequestFigures(0.0, 1.0, (Arrival(1.0, None),), 1, counted_by="chunks")
    assert Summary.of([request(0.0, (1.0, 1), (2.0, 1))], 2.0, ()).notes() == []
    notes = "\n".join(Summary.of([*FIGURES, uncounted], 4.0, ()).notes())
    assert "1 of 4 answers came without usage: their tokens are counted by chunks" in notes
    assert "the prompt tokens of 1 requests are unknown" in notes
    assert "the gap between chunks, which had 2.29 tokens each; TPOT is per token" in notes


def test_the_tables_are_markdown_under_the_fields_names() -> None:
    console = Console(width=200, record=True, file=None, quiet=False)
    with console.capture() as captured:
        for table in Summary.of(FIGURES, 4.0, (50.0, 99.9)).tables():
            console.print(table)
    lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in captured.get().splitlines()]
    assert ["Successful requests", "3"] in lines
    assert ["Output token throughput (tok/s)", "3.75"] in lines
    assert ["Request goodput (req/s)", "-"] in lines
    assert ["time (ms)", "mean", "median", "std", "P50", "P99.9"] in lines
    assert ["TTFT", "400.00", "500.00", "141.42", "500.00", "500.00"] in lines
    times = Summary.of(FIGURES[1:2], 4.0, (50.0,)).tables()[1]
    with console.capture() as captured:
        console.print(times)
    assert ["ITL", "-", "-", "-", "-"] in [
        [cell.strip() for cell in line.strip().strip("|").split("|")] for line in captured.get().splitlines()
    ]


def test_options_are_parsed_or_refused() -> None:
    assert parse_percentiles("50,99.9,50") == (50.0, 99.9)
    assert parse_goodput(["ttft:500 tpot:50", "e2el:1e3"]) == {"ttft": 500.0, "tpot": 50.0, "e2el": 1000.0}
    assert parse_goodput(["ttft:1,tpot:2"]) == {"ttft": 1.0, "tpot": 2.0}
    for text in ("", "x", "101", "-1", "nan"):
        with pytest.raises(ConfigError, match="percentiles must be numbers from 0 to 100"):
            parse_percentiles(text)
    for text in ("ttft", "ttft:", "itl:5", "ttft:0", "ttft:inf", "ttft:nan", "ttft:-1"):
        with pytest.raises(ConfigError, match="goodput must be limits in ms of ttft, tpot, e2el"):
            parse_goodput([text])


def test_a_distribution_of_one_number_has_no_spread() -> None:
    found = Distribution.of([0.25], (99.0,))
    assert found == Distribution(250.0, 250.0, 0.0, {"P99": 250.0})
    assert Distribution.of([], (99.0,)) is None
    assert math.isclose(FIGURES[0].tpot or 0, 2 / 7)
