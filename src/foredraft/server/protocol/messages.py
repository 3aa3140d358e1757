"""The messages of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, Tag, model_validator
from pydantic.types import Discriminator

from foredraft.server.protocol.body import Body, Text, refusal
from foredraft.server.protocol.neutral import NeutralMessageFields
from foredraft.server.protocol.tools import MAX_TOOLS, ToolCall

MAX_MESSAGES = 16_384
MAX_PARTS = 4_096


class TextPart(Body):
    """One part of a message. Images, sound and files are refused: `type` can only be text."""

    type: Literal["text"]
    text: Text


def _text_or_parts(value: object) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


Content = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[TextPart], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS), Tag("<parts>")],
    Discriminator(_text_or_parts),
]


class Message(NeutralMessageFields):
    """A message of a conversation. Only an assistant's may be without content, and only it may have tool_calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(default=None, description="Text, or parts that are text. Null: an assistant's.")
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise refusal("content", f"is required in a message of role {self.role}")
        if self.tool_calls and self.role != "assistant":
            raise refusal("tool_calls", f"must be in a message of role assistant, not {self.role}")
        if self.role == "tool" and self.tool_call_id is None:
            raise refusal("tool_call_id", "is required in a message of role tool")
        if self.tool_call_id is not None and self.role != "tool":
            raise refusal("tool_call_id", f"must be in a message of role tool, not {self.role}")
        return self

    def plain(self) -> dict[str, Any]:
        """As JSON has it, without what is not there; `content` always is."""
        return {"content": None} | self.model_dump(exclude_none=True, exclude=set(NeutralMessageFields.model_fields))


Messages = Annotated[list[Message], Field(fail_fast=True, min_length=1, max_length=MAX_MESSAGES)]
