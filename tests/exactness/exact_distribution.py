"""What a request may say over a table of logits, straight from the description of its options; and requests to try.

The account is in float64, one token at a time, and takes nothing from the package but what the options are called. A
table holds, for each token, the logits of the token after it.
"""

from __future__ import annotations

import copy
import math
import random
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, Self

import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from foredraft import RequestOutput, SamplingParams
from foredraft.logits_processor import StatefulLogitsProcessor, TokenHistory
from foredraft.logprobs import TokenLogprob
from foredraft.sampling.philox import Stream, cycle_keys, uniform
from foredraft.sampling.sampler import SamplingTensors, sample
from foredraft.speculation.drafter import Window

ALIKE, BIASED = 1e-4, 1e-6  # p-values: above the first the distributions agree, below the second they do not
MIN_EXPECTED = 5.0  # of a cell of a chi-square

Tokens = tuple[int, ...]
Distribution = dict[Tokens, float]
Rows = Sequence[Sequence[float]]


def scores(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], params: SamplingParams, ends: Iterable[int]
) -> list[float]:
    """The logits of the token after prompt and output, under the options that change logits. ends: tokens that stop."""
    values = [float(logit) for logit in logits]
    for token_id, bias in params.biases:
        values[token_id] += bias
    for token_id in {*prompt, *output}:
        is_positive = values[token_id] > 0
        values[token_id] *= 1 / params.repetition_penalty if is_positive else params.repetition_penalty
    for token_id, count in Counter(output).items():
        values[token_id] -= params.presence_penalty + params.frequency_penalty * count
    banned = set(completing_bad_words([*prompt, *output], params))
    if len(output) < params.min_tokens:
        banned.update(ends)
    if params.allowed_token_ids is not None:
        banned.update(set(range(len(values))) - set(params.allowed_token_ids))
    values = [-math.inf if token_id in banned else value for token_id, value in enumerate(values)]
    for processor in params.logits_processors:
        if isinstance(processor, StatefulLogitsProcessor):
            processor = processor.clone()
            for token_id in output:
                processor.advance(token_id)
        history = TokenHistory(tuple(prompt), tuple(output))
        values = [float(value) for value in processor.process(history, torch.tensor(values))]
    return [-math.inf if token_id in banned else value for token_id, value in enumerate(values)]


def completing_bad_words(history: Sequence[int], params: SamplingParams) -> list[int]:
    words = [tuple(word) for word in params.bad_words if not isinstance(word, str)]
    ends = [tuple(history[len(history) - len(word) + 1 :]) for word in words]
    return [word[-1] for word, end in zip(words, ends) if end == word[:-1]]


def probabilities(values: Sequence[float], params: SamplingParams) -> list[float]:
    """What the next token is drawn from: temperature, then top_k, top_p, min_p and typical_p, each upon what is left.

    Ties go to the lowest ids.
    """
    if params.temperature == 0:
        return [float(token_id == int(np.argmax(values))) for token_id in range(len(values))]
    probs = normalised([math.exp((value - max(values)) / params.temperature) for value in values])
    by_rank = sorted(range(len(probs)), key=lambda token_id: (-values[token_id], token_id))
    if params.top_k:
        probs = restricted(probs, by_rank[: params.top_k])
    probs = restricted(probs, nucleus(probs, by_rank, params.top_p))
    likely = [token_id for token_id, prob in enumerate(probs) if prob >= params.min_p * max(probs)]
    probs = restricted(probs, likely)
    entropy = -sum(prob * math.log(prob) for prob in probs if prob)
    possible = [token_id for token_id, prob in enumerate(probs) if prob]
    by_typicality = sorted(possible, key=lambda token_id: round(abs(math.log(probs[token_id]) + entropy), 9))
    return restricted(probs, nucleus(probs, by_typicality, params.typical_p))


def nucleus(probs: Sequence[float], order: Sequence[int], share: float) -> list[int]:
    """The first tokens in `order` that reach the share together."""
    if share == 1:
        return list(order)
    before = np.cumsum([0.0, *(probs[token_id] for token_id in order)])
    return [token_id for token_id, mass in zip(order, before) if mass < share]


