"""The official client: tools, called freely or because they have to be, and what they return sent back."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionFunctionToolParam, ChatCompletionMessageParam
from pydantic import BaseModel, Field
from server.clients.teller import Teller

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Weather?"}]
WEATHER: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather somewhere.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "enum": ["Rome", "Oslo"]},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
            },
            "required": ["city", "days"],
            "additionalProperties": False,
        },
    },
}
TIME: ChatCompletionFunctionToolParam = {
    "type": "function",
    "function": {"name": "get_time", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
TOOLS = [WEATHER, TIME]
ROME = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}\n</tool_call>'
TIME_CALL = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
SPOKEN = f"Let me look.\n{ROME}\n{TIME_CALL}"


class Weather(BaseModel):
    """The weather somewhere."""

    city: Literal["Rome", "Oslo"]
    days: int = Field(ge=1, le=9)


def check_weather(arguments: str) -> None:
    found = json.loads(arguments)
    assert set(found) == {"city", "days"}
    assert found["city"] in ("Rome", "Oslo")
    assert found["days"] in range(1, 10)


def joined(stream: Any) -> tuple[str, dict[int, dict[str, Any]], str | None, int]:
    """The text, the calls by index, why it ended, and in how many pieces arguments came."""
    text, calls, reason, num_pieces = "", dict[int, dict[str, Any]](), None, 0
    for chunk in stream:
        (choice,) = chunk.choices
        text += choice.delta.content or ""
        for piece in choice.delta.tool_calls or []:
            if piece.id is not None:
                assert piece.type == "function"
                assert piece.index == len(calls)
                calls[piece.index] = {"id": piece.id, "name": piece.function.name, "arguments": ""}
            calls[piece.index]["arguments"] += piece.function.arguments or ""
            num_pieces += bool(piece.function.arguments)
        reason = choice.finish_reason or reason
    return text, calls, reason, num_pieces


@pytest.mark.parametrize("depth", [0, 3])
@pytest.mark.parametrize(
    "text", [SPOKEN, TIME_CALL, "Nothing.", "<tool_call>\n{no call", '<tool_call>\n{"name": "get_ti']
)
def test_a_stream_holds_all_tokens_of_an_answer_that_calls(
    told: Teller, told_client: OpenAI, depth: int, text: str
) -> None:
    told.tell(text, MESSAGES, TOOLS)
    options: dict[str, Any] = {"model": "model", "messages": MESSAGES, "tools": TOOLS, "temperature": 0, "n": 2}
    options |= {"logprobs": True, "top_logprobs": 1}
    extra = {"num_speculative_tokens": depth, "return_token_ids": True, "return_speculation": True}
    whole: Any = told_client.chat.completions.create(**options, extra_body=extra)
    chunks: Any = list(told_client.chat.completions.create(**options, extra_body=extra, stream=True))
    for choice in whole.choices:
        assert bool(choice.message.tool_calls) == (text in (SPOKEN, TIME_CALL))
        assert choice.message.tool_calls or choice.message.content == text
        mine = [each for chunk in chunks for each in chunk.choices if each.index == choice.index]
        extras = [each.model_extra or {} for each in mine]
        assert bytes(choice.token_ids) == text.encode() + b"\0"
        assert [token_id for each in extras for token_id in each.get("token_ids", [])] == choice.token_ids
        assert "".join(piece["text"] for each in extras for piece in each.get("pieces", [])) == text
        assert extras[-1]["speculation"]["token_depths"] == choice.speculation["token_depths"]
        scored = [score.bytes for each in mine if each.logprobs for score in each.logprobs.content]
        assert scored == [score.bytes for score in choice.logprobs.content] == [[byte] for byte in choice.token_ids]
        assert "".join(each.delta.content or "" for each in mine) == (choice.message.content or "")
        assert [each.finish_reason for each in mine if each.finish_reason] == [choice.finish_reason]


@pytest.mark.parametrize("depth", [0, 3])
def test_free_calls_are_read_from_the_text(told: Teller, told_client: OpenAI, depth: int) -> None:
    told.tell(SPOKEN, MESSAGES, TOOLS)
    options: dict[str, Any] = {"model": "model", "messages": MESSAGES, "tools": TOOLS, "temperature": 0}
    options["extra_body"] = {"num_speculative_tokens": depth}
    (choice,) = told_client.chat.completions.create(**options).choices
    assert choice.finish_reason == "tool_calls"
    assert (choice.message.content or "").strip() == "Let me look."
    calls: list[Any] = choice.message.tool_calls or []
    assert [call.function.name for call in calls] == ["get_weather", "get_time"]
    assert [json.loads(call.function.arguments) for call in calls] == [{"city": "Rome", "days": 3}, {}]
    assert len({call.id for call in calls}) == 2

    text, streamed, reason, num_pieces = joined(told_client.chat.completions.create(**options, stream=True))
    assert text == choice.message.content
    assert reason == "tool_calls"
    assert [call["name"] for call in streamed.values()] == ["get_weather", "get_time"]
    assert [call["arguments"] for call in streamed.values()] == [call.function.arguments for call in calls]
    assert num_pieces > 3  # as they came, not at the end


def test_one_call_where_no_more_are_allowed(told: Teller, told_client: OpenAI) -> None:
    told.tell(SPOKEN, MESSAGES, TOOLS)
    options: dict[str, Any] = {"model": "model", "messages": MESSAGES, "tools": TOOLS, "temperature": 0}
    options["parallel_tool_calls"] = False
    (choice,) = told_client.chat.completions.create(**options).choices
    assert [call.type for call in choice.message.tool_calls or []] == ["function"]
    _, streamed, reason, _ = joined(told_client.chat.completions.create(**options, stream=True))
    assert [call["name"] for call in streamed.values()] == ["get_weather"]
    assert reason == choice.finish_reason == "tool_calls"


def test_an_answer_without_a_call(told: Teller, told_client: OpenAI) -> None:
    text = "No <tool or {brace} is a call."
    told.tell(text, MESSAGES, TOOLS)
    options: dict[str, Any] = {"model": "model", "messages": MESSAGES, "tools": TOOLS, "temperature": 0}
    (choice,) = told_client.chat.completions.create(**options).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (text, None, "stop")
    assert joined(told_client.chat.completions.create(**options, stream=True))[:3] == (text, {}, "stop")


def test_a_choice_of_none_makes_calls_text(told: Teller, told_client: OpenAI) -> None:
    told.tell(ROME, MESSAGES)  # the model is not told of the tools
    (choice,) = told_client.chat.completions.create(
        model="model", messages=MESSAGES, tools=TOOLS, tool_choice="none", temperature=0
    ).choices
    assert (choice.message.content, choice.message.tool_calls, choice.finish_reason) == (ROME, None, "stop")


def test_the_stream_helper_of_the_client_puts_an_answer_together(told: Teller, told_client: OpenAI) -> None:
    told.tell(SPOKEN, MESSAGES, TOOLS)
    with told_client.chat.completions.stream(model="model", messages=MESSAGES, tools=TOOLS, temperature=0) as stream:
        done: list[Any] = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
        final = stream.get_final_completion()
    assert [(event.name, json.loads(event.arguments)) for event in done] == [
        ("get_weather", {"city": "Rome", "days": 3}),
        ("get_time", {}),
    ]
    assert final.choices[0].finish_reason == "tool_calls"
    told.tell("Hello there", MESSAGES)
    with told_client.chat.completions.stream(model="model", messages=MESSAGES, temperature=0) as stream:
        deltas = [event.delta for event in stream if event.type == "content.delta"]
        assert stream.get_final_completion().choices[0].message.content == "".join(deltas) == "Hello there"


def test_results_are_sent_back(told: Teller, told_client: OpenAI) -> None:
    told.tell(SPOKEN, MESSAGES, TOOLS)
    first = told_client.chat.completions.create(model="model", messages=MESSAGES, tools=TOOLS, temperature=0)
    message: Any = first.choices[0].message
    results: list[ChatCompletionMessageParam] = [
        {"role": "tool", "tool_call_id": call.id, "content": "sunny"} for call in message.tool_calls
    ]
    sent = message.model_dump(exclude_none=True)
    told.tell("It is sunny.", [*MESSAGES, sent, *results], TOOLS)
    for turn in (message, sent):
        second = told_client.chat.completions.create(
            model="model",
            messages=[*MESSAGES, turn, *results],
            tools=TOOLS,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
        assert second.choices[0].message.content == "It is sunny."
        prompt = bytes((second.model_extra or {})["prompt_token_ids"]).decode()
        assert '{"name": "get_weather", "arguments": {"city": "Rome", "days": 3}}' in prompt
        assert prompt.count("tool sunny") == 2


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_a_call_that_has_to_be_made_is_made(client: OpenAI, choice: Any, temperature: float) -> None:
    options: dict[str, Any] = {"model": "model", "messages": MESSAGES, "temperature": temperature, "seed": 5}
    options |= {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    (whole,) = client.chat.completions.create(**options).choices
    calls: list[Any] = whole.message.tool_calls or []
    assert len(calls) == 1
    assert whole.finish_reason == "tool_calls"
    assert whole.message.content is None
    name, arguments = calls[0].function.name, calls[0].function.arguments
    if name == "get_weather":
        check_weather(arguments)
    else:
        assert choice == "required"
        assert (name, json.loads(arguments)) == ("get_time", {})
    _, streamed, reason, _ = joined(client.chat.completions.create(**options, stream=True))
    assert reason == "tool_calls"
    assert [(call["name"], call["arguments"]) for call in streamed.values()] == [(name, arguments)]


def test_a_strict_tool_is_called_as_its_schema_says(told: Teller, told_client: OpenAI) -> None:
    tool = openai.pydantic_function_tool(Weather, name="get_weather")
    assert tool["function"]["strict"]
    wrong = ROME.replace("Rome", "Home").replace("3", "33")
    told.tell(wrong, MESSAGES, [tool])
    (choice,) = told_client.chat.completions.parse(
        model="model", messages=MESSAGES, tools=[tool], temperature=0
    ).choices
    (call,) = choice.message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)


def test_pydantic_tools_are_parsed(client: OpenAI) -> None:
    completion = client.chat.completions.parse(
        model="model",
        messages=MESSAGES,
        tools=[openai.pydantic_function_tool(Weather)],
        tool_choice={"type": "function", "function": {"name": "Weather"}},
        temperature=0,
    )
    (call,) = completion.choices[0].message.tool_calls or []
    assert isinstance(call.function.parsed_arguments, Weather)
    check_weather(call.function.arguments)


def test_several_choices_each_call(client: OpenAI) -> None:
    completion = client.chat.completions.create(
        model="model",
        messages=MESSAGES,
        tools=[WEATHER],
        tool_choice="required",
        n=3,
        seed=1,
        parallel_tool_calls=False,
    )
    for choice in completion.choices:
        (call,) = choice.message.tool_calls or []
        assert call.type == "function"
        check_weather(call.function.arguments)
    ids = [call.id for choice in completion.choices for call in choice.message.tool_calls or []]
    assert len(set(ids)) == 3
