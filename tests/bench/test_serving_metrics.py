"""Counters of speculation, before and after, of our server and of vLLM's."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

from foredraft.bench.serving.metrics import ServerCounters, SpeculationFigures, speculation_between
from foredraft.statistics import SpeculationStats


class Page:
    """A page /metrics as prometheus_client writes it."""

    def __init__(self, prefix: str, *, has_drafted: bool = True) -> None:
        self._registry = CollectorRegistry()
        engines = ["model_name", "engine"]
        kept = {
            kind: Counter(f"{prefix}spec_decode_num_{kind}", "-", engines, registry=self._registry)
            for kind in ("drafts", "draft_tokens", "accepted_tokens")
        }
        self._totals = kept
        kinds = ("accepted_tokens", "draft_tokens") if has_drafted else ("accepted_tokens",)
        self._by_position = {
            kind: Counter(
                f"{prefix}spec_decode_num_{kind}_per_pos", "-", [*engines, "position"], registry=self._registry
            )
            for kind in kinds
        }
        self.running = Gauge(f"{prefix}num_requests_running", "-", engines, registry=self._registry)
        Counter("other_requests", "-", registry=self._registry).inc(5)

    def observe(self, num_drafted: int, num_accepted: int, engine: str = "0") -> None:
        values = {"drafts": 1, "draft_tokens": num_drafted, "accepted_tokens": num_accepted}
        for kind, number in values.items():
            self._totals[kind].labels("m", engine).inc(number)
            for position in range(number) if kind in self._by_position else ():
                self._by_position[kind].labels("m", engine, str(position)).inc()

    @property
    def text(self) -> str:
        return generate_latest(self._registry).decode()


@pytest.mark.parametrize(("prefix", "has_drafted"), [("foredraft:", True), ("vllm:", False)])
def test_the_difference_of_two_pages(prefix: str, has_drafted: bool) -> None:
    page = Page(prefix, has_drafted=has_drafted)
    page.observe(3, 3)
    before = ServerCounters.read(page.text)
    for num_drafted, num_accepted, engine in ((3, 0, "0"), (3, 2, "0"), (2, 2, "1"), (4, 4, "1")):
        page.observe(num_drafted, num_accepted, engine)
    page.running.labels("m", "0").set(2)
    after = ServerCounters.read(page.text)
    figures, reason = speculation_between(before, after)
    assert figures is not None
    assert reason == ""
    assert (figures.num_drafts, figures.num_draft_tokens, figures.num_accepted_tokens) == (4, 12, 8)
    assert figures.accepted_by_depth == (3, 3, 1, 1)
    assert figures.drafted_by_depth == ((4, 4, 3, 1) if has_drafted else ())
    assert figures.acceptance_rate == 8 / 12
    assert figures.mean_acceptance_length == 3.0
    assert figures.accepted_rates == [0.75, 0.75, 0.25, 0.25]
    assert figures.source == f"{prefix}* of /metrics"
    assert after is not None
    assert after.num_open == 2.0


@pytest.mark.parametrize(
    "page",
    [None, "", "<html><body>no metrics here</body></html>", "a{b} c d e\n", "up 1\nvllm:num_requests_running 1\n"],
)
def test_pages_without_counters_of_speculation(page: str | None) -> None:
    assert ServerCounters.read(page) is None
    assert speculation_between(None, None) == (None, "the server's /metrics has no counters of speculation")


def test_counters_that_cannot_be_compared_say_why() -> None:
    page = Page("vllm:")
    fresh = ServerCounters.read(page.text)
    page.observe(2, 1)
    used = ServerCounters.read(page.text)
    assert speculation_between(used, fresh)[1].startswith("the server's counters went back")
    assert "before the run" in speculation_between(None, used)[1]
    ours = Page("foredraft:")
    ours.observe(1, 1)
    assert speculation_between(ServerCounters.read(ours.text), used)[0] is None


def test_a_server_that_has_drafted_nothing_yet_began_at_nothing() -> None:
    page = Page("foredraft:")
    before = ServerCounters.read(page.text)
    page.observe(2, 1)
    figures, _ = speculation_between(before, ServerCounters.read(page.text))
    assert figures is not None
    assert (figures.num_drafts, figures.accepted_by_depth) == (1, (1,))


def test_no_drafts_divide_nothing() -> None:
    page = Page("foredraft:")
    page.observe(1, 1)
    counters = ServerCounters.read(page.text)
    figures, _ = speculation_between(counters, counters)
    assert figures is not None
    assert (figures.acceptance_rate, figures.mean_acceptance_length, figures.accepted_rates) == (None, None, [])
    assert figures.to_dict()["acceptance_rate"] is None
    assert figures.table().row_count == 5


def test_our_own_statistics_give_the_same_figures() -> None:
    stats = SpeculationStats()
    for accepted in (0, 2, 3):
        stats.observe(3, accepted)
    figures = SpeculationFigures.of_stats(stats)
    assert figures.accepted_rates == stats.accepted_rates
    assert figures.mean_acceptance_length == stats.mean_acceptance_length
    assert figures.acceptance_rate == 5 / 9


def test_positions_that_are_none_do_not_fill_the_memory() -> None:
    lines = ["# TYPE vllm:spec_decode_num_drafts_total counter", "vllm:spec_decode_num_drafts_total 1"]
    lines += ["# TYPE vllm:spec_decode_num_accepted_tokens_per_pos_total counter"]
    for position in ("999999999999", "x", "1"):
        lines.append(f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="{position}"}} 4')
    counters = ServerCounters.read("\n".join(lines) + "\n")
    assert counters is not None
    assert counters.accepted_by_position == (0.0, 4.0)
