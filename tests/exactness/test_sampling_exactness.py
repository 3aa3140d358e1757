"""Options at every drafted position: with drafts, whatever they are, a request says what it would without.

Greedy requests say exactly that; of sampled ones the distribution of whole outputs is compared with one that is computed
by enumeration. The target is a table, the drafts are scripted; everything between them is real.
"""

from __future__ import annotations

import copy
import math
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Self

import fake_model
import pytest
import torch
from exactness.exact_distribution import ALIKE, BIASED, distribution, p_value, scores
from fake_model import FakeModel, Script, Table, words_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from foredraft import RequestOutput, SamplingParams
from foredraft.logits_processor import LogitsProcessor, TokenHistory
from foredraft.logprobs import TokenLogprob
from foredraft.sampling.token_counts import CountRows, TokenCounts
from foredraft.speculation import verifier

EOS = 1
WORDS = ["a", "b", "c", "ab", "ba", "d", "aab", "e", "cab", "f", "g", "h", "i", "j", "k", "l"]
MAX_DRAFTS = 8
Rows = Sequence[Sequence[float]]
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {"num_speculative_tokens": 0, "max_num_seqs": 1, "enable_prefix_caching": False},
    "roomy": {"num_speculative_tokens": 8},
    "crowded": {"num_speculative_tokens": 8, "max_num_seqs": 4, "max_num_batched_tokens": 36, "num_blocks": 14},
    "narrow": {"num_speculative_tokens": 2, "max_num_seqs": 4, "max_num_batched_tokens": 12, "num_blocks": 12},
}


@cache
def model(kind: str, vocab_size: int) -> FakeModel:
    """Built once; its table and script are each test's own."""
    with tempfile.TemporaryDirectory() as directory:
        tokenizer = words_tokenizer(WORDS[:vocab_size])
        config = {"max_model_len": 40, **ENGINES[kind]}
        return FakeModel(
            Path(directory),
            lambda token_id, position: torch.zeros(vocab_size),
            vocab_size=vocab_size,
            eos_token_ids=[EOS],
            tokenizer=tokenizer,
            **config,
        )


def table_of(rows: Rows) -> Table:
    tensors = [torch.tensor(row) for row in rows]
    return lambda token_id, position: tensors[token_id]


def random_rows(vocab_size: int, seed: int, *, ties: bool = False) -> Rows:
    chance = random.Random(seed)
    logits = [[chance.gauss(0, 1.5) for _ in range(vocab_size)] for _ in range(vocab_size)]
    return [[float(round(logit)) for logit in row] for row in logits] if ties else logits


def assert_drained(model: FakeModel) -> None:
    cache = model.engine.cache
    assert not model.engine.has_unfinished
    cache.check_integrity()
    assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in cache.pools)


# -- a caller's own rules ----------------------------------------------------------------------------------------------


class NotTwice:
    """The last token does not follow itself; fails where the output is `fails_at` tokens long."""

    is_stateful = False

    def __init__(self, fails_at: int | None = None) -> None:
        self._fails_at = fails_at

    def process(self, history: TokenHistory, logits: Tensor) -> Tensor:
        if len(history.output_token_ids) == self._fails_at:
            raise ValueError("as it was told to")
        logits[(*history.prompt_token_ids, *history.output_token_ids)[-1]] = -math.inf
        return logits


class Waves:
    """Its memory is the alternating sum of the tokens: the token of that number, modulo V, becomes likelier."""

    is_stateful = True

    def __init__(self) -> None:
        self._sum = 0

    def process(self, history: TokenHistory, logits: Tensor) -> Tensor:
        logits[self._sum % len(logits)] += 2.5
        return logits

    def advance(self, token_id: int) -> None:
        self._sum = 3 - self._sum + token_id

    def clone(self) -> Self:
        return copy.copy(self)


# -- greedy requests are as without drafts -----------------------------------------------------------------------------


