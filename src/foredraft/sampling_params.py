"""What one request asks of the engine."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.errors import RequestError, shown
from foredraft.logits_processor import LogitsProcessor, StatefulLogitsProcessor
from foredraft.structured_output import StructuredOutput

MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_PRIORITY = 2**31 - 1
MAX_CHOICES = 1024
MAX_WEIGHT = 1e30  # of a bias or a penalty that is subtracted: sums with logits stay finite in float32
MAX_FACTOR = 1e6
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6  # besides 0; beyond them float32 knows but one token, or all alike


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt; validated on construction.

    Length and end: max_tokens None means until a stop or the context is full; 0 only runs the prompt. Up to
    `min_tokens` generated tokens no stop counts. `stop`: texts that end the output, left out of it unless
    include_stop_str_in_output. stop_token_ids add to the model's own end tokens, which ignore_eos takes away.
    Choice: temperature 0 is greedy (ties go to the lowest token id). The options are applied in the order in which they
    stand here, which is that of transformers: logit_bias, the penalties, bad_words, min_tokens, allowed_token_ids and
    structured_output, logits_processors, temperature, top_k, top_p, min_p, typical_p. repetition_penalty looks at
    prompt and output, presence_penalty and frequency_penalty at the output only. bad_words are texts or lists of token
    ids that must not appear.
    seed None draws one from the operating system; with a seed, a request returns the same tokens alone and in any
    batch. n choices are drawn independently, each from a seed that follows from this one.
    logprobs and prompt_logprobs None: none; N: of each token, and of the N likeliest tokens at its place. echo puts the
    prompt before the text and, if there are logprobs, its log-probabilities with them.
    num_speculative_tokens None takes the engine's; 0 is plain decoding. Requests share cached rows only with those of
    the same cache_salt. priority counts under the scheduling policy of that name: lower numbers run first.

    Raises RequestError, which names the field and the rule.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    stop: str | Sequence[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False

    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]] = ()
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    bad_words: Sequence[str | Sequence[int]] = ()
    allowed_token_ids: Sequence[int] | None = None
    structured_output: StructuredOutput | None = None
    logits_processors: Sequence[LogitsProcessor] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0

    n: int = 1
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    echo: bool = False
    skip_special_tokens: bool = True

    num_speculative_tokens: int | None = None
    cache_salt: str | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        self._check_end()
        self._check_rules()
        self._check_temperature_and_filters()
        _integer("n", self.n, 1, MAX_CHOICES)
        _integer("seed", self.seed, 0, MAX_SEED, optional=True)
        _integer("logprobs", self.logprobs, 0, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, optional=True)
        _integer("num_speculative_tokens", self.num_speculative_tokens, 0, optional=True)
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt must be text, not {shown(self.cache_salt)}")
        _integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        for name in ("ignore_eos", "skip_special_tokens", "include_stop_str_in_output", "echo"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {shown(getattr(self, name))}")

    def _check_end(self) -> None:
        _integer("max_tokens", self.max_tokens, 0, optional=True)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            limit = f"at most max_tokens={shown(self.max_tokens)}"
            raise RequestError(f"min_tokens must be {limit}, not {shown(self.min_tokens)}")
        self._set("stop", _texts("stop", self.stop))
        self._set("stop_token_ids", _token_ids("stop_token_ids", _some(self.stop_token_ids)))

    def _check_rules(self) -> None:
        self._set("logit_bias", _biases(self.logit_bias))
        _real("repetition_penalty", self.repetition_penalty, 1 / MAX_FACTOR, MAX_FACTOR)
        _real("presence_penalty", self.presence_penalty, -MAX_WEIGHT, MAX_WEIGHT)
        _real("frequency_penalty", self.frequency_penalty, -MAX_WEIGHT, MAX_WEIGHT)
        self._set("bad_words", tuple(_bad_word(word) for word in _list("bad_words", _some(self.bad_words))))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _token_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids must name at least one token")
        if self.structured_output is not None and not isinstance(self.structured_output, StructuredOutput):
            kind = type(self.structured_output).__name__
            raise RequestError(f"structured_output must be a StructuredOutput, not {kind}")
        if self.structured_output is not None and self.ignore_eos:
            raise RequestError("structured_output ends the output where its grammar does: ignore_eos must be false")
        self._set("logits_processors", _processors(self.logits_processors))

    def _check_temperature_and_filters(self) -> None:
        _real("temperature", self.temperature, -math.inf, MAX_TEMPERATURE)
        if self.temperature < MIN_TEMPERATURE and self.temperature != 0:
            limits = f"0, or between {MIN_TEMPERATURE} and {MAX_TEMPERATURE}"
            raise RequestError(f"temperature must be {limits}, not {shown(self.temperature)}")
        _integer("top_k", self.top_k, 0, MAX_TOP_K)
        for name in ("top_p", "typical_p"):
            _real(name, getattr(self, name), 0.0, 1.0)
            if getattr(self, name) == 0.0:
                raise RequestError(f"{name} must be greater than 0")
        _real("min_p", self.min_p, 0.0, 1.0)
        for name in (
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
            "temperature",
            "top_p",
            "typical_p",
            "min_p",
        ):
            self._set(name, float(getattr(self, name)))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # lists become tuples: the record stays as it was checked

    @property
    def biases(self) -> tuple[tuple[int, float], ...]:
        """logit_bias by rising token id."""
        pairs: Any = self.logit_bias  # a tuple of pairs since it was checked
        return tuple(pairs)

    @property
    def has_penalty(self) -> bool:
        """Whether it matters which tokens there have been."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def changes_logits(self) -> bool:
        """Whether any option acts on the logits themselves, before temperature and filters."""
        has_ban = bool(self.bad_words) or self.allowed_token_ids is not None or self.structured_output is not None
        return self.has_penalty or has_ban or bool(self.logit_bias or self.min_tokens or self.logits_processors)


