"""The official client: output that has to look like something."""

from __future__ import annotations

import json
import re
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel, Field
from server.clients.teller import Teller

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "An animal"}]
NO_SPACE = {str(byte): -100 for byte in b" \t\r\n"}
"""A random model loves white space between values as much as anything."""


class Animal(BaseModel):
    """An animal."""

    kind: Literal["cat", "dog"]
    legs: int = Field(ge=1, le=4)
    tame: bool


@pytest.mark.parametrize("depth", [0, 3])
def test_a_pydantic_model_is_parsed(client: OpenAI, depth: int) -> None:
    completion = client.chat.completions.parse(
        model="model",
        messages=MESSAGES,
        response_format=Animal,
        temperature=0,
        logit_bias=NO_SPACE,
        extra_body={"num_speculative_tokens": depth},
    )
    (choice,) = completion.choices
    assert choice.finish_reason == "stop"
    assert isinstance(choice.message.parsed, Animal)
    with client.beta.chat.completions.stream(
        model="model", messages=MESSAGES, response_format=Animal, temperature=0, logit_bias=NO_SPACE
    ) as stream:
        for _ in stream:
            pass
        assert stream.get_final_completion().choices[0].message.parsed == choice.message.parsed


def test_a_json_schema(client: OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"values": {"type": "array", "items": {"enum": [1, 2]}, "minItems": 2, "maxItems": 2}},
        "required": ["values"],
        "additionalProperties": False,
    }
    for strict in (True, False):
        completion = client.chat.completions.create(
            model="model",
            messages=MESSAGES,
            response_format={
                "type": "json_schema",
                "json_schema": {"name": "values", "schema": schema, "strict": strict},
            },
            logit_bias=NO_SPACE,
            n=3,
            seed=2,
        )
        for choice in completion.choices:
            found = json.loads(choice.message.content or "")
            assert list(found) == ["values"]
            assert len(found["values"]) == 2
            assert set(found["values"]) <= {1, 2}
            assert choice.finish_reason == "stop"


def test_any_json_object(told: Teller, told_client: OpenAI) -> None:
    told.tell('{"a": [1, {"b": null}]}', MESSAGES)
    options: dict[str, Any] = {"model": "model", "messages": MESSAGES, "temperature": 0, "max_tokens": 200}
    options["response_format"] = {"type": "json_object"}
    said = told_client.chat.completions.create(**options).choices[0].message.content
    assert json.loads(said or "") == {"a": [1, {"b": None}]}
    told.tell('"text"', MESSAGES)  # it may not say so
    said = told_client.chat.completions.create(**options).choices[0].message.content
    assert (said or "").lstrip().startswith("{")


def test_free_text(told: Teller, told_client: OpenAI) -> None:
    told.tell("anything", MESSAGES)
    completion = told_client.chat.completions.create(
        model="model", messages=MESSAGES, temperature=0, response_format={"type": "text"}
    )
    assert completion.choices[0].message.content == "anything"


@pytest.mark.parametrize(
    ("structure", "pattern"),
    [
        ({"regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"choice": ["left", "right"]}, "left|right"),
        ({"grammar": 'start: "(" /[xy]{4}/ ")"'}, r"\([xy]{4}\)"),
        ({"json_schema": {"type": "integer", "minimum": 10, "maximum": 99}, "whitespace": False}, "[1-9][0-9]"),
        ({"json_schema": '{"const": "yes"}', "whitespace": False}, '"yes"'),
    ],
)
def test_our_own_structured_output(client: OpenAI, structure: dict[str, Any], pattern: str) -> None:
    extra = {"structured_output": structure}
    chat = client.chat.completions.create(model="model", messages=MESSAGES, seed=4, extra_body=extra).choices[0]
    completion = client.completions.create(model="model", prompt="a", max_tokens=64, seed=4, extra_body=extra).choices[
        0
    ]
    for text, reason in [(chat.message.content, chat.finish_reason), (completion.text, completion.finish_reason)]:
        assert re.fullmatch(pattern, text or "")
        assert reason == "stop"


def test_structure_after_free_text(told: Teller, told_client: OpenAI) -> None:
    told.tell("thinking...</think>no", MESSAGES)
    completion = told_client.chat.completions.create(
        model="model",
        messages=MESSAGES,
        temperature=0,
        extra_body={"structured_output": {"choice": ["yes", "maybe"], "after": "</think>"}},
    )
    thought, _, said = (completion.choices[0].message.content or "").partition("</think>")
    assert thought == "thinking..."
    assert said in ("yes", "maybe")


def test_an_answer_that_was_cut_off_is_said_to_be(client: OpenAI) -> None:
    with pytest.raises(openai.LengthFinishReasonError) as caught:
        client.chat.completions.parse(
            model="model", messages=MESSAGES, response_format=Animal, max_completion_tokens=5, temperature=0
        )
    assert caught.value.completion.usage is not None
    assert caught.value.completion.usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("response_format", "place"),
    [
        ({"type": "json_schema"}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "a b", "schema": {}}}, "response_format.json_schema.name"),
        ({"type": "xml"}, "response_format.type"),
        ({"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "nothing"}}}, "response_format"),
    ],
)
def test_a_format_that_cannot_be_followed(client: OpenAI, response_format: Any, place: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(model="model", messages=MESSAGES, response_format=response_format)
    assert caught.value.param == place
