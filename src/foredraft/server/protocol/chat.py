"""The body of POST /v1/chat/completions."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator

from foredraft.errors import shown
from foredraft.server.protocol.body import Body, JsonObject, refusal
from foredraft.server.protocol.messages import Messages
from foredraft.server.protocol.neutral import NeutralChatFields
from foredraft.server.protocol.sampling import MAX_LOGPROBS, SamplingFields
from foredraft.server.protocol.tools import MAX_TOOLS, NamedTool, Tool, ToolChoice


class TemplateFields(Body):
    """A conversation, and how the chat template writes it."""

    tools: Annotated[list[Tool], Field(fail_fast=True, max_length=MAX_TOOLS)] = Field(default=[])
    add_generation_prompt: bool | None = Field(
        default=None, description="Begin the assistant's answer. Null: unless the final message is continued."
    )
    continue_final_message: bool = Field(default=False, description="Go on with the last message.")
    chat_template_kwargs: JsonObject = Field(default={}, description="Variables of the chat template.")

    @model_validator(mode="after")
    def _check_template(self) -> Self:
        if self.continue_final_message and self.add_generation_prompt:
            raise refusal("continue_final_message", "contradicts add_generation_prompt: only one can be true")
        names = [tool.function.name for tool in self.tools]
        for index, name in enumerate(names):
            if name in names[:index]:
                raise refusal(f"tools.{index}.function.name", f"must differ from all others; {name} is twice there")
        return self

    @property
    def template_options(self) -> dict[str, Any]:
        """Keywords for PromptReader.chat, all but messages and tools."""
        begins = self.add_generation_prompt
        return {
            "add_generation_prompt": not self.continue_final_message if begins is None else begins,
            "continue_final_message": self.continue_final_message,
            "template_kwargs": self.chat_template_kwargs,
        }

    @property
    def plain_tools(self) -> list[dict[str, Any]] | None:
        """The tools as JSON has them, for the chat template; None if there are none."""
        return [tool.model_dump(exclude_none=True, exclude_unset=True) for tool in self.tools] or None


class ChatCompletionRequest(NeutralChatFields, TemplateFields, SamplingFields):
    """Answer a conversation."""

    messages: Messages
    max_tokens: int | None = Field(default=None, ge=1, description="The older name of max_completion_tokens.")
    max_completion_tokens: int | None = Field(
        default=None, ge=1, description="Cut down to what fits. Null: until the context is full."
    )
    logprobs: bool = False
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS, description="Only with logprobs.")
    tool_choice: ToolChoice | None = Field(default=None, description="Null: auto if there are tools, else none.")
    parallel_tool_calls: bool = Field(default=True, description="Whether one answer may call more than one tool.")

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        limits = self.max_tokens, self.max_completion_tokens
        if None not in limits and limits[0] != limits[1]:
            raise refusal("max_tokens", "contradicts max_completion_tokens: give one of them")
        if (limit := self.token_limit) is not None and self.min_tokens > limit:
            raise refusal("min_tokens", f"must be at most {self._limit_name}, which is {shown(limit)}")
        if self.top_logprobs is not None and not self.logprobs:
            raise refusal("top_logprobs", "has an effect only if logprobs is true")
        if not self.parallel_tool_calls and not self.tools:
            raise refusal("parallel_tool_calls", "needs tools")
        if self.tool_choice not in (None, "none") and not self.tools:
            raise refusal("tool_choice", "needs tools")
        if isinstance(self.tool_choice, NamedTool):
            name = self.tool_choice.function.name
            if all(tool.function.name != name for tool in self.tools):
                raise refusal("tool_choice.function.name", f"must be that of one of the tools, not {name}")
        return self

    @property
    def token_limit(self) -> int | None:
        """How many tokens the answer may have."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def _limit_name(self) -> Literal["max_tokens", "max_completion_tokens"]:
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def effective_tool_choice(self) -> Literal["none", "auto", "required"] | NamedTool:
        """tool_choice with its default."""
        if self.tool_choice is None:
            return "auto" if self.tools else "none"
        return self.tool_choice

    @property
    def conversation(self) -> list[dict[str, Any]]:
        """The messages as JSON has them, for PromptReader.chat."""
        return [message.plain() for message in self.messages]

    def _own_options(self) -> dict[str, Any]:
        return {"max_tokens": self.token_limit, "logprobs": self.top_logprobs or 0 if self.logprobs else None}

    def _names(self) -> dict[str, str]:
        names = dict.fromkeys(("prompt", "prompt_token_ids", "media"), "messages") | {"max_tokens": self._limit_name}
        return super()._names() | names | ({} if self.top_logprobs is None else {"logprobs": "top_logprobs"})
