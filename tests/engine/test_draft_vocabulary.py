"""Drafts among the frequent token ids only: fewer may be accepted, the output is the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from reference import Checkpoint
from scripted import finish

from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.errors import ConfigError
from foredraft.sampling_params import SamplingParams

SIZE = 40
"""Of 64 token ids."""


def engine_of(checkpoint: Checkpoint, draft_vocab_size: int | None) -> Engine:
    return build_engine(checkpoint.loaded, EngineConfig(draft_vocab_size=draft_vocab_size, num_blocks=64))


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


def test_the_head_is_not_copied(checkpoints: Callable[[str], Checkpoint]) -> None:
    target = engine_of(checkpoints("llama"), SIZE).runner.target
    hidden = torch.randn(3, target.hidden_size)
    assert torch.allclose(target.draft_logits(hidden, SIZE), target.logits(hidden)[:, :SIZE], atol=1e-5)
    weight = target.model.get_parameter("lm_head.weight")
    saved = weight.clone()
    try:
        weight.zero_()
        assert not target.draft_logits(hidden, SIZE).any()
    finally:
        weight.copy_(saved)


def test_more_than_the_vocabulary_is_refused(checkpoints: Callable[[str], Checkpoint]) -> None:
    with pytest.raises(ConfigError, match="draft_vocab_size=65 is more than the 64 token ids"):
        engine_of(checkpoints("llama"), 65)