def _integer(name: str, value: object, low: int, high: int | None = None, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {shown(value)}")
    if value < low or (high is not None and value > high):
        limit = f"between {low} and {high}" if high is not None else f"at least {low}"
        raise RequestError(f"{name} must be {limit}, not {shown(value)}")


def _real(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise RequestError(f"{name} must be a finite number, not {shown(value)}")
    if not low <= value <= high:
        limit = f"between {low} and {high}" if math.isfinite(high) else f"at least {low}"
        raise RequestError(f"{name} must be {limit}, not {shown(value)}")


def _some(value: object) -> object:
    """None where a list may stand is an empty one."""
    return () if value is None else value


def _list(name: str, value: object) -> list[Any]:
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise RequestError(f"{name} must be a list, not {shown(value)}")
    return list(value)


def _token_ids(name: str, value: object) -> tuple[int, ...]:
    if isinstance(value, str | bytes | Mapping) or not hasattr(value, "__iter__"):
        raise RequestError(f"{name} must be a list of token ids, not {shown(value)}")
    ids = tuple(value)
    for token_id in ids:
        _integer(name, token_id, 0)
    return ids


def _texts(name: str, value: object) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else tuple(_list(name, _some(value)))
    for text in texts:
        if not isinstance(text, str) or not text:
            raise RequestError(f"{name} must be text, or a list of texts, none of them empty, not {shown(text)}")
    return texts


def _bad_word(word: object) -> str | tuple[int, ...]:
    if isinstance(word, str):
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"bad_words must be Unicode text: {error.reason} at character {error.start}") from error
        found: str | tuple[int, ...] = word
    else:
        found = _token_ids("bad_words", word)
    if not found:
        raise RequestError("bad_words must hold texts or lists of token ids, none of them empty")
    return found


def _biases(value: object) -> tuple[tuple[int, float], ...]:
    value = _some(value)
    pairs = list(value.items()) if isinstance(value, Mapping) else _list("logit_bias", value)
    for pair in pairs:
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise RequestError(f"logit_bias must give a number for each token id, not {shown(pair)}")
        _integer("logit_bias token ids", pair[0], 0)
        _real("logit_bias", pair[1], -MAX_WEIGHT, MAX_WEIGHT)
    biases = {int(token_id): float(bias) for token_id, bias in pairs}
    if len(biases) < len(pairs):
        raise RequestError("logit_bias must name each token id once")
    return tuple(sorted(biases.items()))


def _processors(value: object) -> tuple[LogitsProcessor, ...]:
    processors = tuple(_list("logits_processors", _some(value)))
    for processor in processors:
        wanted = StatefulLogitsProcessor if getattr(processor, "is_stateful", None) is True else LogitsProcessor
        if isinstance(processor, type) or not isinstance(processor, wanted):
            kind = processor.__name__ if isinstance(processor, type) else type(processor).__name__
            raise RequestError(f"logits_processors must hold objects with the methods of {wanted.__name__}, not {kind}")
        if not isinstance(processor.is_stateful, bool):
            raise RequestError(f"logits_processors: {type(processor).__name__}.is_stateful must be true or false")
    return processors
