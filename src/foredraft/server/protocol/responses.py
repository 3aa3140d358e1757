"""The bodies of answers, whole or in pieces. Official fields are there even if null, our own only if asked for."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

MIN_LOGPROB = -9999.0
"""What stands for all log-probabilities below it: JSON has no infinity, and the official API does so too."""

FinishReason = Literal["stop", "length", "tool_calls", "abort", "error"]

Logprob = Annotated[float, AfterValidator(lambda value: max(value, MIN_LOGPROB))]


def _is_none(value: object) -> bool:
    return value is None


def _asked() -> Any:
    """A field that is left out while it is None."""
    return Field(default=None, exclude_if=_is_none)


class Answer(BaseModel):
    """Any part of an answer. `model_dump_json()` is what is sent; validated on construction."""

    model_config = ConfigDict(extra="forbid")


class Speculation(Answer):
    """How the drafts of a choice fared: SpeculationStats.to_dict(), and the depth of each token (0: the target's)."""

    num_cycles: int
    num_drafts: int
    num_proposed_tokens: int
    num_rebuilt_rows: int
    drafted_by_depth: list[int]
    accepted_by_depth: list[int]
    num_drafted_tokens: int
    num_accepted_tokens: int
    mean_acceptance_length: float
    accepted_rates: list[float]
    conditional_rates: list[float]
    token_depths: list[int]


class Piece(Answer):
    """Text that came with one token, accepted at `depth` or (0) the target's own."""

    text: str
    depth: int


class PromptTokensDetails(Answer):
    """Of the prompt's tokens, how many had their rows in the cache."""

    cached_tokens: int


class Usage(Answer):
    """Tokens of a request: each prompt once, all choices."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Usage:
        """With the total."""
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached_tokens),
        )


class CompletionLogprobs(Answer):
    """One entry in each list for each token. Null: the first token of an echoed prompt. text_offset: characters."""

    tokens: list[str]
    token_logprobs: list[Logprob | None]
    top_logprobs: list[dict[str, Logprob] | None] | None
    text_offset: list[int]


class Extras(Answer):
    """Our own fields of a choice, whole or a piece of it."""

    token_ids: list[int] | None = _asked()
    speculation: Speculation | None = _asked()
    pieces: list[Piece] | None = _asked()


class PromptLogprob(Answer):
    """A prompt token's log-probability; rank 1 is the likeliest. top: the likeliest tokens there, best first."""

    token_id: int
    token: str
    logprob: Logprob
    rank: int
    top: list[tuple[int, Logprob]]


class CompletionChoice(Extras):
    """A continuation, or in a stream what a step added to it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None = None
    prompt_logprobs: list[PromptLogprob | None] | None = _asked()


class Completion(Answer):
    """The answer to a completion; in a stream a chunk of it has the same form."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | None = _asked()
    prompt_token_ids: list[int] | list[list[int]] | None = _asked()


class TopLogprob(Answer):
    """A token that could have stood there."""

    token: str
    logprob: Logprob
    bytes: list[int] | None


class ChatLogprob(TopLogprob):
    """A token and what could have stood there instead."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(Answer):
    """One entry for each token."""

    content: list[ChatLogprob]
    refusal: None = None


class CalledFunction(Answer):
    """A function that the model calls. arguments: JSON text as the model wrote it."""

    name: str
    arguments: str


class MadeToolCall(Answer):
    """A call that the model makes."""

    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class ChatMessage(Answer):
    """The assistant's answer."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    refusal: None = None
    tool_calls: list[MadeToolCall] | None = _asked()


class ChatChoice(Extras):
    """One answer to a conversation."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason


class ChatCompletion(Answer):
    """The answer to a chat completion."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_token_ids: list[int] | None = _asked()
    prompt_logprobs: list[PromptLogprob | None] | None = _asked()


class FunctionDelta(Answer):
    """What a step added to a call: its name at first, then pieces of its arguments."""

    name: str | None = _asked()
    arguments: str | None = _asked()


class ToolCallDelta(Answer):
    """What a step added to the call of number `index`. id and type come with the first piece."""

    index: int
    id: str | None = _asked()
    type: Literal["function"] | None = _asked()
    function: FunctionDelta


class Delta(Answer):
    """What a step added to an answer. What it did not touch is left out."""

    role: Literal["assistant"] | None = _asked()
    content: str | None = _asked()
    tool_calls: list[ToolCallDelta] | None = _asked()


class ChatChunkChoice(Extras):
    """What a step added to one choice."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None = None


class ChatChunk(Answer):
    """A chunk of a streamed chat completion. The one with the usage has no choices."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | None = _asked()
    prompt_token_ids: list[int] | None = _asked()
    prompt_logprobs: list[PromptLogprob | None] | None = _asked()


class Model(Answer):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "foredraft"
    max_model_len: int | None = _asked()
    max_num_speculative_tokens: int | None = _asked()
    marks: list[str] | None = _asked()


class ModelList(Answer):
    """All models that are served."""

    object: Literal["list"] = "list"
    data: list[Model]


class Tokenized(Answer):
    """Token ids, how many they are and how many there is room for."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = _asked()


class Detokenized(Answer):
    """The text of tokens."""

    prompt: str


class ErrorDetail(Answer):
    """What is wrong: param is the field at fault."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(Answer):
    """An error."""

    error: ErrorDetail
