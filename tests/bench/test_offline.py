"""The closed loop in process: who is in the engine when, and figures that are those of `LLM.generate`."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from tiny_models import tiny_llama
from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.bench.offline import check, measure_latency, run_closed_loop, speculation_of, warm_up
from foredraft.bench.serving.figures import duration_of
from foredraft.errors import ForedraftError, RequestError
from foredraft.logits_processor import TokenHistory
from foredraft.statistics import SpeculationStats

PROMPTS = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10], [11, 12]]
PARAMS = [SamplingParams(max_tokens=number, ignore_eos=True) for number in (6, 1, 9, 3, 7)]


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = tiny_llama(tmp_path_factory.mktemp("model"), num_modules=3)
    return LLM(path, device="cpu", num_blocks=64, block_size=4)


def ticking() -> Callable[[], float]:
    """A clock that is one second later whenever it is read."""
    ticks = itertools.count()
    return lambda: float(next(ticks))


@pytest.mark.parametrize("concurrency", [1, 2, 5, None])
def test_tokens_and_drafts_are_those_of_generate(llm: LLM, concurrency: int | None) -> None:
    outputs = llm.generate(PROMPTS, PARAMS)
    ends: list[None] = []
    figures = run_closed_loop(llm, PROMPTS, PARAMS, concurrency, on_end=lambda: ends.append(None))
    assert [each.token_ids for each in figures] == [output.token_ids for output in outputs]
    assert [each.num_tokens for each in figures] == [6, 1, 9, 3, 7]
    assert [each.num_prompt_tokens for each in figures] == [len(prompt) for prompt in PROMPTS]
    assert len(ends) == 5
    expected = SpeculationStats()
    for output in outputs:
        expected.add(output.stats)
    assert speculation_of(figures).drafted_by_depth == expected.drafted_by_depth
    assert speculation_of(figures).num_cycles == expected.num_cycles
    assert not llm.engine.has_unfinished


@pytest.mark.parametrize("concurrency", [1, 2, 3])
def test_no_more_are_in_the_engine_than_may_be(llm: LLM, concurrency: int) -> None:
    figures = run_closed_loop(llm, PROMPTS, PARAMS, concurrency)
    for each in figures:
        others = [other for other in figures if other.started <= each.started < other.ended]
        assert len(others) <= concurrency
    begun = sorted(figures, key=lambda each: each.started)
    for earlier, later in zip(begun, begun[concurrency:]):
        assert later.started > earlier.started
    if concurrency == 1:
        assert all(after.started >= before.ended for before, after in itertools.pairwise(begun))


def test_times_are_of_handing_over_and_of_the_ends_of_steps(llm: LLM) -> None:
    plain = SamplingParams(max_tokens=3, ignore_eos=True, num_speculative_tokens=0)
    (first, second) = run_closed_loop(llm, PROMPTS[:2], plain, 1, clock=ticking())
    assert (first.started, [tuple(each) for each in first.arrivals]) == (0.0, [(1.0, 1), (2.0, 1), (3.0, 1)])
    assert (first.ttft, first.itl, first.tpot, first.e2el) == (1.0, [1.0, 1.0], 1.0, 3.0)
    assert (second.started, second.ended) == (4.0, 7.0)
    assert duration_of([first, second]) == 7.0


def test_accepted_drafts_arrive_together(builtin_llm: LLM) -> None:
    prompt = builtin_llm.chat_prompt([{"role": "user", "content": "Count from 1 to 20."}])
    params = SamplingParams(max_tokens=24, ignore_eos=True, num_speculative_tokens=4)
    (figures,) = run_closed_loop(builtin_llm, [prompt], params)
    assert sum(each.num_tokens or 0 for each in figures.arrivals) == 24
    assert max(each.num_tokens or 0 for each in figures.arrivals) > 1
    assert figures.speculation is not None
    assert len(figures.arrivals) == figures.speculation.num_cycles


def test_what_the_engine_refuses_is_a_failure_of_that_request_alone(llm: LLM) -> None:
    figures = run_closed_loop(llm, [[1], [999], [2]], SamplingParams(max_tokens=2, ignore_eos=True), 1)
    assert [each.failure is None for each in figures] == [True, False, True]
    failure = figures[1].failure
    assert failure is not None
    assert failure.kind == "refused"
    assert "prompt_token_ids must be between 0 and 63" in failure.message
    with pytest.raises(ForedraftError, match="prompt 1: refused: prompt_token_ids"):
        check(figures)


class BrokenProcessor:
    """Fails at the first token."""

    is_stateful = False

    def process(self, history: TokenHistory, logits: Tensor) -> Tensor:
        raise RuntimeError("no such rule")


def test_what_the_engine_fails_is_a_failure_of_that_request_alone(llm: LLM) -> None:
    broken = SamplingParams(max_tokens=2, logits_processors=[BrokenProcessor()])
    good = SamplingParams(max_tokens=2, ignore_eos=True)
    figures = run_closed_loop(llm, [[1], [2]], [broken, good])
    failure = figures[0].failure
    assert failure is not None
    assert failure.kind == "ended by the engine"
    assert "no such rule" in failure.message
    assert figures[1].failure is None


def test_wrong_use_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="params has 1 entries for 2 prompts"):
        run_closed_loop(llm, [[1], [2]], [SamplingParams()])
    with pytest.raises(RequestError, match=r"params\.n must be 1"):
        run_closed_loop(llm, [[1]], SamplingParams(n=2))
    stream = llm.stream([1, 2], SamplingParams(max_tokens=4))
    with pytest.raises(ForedraftError, match="without other requests"):
        run_closed_loop(llm, [[1]], SamplingParams())
    stream.close()
    assert run_closed_loop(llm, [], SamplingParams()) == []


def test_one_that_is_broken_off_leaves_no_request(llm: LLM) -> None:
    num_read = itertools.count()

    def clock() -> float:
        if next(num_read) == 4:
            raise KeyboardInterrupt
        return 0.0

    with pytest.raises(KeyboardInterrupt):
        run_closed_loop(llm, PROMPTS, SamplingParams(max_tokens=50, ignore_eos=True), 2, clock=clock)
    assert not llm.engine.has_unfinished


def test_latency_repeats_one_batch_that_finds_nothing_cached(llm: LLM) -> None:
    prompts = [[index, *range(20)] for index in range(3)]
    params = [SamplingParams(max_tokens=2, ignore_eos=True, num_speculative_tokens=0)] * 3
    result = measure_latency(llm, prompts, params, range(4), (50.0, 90.0), clock=ticking())
    assert [len(repeat) for repeat in result.repeats] == [3] * 4
    assert {each.num_cached_tokens for each in result.figures} == {0}
    # Three reads of the clock hand the batch over; two steps follow.
    assert result.seconds == [4.0] * 4
    assert (result.latency.mean, result.latency.std) == (4000.0, 0.0)
    assert result.to_dict()["p90_latency_ms"] == 4000.0
    assert result.table().row_count == 1


def test_latency_of_a_request_that_fails_is_an_error(llm: LLM) -> None:
    with pytest.raises(ForedraftError, match="prompt 0: refused"):
        measure_latency(llm, [[64]], [SamplingParams()], range(1), ())


def test_a_warm_up_is_short_and_leaves_nothing_cached(llm: LLM) -> None:
    prompt = [33, *range(24)]
    llm.reset_stats()
    warm_up(llm, [prompt], SamplingParams(max_tokens=100, ignore_eos=True), None)
    assert llm.stats.num_generated_tokens == 16
    (figures,) = run_closed_loop(llm, [prompt], SamplingParams(max_tokens=1))
    assert figures.num_cached_tokens == 0
    (again,) = run_closed_loop(llm, [prompt], SamplingParams(max_tokens=1))
    assert again.num_cached_tokens == 24
