"""The messages of a conversation."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, Tag, model_validator
from pydantic.types import Discriminator

from foredraft.errors import shown
from foredraft.server.protocol.body import Body, Text, refusal
from foredraft.server.protocol.neutral import NeutralMessageFields
from foredraft.server.protocol.tools import MAX_TOOLS, ToolCall

MAX_MESSAGES = 16_384
MAX_PARTS = 4_096


MediaText = Annotated[str, Field(max_length=1 << 30)]
"""What the body may be as large as."""


class TextPart(Body):
    """A part of a message that is text."""

    type: Literal["text"]
    text: Text

    @model_validator(mode="before")
    @classmethod
    def _check_type(cls, value: Any) -> Any:
        if isinstance(value, dict) and isinstance(kind := value.get("type"), str) and kind != "text":
            raise refusal("type", f"must be text, image_url or input_audio, not {shown(kind)}")
        return value


class ImageUrl(Body):
    """Where an image is."""

    url: MediaText = Field(description="A data URL in base64; file:// and https:// where the server allows them.")
    detail: Literal["auto"] = Field(default="auto", description="The model's processor knows one size of each image.")


class ImagePart(Body):
    """A part of a message that shows an image."""

    type: Literal["image_url"]
    image_url: ImageUrl


class InputAudio(Body):
    """Sound."""

    data: MediaText = Field(description="The file in base64; or a URL as an image has.")
    format: Literal["wav", "mp3", "flac", "ogg"]


class AudioPart(Body):
    """A part of a message that plays sound."""

    type: Literal["input_audio"]
    input_audio: InputAudio


def _text_or_parts(value: object) -> str:
    return "<parts>" if isinstance(value, list) else "<text>"


def _kind_of_part(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return {"image_url": "<image>", "input_audio": "<audio>"}.get(str(kind), "<text>")


Part = Annotated[
    Annotated[TextPart, Tag("<text>")] | Annotated[ImagePart, Tag("<image>")] | Annotated[AudioPart, Tag("<audio>")],
    Discriminator(_kind_of_part),
]
Content = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Part], Field(fail_fast=True, min_length=1, max_length=MAX_PARTS), Tag("<parts>")],
    Discriminator(_text_or_parts),
]


class Message(NeutralMessageFields):
    """A message of a conversation. Only an assistant's may be without content, and only it may have tool_calls."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = Field(default=None, description="Text, or parts. Null: an assistant's.")
    name: Annotated[str, Field(max_length=256)] | None = None
    tool_calls: Annotated[list[ToolCall], Field(fail_fast=True, max_length=MAX_TOOLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.content is None and self.role != "assistant":
            raise refusal("content", f"is required in a message of role {self.role}")
        if self.role != "user" and isinstance(self.content, list):
            for index, part in enumerate(self.content):
                if part.type != "text":
                    raise refusal(f"content.{index}.type", f"must be text in a message of role {self.role}")
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
