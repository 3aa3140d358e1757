"""Tools that a model may call, and which of them it has to."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, Tag
from pydantic.types import Discriminator

from foredraft.server.protocol.body import Body, JsonObject, Text

MAX_TOOLS = 128

Name = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")]
"""A tool's or a schema's name."""


class FunctionDefinition(Body):
    """A function that a model may call. parameters: a JSON schema of an object; None if there are none."""

    name: Name
    description: Text | None = None
    parameters: JsonObject | None = None
    strict: bool = False


class Tool(Body):
    """Something that a model may call: a function."""

    type: Literal["function"]
    function: FunctionDefinition


class FunctionName(Body):
    """Which function is meant."""

    name: Name


class NamedTool(Body):
    """The one tool that has to be called."""

    type: Literal["function"]
    function: FunctionName


def _mode_or_name(value: object) -> str:
    return "<mode>" if value is None or isinstance(value, str | int | float | list) else "<function>"


ToolChoice = Annotated[
    Annotated[Literal["none", "auto", "required"], Tag("<mode>")] | Annotated[NamedTool, Tag("<function>")],
    Discriminator(_mode_or_name),
]


class FunctionCall(Body):
    """A call of a function. arguments: JSON text as the model wrote it, which may be anything."""

    name: Annotated[str, Field(min_length=1, max_length=256)]
    arguments: Text


class ToolCall(Body):
    """A call in an assistant's message."""

    id: Annotated[str, Field(max_length=256)]
    type: Literal["function"] = "function"
    function: FunctionCall
