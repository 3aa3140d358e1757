"""What SamplingParams accepts, how it keeps it, and what it says of the rest."""

from __future__ import annotations

import math
import pickle
from dataclasses import fields, replace
from enum import IntEnum
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from torch import Tensor

from foredraft import SamplingParams
from foredraft.errors import RequestError
from foredraft.logits_processor import TokenHistory
from foredraft.sampling_params import (
    MAX_CHOICES,
    MAX_FACTOR,
    MAX_PRIORITY,
    MAX_SEED,
    MAX_TEMPERATURE,
    MAX_TOP_K,
    MAX_WEIGHT,
)
from foredraft.structured_output import StructuredOutput

HUGE = 10**5000
"""More digits than Python turns into text."""
LONGEST_MESSAGE = 300

LOWEST: dict[str, int | float] = {
    "max_tokens": 0,
    "min_tokens": 0,
    "repetition_penalty": 1 / MAX_FACTOR,
    "presence_penalty": -MAX_WEIGHT,
    "frequency_penalty": -MAX_WEIGHT,
    "temperature": 0.0,
    "top_k": 0,
    "min_p": 0.0,
    "n": 1,
    "seed": 0,
    "logprobs": 0,
    "prompt_logprobs": 0,
    "num_speculative_tokens": 0,
    "priority": -MAX_PRIORITY,
}
HIGHEST: dict[str, int | float] = {
    "repetition_penalty": MAX_FACTOR,
    "presence_penalty": MAX_WEIGHT,
    "frequency_penalty": MAX_WEIGHT,
    "temperature": MAX_TEMPERATURE,
    "top_k": MAX_TOP_K,
    "top_p": 1.0,
    "min_p": 1.0,
    "typical_p": 1.0,
    "n": MAX_CHOICES,
    "seed": MAX_SEED,
    "priority": MAX_PRIORITY,
}
INTEGERS = (
    "max_tokens",
    "min_tokens",
    "top_k",
    "n",
    "seed",
    "logprobs",
    "prompt_logprobs",
    "num_speculative_tokens",
    "priority",
)
OPTIONAL = ("max_tokens", "seed", "logprobs", "prompt_logprobs", "num_speculative_tokens", "cache_salt")
REALS = (
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
)
FLAGS = ("ignore_eos", "include_stop_str_in_output", "echo", "skip_special_tokens")
LISTS = ("stop_token_ids", "allowed_token_ids", "bad_words", "logit_bias", "logits_processors")


class Number(IntEnum):
    THREE = 3


class Rule:
    is_stateful = False

    def process(self, history: TokenHistory, logits: Tensor) -> Tensor:
        return logits


class Memory(Rule):
    is_stateful = True

    def advance(self, token_id: int) -> None:
        pass

    def clone(self) -> Memory:
        return Memory()


