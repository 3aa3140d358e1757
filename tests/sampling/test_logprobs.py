"""Log-probabilities: of which tokens, in what order, by which distribution, and the same at any number of drafts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_model import FakeModel, at_positions, one_after_another, right
from torch import Tensor

from foredraft import SamplingParams
from foredraft.errors import RequestError
from foredraft.logprobs import TokenLogprob
from foredraft.sampling.logprobs import token_logprobs
from foredraft.stopping import FinishReason

VOCAB_SIZE = 16
PROMPT = [3, 1]


def naive(logprobs: Tensor, token_id: int, num_top: int) -> TokenLogprob:
    values = logprobs.tolist()
    order = sorted(range(len(values)), key=lambda other: (-values[other], other))
    top = tuple((other, values[other]) for other in order[:num_top] if values[other] > -math.inf)
    return TokenLogprob(token_id, values[token_id], 1 + sum(value > values[token_id] for value in values), top)


@pytest.mark.parametrize("num_top", [0, 1, 2, 5, 40])
@pytest.mark.parametrize("num_levels", [1, 2, 3, 1000])
def test_ranks_and_order(num_top: int, num_levels: int) -> None:
    """With few different values there are many ties: the lowest ids come first, and are those that are listed."""
    torch.manual_seed(num_levels)
    logprobs = torch.randint(num_levels, (20, 40)).float().log_softmax(dim=-1)
    token_ids = torch.randint(40, (20,)).tolist()
    expected = [naive(row, token_id, num_top) for row, token_id in zip(logprobs, token_ids)]
    assert token_logprobs(logprobs, token_ids, num_top) == expected
    for row in range(20):  # whatever rows are beside it
        assert token_logprobs(logprobs[row : row + 1], token_ids[row : row + 1], num_top) == expected[row : row + 1]


def test_what_cannot_follow_is_not_listed() -> None:
    logprobs = torch.tensor([[0.0, -math.inf, 1.0, -math.inf]]).log_softmax(dim=-1)
    (found,) = token_logprobs(logprobs, [3], 4)
    assert (found.logprob, found.rank) == (-math.inf, 3)
    assert [token_id for token_id, _ in found.top] == [2, 0]


def test_more_than_there_are() -> None:
    (found,) = token_logprobs(torch.zeros(1, 3).log_softmax(dim=-1), [1], 9)
    assert [token_id for token_id, _ in found.top] == [0, 1, 2]


# -- in an engine ------------------------------------------------------------------------------------------------------

SEQUENCE = [5, 9, 4, 11, 3, 8, 6, 10, 1, 4]


def table(token_id: int, position: int) -> Tensor:
    """Likely tokens by position, with ties among the others."""
    logits = one_after_another(SEQUENCE, VOCAB_SIZE, start=len(PROMPT), gap=2.0)(token_id, position)
    return (logits * 4).round() / 4


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fake") / "model"


@pytest.fixture(scope="module", params=["raw", "processed"])
def model(checkpoint: Path, request: pytest.FixtureRequest) -> FakeModel:
    """Rejected drafts do not change what is sampled."""
    return FakeModel(checkpoint, table, logprobs_mode=request.param, draft_sampling="greedy")


SCRIPTS = {"right": right(table), "two": right(table, 2), "never": at_positions({}, 15)}
CASES = [(0, "right"), (1, "right"), (3, "two"), (4, "right"), (4, "never")]
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "greedy under rules": {"bad_words": [[9, 4]], "repetition_penalty": 1.5, "allowed_token_ids": [3, 4, 5, 7, 9, 11]},
    "sampled": {"temperature": 1.3},
    "filtered": {"temperature": 0.7, "top_k": 5, "top_p": 0.9, "presence_penalty": 0.5},
    "biased": {"temperature": 1.0, "logit_bias": {2: 3.0}, "min_p": 0.1},
}


def generate(model: FakeModel, depth: int, script: str, **settings: Any) -> Any:
    model.drafter.script = SCRIPTS[script]
    params = SamplingParams(max_tokens=10, num_speculative_tokens=depth, seed=5, **settings)
    return model.llm.generate([PROMPT], params)[0]


@pytest.mark.parametrize("kind", OPTIONS)
@pytest.mark.parametrize("num_top", [0, 3, VOCAB_SIZE])
def test_the_same_at_any_depth(model: FakeModel, kind: str, num_top: int) -> None:
    plain = generate(model, 0, "right", logprobs=num_top, **OPTIONS[kind])
    assert len(plain.logprobs) == len(plain.token_ids) == 10
    for depth, script in CASES:
        found = generate(model, depth, script, logprobs=num_top, **OPTIONS[kind])
        assert (found.token_ids, found.logprobs) == (plain.token_ids, plain.logprobs)


@pytest.mark.parametrize(("depth", "script"), CASES)
@pytest.mark.parametrize("kind", OPTIONS)
def test_values(model: FakeModel, kind: str, depth: int, script: str) -> None:
    found = generate(model, depth, script, logprobs=4, **OPTIONS[kind])
    before = [*PROMPT, *found.token_ids]
    for index, (token_id, one) in enumerate(zip(found.token_ids, found.logprobs)):
        logits = table(before[index + 1], index + 1)
        if model.llm.config.logprobs_mode == "raw":
            assert one == naive(logits.log_softmax(dim=-1), token_id, 4)
        else:
            assert one.token_id == token_id
            listed = {token_id: one.logprob, **dict(one.top)}
            assert sum(map(math.exp, listed.values())) <= 1 + 1e-5
            assert all(math.isfinite(value) for value in listed.values())
            assert (one.rank == 1) == (one.logprob == max(listed.values()))
            if kind == "sampled":
                expected = naive((logits / 1.3).log_softmax(dim=-1), token_id, 4)
                assert one.rank == expected.rank
                assert [other for other, _ in one.top] == [other for other, _ in expected.top]
                assert one.logprob == pytest.approx(expected.logprob, abs=1e-5)
            if kind == "filtered":
                assert len(one.top) <= 5
            if kind == "greedy":
                assert one == naive(logits.log_softmax(dim=-1), token_id, 4)
            if kind == "greedy under rules":
                assert one.rank == 1
                assert {other for other, _ in one.top} <= {3, 4, 5, 7, 9, 11}


def test_all_of_a_distribution_sums_to_one(model: FakeModel) -> None:
    for kind, settings in OPTIONS.items():
        found = generate(model, 3, "two", logprobs=VOCAB_SIZE, **settings)
        for one in found.logprobs:
            assert sum(math.exp(value) for _, value in one.top) == pytest.approx(1, abs=1e-5), kind
            assert (one.token_id, one.logprob) in one.top


def test_how_many_may_be_asked_for(model: FakeModel) -> None:
    for name in ("logprobs", "prompt_logprobs"):
        settings: dict[str, Any] = {name: VOCAB_SIZE + 1}
        with pytest.raises(RequestError, match=f"{name} must be at most 16, the number of token ids"):
            model.engine.add_request("many", PROMPT, SamplingParams(**settings))
    assert not model.engine.has_unfinished
    assert generate(model, 3, "right").logprobs is None
    assert generate(model, 3, "right", logprobs=0).logprobs[0].top == ()


@pytest.mark.parametrize(("depth", "script"), CASES)
def test_they_end_where_the_tokens_do(model: FakeModel, depth: int, script: str) -> None:
    """At a stop token in the middle of accepted drafts, and before an error."""
    stopped = generate(model, depth, script, logprobs=1, stop_token_ids=[11])
    assert stopped.token_ids == tuple(SEQUENCE[:4])
    assert [one.token_id for one in stopped.logprobs] == SEQUENCE[:4]
    words = [[9, 4], [9, 5], [9, 9]]
    failed = generate(model, depth, script, logprobs=1, allowed_token_ids=[4, 5, 9], bad_words=words)
    assert failed.finish_reason is FinishReason.ERROR
    assert failed.token_ids == tuple(one.token_id for one in failed.logprobs) == (5, 9)


@pytest.mark.parametrize(("depth", "script"), CASES)
def test_an_error_at_the_first_token(model: FakeModel, depth: int, script: str) -> None:
    failed = generate(model, depth, script, logprobs=1, prompt_logprobs=1, allowed_token_ids=[4], bad_words=[[4]])
    assert failed.finish_reason is FinishReason.ERROR
    assert (failed.token_ids, failed.logprobs) == ((), ())
    assert len(failed.prompt_logprobs) == len(PROMPT)


@pytest.mark.parametrize(("depth", "script"), CASES)
def test_streamed_with_their_tokens(model: FakeModel, depth: int, script: str) -> None:
    model.drafter.script = SCRIPTS[script]
    params = SamplingParams(max_tokens=10, num_speculative_tokens=depth, logprobs=2)
    chunks = list(model.llm.stream(PROMPT, params))
    output = chunks[-1].output
    assert output is not None
    assert all(len(chunk.logprobs) == len(chunk.token_ids) for chunk in chunks)
    assert output.logprobs == tuple(one for chunk in chunks for one in chunk.logprobs)
