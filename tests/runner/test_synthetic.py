"""Acceptance by given rates: they come out, all else is as ever, and the output is not taken for the target's."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_model import FakeModel, one_after_another, right
from torch import Tensor

from foredraft import SamplingParams
from foredraft.config import EngineConfig
from foredraft.errors import ConfigError
from foredraft.outputs import RequestOutput
from foredraft.runner.verification import accept_by_chance
from foredraft.stopping import FinishReason

WORDS = [5, 3, 8, 1, 9, 2, 7, 4]
WRONG = right(one_after_another(WORDS, 16), 0)  # every draft is another token than the target's


def model(path: Path, rates: Any, **settings: Any) -> FakeModel:
    return FakeModel(path, one_after_another(WORDS, 16), WRONG, synthetic_acceptance=rates, num_blocks=256, **settings)


def run(fake: FakeModel, temperature: float = 0.0, **params: Any) -> list[RequestOutput]:
    each = [SamplingParams(max_tokens=60, temperature=temperature, seed=seed, **params) for seed in range(6)]
    return fake.llm.generate([[1, 2, 3]] * len(each), each)


def chosen(num_requests: int, rates: list[float], can_follow: bool = True) -> Tensor:
    """The verification of so many requests: tokens emitted, [B, 4]; drafts are 7, the target's own tokens 9."""
    drafts = torch.full((num_requests, len(rates)), 7)
    own = torch.full((num_requests, len(rates) + 1), 9)
    seeds, positions = torch.arange(num_requests) + 11, torch.full((num_requests,), 5)
    allowed = torch.full(drafts.shape, can_follow)
    return accept_by_chance(drafts, allowed, own, torch.tensor(rates), seeds, positions)


def test_conditional_rates_are_those_asked_for() -> None:
    rates = [0.8, 0.5, 0.3]
    num_accepted = (chosen(20_000, rates) == 7).sum(dim=1)
    reached = 20_000
    for depth, rate in enumerate(rates, start=1):
        accepted = int((num_accepted >= depth).sum())
        assert abs(accepted - rate * reached) < 4 * math.sqrt(reached * rate * (1 - rate))
        reached = accepted


def test_after_the_accepted_drafts_comes_one_token_of_the_target() -> None:
    for row in chosen(50, [0.5, 0.5, 0.5]).tolist():
        count = row.count(7)
        assert row == [7] * count + [9] + [-1] * (3 - count)


def test_rates_of_zero_and_one_are_certain_and_padding_is_no_draft() -> None:
    assert chosen(4, [1.0, 1.0]).tolist() == [[7, 7, 9]] * 4
    assert chosen(4, [0.0, 1.0]).tolist() == [[9, -1, -1]] * 4
    assert chosen(4, [1.0, 1.0], can_follow=False).tolist() == [[9, -1, -1]] * 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_an_engine_accepts_by_the_rates_whatever_the_drafts_are(tmp_path: Path, temperature: float) -> None:
    fake = model(tmp_path, [0.8, 0.5], num_speculative_tokens=3)
    run(fake, temperature)
    run(fake, temperature, logprobs=2)
    stats = fake.llm.stats
    assert stats.verification == "synthetic 0.8,0.5"
    reached = stats.speculation.drafted_by_depth
    before = stats.speculation.num_drafts
    for accepted, drafted, rate in zip(stats.speculation.accepted_by_depth, reached, (0.8, 0.5, 0.5), strict=True):
        tried = min(before, drafted)
        assert abs(accepted - rate * tried) < 5 * math.sqrt(tried * rate * (1 - rate))
        before = accepted


def test_the_output_follows_from_the_seed_and_not_from_the_batch(tmp_path: Path) -> None:
    fake = model(tmp_path, "0.7")
    together = [output.token_depths for output in run(fake)]
    assert together == [output.token_depths for output in run(fake)]
    alone = fake.llm.generate([[1, 2, 3]], SamplingParams(max_tokens=60, seed=4))[0]
    assert alone.token_depths == together[4]
    assert len(set(together)) > 1


def test_without_drafts_the_output_is_the_targets(tmp_path: Path) -> None:
    fake = model(tmp_path, "1")
    output = fake.llm.generate([[1]], SamplingParams(max_tokens=6, num_speculative_tokens=0))[0]
    assert output.token_ids == (3, 8, 1, 9, 2, 7)
    assert output.stats.num_drafts == 0
    drafted = fake.llm.generate([[1]], SamplingParams(max_tokens=6))[0]
    assert drafted.token_ids != output.token_ids
    assert drafted.token_depths == (0, 1, 2, 3, 4, 0)


def test_stop_tokens_and_limits_hold_for_accepted_drafts(tmp_path: Path) -> None:
    fake = model(tmp_path, [1.0])
    free = fake.llm.generate([[1]], SamplingParams(max_tokens=12))[0]
    assert len(free.token_ids) == 12
    assert free.finish_reason is FinishReason.LENGTH
    stop = free.token_ids[3]
    stopped = fake.llm.generate([[1]], SamplingParams(max_tokens=12, stop_token_ids=[stop]))[0]
    assert stopped.token_ids == free.token_ids[: free.token_ids.index(stop) + 1]
    assert stopped.finish_reason is FinishReason.STOP


def test_a_draft_that_the_rules_forbid_is_not_accepted(tmp_path: Path) -> None:
    fake = model(tmp_path, [1.0])
    for output in run(fake, allowed_token_ids=[3, 4, 5]):
        assert set(output.token_ids) <= {3, 4, 5}


def test_it_is_said_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="foredraft"):
        model(tmp_path, (0.8, 0.25))
    assert "synthetic 0.8,0.25" in caplog.text
    assert "NOT the target's" in caplog.text


@pytest.mark.parametrize("rates", ["", "1.5", "nan", "0.5,,0.5", "high", [], [-0.1], [True], [None], 0.5, "0," * 300])
def test_wrong_rates_are_refused(rates: Any) -> None:
    with pytest.raises(ConfigError, match="synthetic_acceptance must be rates from 0 to 1") as refused:
        EngineConfig(synthetic_acceptance=rates)
    assert len(str(refused.value)) < 250


def test_other_verification_methods_are_refused() -> None:
    assert EngineConfig(synthetic_acceptance="0.8, 0.7").synthetic_rates == (0.8, 0.7)
    with pytest.raises(ConfigError, match="synthetic_acceptance takes the place of verification=block"):
        EngineConfig(synthetic_acceptance="0.8", verification="block")