def refuse(**settings: Any) -> str:
    """The message, which is short and names the field that it is about."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**settings)
    message = str(caught.value)
    assert len(message) <= LONGEST_MESSAGE
    return message


def test_every_field_is_tried() -> None:
    tried = {*LOWEST, *HIGHEST, *OPTIONAL, *FLAGS, *LISTS, *REALS, *INTEGERS, "stop", "structured_output"}
    assert tried == {field.name for field in fields(SamplingParams)}


@pytest.mark.parametrize("limits", [LOWEST, HIGHEST])
def test_limits_are_allowed(limits: dict[str, int | float]) -> None:
    for name, value in limits.items():
        assert getattr(SamplingParams(**{name: value}), name) == value  # type: ignore[arg-type]


@pytest.mark.parametrize("name", LOWEST)
def test_below_the_lowest(name: str) -> None:
    lowest = LOWEST[name]
    below = lowest - 1 if isinstance(lowest, int) else math.nextafter(lowest, -math.inf)
    assert refuse(**{name: below}).startswith(f"{name} must be ")


@pytest.mark.parametrize("name", [name for name in HIGHEST if name != "temperature"])
def test_above_the_highest(name: str) -> None:
    highest = HIGHEST[name]
    above = highest + 1 if isinstance(highest, int) else math.nextafter(highest, math.inf)
    assert refuse(**{name: above}).startswith(f"{name} must be ")


@pytest.mark.parametrize("name", ["top_p", "typical_p"])
def test_a_share_is_more_than_nothing(name: str) -> None:
    assert refuse(**{name: 0}) == f"{name} must be greater than 0"
    assert getattr(SamplingParams(**{name: 5e-324}), name) == 5e-324  # type: ignore[arg-type]


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [1.0, "1", True, [1], np.int64(1), np.float64(1), math.nan, b"1"])
def test_integers_of_another_kind(name: str, value: Any) -> None:
    assert refuse(**{name: value}).startswith(f"{name} must be an integer, not ")


@pytest.mark.parametrize("name", REALS)
@pytest.mark.parametrize(
    "value", ["1", True, None, [1.0], 1j, np.float32(1), np.int64(1), math.nan, math.inf, -math.inf]
)
def test_numbers_of_another_kind(name: str, value: Any) -> None:
    assert refuse(**{name: value}).startswith(f"{name} must be a finite number, not ")


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("value", [1, 0, None, "true", np.bool_(True)])
def test_flags_of_another_kind(name: str, value: Any) -> None:
    assert refuse(**{name: value}).startswith(f"{name} must be true or false, not ")


@pytest.mark.parametrize("name", [*LISTS, "stop"])
@pytest.mark.parametrize("value", [5, 1.5, b"ab", True])
def test_lists_of_another_kind(name: str, value: Any) -> None:
    assert refuse(**{name: value}).startswith(f"{name} must be ")


def assert_short(name: str, value: Any) -> None:
    """If `value` is refused, then with a short message that names the field."""
    try:
        SamplingParams(**{name: value})
    except RequestError as error:
        message = str(error)
    else:
        return
    assert len(message) <= LONGEST_MESSAGE
    assert message.startswith(name)


@pytest.mark.parametrize("name", [*INTEGERS, *REALS, *FLAGS, *LISTS, "stop", "cache_salt", "structured_output"])
def test_messages_are_bounded(name: str) -> None:
    values: list[Any] = ["x" * 10_000, ["x"] * 10_000, [-1] * 10_000, {"a": "x" * 10_000}]
    for value in values:
        assert_short(name, value)


@pytest.mark.parametrize("number", [HUGE, -HUGE, 10**4000], ids=["huge", "negative", "long"])
@pytest.mark.parametrize("name", [*INTEGERS, *REALS, *FLAGS, *LISTS, "stop", "cache_salt"])
def test_numbers_too_long_to_print(name: str, number: int) -> None:
    assert_short(name, number)
    assert_short(name, [number])
    assert_short(name, [[number]])
    assert_short(name, {number: 1.0})
    assert_short(name, {1: number})


def test_min_tokens_is_at_most_max_tokens() -> None:
    assert SamplingParams(max_tokens=3, min_tokens=3).min_tokens == 3
    assert refuse(max_tokens=2, min_tokens=3) == "min_tokens must be at most max_tokens=2, not 3"
    assert "min_tokens must be at most" in refuse(max_tokens=2, min_tokens=HUGE)


@pytest.mark.parametrize("name", OPTIONAL)
def test_none_where_it_means_something(name: str) -> None:
    assert getattr(SamplingParams(**{name: None}), name) is None  # type: ignore[arg-type]


@pytest.mark.parametrize("name", [*(name for name in INTEGERS if name not in OPTIONAL), *REALS, *FLAGS])
def test_none_where_it_means_nothing(name: str) -> None:
    assert refuse(**{name: None}).startswith(f"{name} must be ")


# -- lists -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_token_ids(name: str) -> None:
    for value in ([3, 1, 3], (3, 1, 3), iter([3, 1, 3]), dict.fromkeys([3, 1]).keys()):
        found = getattr(SamplingParams(**{name: value}), name)  # type: ignore[arg-type]
        assert isinstance(found, tuple)
        assert found[:2] == (3, 1)
    for entry in (-1, 1.0, True, "1", None, np.int64(1)):
        assert refuse(**{name: [3, entry]}).startswith(f"{name} must be ")
    assert getattr(SamplingParams(**{name: [Number.THREE]}), name) == (3,)  # type: ignore[arg-type]
    assert refuse(**{name: np.array([1, 2])}).startswith(f"{name} must be an integer")


def test_allowed_token_ids_leave_something() -> None:
    assert SamplingParams().allowed_token_ids is None
    assert refuse(allowed_token_ids=[]) == "allowed_token_ids must name at least one token"


def test_stop() -> None:
    assert SamplingParams(stop="END").stop == ("END",)
    assert SamplingParams(stop=["a", "bc"]).stop == ("a", "bc")
    assert SamplingParams(stop=None).stop == ()  # type: ignore[arg-type]
    for value in ("", [""], ["a", ""], [1], [None], [["a"]], {"a": 1}):
        assert refuse(stop=value).startswith("stop must be ")


def test_bad_words() -> None:
    assert SamplingParams(bad_words=["no", [3, 4], (5,)]).bad_words == ("no", (3, 4), (5,))
    wrong: list[Any] = [["no", ""], [[]], [[1], []], [[-1]], [[1.0]], [3], [None], "word", [[True]]]
    for value in wrong:
        assert refuse(bad_words=value).startswith("bad_words must ")
    assert "surrogates not allowed at character 1" in refuse(bad_words=["a\ud800"])


def test_logit_bias() -> None:
    expected = ((2, -1.0), (5, 0.5))
    mappings: list[Any] = [{5: 0.5, 2: -1}, MappingProxyType({5: 0.5, 2: -1.0})]
    for value in [*mappings, [(5, 0.5), [2, -1]], ((2, -1), (5, 0.5))]:
        params = SamplingParams(logit_bias=value)
        assert params.logit_bias == params.biases == expected
    assert SamplingParams(logit_bias={3: MAX_WEIGHT, 4: -MAX_WEIGHT}).biases == ((3, MAX_WEIGHT), (4, -MAX_WEIGHT))
    assert SamplingParams(logit_bias=None).biases == ()  # type: ignore[arg-type]
    assert refuse(logit_bias=[(1, 0.5), (1, 0.25)]) == "logit_bias must name each token id once"
    wrong: list[Any] = [{-1: 0.0}, {"1": 0.0}, {1.0: 0.0}, {True: 0.0}, {1: "x"}, {1: True}, {1: None}, {1: math.nan}]
    wrong += [{1: math.inf}, {1: -math.inf}, {1: 1.01 * MAX_WEIGHT}, [1], [(1,)], [(1, 2, 3)], ["ab"], [{1: 2}]]
    wrong += [{np.int64(1): 0.0}, {1: np.float32(0.5)}]
    for value in wrong:
        assert refuse(logit_bias=value).startswith(("logit_bias must ", "logit_bias token ids must "))


def test_logits_processors() -> None:
    rule, memory = Rule(), Memory()
    assert SamplingParams(logits_processors=[rule, memory]).logits_processors == (rule, memory)
    assert SamplingParams(logits_processors=None).logits_processors == ()  # type: ignore[arg-type]

    class Forgetful(Rule):
        is_stateful = True

    class Vague(Rule):
        is_stateful: Any = 1

    class Silent:
        is_stateful = False

    for processor in (Forgetful(), Vague(), Silent(), Rule, Memory, None, 3, lambda history, logits: logits):
        assert refuse(logits_processors=[rule, processor]).startswith("logits_processors")
    assert "not Rule" in refuse(logits_processors=[Rule])
    assert "StatefulLogitsProcessor, not Forgetful" in refuse(logits_processors=[Forgetful()])


def test_structured_output() -> None:
    wanted = StructuredOutput(regex="a+")
    assert SamplingParams(structured_output=wanted).structured_output is wanted
    assert refuse(structured_output={"regex": "a+"}) == "structured_output must be a StructuredOutput, not dict"
    assert "ignore_eos must be false" in refuse(structured_output=wanted, ignore_eos=True)


def test_cache_salt() -> None:
    assert SamplingParams(cache_salt="").cache_salt == ""
    for value in (1, b"a", ["a"]):
        assert refuse(cache_salt=value).startswith("cache_salt must be text, not ")


# -- the record --------------------------------------------------------------------------------------------------------

FULL = SamplingParams(
    max_tokens=9,
    min_tokens=2,
    stop=["a"],
    stop_token_ids=[3],
    logit_bias={3: 1},
    bad_words=["x", [1, 2]],
    allowed_token_ids=[4, 5],
    structured_output=StructuredOutput(choice=["yes"]),
    temperature=0.5,
    seed=7,
    n=3,
    cache_salt="salt",
)


def test_it_is_a_value() -> None:
    assert replace(FULL) == FULL
    assert hash(replace(FULL)) == hash(FULL)
    assert pickle.loads(pickle.dumps(FULL)) == FULL
    changed = replace(FULL, temperature=0.25, stop="b")
    assert (changed.temperature, changed.stop, changed.biases) == (0.25, ("b",), ((3, 1.0),))
    assert changed != FULL
    with pytest.raises(RequestError, match="temperature"):
        replace(FULL, temperature=-1)
    with pytest.raises(AttributeError):
        FULL.n = 2  # type: ignore[misc]


def test_the_callers_lists_may_change_afterwards() -> None:
    words, biases, ids = [[1, 2]], {3: 1.0}, [4]
    params = SamplingParams(bad_words=words, logit_bias=biases, allowed_token_ids=ids)
    words[0].append(3)
    biases[9] = 1.0
    ids.clear()
    assert (params.bad_words, params.biases, params.allowed_token_ids) == (((1, 2),), ((3, 1.0),), (4,))


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        ({}, False),
        ({"temperature": 1.0, "top_k": 3, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.5}, False),
        ({"stop": "a", "stop_token_ids": [1], "ignore_eos": True, "logprobs": 3, "n": 2, "seed": 1}, False),
        ({"logit_bias": {}, "bad_words": [], "logits_processors": []}, False),
        ({"logit_bias": {1: 0.0}}, True),
        ({"repetition_penalty": 1.1}, True),
        ({"presence_penalty": -0.1}, True),
        ({"frequency_penalty": 0.1}, True),
        ({"bad_words": [[1]]}, True),
        ({"min_tokens": 1}, True),
        ({"allowed_token_ids": [1]}, True),
        ({"structured_output": StructuredOutput(regex="a")}, True),
        ({"logits_processors": [Rule()]}, True),
    ],
)
def test_changes_logits(settings: dict[str, Any], changes: bool) -> None:
    assert SamplingParams(**settings).changes_logits is changes
