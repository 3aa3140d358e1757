"""A request whose rows are not finite fails alone, and nothing of it is shared (case 157)."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny_models import tiny_llama
from torch import Tensor

from foredraft import LLM, SamplingParams
from foredraft.models.attention import PagedAttention
from foredraft.models.target import TargetModel
from foredraft.stopping import FinishReason

PREFIX = [3, 1, 4, 1, 5, 9, 2, 6]
EXECUTIONS = ["host", "synchronous", "overlapped"]


class PoisonedTarget(TargetModel):
    """Rows of one token are not finite, as after a fault in memory."""

    poison: int | None = None

    def forward(self, token_ids: Tensor, positions: Tensor, paged: PagedAttention) -> Tensor:
        hidden = super().forward(token_ids, positions, paged)
        return hidden if self.poison is None else torch.where((token_ids == self.poison)[:, None], torch.nan, hidden)


@pytest.fixture
def llm(tmp_path: Path, request: pytest.FixtureRequest) -> LLM:
    path = tiny_llama(tmp_path / "model", num_modules=3)
    llm = LLM(path, block_size=2, num_speculative_tokens=3, execution=request.param, device="cpu")
    llm.engine.runner.target.__class__ = PoisonedTarget
    return llm


def tokens(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0))
    return [output.token_ids for output in outputs]


def poison(llm: LLM, token_id: int | None) -> None:
    target = llm.engine.runner.target
    assert isinstance(target, PoisonedTarget)
    target.poison = token_id


@pytest.mark.parametrize("llm", EXECUTIONS, indirect=True)
def test_a_request_that_is_not_finite_fails_alone_and_is_not_shared(llm: LLM) -> None:
    """In its prompt, or at a token that it writes itself; drafts that are rejected do not count."""
    prompts = [
        [*PREFIX[: 2 + index % 6], 10 + index, *((7 * index + j * j) % 60 for j in range(index))] for index in range(8)
    ]
    expected = tokens(llm, prompts)
    wholes = [set(prompt + list(written[:-1])) for prompt, written in zip(prompts, expected)]
    written = (token_id for whole in expected for token_id in whole[2:-1])
    late = next(token_id for token_id in written if not all(token_id in whole for whole in wholes))
    for token_id in (10, late):
        llm.reset_prefix_cache()
        poison(llm, token_id)
        outputs = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True, temperature=0.0))
        poison(llm, None)
        is_hit = [token_id in whole for whole in wholes]
        assert any(is_hit)
        assert not all(is_hit)
        for output, hit, whole in zip(outputs, is_hit, expected):
            assert (output.choices[0].finish_reason is FinishReason.ERROR) == hit
            assert whole[: len(output.token_ids)] == output.token_ids
            assert not hit or "not finite" in str(output.choices[0].error)
        llm.engine.cache.check_integrity()
        assert tokens(llm, prompts) == expected
