"""The benchmark of sampling options: every option is there, alone and among all, and all take turns."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
from tiny_models import tiny_llama

from foredraft import LLM, SamplingParams
from foredraft.bench.processors import (
    GREEDY,
    TEMPERATURE,
    WARM_UP_STEPS,
    OptionsCost,
    ProcessorsResult,
    measure_processors,
    num_tokens_of,
    sets_of_options,
)
from foredraft.bench.steps import StepTime, time_decode_steps
from foredraft.errors import ForedraftError

ALL = "all of these"
PROMPTS = [[1, 2, 3], [4, 5], [6]]
OPTIONS = {
    "logit_bias",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "min_tokens",
    "allowed_token_ids",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    model = tiny_llama(tmp_path_factory.mktemp("model"), num_modules=3, eos_token_id=17)
    return LLM(model, num_blocks=64, dtype="float32", device="cpu")


def changed(params: SamplingParams) -> set[str]:
    plain = SamplingParams()
    names = {field.name for field in fields(SamplingParams)}
    return {name for name in names if getattr(params, name) != getattr(plain, name)}


@pytest.mark.parametrize("text", [[], [3, 3, 4], list(range(30))])
def test_every_option_is_tried_alone_and_with_all_others(text: list[int]) -> None:
    sets = sets_of_options(64, text, 40)
    common = {"max_tokens", "seed", "ignore_eos"}
    assert changed(sets[GREEDY]) == common
    assert changed(sets[TEMPERATURE]) == {*common, "temperature"}
    assert changed(sets[ALL]) - common == OPTIONS
    alone = [changed(params) - common for name, params in sets.items() if name not in (GREEDY, TEMPERATURE, ALL)]
    assert set().union(*alone) == {*OPTIONS, "logprobs"}
    assert {len(word) for word in sets[ALL].bad_words} == {1, 2, 3}
    assert len(sets[ALL].biases) == 10
    allowed = sets[ALL].allowed_token_ids
    assert allowed is not None
    assert 0.9 * 64 < len(allowed) < 64


def test_all_take_turns_in_rotation(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    turns: list[tuple[str, int | None]] = []
    sets = sets_of_options(64, [1, 2, 3], num_tokens_of(2, 3))
    chosen = {name: sets[name] for name in (GREEDY, TEMPERATURE, ALL, "logprobs=5")}
    names = {changed_key(params): name for name, params in chosen.items()}

    def watch(llm: LLM, prompts: Any, params: list[SamplingParams], num_steps: int) -> list[StepTime]:
        turns.append((names[changed_key(params[0])], params[0].num_speculative_tokens))
        assert len(params) == 3
        return time_decode_steps(llm, prompts, params, num_steps)

    monkeypatch.setattr("foredraft.bench.processors.time_decode_steps", watch)
    result = measure_processors(llm, PROMPTS, chosen, (0, 3), 2, range(2))
    kinds = [(name, depth) for depth in (0, 3) for name in chosen]
    assert turns == [*kinds, *kinds[1:], kinds[0]]
    assert [(cost.name, cost.depth) for cost in result.costs] == kinds
    assert all(len(cost.steps) == 2 * 2 for cost in result.costs)


def changed_key(params: SamplingParams) -> tuple[object, ...]:
    return params.temperature, params.top_k, params.logprobs


def test_requests_that_end_too_early_are_an_error(llm: LLM) -> None:
    sets = sets_of_options(64, [1, 2, 3], WARM_UP_STEPS + 2)
    with pytest.raises(ForedraftError, match="none, greedy, K=0: a request ended early"):
        measure_processors(llm, PROMPTS, sets, (0,), 5, range(1))


def test_ratios_are_of_medians_at_the_same_depth() -> None:
    seconds = {
        (GREEDY, 0): (1.0, 2.0, 9.0),
        (TEMPERATURE, 0): (4.0,),
        (ALL, 0): (8.0, 8.0, 1.0),
        (GREEDY, 3): (5.0,),
        (TEMPERATURE, 3): (5.0,),
        (ALL, 3): (10.0,),
    }
    costs = [OptionsCost(*kind, tuple(StepTime(each, 0.5, 0.25) for each in times)) for kind, times in seconds.items()]
    record = ProcessorsResult(tuple(costs)).to_dict()["options"]
    assert [each["ratio_to_greedy"] for each in record] == [1, 2, 4, 1, 1, 2]
    assert [each["ratio_to_temperature"] for each in record] == [0.5, 1, 2, 1, 1, 2]
    assert record[0]["median_verification_seconds"] == 0.5
