"""The cache benchmark: what it counts, and that it refuses to report a run that is not what it is meant to be."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_llama

from foredraft import LLM
from foredraft.bench.cache import (
    BLOCKS_PER_SEQUENCE,
    CASES,
    NUM_MORE_TOKENS,
    CacheResult,
    FirstTokenTimes,
    measure_first_token,
    measure_index,
    measure_steps,
    shared_prefix_prompts,
)
from foredraft.cache.manager import CacheManager
from foredraft.errors import ConfigError, ForedraftError
from foredraft.outputs import StreamChunk
from foredraft.plan import StepPlan
from foredraft.scheduler.scheduler import Scheduler

BLOCK_SIZE = 8
NUM_PREFIX_TOKENS = 45
TEXT = [(7 * index + 3) % 50 for index in range(20)]
NOTHING, PREFIX, WHOLE = CASES

Load = Callable[..., LLM]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), num_modules=3)


@pytest.fixture
def load(model: Path) -> Load:
    def load(**settings: Any) -> LLM:
        defaults = {"block_size": BLOCK_SIZE, "num_blocks": 64, "dtype": "float32", "device": "cpu"}
        return LLM(model, **(defaults | settings))

    return load


def measure(llm: LLM, repeats: int = 3) -> dict[tuple[int, str], FirstTokenTimes]:
    prompts = shared_prefix_prompts(llm, TEXT, NUM_PREFIX_TOKENS, repeats)
    measured = measure_first_token(llm, prompts, NUM_PREFIX_TOKENS, range(repeats))
    return {(times.depth, times.case): times for times in measured}


def test_prompts_share_the_prefix_and_nothing_more(load: Load) -> None:
    for num_prefix_tokens in (8, 45, 48):
        prompts = shared_prefix_prompts(load(), TEXT, num_prefix_tokens, 4)
        assert {len(prompt) for prompt in prompts} == {(num_prefix_tokens // BLOCK_SIZE + 1) * BLOCK_SIZE}
        assert len({tuple(prompt[:num_prefix_tokens]) for prompt in prompts}) == 1
        assert len({prompt[num_prefix_tokens] for prompt in prompts}) == 4
        assert prompts[0][:num_prefix_tokens] == (3 * TEXT)[:num_prefix_tokens]


def test_every_trial_is_of_its_kind(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load()
    seen: list[tuple[int, int, tuple[int, ...]]] = []
    stream = llm.stream

    def watch(prompt: Any, params: Any) -> Iterator[StreamChunk]:
        for chunk in stream(prompt, params):
            if chunk.output is not None:
                seen.append((params.num_speculative_tokens, chunk.output.num_cached_tokens, tuple(prompt)))
            yield chunk

    monkeypatch.setattr(llm, "stream", watch)
    times = measure(llm)
    assert list(times) == [(depth, case) for depth in (0, 3) for case in CASES]
    assert [one.num_cached_tokens for one in times.values()] == [0, 40, 48] * 2
    assert all(len(one.seconds) == 3 and min(one.seconds) > 0 for one in times.values())
    assert [(depth, cached) for depth, cached, _ in seen] == [
        (depth, cached) for turn in ((0, 3), (3, 0), (0, 3)) for depth in turn for cached in (0, 40, 48)
    ]
    for missed, hit, whole in zip(*(iter(prompt for *_, prompt in seen),) * 3):
        assert missed != hit == whole


def test_without_modules_there_is_one_depth(load: Load) -> None:
    assert {depth for depth, _ in measure(load(num_speculative_tokens=0), 2)} == {0}


def test_a_hit_without_prefix_caching_is_refused(load: Load) -> None:
    with pytest.raises(
        ForedraftError, match="prompt 1 with the prefix cached, K=0: 0 tokens were cached instead of 40"
    ):
        measure(load(enable_prefix_caching=False))


def test_a_miss_that_is_cached_is_refused(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = load()
    monkeypatch.setattr(llm, "reset_prefix_cache", lambda: None)
    with pytest.raises(ForedraftError, match="prompt 0 with nothing cached, K=0: 48 tokens were cached instead of 0"):
        measure(llm)


@pytest.mark.parametrize("change", [lambda ids: (*ids[:-1], ids[-1] ^ 1), lambda ids: ids[:-1]])
def test_other_tokens_are_refused(
    load: Load, monkeypatch: pytest.MonkeyPatch, change: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> None:
    llm = load()
    stream = llm.stream

    def falsify(prompt: Any, params: Any) -> Iterator[StreamChunk]:
        for chunk in stream(prompt, params):
            output = chunk.output
            if output is not None and output.num_cached_tokens == 48 and params.num_speculative_tokens:
                (choice,) = output.choices
                output = replace(output, choices=(replace(choice, token_ids=change(choice.token_ids)),))
            yield replace(chunk, output=output)

    monkeypatch.setattr(llm, "stream", falsify)
    message = (
        f"prompt 1 with the whole prompt cached, K=3: the new tokens are .*, "
        f"not the {3 + NUM_MORE_TOKENS} of prompt 1 with the prefix cached, K=0"
    )
    with pytest.raises(ForedraftError, match=message):
        measure(llm)


def test_prompts_that_do_not_fit_are_refused(load: Load) -> None:
    with pytest.raises(
        ConfigError, match=r"prompts and new tokens are 59 tokens; max_model_len=58: lower prefix_token"
    ):
        measure(load(max_model_len=58))
    with pytest.raises(ConfigError, match="prefix_tokens=7 must be at least block_size=8"):
        shared_prefix_prompts(load(), TEXT, 7, 2)
    with pytest.raises(ConfigError, match="repeats=65 is more than the 64 token ids"):
        shared_prefix_prompts(load(), TEXT, 40, 65)


def test_the_index_is_as_large_as_it_says() -> None:
    cost = measure_index(2 * BLOCKS_PER_SEQUENCE - 1)
    assert cost.num_blocks == 2 * BLOCKS_PER_SEQUENCE
    assert cost.publish_microseconds_per_block > 0
    assert cost.match_microseconds_per_block > 0
    assert cost.miss_microseconds > 0


def test_an_index_that_loses_blocks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheManager, "publish", lambda *arguments: None)
    with pytest.raises(
        ForedraftError, match="index of 125 blocks found 0 target rows and 0 module rows instead of 2000"
    ):
        measure_index(BLOCKS_PER_SEQUENCE)


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("num_running", [1, 8])
def test_all_numbers_of_drafts_are_accepted_alike(num_running: int, depth: int) -> None:
    cost = measure_steps(num_running, depth, 12)
    assert len(cost.milliseconds) == 12
    assert min(cost.milliseconds) > 0
    assert cost.num_tokens == num_running * 12 * (1 + depth / 2)


def test_a_step_without_all_requests_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Scheduler.plan

    def without_the_last(scheduler: Scheduler) -> StepPlan:
        return StepPlan(plan(scheduler).requests[:-1])

    monkeypatch.setattr(Scheduler, "plan", without_the_last)
    with pytest.raises(ForedraftError, match="3 of 4 requests decode 0 drafts in a steady step"):
        measure_steps(4, 2, 2)


def test_a_step_whose_tokens_are_lost_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    commit = Scheduler.commit

    def lose_the_first(scheduler: Scheduler, plan: Any, result: Any) -> Any:
        return commit(scheduler, plan, result)[1:]

    monkeypatch.setattr(Scheduler, "commit", lose_the_first)
    with pytest.raises(ForedraftError, match="the scheduler committed other tokens than the step made"):
        measure_steps(4, 2, 2)


def test_ratios_are_of_medians_at_the_same_depth() -> None:
    seconds = {
        (0, NOTHING): (4.0, 9.0, 1.0),
        (0, PREFIX): (2.0,),
        (0, WHOLE): (0.5,),
        (3, NOTHING): (6.0,),
        (3, PREFIX): (2.0,),
        (3, WHOLE): (1.0,),
    }
    measured = tuple(FirstTokenTimes(depth, case, 0, times) for (depth, case), times in seconds.items())
    result = CacheResult(48, measured, (), ())
    ratios = [times["ratio_to_nothing_cached"] for times in result.to_dict()["first_token"]]
    assert ratios == [1, 2, 8, 1, 3, 6]