def option_strategies(vocab_size: int) -> dict[str, st.SearchStrategy[Any]]:
    ids = st.integers(0, vocab_size - 1)
    processors = st.sampled_from([NotTwice(), NotTwice(fails_at=5), Waves()])
    return {
        "logit_bias": st.dictionaries(ids, st.sampled_from([-3.0, -0.5, 1.0, 2.5]), max_size=3),
        "repetition_penalty": st.sampled_from([0.7, 1.3, 2.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.5, 2.0]),
        "frequency_penalty": st.sampled_from([-0.5, 0.3, 1.5]),
        "bad_words": st.lists(st.lists(ids, min_size=1, max_size=3), max_size=4),
        "allowed_token_ids": st.lists(ids, min_size=1, max_size=vocab_size),
        "stop_token_ids": st.lists(ids, max_size=2),
        "ignore_eos": st.booleans(),
        "stop": st.lists(st.sampled_from(["aa", "ba", "abab", "cab", "bca", "d", "ee"]), min_size=1, max_size=3),
        "include_stop_str_in_output": st.booleans(),
        "logits_processors": st.lists(processors, min_size=1, max_size=2),
        "logprobs": st.integers(0, 4),
        "prompt_logprobs": st.integers(0, 4),
        "echo": st.booleans(),
        "n": st.integers(2, 3),
        "num_speculative_tokens": st.integers(0, 2),
    }


@st.composite
def requests(draw: st.DrawFn, vocab_size: int) -> tuple[list[int], SamplingParams]:
    prompt = draw(st.lists(st.integers(0, vocab_size - 1), min_size=1, max_size=14))
    options = draw(st.fixed_dictionaries({}, optional=option_strategies(vocab_size)))
    max_tokens = draw(st.integers(0, 20))
    min_tokens = draw(st.sampled_from([0, 0, min(4, max_tokens), max_tokens]))
    return prompt, SamplingParams(max_tokens=max_tokens, min_tokens=min_tokens, **options)


def scripted(kind: str, rows: Rows, seed: int, known: Callable[[str], Sequence[int]]) -> Script:
    """Drafts of a kind; `known`: from a request's id to the tokens that it has without drafts."""
    vocab_size = len(rows)

    def script(request_id: str, position: int, depth: int, previous: int) -> int | Tensor:
        chance = random.Random(seed * 1_000_003 + position * 31 + depth)
        chosen = chance.choice(["right", "right", "wrong", "random", "sampled"]) if kind == "any" else kind
        if chosen == "deep":  # right up to a depth that the cycle chooses
            chosen = "right" if depth < random.Random(seed + position - depth).randrange(MAX_DRAFTS + 1) else "wrong"
        if chosen == "sampled":
            return torch.tensor(rows[previous]).softmax(0)
        token_ids = known(request_id)
        if chosen == "random" or position >= len(token_ids):
            return chance.randrange(vocab_size)
        return (token_ids[position] + (chosen == "wrong")) % vocab_size

    return script


def serve_plainly(model: FakeModel, rows: Rows, prompt: list[int], params: SamplingParams) -> RequestOutput:
    model.target.table = table_of(rows)
    plain = SamplingParams(**{**vars(params), "num_speculative_tokens": 0})
    (output,) = model.llm.generate([prompt], [plain])
    assert_drained(model)
    return output


def assert_alike(output: RequestOutput, expected: RequestOutput) -> None:
    assert output.prompt_token_ids == expected.prompt_token_ids
    for choice, wanted in zip(output.choices, expected.choices, strict=True):
        names = ("index", "token_ids", "text", "finish_reason", "error")
        assert [getattr(choice, name) for name in names] == [getattr(wanted, name) for name in names]
        assert_logprobs_alike(choice.logprobs, wanted.logprobs)
    assert_logprobs_alike(output.prompt_logprobs, expected.prompt_logprobs)


def assert_logprobs_alike(
    logprobs: Sequence[TokenLogprob | None] | None, expected: Sequence[TokenLogprob | None] | None
) -> None:
    assert (logprobs is None) == (expected is None)
    for one, wanted in zip(logprobs or (), expected or (), strict=True):
        assert (one is None) == (wanted is None)
        if one is not None and wanted is not None:
            assert (one.token_id, one.rank) == (wanted.token_id, wanted.rank)
            assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in wanted.top]
            values, wanted_values = ((each.logprob, *(value for _, value in each.top)) for each in (one, wanted))
            assert values == pytest.approx(wanted_values, abs=1e-5)


