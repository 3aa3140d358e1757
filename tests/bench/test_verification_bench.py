"""The verification benchmark: pairs of the same prompt and seed, means and their standard errors."""

from __future__ import annotations

from typing import Any

import pytest
from tiny_models import tiny_llama

from foredraft import LLM, SamplingParams
from foredraft.bench.verification import (
    WARM_UP_TOKENS,
    Estimate,
    MethodResult,
    VerificationResult,
    measure_verification,
    method_config,
)
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError, ForedraftError
from foredraft.statistics import SpeculationStats

BATCHES = [[[1, 2, 3], [4, 5]], [[6]], [[7, 8, 9]]]
METHODS = ("rejection", "block", "lossy-typical")


@pytest.fixture(scope="module")
def llms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LLM]:
    model = tiny_llama(tmp_path_factory.mktemp("model"), num_modules=3)
    return {name: LLM(model, verification=name, num_blocks=64, dtype="float32", device="cpu") for name in METHODS}


def counts(*accepted: int) -> SpeculationStats:
    stats = SpeculationStats()
    for number in accepted:
        stats.observe(3, number)
    return stats


def test_means_are_over_prompts_and_differences_within_them() -> None:
    first = MethodResult("rejection", [counts(0, 1, 2), counts(3), counts(0)], [10.0, 30.0, 20.0])
    second = MethodResult("block", [counts(1, 1, 2, 2), counts(3), counts(2)], [10.0, 50.0, 40.0])
    result = VerificationResult((first, second))
    assert first.lengths == [2.0, 4.0, 1.0]
    assert second.lengths == [2.5, 4.0, 3.0]
    assert Estimate.of([1.0, 3.0]) == Estimate(2.0, 1.0)
    difference = result.difference(second)
    assert difference.mean == pytest.approx(2.5 / 3)
    assert difference.standard_error == pytest.approx((13 / 36) ** 0.5)
    assert result.speed_ratio(second) == 2.0
    assert first.total.num_drafts == 5
    record = result.to_dict()["methods"]
    assert record[0]["difference_to_first"] == 0
    assert record[1]["mean_acceptance_length"] == pytest.approx(9.5 / 3)


def test_all_methods_get_the_same_requests_in_rotation(llms: dict[str, LLM], monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, list[list[int]], list[int | None]]] = []

    def watch(name: str, llm: LLM) -> Any:
        generate = llm.generate

        def watched(prompts: Any, params: Any) -> Any:
            if isinstance(params, SamplingParams):
                assert params.max_tokens == WARM_UP_TOKENS
            else:
                calls.append((name, prompts, [one.seed for one in params]))
            return generate(prompts, params)

        return watched

    for name, llm in llms.items():
        monkeypatch.setattr(llm, "generate", watch(name, llm))
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=5)
    result = measure_verification(llms, BATCHES, params, num_seeds=2)
    first, second, third = METHODS
    assert [name for name, _, _ in calls] == [first, second, third, second, third, first, third, first, second]
    one, two, three, four = (prompt for batch in BATCHES for prompt in batch)
    assert [call[1:] for call in calls[::3]] == [
        ([one, one, two, two], [5, 6, 7, 8]),
        ([three, three], [9, 10]),
        ([four, four], [11, 12]),
    ]
    for turn in range(0, 9, 3):
        assert calls[turn][1:] == calls[turn + 1][1:] == calls[turn + 2][1:]
    for method in result.methods:
        assert len(method.lengths) == 4
        assert len(method.tokens_per_second) == 3
        assert all(1 <= length <= 4 for length in method.lengths)


def test_an_engine_without_drafts_is_refused(llms: dict[str, LLM]) -> None:
    llm = LLM(llms["block"].info.path, num_speculative_tokens=0, num_blocks=8, dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match="verification=block has nothing to verify"):
        measure_verification({"block": llm}, BATCHES, SamplingParams(), 1)


def test_a_request_that_fails_is_an_error(llms: dict[str, LLM]) -> None:
    with pytest.raises(ForedraftError, match="rejection: the prompt has 300 tokens"):
        measure_verification(llms, [[[1] * 300]], SamplingParams(max_tokens=20), 1)


def test_settings_of_another_method_are_left_out() -> None:
    config = EngineConfig(verification="lossy-typical", lossy_epsilon=0.1, num_speculative_tokens=2)
    assert method_config(config, "lossy-typical") == config
    assert method_config(config, "block") == EngineConfig(verification="block", num_speculative_tokens=2)
    with pytest.raises(ConfigError, match="verification must be one of rejection, block"):
        method_config(config, "magic")
