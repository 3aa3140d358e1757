"""Tools for models whose chat template does not know of any: all is said in plain messages, in Hermes' format."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from foredraft.errors import RequestError, shown
from foredraft.server.tools.function import json_text


def tool_instructions(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a system message says about tools: which there are, and how to call them. RequestError if not JSON."""
    lines = [json_text(tool, f"tools[{index}]") for index, tool in enumerate(tools)]
    return "\n".join(
        [
            "You may call functions to help with the user's request. These are their signatures, one a line, as JSON "
            "schemas:",
            "<tools>",
            *lines,
            "</tools>",
            "For each call, write a JSON object with the function's name and its arguments between tags:",
            "<tool_call>",
            '{"name": "the name", "arguments": {"argument": "value"}}',
            "</tool_call>",
            "What a function returns comes in the next message, between <tool_response> and </tool_response>.",
        ]
    )


def render_without_template(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The messages for a template that knows neither tools nor calls nor results; what is given is not changed.

    Calls become text of the assistant, results a message of the user, several in a row one; the instructions join the
    first message if it is the system's, or come before it. Raises RequestError, which names the message.
    """
    rendered: list[dict[str, Any]] = []
    follows_result = False
    for index, message in enumerate(messages):
        role, content = message.get("role"), message.get("content")
        if role == "tool":
            text = f"<tool_response>\n{_text(content, index)}\n</tool_response>"
            if follows_result:
                rendered[-1]["content"] += f"\n{text}"
            else:
                rendered.append({"role": "user", "content": text})
        elif calls := message.get("tool_calls"):
            texts = [_call_text(call, f"messages[{index}].tool_calls[{at}]") for at, call in enumerate(calls)]
            others = {key: value for key, value in message.items() if key != "tool_calls"}
            rendered.append(others | {"content": "\n".join(filter(None, [_text(content, index), *texts]))})
        else:
            rendered.append(dict(message))
        follows_result = role == "tool"
    if tools:
        instructions = tool_instructions(tools)
        if rendered and rendered[0].get("role") in ("system", "developer"):
            text = _text(rendered[0].get("content"), 0)
            rendered[0] = rendered[0] | {"content": f"{text}\n\n{instructions}" if text else instructions}
        else:
            rendered.insert(0, {"role": "system", "content": instructions})
    return rendered


def _call_text(call: Mapping[str, Any], field: str) -> str:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{field}.function must be an object with a name, not {shown(function)}")
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            raise RequestError(f"{field}.function.arguments must be JSON, not {shown(arguments)}") from None
    call_text = json_text({"name": function["name"], "arguments": {} if arguments is None else arguments}, field)
    return f"<tool_call>\n{call_text}\n</tool_call>"


def _text(content: object, index: int) -> str:
    """Content that is text, or a list of parts of text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(f"messages[{index}].content must be text, or parts that are text, beside tools")
    return "".join(map(str, texts))