def restricted(probs: Sequence[float], kept: Sequence[int]) -> list[float]:
    return normalised([prob if token_id in kept else 0.0 for token_id, prob in enumerate(probs)])


def normalised(weights: Sequence[float]) -> list[float]:
    return [weight / sum(weights) for weight in weights]


def distribution(
    table: Rows, prompt: Sequence[int], params: SamplingParams, eos_token_ids: Iterable[int] = ()
) -> Distribution:
    """The probability of every output of a request: max_tokens tokens, or fewer where the last one stops."""
    assert params.max_tokens is not None
    ends = {*params.stop_token_ids, *(() if params.ignore_eos else eos_token_ids)}
    unfinished: Distribution = {(): 1.0}
    finished: Distribution = {}
    for length in range(1, params.max_tokens + 1):
        longer: Distribution = {}
        for output, prob in unfinished.items():
            logits = table[(*prompt, *output)[-1]]
            for token_id, share in enumerate(probabilities(scores(logits, prompt, output, params, ends), params)):
                if share:
                    is_end = token_id in ends and length > params.min_tokens
                    (finished if is_end else longer)[(*output, token_id)] = prob * share
        unfinished = longer
    return finished | unfinished


def p_value(outputs: Iterable[Tokens], expected: Distribution) -> float:
    """Of a chi-square test; cells that expect too few are taken together."""
    counts = Counter(outputs)
    assert counts.keys() <= expected.keys(), "an output of probability 0 was emitted"
    cells = sorted(((prob * counts.total(), counts[output]) for output, prob in expected.items()), reverse=True)
    merged: list[tuple[float, int]] = []
    for mean, count in cells:
        if merged and mean < MIN_EXPECTED and merged[-1][0] < MIN_EXPECTED:
            mean, count = merged[-1][0] + mean, merged.pop()[1] + count
        merged.append((mean, count))
    if len(merged) > 1 and merged[-1][0] < MIN_EXPECTED:
        (mean, count), (rest_mean, rest_count) = merged[-2:]
        merged[-2:] = [(mean + rest_mean, count + rest_count)]
    means, observed = zip(*merged)
    return float(stats.chisquare(observed, means).pvalue) if len(merged) > 1 else 1.0


def random_rows(vocab_size: int, seed: int, *, ties: bool = False) -> Rows:
    chance = random.Random(seed)
    logits = [[chance.gauss(0, 1.5) for _ in range(vocab_size)] for _ in range(vocab_size)]
    return [[float(round(logit)) for logit in row] for row in logits] if ties else logits


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


def assert_likeliest(output: RequestOutput, rows: Rows, params: SamplingParams, eos: int) -> None:
    """Every token has the highest score, and its own log-probability, by the independent account."""
    prompt, ends = output.prompt_token_ids, {*params.stop_token_ids, *(() if params.ignore_eos else (eos,))}
    for choice in output.choices:
        for index, token_id in enumerate(choice.token_ids):
            before, logits = choice.token_ids[:index], rows[(*prompt, *choice.token_ids[:index])[-1]]
            values = scores(logits, prompt, before, params, ends)
            assert values[token_id] > max(values) - 1e-4
            assert values[token_id] > -math.inf
            if choice.logprobs is not None:
                logprob = logits[token_id] - math.log(sum(map(math.exp, logits)))
                assert choice.logprobs[index].logprob == pytest.approx(logprob, abs=1e-5)


class TableDrafts:
    """Drafts of all requests at once, drawn from probabilities [V, V] by the token before."""

    def __init__(self, logits: Rows) -> None:
        self._probs = torch.tensor(logits).softmax(-1)
        self._previous: dict[str, int] = {}

    def choose(
        self, index: int, windows: Sequence[Window], logits: Tensor, sampling: SamplingTensors
    ) -> tuple[Tensor, Tensor]:
        previous = [self._previous[w.request_id] if index else w.token_ids[-1] for w in windows]
        positions = torch.tensor([window.num_tokens for window in windows])
        probs = self._probs[previous]
        chosen = sample(probs, uniform(sampling.seeds, cycle_keys(positions, index), Stream.DRAFT))
        self._previous.update(zip((window.request_id for window in windows), chosen.tolist()))
        return chosen, probs
