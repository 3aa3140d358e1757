"""What completions and chats ask alike, and what it means for the engine."""

from __future__ import annotations

from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator

from foredraft.errors import RequestError
from foredraft.sampling_params import (
    MAX_FACTOR,
    MAX_PRIORITY,
    MAX_SEED,
    MAX_TEMPERATURE,
    MAX_TOP_K,
    SamplingParams,
)
from foredraft.server.protocol.body import MAX_IDS, Body, TextOrIds, TokenId, TokenIds, refusal
from foredraft.server.protocol.errors import ApiError, from_request_error
from foredraft.server.protocol.formats import ResponseFormat, StructuredOutputBody
from foredraft.server.protocol.neutral import Off
from foredraft.structured_output import StructuredOutput

MAX_N = 128
MAX_STOPS = 16
MAX_STOP = 1_024  # characters of one stop string
MAX_STOP_IDS = 4_096
MAX_BIASES = 4_096
MAX_BAD_WORDS = 1_024
MAX_LOGPROBS = 20

SAME = (
    "min_tokens",
    "include_stop_str_in_output",
    "stop_token_ids",
    "ignore_eos",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "bad_words",
    "allowed_token_ids",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "n",
    "prompt_logprobs",
    "skip_special_tokens",
    "num_speculative_tokens",
    "cache_salt",
    "priority",
)
"""Fields that the engine knows under the same name."""


def _listed(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _few_biases(value: object) -> object:
    if isinstance(value, dict) and len(value) > MAX_BIASES:  # before each is looked at
        raise refusal("", f"may have {MAX_BIASES} token ids at most, not {len(value)}")
    return value


StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP)]
Stop = Annotated[
    list[StopString],
    Field(fail_fast=True, max_length=MAX_STOPS),
    BeforeValidator(
        _listed, json_schema_input_type=StopString | Annotated[list[StopString], Field(max_length=MAX_STOPS)]
    ),
]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern=r"^(0|[1-9][0-9]{0,9})$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=MAX_BIASES),
    BeforeValidator(_few_biases),
]


class StreamOptions(Body):
    """How a stream is sent. include_usage: one more chunk, the last one, with the usage."""

    include_usage: bool = False
    include_obfuscation: Off = Field(default=False, description="Cannot be honoured; false is fine.")


class SamplingFields(Body):
    """Fields of both kinds of generation. `sampling_params` is what they mean."""

    model: Annotated[str, Field(max_length=1_024)] | None = Field(
        default=None, description="A name that /v1/models lists. Null: the model that is served."
    )
    stream: bool = False
    stream_options: StreamOptions | None = Field(default=None, description="Only with stream.")
    n: int = Field(default=1, ge=1, le=MAX_N)
    seed: int | None = Field(default=None, ge=-(2**63), le=2**63 - 1)

    stop: Stop = Field(default=[], description="Texts that end the output.")
    stop_token_ids: Annotated[list[TokenId], Field(fail_fast=True, max_length=MAX_STOP_IDS)] = Field(default=[])
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)

    temperature: float = Field(default=1.0, ge=0, le=MAX_TEMPERATURE)
    top_k: int = Field(default=0, ge=0, le=MAX_TOP_K, description="0: off.")
    top_p: float = Field(default=1.0, gt=0, le=1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    typical_p: float = Field(default=1.0, gt=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, ge=1 / MAX_FACTOR, le=MAX_FACTOR)
    logit_bias: LogitBias = Field(default={}, description="By token id, as text.")
    bad_words: Annotated[list[TextOrIds], Field(fail_fast=True, max_length=MAX_BAD_WORDS)] = Field(default=[])
    allowed_token_ids: Annotated[TokenIds, Field(min_length=1, max_length=MAX_IDS)] | None = None

    prompt_logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    skip_special_tokens: bool = True
    response_format: ResponseFormat | None = None
    structured_output: StructuredOutputBody | None = None

    num_speculative_tokens: int | None = Field(default=None, ge=0, description="Drafts a step. Null: the server's.")
    cache_salt: Annotated[str, Field(min_length=1, max_length=1_024)] | None = Field(
        default=None, description="Only requests with the same salt share cached rows."
    )
    priority: int = Field(
        default=0,
        ge=-MAX_PRIORITY,
        le=MAX_PRIORITY,
        description="Lower numbers run first; 0 unless the server goes by it.",
    )
    return_token_ids: bool = Field(default=False, description="Answer with prompt_token_ids and token_ids too.")
    return_speculation: bool = Field(default=False, description="Answer with how drafts fared too.")

    @model_validator(mode="after")
    def _check_conflicts(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "has an effect only if stream is true")
        if self._formatted and self.structured_output is not None:
            raise refusal("structured_output", "contradicts response_format: give one of them")
        if self.ignore_eos and (self._formatted or self.structured_output is not None):
            name = "response_format" if self._formatted else "structured_output"
            raise refusal("ignore_eos", f"must be false with {name}, which ends the output where it is complete")
        return self

    @property
    def _formatted(self) -> bool:
        return self.response_format is not None and self.response_format.type != "text"

    @property
    def wants_usage(self) -> bool:
        """Whether the stream ends with a chunk of the usage."""
        return self.stream and self.stream_options is not None and self.stream_options.include_usage

    def structure(self) -> StructuredOutput | None:
        """What the output must look like; None for free text. Raises ApiError."""
        try:
            if self.structured_output is not None:
                return self.structured_output.record()
            return None if self.response_format is None else self.response_format.record()
        except RequestError as error:
            raise self.refused(error) from None

    def sampling_params(self) -> SamplingParams:
        """How to continue the prompt. Raises ApiError, which names the field of this request."""
        options: dict[str, Any] = {name: getattr(self, name) for name in SAME}
        options |= {
            "stop": self.stop,
            "logit_bias": {int(token_id): bias for token_id, bias in self.logit_bias.items()},
            "seed": None if self.seed is None else self.seed & MAX_SEED,  # a negative one wraps round
            "structured_output": self.structure(),
        }
        try:
            return SamplingParams(**options | self._own_options())
        except RequestError as error:
            raise self.refused(error) from None

    def refused(self, error: RequestError) -> ApiError:
        """What the engine says against this request, with the name that the field at fault has here."""
        return from_request_error(error, self._names())

    def _own_options(self) -> dict[str, Any]:
        """Of SamplingParams, what the two kinds of request say differently."""
        raise NotImplementedError

    def _names(self) -> dict[str, str]:
        return {"structured_output": "response_format"} if self._formatted else {}