def assert_likeliest(output: RequestOutput, rows: Rows, params: SamplingParams) -> None:
    """Every token has the highest score, and its own log-probability, by the independent account."""
    prompt, ends = output.prompt_token_ids, {*params.stop_token_ids, *(() if params.ignore_eos else (EOS,))}
    for choice in output.choices:
        for index, token_id in enumerate(choice.token_ids):
            before, logits = choice.token_ids[:index], rows[(*prompt, *choice.token_ids[:index])[-1]]
            values = scores(logits, prompt, before, params, ends)
            assert values[token_id] > max(values) - 1e-4
            assert values[token_id] > -math.inf
            if choice.logprobs is not None:
                logprob = logits[token_id] - math.log(sum(map(math.exp, logits)))
                assert choice.logprobs[index].logprob == pytest.approx(logprob, abs=1e-5)


def assert_streamed_alike(model: FakeModel, prompt: list[int], params: SamplingParams, wanted: RequestOutput) -> None:
    chunks = list(model.llm.stream(prompt, params))
    assert chunks[-1].output is not None
    assert_alike(chunks[-1].output, wanted)
    for choice in chunks[-1].output.choices:
        own = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in own) == choice.text
        assert tuple(token_id for chunk in own for token_id in chunk.token_ids) == choice.token_ids
        assert tuple(logprob for chunk in own for logprob in chunk.logprobs) == (choice.logprobs or ())
        assert [chunk.finish_reason for chunk in own if chunk.finish_reason] == [choice.finish_reason]


def check_greedy(
    kind: str, rows: Rows, batch: Sequence[tuple[list[int], SamplingParams]], drafts: str, seed: int
) -> Iterator[str]:
    """Compare a batch, and the same once more, and each of it streamed, with each alone without drafts. Returns what
    has happened on the way."""
    vocab_size = len(rows)
    plain, drafting = model("plain", vocab_size), model(kind, vocab_size)
    expected = [serve_plainly(plain, rows, *request) for request in batch]
    for output, (_, params) in zip(expected, batch):
        assert_likeliest(output, rows, params)

    def known(request_id: str) -> Sequence[int]:
        (request,) = (r for r in drafting.engine.scheduler.requests() if r.request_id == request_id)
        for output, (_, params) in zip(expected, batch):
            if request.params is params:
                return (*output.prompt_token_ids, *output.token_ids)
        return ()

    drafting.llm.reset_prefix_cache()
    drafting.llm.reset_stats()
    drafting.target.table, drafting.drafter.script = table_of(rows), scripted(drafts, rows, seed, known)
    prompts, params = [prompt for prompt, _ in batch], [params for _, params in batch]
    sampled = SamplingParams(max_tokens=12, temperature=1.0, seed=seed, repetition_penalty=1.2)
    for _ in range(2):
        outputs = drafting.llm.generate([*prompts, prompts[0]], [*params, sampled])
        for output, wanted in zip(outputs, expected):
            assert_alike(output, wanted)
        assert_drained(drafting)
    for prompt, one, wanted in zip(prompts, params, expected):
        assert_streamed_alike(drafting, prompt, one, wanted)
    assert_drained(drafting)
    choices = [choice for output in expected for choice in output.choices]
    yield from (choice.finish_reason for choice in choices)
    yield from {error.split()[0] for choice in choices if (error := choice.error)}
    counts = {"preempted": drafting.engine.stats.num_preemptions, "hit": drafting.engine.stats.num_cached_tokens}
    yield from (name for name, count in counts.items() if count)
    yield from (f"accepted {depth}" for depth, n in enumerate(drafting.llm.stats.speculation.accepted_by_depth) if n)


def test_greedy_requests_are_as_without_drafts_whatever_they_ask_and_whatever_is_drafted() -> None:
    happened: set[str] = set()

    @settings(max_examples=60, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(data=st.data(), vocab_size=st.sampled_from([6, 11, 16]), seed=st.integers(0, 999), ties=st.booleans())
    def check(data: st.DataObject, vocab_size: int, seed: int, ties: bool) -> None:
        batch = data.draw(st.lists(requests(vocab_size), min_size=1, max_size=4))
        kind = data.draw(st.sampled_from(["roomy", "crowded", "narrow"]))
        drafts = data.draw(st.sampled_from(["any", "deep", "right", "wrong", "random", "sampled"]))
        happened.update(check_greedy(kind, random_rows(vocab_size, seed, ties=ties), batch, drafts, seed))

    check()
    print(happened)
    assert happened >= {"stop", "length", "error", "preempted", "hit", "accepted 7"}
