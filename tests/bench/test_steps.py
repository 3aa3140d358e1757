"""Timed decode steps: only those in which all requests decode, and nothing of them stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tiny_models import tiny_llama

from foredraft import LLM, SamplingParams
from foredraft.bench.steps import time_decode_steps
from foredraft.errors import ConfigError, ForedraftError

PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_llama(tmp_path_factory.mktemp("model"), num_modules=3)


def load(model: Path, **settings: Any) -> LLM:
    return LLM(model, **({"num_blocks": 64, "dtype": "float32", "device": "cpu"} | settings))


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize("num_rows", [4 * 3, 1024])
def test_steps_are_timed_and_the_requests_are_gone(model: Path, depth: int, num_rows: int) -> None:
    llm = load(model, max_num_seqs=3, max_num_batched_tokens=num_rows)
    params = [SamplingParams(max_tokens=100, num_speculative_tokens=depth)] * 3
    steps = time_decode_steps(llm, PROMPTS, params, 5)
    assert len(steps) == 5
    for step in steps:
        assert 0 < step.verification_seconds + step.drafting_seconds < step.seconds
    assert not llm.engine.has_unfinished
    assert len(time_decode_steps(llm, PROMPTS, params, 2)) == 2  # and so can be run again


def test_they_end_before_the_step_in_which_a_request_does(model: Path) -> None:
    params = [SamplingParams(max_tokens=number, num_speculative_tokens=0) for number in (9, 6, 9)]
    llm = load(model)
    assert len(time_decode_steps(llm, PROMPTS, params, 50)) == 4  # of six tokens, without the first and the last
    assert not llm.engine.has_unfinished


def test_more_requests_than_may_run_are_refused(model: Path) -> None:
    with pytest.raises(ConfigError, match="3 requests are to run at once, but max_num_seqs=2"):
        time_decode_steps(load(model, max_num_seqs=2), PROMPTS, [SamplingParams()] * 3, 1)


def test_a_cache_that_makes_requests_wait_is_an_error(model: Path) -> None:
    llm = load(model, num_blocks=8, block_size=4)
    with pytest.raises(ForedraftError, match="2 of 3 requests decode: the cache is too small"):
        time_decode_steps(llm, PROMPTS, [SamplingParams(max_tokens=20, num_speculative_tokens=0)] * 3, 50)
    assert not llm.engine.has_unfinished


class Broken:
    is_stateful = False

    def process(self, history: object, logits: object) -> Any:
        raise ValueError("broken")


def test_a_request_that_fails_is_an_error(model: Path) -> None:
    params = [SamplingParams(logits_processors=[Broken()])] * 3
    with pytest.raises(ForedraftError, match="a request failed while its steps were timed"):
        time_decode_steps(load(model), PROMPTS, params, 5)
