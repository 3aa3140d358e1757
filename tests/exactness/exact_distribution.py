"""What a request may say over a table of logits, straight from the description of its options: float64, one token at a
time, and nothing of the package but what the options are called.

A table holds, for each token, the logits of the token after it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from scipy import stats  # type: ignore[import-untyped]

from foredraft import SamplingParams
from foredraft.logits_processor import StatefulLogitsProcessor, TokenHistory

ALIKE, BIASED = 1e-4, 1e-6  # p-values: above the first the distributions agree, below the second they do not
MIN_EXPECTED = 5.0  # of a cell of a chi-square

Tokens = tuple[int, ...]
Distribution = dict[Tokens, float]


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
    table: Sequence[Sequence[float]], prompt: Sequence[int], params: SamplingParams, eos_token_ids: Iterable[int] = ()
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
