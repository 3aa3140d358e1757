"""Faults seen in other servers' validation: what is wrong is a 4xx that names the field, and the next one is served."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from server.held_steps import held_steps
from server.open_connection import OpenConnection
from server.talking_server import CHAT, COMPLETIONS, VOCAB_SIZE, TalkingServer, talking_server

LENGTH = 96  # max_model_len (L)
MESSAGES = [{"role": "user", "content": "ab"}]
ASKED: dict[str, dict[str, Any]] = {COMPLETIONS: {"prompt": "abc"}, CHAT: {"messages": MESSAGES}}
START = 3  # of either


@pytest.fixture(scope="module")
def module_talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TalkingServer]:
    with talking_server(tmp_path_factory.mktemp("talking"), max_model_len=LENGTH) as talking:
        yield talking


@pytest.fixture
def talking(module_talking: TalkingServer) -> Iterator[TalkingServer]:
    """After every test, the next good request is served and nothing is held."""
    yield module_talking
    module_talking.serves()


@pytest.fixture(params=[COMPLETIONS, CHAT], ids=["completions", "chat"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[0, 3], ids=["K=0", "K=3"])
def depth(request: pytest.FixtureRequest) -> int:
    """Drafts a step (K)."""
    return int(request.param)


def text_of(path: str, choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if path == CHAT else choice["text"])


# -- conversations -----------------------------------------------------------------------------------------------------


def test_a_conversation_without_messages_is_refused(talking: TalkingServer) -> None:
    """Mintplex-Labs/anything-llm#6430, vllm-project/vllm#21089: it is bad input, not a fault of the server."""
    talking.refuses(CHAT, {"messages": []}, "messages")
    talking.refuses("/tokenize", {"messages": []}, "messages")


@pytest.mark.parametrize("content", ["", None])
def test_an_assistant_may_have_said_nothing(talking: TalkingServer, depth: int, content: str | None) -> None:
    """The same reports: an empty message of the assistant is taken, as the public API does."""
    talking.says("hello", 5)
    messages = [*MESSAGES, {"role": "assistant", "content": content}, {"role": "user", "content": "cd"}]
    body = {"messages": messages, "max_tokens": 5, "num_speculative_tokens": depth, "return_token_ids": True}
    answer = talking.ask(CHAT, **body)
    assert bytes(answer["prompt_token_ids"]) == b"abcd:"
    assert answer["choices"][0]["message"]["content"] == "hello"


# -- numbers -----------------------------------------------------------------------------------------------------------

NUMBERS = (
    "temperature",
    "top_p",
    "min_p",
    "typical_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-Infinity", "1e999", "-100", '"nan"', '"1"', "true", "[1]"])
def test_numbers_that_are_none(talking: TalkingServer, path: str, value: str) -> None:
    """sgl-project/sglang#28153, NVIDIA/TensorRT-LLM#17158, raullenchai/Rapid-MLX#740: no check is one-sided."""
    for field in NUMBERS:
        body = json.dumps(ASKED[path])[:-1] + f', "{field}": {value}}}'
        talking.refuses(path, body.encode(), field)


def test_numbers_below_their_range(talking: TalkingServer, path: str) -> None:
    """The same reports: -1 is a penalty, but none of these."""
    for field in ("temperature", "top_p", "min_p", "typical_p", "repetition_penalty"):
        talking.refuses(path, ASKED[path] | {field: -1}, field)


@pytest.mark.parametrize("value", ["NaN", "Infinity", "1.5", '"1"', "true", "-9223372036854775809"])
def test_integers_that_are_none(talking: TalkingServer, path: str, value: str) -> None:
    """The same reports, for whole numbers."""
    for field in ("n", "seed", "top_k", "min_tokens", "priority", "num_speculative_tokens", "max_tokens"):
        body = json.dumps(ASKED[path])[:-1] + f', "{field}": {value}}}'
        talking.refuses(path, body.encode(), field)


# -- token ids ---------------------------------------------------------------------------------------------------------


