"""The bodies of POST /tokenize and POST /detokenize."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, model_validator

from foredraft.server.protocol.body import Body, Text, TokenIds, refusal
from foredraft.server.protocol.chat import TemplateFields
from foredraft.server.protocol.messages import Messages

ModelName = Annotated[str, Field(max_length=1_024)]


class TokenizeRequest(TemplateFields):
    """Which tokens a text has, or a conversation in the chat template: exactly one of prompt and messages."""

    model: ModelName | None = None
    prompt: Text | None = None
    messages: Messages | None = None
    add_special_tokens: bool | None = Field(
        default=None, description="Of a text, with those that begin it. Null: true."
    )
    return_token_strs: bool = Field(default=False, description="Answer with the text of each token too.")

    @model_validator(mode="after")
    def _check_kind(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "or messages is required, and not both")
        wrong = self.model_fields_set & set(TemplateFields.model_fields) if self.messages is None else set()
        if wrong:
            raise refusal(min(wrong), "has an effect only with messages")
        if self.messages is not None and self.add_special_tokens is not None:
            raise refusal("add_special_tokens", "has an effect only with prompt")
        return self

    @property
    def conversation(self) -> list[dict[str, Any]] | None:
        """The messages as JSON has them; None if there is a prompt."""
        return None if self.messages is None else [message.plain() for message in self.messages]


class DetokenizeRequest(Body):
    """Which text tokens have."""

    model: ModelName | None = None
    tokens: TokenIds
    skip_special_tokens: bool = False
