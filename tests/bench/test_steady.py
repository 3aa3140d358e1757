"""Steady batches: all requests decode in every step of a span, and nothing of them stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_llama

from foredraft import LLM
from foredraft.bench.steady import WARM_STEPS, random_prompts, steady_batch
from foredraft.errors import ConfigError, ForedraftError, RequestError


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), num_modules=3)


def load(model: Path, **settings: Any) -> LLM:
    return LLM(model, **({"num_blocks": 64, "dtype": "float32", "device": "cpu"} | settings))


@pytest.mark.parametrize("depth", [0, 3])
def test_a_span_counts_the_cycles_of_all_requests(model: Path, depth: int) -> None:
    llm = load(model, synthetic_acceptance=[1.0])
    prompts = random_prompts(llm, 2, 20)
    with steady_batch(llm, prompts, depth, "a") as batch:
        span = batch.run(5)
        following = batch.run(5)
    assert (span.num_requests, span.num_steps, span.num_cycles) == (2, 5, 10)
    assert span.num_tokens == 10 * (depth + 1)
    assert span.tokens_per_cycle == depth + 1
    assert span.seconds_per_cycle == pytest.approx(span.seconds / 5)
    assert span.tokens_per_second == pytest.approx(span.num_tokens / span.seconds)
    assert span.mean_context == 21 + (WARM_STEPS + 2.5) * (depth + 1)
    assert following.mean_context == span.mean_context + 5 * (depth + 1)
    assert not llm.engine.has_unfinished


def test_prompts_are_prefilled_in_as_many_steps_as_it_takes_and_are_found_by_nobody(model: Path) -> None:
    llm = load(model, max_num_seqs=4, max_num_batched_tokens=16)
    for salt in ("a", "b"):
        with steady_batch(llm, random_prompts(llm, 4, 30), 0, salt) as batch:
            assert batch.run(2).num_cycles == 8
    assert llm.stats.num_cached_tokens == 0


def test_prompts_differ_and_are_the_same_in_every_run(model: Path) -> None:
    llm = load(model)
    prompts = random_prompts(llm, 3, 50)
    assert len({tuple(prompt) for prompt in prompts}) == 3
    assert {len(prompt) for prompt in prompts} == {50}
    assert prompts == random_prompts(llm, 3, 50)
    assert prompts != random_prompts(llm, 3, 50, seed=1)


def test_what_ends_or_waits_or_does_not_fit_is_an_error_and_leaves_nothing(model: Path) -> None:
    llm = load(model, max_num_seqs=2)
    with (
        steady_batch(llm, [[1]], 0, "a") as batch,
        pytest.raises(ForedraftError, match="246 steps may give"),
    ):
        batch.run(256 - 1 - 1 - WARM_STEPS)
    refused: list[tuple[list[list[int]], type[Exception], str]] = [
        ([[1]] * 3, ConfigError, "3 requests are to run at once, but max_num_seqs=2"),
        ([[1], [1] * 300], RequestError, "the prompt has 300 tokens"),
        ([[1] * 250], ForedraftError, "it has 256 tokens, and max_model_len allows no more"),
    ]
    for prompts, error, message in refused:
        with pytest.raises(error, match=message), steady_batch(llm, prompts, 0, "a"):
            pass
    with steady_batch(llm, [[1]], 0, "a"), pytest.raises(ForedraftError, match="without other requests"):
        steady_batch(llm, [[1]], 0, "b").__enter__()
    assert not llm.engine.has_unfinished


def test_a_cache_that_makes_requests_wait_is_an_error(model: Path) -> None:
    llm = load(model, num_blocks=20, block_size=4)
    message = r"2 requests in 40 steps had \d+ cycles, not 80: some had to wait"
    with steady_batch(llm, random_prompts(llm, 2, 20), 0, "a") as batch, pytest.raises(ForedraftError, match=message):
        batch.run(40)
    assert not llm.engine.has_unfinished