WRONG_BIASES: list[tuple[str, Any, str]] = [
    ("-1", 1, "logit_bias.-1"),
    (str(VOCAB_SIZE), 1, "logit_bias"),
    (str(2**31), 1, "logit_bias"),
    ("9" * 40, 1, "logit_bias." + "9" * 40),
    ("abc", 1, "logit_bias.abc"),
    ("1.0", 1, "logit_bias.1.0"),
    ("", 1, "logit_bias."),
    ("5", 1000, "logit_bias.5"),
    ("5", -101, "logit_bias.5"),
    ("5", float("nan"), "logit_bias.5"),
    ("5", float("inf"), "logit_bias.5"),
    ("5", "1", "logit_bias.5"),
    ("5", None, "logit_bias.5"),
]


def test_biases_of_what_is_no_token(talking: TalkingServer, path: str) -> None:
    """vllm-project/vllm#16529, sgl-project/sglang#7670: ids and values that would break the engine are refused."""
    for token_id, bias, param in WRONG_BIASES:
        body = json.dumps({**ASKED[path], "logit_bias": {token_id: bias}})
        assert "logit_bias" in talking.refuses(path, body.encode(), param)


def test_the_last_token_can_be_biased(talking: TalkingServer, path: str, depth: int) -> None:
    """The same reports: V - 1 is a token, and the bias has its effect."""
    talking.says("hello", START)
    options = {"max_tokens": 4, "num_speculative_tokens": depth, "return_token_ids": True}
    answer = talking.ask(path, **ASKED[path], **options, logit_bias={str(VOCAB_SIZE - 1): 100})
    assert answer["choices"][0]["token_ids"] == [VOCAB_SIZE - 1] * 4


def test_stop_tokens_outside_the_vocabulary_beside_another_request(talking: TalkingServer, depth: int) -> None:
    """vllm-project/vllm#54195: refused, with min_tokens too; the neighbour's logits are what they were."""
    talking.says("hello world" * 3, START)
    options = {"max_tokens": 30, "num_speculative_tokens": depth, "temperature": 0}
    expected = talking.ask(COMPLETIONS, prompt="abc", **options, logprobs=3)["choices"][0]
    with held_steps(talking.fake.engine) as held:
        body = {"prompt": "abc", **options, "logprobs": 3}
        neighbour = OpenConnection(talking.live.url, COMPLETIONS, body)
        held.wait_for_step()
        for token_id in (VOCAB_SIZE, 2**31, 2**63):
            wrong = {"prompt": "abc", "stop_token_ids": [token_id], "min_tokens": 1}
            refused = OpenConnection(talking.live.url, COMPLETIONS, wrong)
            talking.live.wait(lambda: talking.live.server.service.engine.num_open == 2, "the engine had it")
            held.let(1)  # what comes in is looked at between steps
            assert refused.json()["error"]["param"] == "stop_token_ids"
        held.free()
        assert neighbour.json()["choices"][0] == expected


def test_stop_tokens_that_are_none(talking: TalkingServer, path: str) -> None:
    """The same report: each is named with its place."""
    for token_id in (-1, 1.5, "5", None, True):
        talking.refuses(path, ASKED[path] | {"stop_token_ids": [1, token_id]}, "stop_token_ids.1")


@pytest.mark.parametrize("number", [-1, VOCAB_SIZE, 2**63])
def test_log_probabilities_of_ids_or_numbers_that_are_none(talking: TalkingServer, path: str, number: int) -> None:
    """sgl-project/sglang#28088: ids cannot be asked for, and the field says so; numbers of them are bounded."""
    for field in ("logprob_token_ids", "token_ids_logprob"):
        talking.refuses(path, ASKED[path] | {field: [number]}, field)
    talking.refuses(path, ASKED[path] | {"prompt_logprobs": number}, "prompt_logprobs")
    if path == CHAT:
        talking.refuses(path, ASKED[path] | {"logprobs": True, "top_logprobs": number}, "top_logprobs")
    talking.refuses(path, ASKED[path] | {"logprobs": number}, "logprobs")


