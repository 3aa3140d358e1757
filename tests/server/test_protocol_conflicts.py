"""Fields that contradict each other, and what requests are read as."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foredraft.errors import RequestError
from foredraft.server.protocol.body import Body, read_body
from foredraft.server.protocol.chat import ChatCompletionRequest
from foredraft.server.protocol.completions import CompletionRequest
from foredraft.server.protocol.errors import ApiError
from foredraft.server.protocol.tokenization import DetokenizeRequest, TokenizeRequest
from foredraft.server.protocol.tools import NamedTool

USER = {"role": "user", "content": "x"}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
NAMED = {"type": "function", "function": {"name": "f"}}
JSON_FORMAT = {"type": "json_object"}


def completion(**fields: Any) -> CompletionRequest:
    return read_body(json.dumps({"prompt": "x"} | fields).encode(), CompletionRequest)


def chat(**fields: Any) -> ChatCompletionRequest:
    return read_body(json.dumps({"messages": [USER]} | fields).encode(), ChatCompletionRequest)


def refused(kind: type[Body], body: dict[str, Any]) -> ApiError:
    with pytest.raises(ApiError) as caught:
        read_body(json.dumps(body).encode(), kind)
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.message.startswith(caught.value.param)
    return caught.value


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": JSON_FORMAT, "structured_output": {"regex": "a"}}, "structured_output"),
        ({"response_format": JSON_FORMAT, "ignore_eos": True}, "ignore_eos"),
        ({"structured_output": {"regex": "a"}, "ignore_eos": True}, "ignore_eos"),
        ({"min_tokens": 17}, "min_tokens"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"min_tokens": 10**4000}, "min_tokens"),
        ({"max_tokens": 0, "logprobs": 1}, "max_tokens"),
        ({"best_of": 2, "n": 3}, "best_of"),
        ({"prompt": ["x"] * 2048, "n": 3}, "n"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
    ],
)
def test_conflicts_in_a_completion(fields: dict[str, Any], param: str) -> None:
    assert refused(CompletionRequest, {"prompt": "x"} | fields).param == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 3, "max_completion_tokens": 4}, "max_tokens"),
        ({"max_completion_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": "required", "tools": []}, "tool_choice"),
        ({"tool_choice": NAMED}, "tool_choice"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "g"}}, "tools": [TOOL]},
            "tool_choice.function.name",
        ),
        ({"tool_choice": {"type": "allowed_tools"}, "tools": [TOOL]}, "tool_choice.type"),
        ({"tool_choice": {"type": "function"}, "tools": [TOOL]}, "tool_choice.function"),
        ({"tool_choice": 3, "tools": [TOOL]}, "tool_choice"),
        ({"tool_choice": "f", "tools": [TOOL]}, "tool_choice"),
        ({"tools": [TOOL, TOOL]}, "tools.1.function.name"),
        ({"tools": 3}, "tools"),
        ({"tools": [3]}, "tools.0"),
        ({"tools": [{"type": "custom", "custom": {}}]}, "tools.0.type"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name"),
        ({"tools": [{"type": "function", "function": {"name": "x" * 65}}]}, "tools.0.function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": float("nan")}}}]},
            "tools.0.function.parameters",
        ),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"parallel_tool_calls": False}, "parallel_tool_calls"),
        ({"add_generation_prompt": True, "continue_final_message": True}, "continue_final_message"),
    ],
)
def test_conflicts_in_a_chat(fields: dict[str, Any], param: str) -> None:
    assert refused(ChatCompletionRequest, {"messages": [USER]} | fields).param == param


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        (None, "messages"),
        (3, "messages"),
        ({}, "messages"),
        ([3], "messages.0"),
        ([USER, {}], "messages.1.role"),
        ([{"role": "king", "content": "x"}], "messages.0.role"),
        ([{"role": "user"}], "messages.0.content"),
        ([{"role": "user", "content": None}], "messages.0.content"),
        ([{"role": "user", "content": 3}], "messages.0.content"),
        ([{"role": "user", "content": {}}], "messages.0.content"),
        ([{"role": "user", "content": []}], "messages.0.content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages.0.content.0.image_url.url"),
        ([{"role": "user", "content": [{"type": "input_audio"}]}], "messages.0.content.0.input_audio"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "messages.0.content.0.text"),
        ([{"role": "user", "content": "\ud800"}], "messages.0.content"),
        ([{"role": "user", "content": "x", "x": 1}], "messages.0.x"),
        ([{"role": "user", "content": "x", "tool_calls": [CALL]}], "messages.0.tool_calls"),
        ([{"role": "user", "content": "x", "tool_call_id": "1"}], "messages.0.tool_call_id"),
        ([{"role": "tool", "content": "x"}], "messages.0.tool_call_id"),
        ([{"role": "assistant", "tool_calls": [{"id": "1"}]}], "messages.0.tool_calls.0.function"),
        (
            [{"role": "assistant", "tool_calls": [CALL | {"function": {"name": "f", "arguments": {}}}]}],
            "messages.0.tool_calls.0.function.arguments",
        ),
        ([{"role": "assistant", "content": "x", "refusal": "no"}], "messages.0.refusal"),
        ([{"role": "assistant", "content": "x", "function_call": {}}], "messages.0.function_call"),
    ],
)
def test_bad_messages(messages: object, param: str) -> None:
    assert refused(ChatCompletionRequest, {"messages": messages}).param == param


def test_messages_that_clients_send() -> None:
    empty = {"role": "assistant", "content": ""}
    answer = {
        "role": "assistant",
        "content": None,
        "tool_calls": [CALL],
        "refusal": None,
        "annotations": [],
        "audio": None,
    }
    messages = [
        {"role": "developer", "content": "d", "name": "boss"},
        USER | {"type": "text"},
        empty,
        {"role": "assistant", "content": None},
        {"role": "assistant"},
        answer,
        {"role": "tool", "content": [{"type": "text", "text": "a"}], "tool_call_id": "1"},
    ]
    assert chat(messages=messages).conversation == [
        {"role": "developer", "content": "d", "name": "boss"},
        USER,
        empty,
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None},
        {"role": "assistant", "content": None, "tool_calls": [CALL]},
        {"role": "tool", "content": [{"type": "text", "text": "a"}], "tool_call_id": "1"},
    ]


def test_prompts_are_a_list_of_texts_or_of_ids() -> None:
    assert completion(prompt="a").prompts == ["a"]
    assert completion(prompt=["a", "b"]).prompts == ["a", "b"]
    assert completion(prompt=[1, 2]).prompts == [[1, 2]]
    assert completion(prompt=[[1], [2, 3]]).prompts == [[1], [2, 3]]


def test_usage_is_wanted_only_if_asked_for() -> None:
    assert not completion().wants_usage
    assert not completion(stream=True).wants_usage
    assert not completion(stream=True, stream_options={"include_usage": False}).wants_usage
    assert completion(stream=True, stream_options={"include_usage": True, "include_obfuscation": False}).wants_usage


def test_no_tokens_with_echo_or_prompt_logprobs() -> None:
    assert completion(max_tokens=0, echo=True, logprobs=1).sampling_params().max_tokens == 0
    assert completion(max_tokens=0, prompt_logprobs=1).sampling_params().prompt_logprobs == 1


def test_a_chat_has_one_limit_under_two_names() -> None:
    assert chat(max_tokens=3).sampling_params().max_tokens == 3
    assert chat(max_completion_tokens=3).sampling_params().max_tokens == 3
    assert chat(max_completion_tokens=3, max_tokens=3).sampling_params().max_tokens == 3


def test_logprobs_of_a_chat() -> None:
    assert chat().sampling_params().logprobs is None
    assert chat(logprobs=True).sampling_params().logprobs == 0
    assert chat(logprobs=True, top_logprobs=5).sampling_params().logprobs == 5


def test_negative_seeds_differ_and_are_in_range() -> None:
    seeds = [completion(seed=seed).sampling_params().seed for seed in (-1, -2, 5, -(2**63))]
    assert seeds == [2**63 - 1, 2**63 - 2, 5, 0]


def test_tools_and_their_choice() -> None:
    assert chat().effective_tool_choice == "none"
    assert chat(tools=[TOOL]).effective_tool_choice == "auto"
    assert chat(tools=[TOOL], tool_choice="required").effective_tool_choice == "required"
    choice = chat(tools=[TOOL], tool_choice=NAMED).effective_tool_choice
    assert isinstance(choice, NamedTool)
    assert choice.function.name == "f"
    assert chat(tools=[TOOL]).plain_tools == [TOOL]
    assert chat(tools=[]).plain_tools is None


def test_how_the_template_is_asked() -> None:
    assert chat().template_options["add_generation_prompt"] is True
    assert chat(continue_final_message=True).template_options["add_generation_prompt"] is False
    assert chat(add_generation_prompt=False).template_options["add_generation_prompt"] is False


@pytest.mark.parametrize(
    ("request_", "message", "param"),
    [
        (completion(), "prompt_token_ids must be between 0 and 5, not 7", "prompt"),
        (completion(), "the prompt has 30 tokens", "prompt"),
        (chat(), "the prompt has 30 tokens", "messages"),
        (chat(logprobs=True, top_logprobs=1), "logprobs must be at most 5", "top_logprobs"),
        (chat(max_completion_tokens=5), "max_tokens must be less", "max_completion_tokens"),
        (chat(response_format=JSON_FORMAT), "structured_output needs a tokenizer", "response_format"),
        (chat(structured_output={"regex": "("}), "structured_output.regex is bad", "structured_output"),
    ],
)
def test_the_engine_s_refusals_get_the_name_of_the_field_here(
    request_: CompletionRequest | ChatCompletionRequest, message: str, param: str
) -> None:
    error = request_.refused(RequestError(message))
    assert error.param == param
    assert message in error.message
    assert param in error.message


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "prompt"),
        ({"prompt": "x", "messages": [USER]}, "prompt"),
        ({"prompt": 3}, "prompt"),
        ({"prompt": [1]}, "prompt"),
        ({"messages": []}, "messages"),
        ({"prompt": "x", "tools": [TOOL]}, "tools"),
        ({"prompt": "x", "continue_final_message": True}, "continue_final_message"),
        ({"messages": [USER], "add_special_tokens": True}, "add_special_tokens"),
        ({"prompt": "x", "add_special_tokens": 1}, "add_special_tokens"),
        ({"prompt": "x", "y": 1}, "y"),
    ],
)
def test_bad_bodies_of_tokenize(body: dict[str, Any], param: str) -> None:
    assert refused(TokenizeRequest, body).param == param


@pytest.mark.parametrize("tokens", [None, 3, "x", [-1], ["1"], [1.0], [True], [[1]]])
def test_bad_bodies_of_detokenize(tokens: object) -> None:
    assert str(refused(DetokenizeRequest, {"tokens": tokens}).param).split(".")[0] == "tokens"


def test_tokenize_takes_a_text_or_a_conversation() -> None:
    assert read_body(b'{"prompt": ""}', TokenizeRequest).conversation is None
    body = json.dumps({"messages": [USER], "tools": [TOOL], "add_generation_prompt": False}).encode()
    request = read_body(body, TokenizeRequest)
    assert (request.conversation, request.plain_tools) == ([USER], [TOOL])
    assert read_body(b'{"tokens": []}', DetokenizeRequest).tokens == []
