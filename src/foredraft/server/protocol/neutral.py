"""The one table of official fields that change no answer here: accepted where they mean nothing, else refused."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from foredraft.server.protocol.body import Body, refusal


def _only_false(value: bool) -> bool:
    if value:
        raise refusal("", "cannot be honoured: it must be false")
    return value


Off = Annotated[bool, AfterValidator(_only_false), Field(json_schema_extra={"const": False})]
"""A switch that can only be off. (A literal False would take 0 too.)"""

Label = Annotated[str, Field(max_length=1_024)]
Labels = dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]]


class NeutralFields(Body):
    """Fields of any request."""

    user: Label | None = Field(default=None, description="A name for the end user. Has no effect.")
    safety_identifier: Label | None = Field(default=None, description="A name for the end user. Has no effect.")
    metadata: Annotated[Labels, Field(max_length=16)] | None = Field(
        default=None, description="The client's own notes. Nothing is stored, so they have no effect."
    )
    prompt_cache_key: Label | None = Field(
        default=None, description="A hint for routing. Has no effect: rows are shared wherever prompts agree."
    )
    prompt_cache_retention: Literal["in_memory"] | None = Field(
        default=None, description="in_memory is how rows are kept. No retention time is promised."
    )
    prompt_cache_options: None = Field(default=None, description="Cannot be honoured.")
    service_tier: Literal["auto", "default"] | None = Field(default=None, description="There is one tier.")
    store: Off = Field(default=False, description="Nothing is stored.")


class NeutralCompletionFields(NeutralFields):
    """Fields of a completion."""

    suffix: Literal[""] | None = Field(default=None, description="Text after the gap cannot be honoured.")


class NeutralChatFields(NeutralFields):
    """Fields of a chat completion."""

    audio: None = Field(default=None, description="Cannot be honoured: the output is text.")
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = Field(
        default=None, description="The output is text."
    )
    prediction: None = Field(default=None, description="Cannot be honoured: drafts come from the model's own modules.")
    reasoning_effort: None = Field(
        default=None, description="Cannot be honoured; chat_template_kwargs reach the model's own switches."
    )
    verbosity: Literal["medium"] | None = Field(default=None, description="Only the neutral value can be honoured.")
    web_search_options: None = Field(default=None, description="Cannot be honoured.")
    moderation: None = Field(default=None, description="Cannot be honoured.")
    functions: None = Field(default=None, description="Replaced by tools.")
    function_call: Literal["none"] | None = Field(default=None, description="Replaced by tool_choice.")


class NeutralMessageFields(Body):
    """Fields of a message, as clients send them back with an answer of theirs."""

    type: Literal["text"] | None = Field(default=None, description="Has no effect.")
    audio: None = Field(default=None, description="Cannot be honoured.")
    refusal: None = Field(default=None, description="Cannot be honoured: templates know no refusals.")
    function_call: None = Field(default=None, description="Replaced by tool_calls.")
    annotations: Annotated[list[Any], Field(max_length=0)] | None = Field(
        default=None, description="Cannot be honoured; an empty list is fine."
    )