@pytest.mark.parametrize("token_id", [-1, VOCAB_SIZE, 2**63])
def test_other_ids_outside_the_vocabulary(talking: TalkingServer, token_id: int) -> None:
    """The whole kind: prompts, bad words, allowed ids and ids to decode."""
    ids = [65, token_id]
    place = "" if token_id >= 0 else ".1"
    talking.refuses(COMPLETIONS, {"prompt": ids}, f"prompt{place}")
    talking.refuses(COMPLETIONS, {"prompt": [[65], ids]}, "prompt" if not place else "prompt.1.1")
    talking.refuses(COMPLETIONS, {"prompt": "a", "allowed_token_ids": ids}, f"allowed_token_ids{place}")
    talking.refuses(COMPLETIONS, {"prompt": "a", "bad_words": [ids]}, "bad_words" if not place else "bad_words.0.1")
    talking.refuses("/detokenize", {"tokens": ids}, f"tokens{place}")


# -- bodies ------------------------------------------------------------------------------------------------------------

PATHS = [COMPLETIONS, CHAT, "/tokenize", "/detokenize"]
BODIES = [b"[]", b"null", b"5", b'"text"', b"true", b"", b"{", b'{"prompt": ', b"\xff\xfe", b"[" * 100_000, b"9" * 5000]


@pytest.mark.parametrize("endpoint", PATHS)
def test_bodies_that_are_no_objects(talking: TalkingServer, endpoint: str) -> None:
    """vllm-project/vllm#42961, vllm-project/vllm#54026: whatever is sent, it is bad input."""
    for body in BODIES:
        assert "body" in talking.refuses(endpoint, body, None)


WRONG_TYPES = [3, "x", True, {"a": 1}, [3], [[]], 1.5, [None], "\ud800"]
CHAT_FIELDS = ["messages", "stop", "tools", "n", "stream", "stream_options", "logit_bias", "tool_choice", "metadata"]
COMPLETION_FIELDS = ["prompt", "stop", "n", "stream", "echo", "logprobs", "bad_words", "response_format", "logit_bias"]


@pytest.mark.parametrize("value", WRONG_TYPES)
def test_fields_of_the_wrong_type(talking: TalkingServer, value: Any) -> None:
    """The same reports: the field is named, with the place in it. What has the right type for a field is left out."""
    right = {int: {"n", "logprobs"}, str: {"stop", "prompt"}, bool: {"stream", "echo"}}.get(type(value), set())
    right = right | ({"prompt", "bad_words"} if value == [3] else set())
    for path, fields in ((CHAT, CHAT_FIELDS), (COMPLETIONS, COMPLETION_FIELDS)):
        for field in fields:
            if field not in right or value == "\ud800":
                response = talking.post(path, ASKED[path] | {field: value})
                assert response.status_code == 400, (field, response.text)
                assert str(response.json()["error"]["param"]).split(".")[0] == field


WRONG_FORMATS: list[tuple[Any, str]] = [
    ({"type": "json_schema", "schema": {"type": "object"}}, "response_format.schema"),
    ({"type": "json_schema"}, "response_format.json_schema"),
    ({"type": "json_schema", "json_schema": {"type": "object"}}, "response_format.json_schema.name"),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": 3}}, "response_format.json_schema.schema"),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": []}}, "response_format.json_schema.schema"),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": "{}"}}, "response_format.json_schema.schema"),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "x"}}}, "response_format"),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 3}}}, "response_format"),
    ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": "#/no"}}}, "response_format"),
    ({"type": "json_schema", "json_schema": []}, "response_format.json_schema"),
    ({"type": "json_schema", "json_schema": "x"}, "response_format.json_schema"),
    ({"type": "json_object", "json_schema": {"name": "a", "schema": {}}}, "response_format.json_schema"),
    ({"type": "xml"}, "response_format.type"),
    ({"type": None}, "response_format.type"),
    ({"type": ["text"]}, "response_format.type"),
    ({}, "response_format.type"),
    ([], "response_format"),
    ("json_object", "response_format"),
    (3, "response_format"),
]


def test_a_wrong_response_format(talking: TalkingServer, path: str) -> None:
    """vllm-project/vllm#35438: every wrong shape is refused by the field's name."""
    for response_format, param in WRONG_FORMATS:
        talking.refuses(path, ASKED[path] | {"response_format": response_format, "max_tokens": 5}, param)


