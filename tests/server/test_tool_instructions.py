"""Tools for models whose chat template knows of none."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from foredraft.errors import RequestError
from foredraft.server.tools.events import CallArguments, CallStart
from foredraft.server.tools.formats import TOOL_FORMATS
from foredraft.server.tools.instructions import render_without_template, tool_instructions

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"ü": {}}}}},
    {"type": "function", "function": {"name": "g"}},
]


def call(name: str, arguments: object) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def test_the_instructions_hold_each_tool_as_json_and_the_format() -> None:
    text = tool_instructions(TOOLS)
    listed = text.partition("<tools>\n")[2].partition("\n</tools>")[0]
    assert [json.loads(line) for line in listed.splitlines()] == TOOLS
    assert "ü" in listed
    events = TOOL_FORMATS["hermes"].parser().add(text.partition("between tags:\n")[2])
    assert [event.name for event in events if isinstance(event, CallStart)] == ["the name"]


def test_a_conversation_with_calls_and_results() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
        {"role": "assistant", "content": None, "tool_calls": [call("f", '{"ü": "\\"1"}'), call("g", "")]},
        {"role": "tool", "tool_call_id": "call_f", "content": "one"},
        {"role": "tool", "tool_call_id": "call_g", "content": [{"type": "text", "text": "two"}]},
        {"role": "assistant", "content": "Once more.", "tool_calls": [call("f", {"ü": 2})]},
        {"role": "tool", "tool_call_id": "call_f", "content": None},
    ]
    before = copy.deepcopy(messages)
    rendered = render_without_template(messages, TOOLS)
    assert messages == before
    assert rendered == [
        {"role": "system", "content": f"Be brief.\n\n{tool_instructions(TOOLS)}"},
        messages[1],
        {
            "role": "assistant",
            "content": '<tool_call>\n{"name": "f", "arguments": {"ü": "\\"1"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        },
        {
            "role": "user",
            "content": "<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>",
        },
        {
            "role": "assistant",
            "content": 'Once more.\n<tool_call>\n{"name": "f", "arguments": {"ü": 2}}\n</tool_call>',
        },
        {"role": "user", "content": "<tool_response>\n\n</tool_response>"},
    ]


def test_calls_come_back_as_they_were() -> None:
    """What the assistant is shown to have written is read as the same calls."""
    (message,) = render_without_template(
        [{"role": "assistant", "tool_calls": [call("f", '{"a": "</tool_call>"}')]}], []
    )
    events = TOOL_FORMATS["hermes"].parser().add(message["content"])
    assert [event.name for event in events if isinstance(event, CallStart)] == ["f"]
    arguments = "".join(event.text for event in events if isinstance(event, CallArguments))
    assert json.loads(arguments) == {"a": "</tool_call>"}


def test_instructions_come_first_without_a_system_message() -> None:
    rendered = render_without_template([{"role": "user", "content": "Hello"}], TOOLS)
    assert rendered == [
        {"role": "system", "content": tool_instructions(TOOLS)},
        {"role": "user", "content": "Hello"},
    ]
    assert render_without_template([{"role": "user", "content": "Hello"}], []) == rendered[1:]


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        ({"role": "assistant", "tool_calls": [call("f", "{")]}, r"messages\[0\].tool_calls\[0\].function.arguments"),
        ({"role": "assistant", "tool_calls": [{"id": "1"}]}, r"messages\[0\].tool_calls\[0\].function must"),
        ({"role": "tool", "content": [{"type": "image_url"}]}, r"messages\[0\].content must be text"),
    ],
)
def test_what_cannot_be_text_is_refused(message: dict[str, Any], expected: str) -> None:
    with pytest.raises(RequestError, match=expected):
        render_without_template([message], TOOLS)
