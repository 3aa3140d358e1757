"""The body of POST /v1/completions."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import Field, Tag, model_validator
from pydantic.types import Discriminator

from foredraft.errors import shown
from foredraft.server.protocol.body import Text, TokenIds, refusal
from foredraft.server.protocol.neutral import NeutralCompletionFields
from foredraft.server.protocol.sampling import MAX_LOGPROBS, SamplingFields

DEFAULT_MAX_TOKENS = 16
MAX_PROMPTS = 2_048
MAX_TOTAL_CHOICES = 4_096  # of all prompts of a request


def _prompt_form(value: object) -> str:
    if not isinstance(value, list):
        return "<text>"
    first = value[0] if value else ""
    if isinstance(first, list):
        return "<lists>"
    return "<texts>" if isinstance(first, str) else "<ids>"


Prompt = Annotated[
    Annotated[Text, Tag("<text>")]
    | Annotated[list[Text], Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS), Tag("<texts>")]
    | Annotated[TokenIds, Field(min_length=1), Tag("<ids>")]
    | Annotated[
        list[Annotated[TokenIds, Field(min_length=1)]],
        Field(fail_fast=True, min_length=1, max_length=MAX_PROMPTS),
        Tag("<lists>"),
    ],
    Discriminator(_prompt_form),
]


class CompletionRequest(NeutralCompletionFields, SamplingFields):
    """Continue one prompt or several."""

    prompt: Prompt = Field(description="Text, token ids, or a list of either.")
    max_tokens: int = Field(
        default=DEFAULT_MAX_TOKENS, ge=0, description="0 only with echo or prompt_logprobs; cut down to what fits."
    )
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = Field(default=False, description="Put the prompt before the text.")
    best_of: int | None = Field(default=None, ge=1, description="Only the value of n can be honoured.")

    @model_validator(mode="after")
    def _check_completion(self) -> Self:
        if self.max_tokens == 0 and not self.echo and self.prompt_logprobs is None:
            raise refusal("max_tokens", "may be 0 only with echo or prompt_logprobs")
        if self.min_tokens > self.max_tokens:
            raise refusal("min_tokens", f"must be at most max_tokens, which is {shown(self.max_tokens)}")
        if self.best_of is not None and self.best_of != self.n:
            raise refusal("best_of", "cannot be honoured unless it is n: no more choices are drawn than returned")
        if len(self.prompts) * self.n > MAX_TOTAL_CHOICES:
            raise refusal("n", f"times the number of prompts may be {MAX_TOTAL_CHOICES} at most")
        return self

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """Each prompt, as text or as token ids."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        prompt: Any = self.prompt
        return [prompt] if isinstance(prompt[0], int) else prompt

    def _own_options(self) -> dict[str, Any]:
        return {"max_tokens": self.max_tokens, "logprobs": self.logprobs, "echo": self.echo}

    def _names(self) -> dict[str, str]:
        return super()._names() | {"prompt_token_ids": "prompt", "media": "prompt"}
