"""Drafts by a smaller head, fewer tokens or fewer bits: fewer may be accepted, the output is the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference import Checkpoint
from scripted import finish

from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.draft_vocabulary import build_draft_head
from foredraft.engine.engine import Engine
from foredraft.errors import ConfigError
from foredraft.models.target import TargetModel
from foredraft.sampling_params import SamplingParams

SIZE = 40
"""Of 64 token ids."""


RANKED = [*range(63, 40, -2), 7, 12, 0, 33]
"""Token ids of a ranking; all but a few lie above SIZE."""


def engine_of(checkpoint: Checkpoint, draft_vocab_size: int | None, **settings: Any) -> Engine:
    config = EngineConfig(draft_vocab_size=draft_vocab_size, num_blocks=64, **settings)
    return build_engine(checkpoint.loaded, config)


@pytest.fixture
def ranking(tmp_path: Path) -> Path:
    path = tmp_path / "ranking.json"
    path.write_text(json.dumps(RANKED))
    return path


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_come_from_the_first_token_ids(checkpoints: Callable[[str], Checkpoint], temperature: float) -> None:
    engine = engine_of(checkpoints("llama"), SIZE)
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=1)
    requests = [engine.add_request(f"{first}", [first, 5, 9], params) for first in range(8)]
    drafts: list[int] = []
    finish(engine, lambda: drafts.extend(token for request in requests for token in request.draft_token_ids))
    assert len(set(drafts)) > 10
    assert max(drafts) < SIZE
    assert any(token >= SIZE for request in requests for token in request.output_token_ids)


def test_greedy_output_is_the_same(checkpoints: Callable[[str], Checkpoint]) -> None:
    outputs = []
    for size, depth in ((None, 0), (None, 3), (SIZE, 3), (1, 3)):
        engine = engine_of(checkpoints("llama"), size)
        params = SamplingParams(max_tokens=24, ignore_eos=True, num_speculative_tokens=depth)
        requests = [engine.add_request(f"{first}", [first, 5, 9], params) for first in range(4)]
        finish(engine)
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[1:] == outputs[:1] * 3


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_come_from_the_ranking(
    checkpoints: Callable[[str], Checkpoint], ranking: Path, temperature: float
) -> None:
    checkpoint = checkpoints("llama")
    engine = engine_of(checkpoint, len(RANKED), draft_vocab=ranking)
    params = SamplingParams(max_tokens=24, ignore_eos=True, temperature=temperature, seed=1)
    requests = [engine.add_request(f"{first}", [first, 5, 9], params) for first in range(8)]
    drafts: list[int] = []
    finish(engine, lambda: drafts.extend(token for request in requests for token in request.draft_token_ids))
    assert len(set(drafts)) > 3
    assert set(drafts) <= {*RANKED, *checkpoint.loaded.eos_token_ids}


@pytest.mark.parametrize("bits", [16, 8])
@pytest.mark.parametrize("is_ranked", [False, True])
@pytest.mark.parametrize("options", [{}, {"allowed_token_ids": (3, 7, 12, 20, 61, 63)}, {"repetition_penalty": 1.5}])
def test_greedy_output_is_the_same_with_every_head(
    checkpoints: Callable[[str], Checkpoint], ranking: Path, bits: int, is_ranked: bool, options: dict[str, Any]
) -> None:
    settings: dict[str, Any] = {"draft_head_bits": bits} | ({"draft_vocab": ranking} if is_ranked else {})
    outputs = []
    for depth, own in ((0, {}), (3, settings)):
        engine = engine_of(checkpoints("llama"), 16, **own)
        params = SamplingParams(max_tokens=24, ignore_eos=True, num_speculative_tokens=depth, **options)
        requests = [engine.add_request(f"{first}", [first, 5, 9], params) for first in range(4)]
        finish(engine)
        outputs.append([request.output_token_ids for request in requests])
    assert outputs[0] == outputs[1]
    assert engine.stats.speculation.num_drafts > 0


def test_a_draft_that_the_rules_leave_and_the_ranking_lacks(
    checkpoints: Callable[[str], Checkpoint], ranking: Path
) -> None:
    """The head knows neither 24 nor 26: the lower one is drafted without it. Of 24 and 7 it knows 7."""
    engine = engine_of(checkpoints("llama"), len(RANKED), draft_vocab=ranking)
    for name, allowed, expected in (("unknown", (24, 26), {24}), ("known", (24, 7), {7})):
        params = SamplingParams(max_tokens=12, ignore_eos=True, allowed_token_ids=allowed)
        request = engine.add_request(name, [1, 5, 9], params)
        drafts: list[int] = []
        finish(engine, lambda: drafts.extend(request.draft_token_ids))  # noqa: B023 -- called within the loop
        assert set(drafts) == expected


def test_the_head_is_not_copied(checkpoints: Callable[[str], Checkpoint]) -> None:
    checkpoint = checkpoints("llama")
    target = TargetModel(checkpoint.loaded.target)
    head = build_draft_head(EngineConfig(draft_vocab_size=SIZE), checkpoint.loaded, target)
    hidden = torch.randn(3, target.hidden_size)
    assert torch.allclose(head.logits(hidden), target.logits(hidden)[:, :SIZE], atol=1e-5)
    assert head.weight.data_ptr() == target.model.get_parameter("lm_head.weight").data_ptr()


def test_a_ranking_of_another_vocabulary_is_refused(checkpoints: Callable[[str], Checkpoint], tmp_path: Path) -> None:
    (tmp_path / "other.json").write_text("[64]")
    with pytest.raises(ConfigError, match="draft_vocab has token id 64, but the model has 64 token ids"):
        engine_of(checkpoints("llama"), 8, draft_vocab=tmp_path / "other.json")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"draft_vocab": "a.json"}, "draft_vocab needs draft_vocab_size"),
        ({"draft_vocab": 3, "draft_vocab_size": 8}, "draft_vocab must be a path or a name, not 3"),
        ({"draft_head_bits": 4}, "draft_head_bits must be 16 or 8, not 4"),
        ({"draft_head_bits": True}, "draft_head_bits must be 16 or 8, not True"),
    ],
)
def test_settings_that_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        EngineConfig(**settings)


def test_more_than_the_vocabulary_is_refused(checkpoints: Callable[[str], Checkpoint]) -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size=65 is more than the 64 token ids"):
        engine_of(checkpoints("llama"), 65)
