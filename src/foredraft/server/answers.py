"""What completions and chats answer alike: errors of a choice, usage, log-probabilities, our own fields."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

from foredraft.engine.async_engine import Submission
from foredraft.errors import EngineBusyError, EngineUnavailableError, RequestError
from foredraft.logprobs import TokenLogprob
from foredraft.outputs import Choice, RequestOutput, StreamChunk
from foredraft.server.prompts import PromptReader
from foredraft.server.protocol.errors import ApiError, from_request_error, server_failed
from foredraft.server.protocol.responses import (
    ChatLogprob,
    ChatLogprobs,
    CompletionLogprobs,
    Piece,
    PromptLogprob,
    Speculation,
    TopLogprob,
    Usage,
)
from foredraft.server.protocol.sampling import SamplingFields
from foredraft.server.streaming import DONE, event
from foredraft.stopping import FinishReason

RETRY_SECONDS = 1
"""When a client may try again: how soon a place is free depends on the requests that run."""


def new_id(kind: str) -> str:
    """An id that no other answer has."""
    return f"{kind}-{secrets.token_hex(16)}"


def api_error(error: Exception) -> ApiError | None:
    """What a client is told of an error; None for one that nobody has foreseen."""
    match error:
        case ApiError():
            return error
        case RequestError():
            return from_request_error(error)
        case EngineBusyError():
            return ApiError(429, str(error), code="queue_full", retry_after=RETRY_SECONDS)
        case EngineUnavailableError():
            return ApiError(503, str(error), code="engine_unavailable", retry_after=RETRY_SECONDS)
    return None


def check_choice(choice: Choice) -> None:
    """Raise ApiError if a choice has not ended as it should."""
    if choice.finish_reason is FinishReason.ERROR:  # its own options leave no token to choose, for instance
        raise ApiError(400, f"the request cannot be continued: {choice.error}", code="generation_failed")
    if choice.finish_reason is FinishReason.ABORT:
        raise ApiError(503, "the engine has given up the request", code="aborted", retry_after=RETRY_SECONDS)


async def collect(submission: Submission) -> list[RequestOutput]:
    """The output of each job. Raises ApiError if one of their choices has failed."""
    outputs: dict[int, RequestOutput] = {}
    try:
        async for index, chunk in submission:
            if chunk.choice is not None:
                check_choice(chunk.choice)
            if chunk.output is not None:
                outputs[index] = chunk.output
    finally:
        submission.abort()
    return [outputs[index] for index in range(len(submission.ticket.jobs))]


async def guarded(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Events of a stream, and its end: the mark of it, or an error."""
    try:
        async for chunk in chunks:
            yield chunk
        yield DONE
    except Exception as error:
        known = api_error(error)
        if known is None:
            yield event(server_failed().body())
            raise
        yield event(known.body())


class UsageCount:
    """Counts the tokens of a request: each prompt once, and those of all choices."""

    def __init__(self) -> None:
        self._prompt_tokens = 0
        self._completion_tokens = 0
        self._cached_tokens = 0

    def add(self, chunk: StreamChunk) -> None:
        """Count what a chunk has brought."""
        self._completion_tokens += len(chunk.token_ids)
        if chunk.output is not None:
            self._prompt_tokens += len(chunk.output.prompt_token_ids)
            self._cached_tokens += chunk.output.num_cached_tokens

    def usage(self) -> Usage:
        """Of all that was added."""
        return Usage.of(self._prompt_tokens, self._completion_tokens, self._cached_tokens)

    @classmethod
    def of(cls, outputs: Iterable[RequestOutput]) -> Usage:
        """The usage of finished requests."""
        count = cls()
        for output in outputs:
            count._prompt_tokens += len(output.prompt_token_ids)
            count._cached_tokens += output.num_cached_tokens
            count._completion_tokens += sum(len(choice.token_ids) for choice in output.choices)
        return count.usage()


def speculation(choice: Choice) -> Speculation:
    """How the drafts of a choice fared."""
    return Speculation(**choice.stats.to_dict(), token_depths=list(choice.token_depths))


def choice_extras(body: SamplingFields, choice: Choice) -> dict[str, Any]:
    """Our own fields of a whole choice, as far as they are asked for."""
    extras: dict[str, Any] = {}
    if body.return_token_ids:
        extras["token_ids"] = list(choice.token_ids)
    if body.return_speculation:
        extras["speculation"] = speculation(choice)
    return extras


def chunk_extras(body: SamplingFields, chunk: StreamChunk) -> dict[str, Any]:
    """Our own fields of a piece of a choice, as far as they are asked for."""
    extras: dict[str, Any] = {}
    if body.return_token_ids:
        extras["token_ids"] = list(chunk.token_ids)
    if body.return_speculation:
        extras["pieces"] = [Piece(text=piece.text, depth=piece.depth) for piece in chunk.pieces]
        if chunk.choice is not None:
            extras["speculation"] = speculation(chunk.choice)
    return extras


def prompt_logprobs(
    reader: PromptReader, scores: Sequence[TokenLogprob | None] | None
) -> list[PromptLogprob | None] | None:
    """Our own form of a prompt's log-probabilities."""
    if scores is None:
        return None
    return [
        None
        if score is None
        else PromptLogprob(
            token_id=score.token_id,
            token=reader.token_text(score.token_id),
            logprob=score.logprob,
            rank=score.rank,
            top=list(score.top),
        )
        for score in scores
    ]


class CompletionLogprobsWriter:
    """Log-probabilities of one choice in the form that completions have; goes on where the last call ended."""

    def __init__(self, reader: PromptReader, num_top: int) -> None:
        self._reader = reader
        self._num_top = num_top
        self._offset = 0

    def write(self, token_ids: Sequence[int], scores: Sequence[TokenLogprob | None]) -> CompletionLogprobs:
        """scores: one for each token; None where nothing comes before it."""
        tokens = [self._reader.token_text(token_id) for token_id in token_ids]
        offsets = []
        for token in tokens:
            offsets.append(self._offset)
            self._offset += len(token)
        return CompletionLogprobs(
            tokens=tokens,
            token_logprobs=[None if score is None else score.logprob for score in scores],
            top_logprobs=[self._top(score) for score in scores] if self._num_top else None,
            text_offset=offsets,
        )

    def _top(self, score: TokenLogprob | None) -> dict[str, float] | None:
        """The likeliest tokens and the one that came. Of several with the same text the likeliest stands."""
        if score is None:
            return None
        top: dict[str, float] = {}
        for token_id, logprob in (*score.top, (score.token_id, score.logprob)):
            top.setdefault(self._reader.token_text(token_id), logprob)
        return top


def chat_logprobs(reader: PromptReader, scores: Sequence[TokenLogprob]) -> ChatLogprobs:
    """Log-probabilities in the form that chats have."""
    return ChatLogprobs(content=[_chat_logprob(reader, score) for score in scores])


def _chat_logprob(reader: PromptReader, score: TokenLogprob) -> ChatLogprob:
    top = [TopLogprob(**_token(reader, token_id), logprob=logprob) for token_id, logprob in score.top]
    return ChatLogprob(**_token(reader, score.token_id), logprob=score.logprob, top_logprobs=top)


def _token(reader: PromptReader, token_id: int) -> dict[str, Any]:
    return {"token": reader.token_text(token_id), "bytes": list(reader.token_bytes(token_id))}