# -- budgets -----------------------------------------------------------------------------------------------------------


def test_no_tokens_only_with_echo(talking: TalkingServer, depth: int) -> None:
    """vllm-project/vllm#10432: max_tokens=0 scores or echoes the prompt, or is refused; below 0 it always is."""
    talking.says("hello", START)
    options: dict[str, Any] = {"num_speculative_tokens": depth, "return_token_ids": True}
    talking.refuses(COMPLETIONS, {"prompt": "abc", "max_tokens": 0}, "max_tokens")
    talking.refuses(CHAT, {"messages": MESSAGES, "max_tokens": 0}, "max_tokens")
    talking.refuses(CHAT, {"messages": MESSAGES, "max_completion_tokens": 0}, "max_completion_tokens")
    for path in (COMPLETIONS, CHAT):
        talking.refuses(path, ASKED[path] | {"max_tokens": -1}, "max_tokens")
    answer = talking.ask(COMPLETIONS, prompt="abc", max_tokens=0, echo=True, logprobs=1, **options)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("abc", [], "length")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c"]
    assert choice["logprobs"]["token_logprobs"][0] is None
    assert answer["usage"]["completion_tokens"] == 0
    events = talking.stream(COMPLETIONS, prompt="abc", max_tokens=0, echo=True, **options)
    assert (events.choice().text, events.choice().token_ids) == ("abc", ())
    assert talking.fake.drafter.drafted == []


def test_one_token_needs_no_draft(talking: TalkingServer, path: str, depth: int) -> None:
    """The same report: max_tokens=1 is one token, for which nothing is drafted."""
    talking.says("hello", START)
    answer = talking.ask(path, **ASKED[path], max_tokens=1, num_speculative_tokens=depth)
    assert (text_of(path, answer["choices"][0]), answer["usage"]["completion_tokens"]) == ("h", 1)
    assert talking.fake.drafter.drafted == []


def test_null_is_the_default_budget(talking: TalkingServer, path: str, depth: int) -> None:
    """The same report: null and nothing are the same, 16 tokens of a completion and the whole context of a chat."""
    talking.says("hello", START)
    expected = 16 if path == COMPLETIONS else LENGTH - START
    for options in ({}, {"max_tokens": None}):
        answer = talking.ask(path, **ASKED[path], **options, num_speculative_tokens=depth)
        assert answer["usage"]["completion_tokens"] == expected


@pytest.mark.parametrize("max_tokens", [LENGTH, LENGTH - START, LENGTH - START + 1, 2**31, 2**63, 10**100])
def test_a_budget_beyond_the_context_is_cut_down(
    talking: TalkingServer, path: str, depth: int, max_tokens: int
) -> None:
    """vllm-project/vllm#42474, vllm-project/vllm#19861, vllm-project/vllm#33418: as much as fits, no overflow."""
    talking.says("hello", START)
    body = {**ASKED[path], "max_tokens": max_tokens, "num_speculative_tokens": depth}
    answer = talking.ask(path, **body)
    assert answer["usage"]["completion_tokens"] == LENGTH - START
    assert answer["choices"][0]["finish_reason"] == "length"
    assert talking.stream(path, **body).usage == answer["usage"] | {
        "prompt_tokens_details": {"cached_tokens": 0}  # fewer rows than one block
    }


def test_a_prompt_that_leaves_no_room_is_refused_with_true_numbers(talking: TalkingServer) -> None:
    """The same reports: the message says how long the prompt is and how long it may be."""
    talking.says("hello", LENGTH - 1)
    for length in (LENGTH, LENGTH + 1, 10 * LENGTH):
        message = talking.refuses(COMPLETIONS, {"prompt": "a" * length}, "prompt")
        assert str(length) in message
        assert str(LENGTH) in message
        messages = [{"role": "user", "content": "a" * (length - 1)}]
        assert str(length) in talking.refuses(CHAT, {"messages": messages}, "messages")
    answer = talking.ask(COMPLETIONS, prompt="a" * (LENGTH - 1), max_tokens=5)
    assert answer["usage"]["completion_tokens"] == 1
