"""What one request asks of the engine."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, fields
from typing import Any

from foredraft.errors import RequestError, UnsupportedOptionError

MAX_SEED = 2**63 - 1
MAX_TOP_K = 2**31 - 1
MAX_PRIORITY = 2**31 - 1

# Options that belong to the wide sampling surface, with the value that means "off". Any other value is refused.
_NOT_SUPPORTED_YET: dict[str, Any] = {
    "n": 1,
    "stop": None,
    "min_p": 0.0,
    "min_tokens": 0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "logit_bias": None,
    "bad_words": None,
    "allowed_token_ids": None,
    "logprobs": None,
    "prompt_logprobs": None,
    "structured_output": None,
    "logits_processors": None,
}


@dataclass(frozen=True)
class SamplingParams:
    """How to continue a prompt; validated on construction.

    temperature 0 is greedy (ties go to the lowest token id). max_tokens None means: until a stop or the context is
    full. seed None draws one from the operating system; with a seed, a request returns the same tokens alone and in
    any batch. num_speculative_tokens None takes the engine's; 0 is plain decoding. Requests share cached rows only with
    those of the same cache_salt. priority counts under the scheduling policy of that name: lower numbers run first.

    Raises RequestError, which names the field and the rule; UnsupportedOptionError for an option that is known but
    not supported yet (the fields below `priority` take their neutral value only).
    """

    max_tokens: int | None = None
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    num_speculative_tokens: int | None = None
    cache_salt: str | None = None
    priority: int = 0

    n: int = 1
    stop: Any = None
    min_p: float = 0.0
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    structured_output: Any = None
    logits_processors: Any = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop_token_ids", _token_ids(self.stop_token_ids))
        _integer("max_tokens", self.max_tokens, 1, optional=True)
        _real("temperature", self.temperature, 0.0, math.inf)
        _integer("top_k", self.top_k, 0, MAX_TOP_K)
        _real("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise RequestError("top_p must be greater than 0")
        _integer("seed", self.seed, 0, MAX_SEED, optional=True)
        _integer("num_speculative_tokens", self.num_speculative_tokens, 0, optional=True)
        if self.cache_salt is not None and not isinstance(self.cache_salt, str):
            raise RequestError(f"cache_salt must be text, not {self.cache_salt!r}")
        _integer("priority", self.priority, -MAX_PRIORITY, MAX_PRIORITY)
        for name in ("ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, not {getattr(self, name)!r}")
        for field in fields(self):
            _refuse_unsupported(field.name, getattr(self, field.name))


def _refuse_unsupported(name: str, value: Any) -> None:
    if name not in _NOT_SUPPORTED_YET:
        return
    neutral = _NOT_SUPPORTED_YET[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if value is not neutral and not (is_number and value == neutral):
        raise UnsupportedOptionError(f"{name}={value!r} is not supported yet; only {name}={neutral!r} is")


def _integer(name: str, value: object, low: int, high: int | None = None, *, optional: bool = False) -> None:
    if optional and value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, not {value!r}")
    if value < low or (high is not None and value > high):
        limit = f"between {low} and {high}" if high is not None else f"at least {low}"
        raise RequestError(f"{name} must be {limit}, not {value}")


def _real(name: str, value: object, low: float, high: float) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= sys.float_info.max:
        raise RequestError(f"{name} must be a finite number, not {value!s:.40}")
    if not low <= value <= high:
        limit = f"between {low} and {high}" if math.isfinite(high) else f"at least {low}"
        raise RequestError(f"{name} must be {limit}, not {value}")


def _token_ids(value: object) -> tuple[int, ...]:
    if isinstance(value, str | bytes) or not hasattr(value, "__iter__"):
        raise RequestError(f"stop_token_ids must be a list of token ids, not {value!r}")
    ids = tuple(value)
    for token_id in ids:
        _integer("stop_token_ids", token_id, 0)
    return ids
