"""POST /v1/chat/completions: conversations answered, with calls of tools read from the text as it comes."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

from foredraft.engine.async_engine import Submission
from foredraft.engine.media_parts import take_media
from foredraft.engine.served import Job
from foredraft.errors import RequestError
from foredraft.media import MediaPrompt
from foredraft.outputs import Choice, StreamChunk
from foredraft.sampling_params import SamplingParams
from foredraft.server.answers import (
    UsageCount,
    chat_logprobs,
    check_choice,
    choice_extras,
    chunk_extras,
    collect,
    new_id,
    prompt_logprobs,
)
from foredraft.server.prompts import PromptReader
from foredraft.server.protocol.chat import ChatCompletionRequest, TemplateFields
from foredraft.server.protocol.errors import invalid
from foredraft.server.protocol.responses import ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, Delta
from foredraft.server.protocol.tools import NamedTool
from foredraft.server.service import Service
from foredraft.server.spoken import SpokenChoice
from foredraft.server.streaming import event
from foredraft.server.tools.instructions import render_without_template


class ChatAnswer:
    """Answers one conversation, whole or as a stream."""

    def __init__(self, service: Service, body: ChatCompletionRequest) -> None:
        self._service = service
        self._reader = service.reader
        self._body = body
        self._choice = body.effective_tool_choice
        # Without a choice to make, the model is not told of tools, and what it writes is text.
        self._tools = body.plain_tools if self._choice != "none" else None
        self._head: dict[str, Any] = {
            "id": new_id("chatcmpl"),
            "created": int(time.time()),
            "model": service.model_name,
        }

    async def submit(self) -> Submission:
        """Read the conversation and hand it to the engine. Raises ApiError, or what the engine raises."""
        try:
            return await self._service.submit(self._body.n, self._jobs)
        except RequestError as error:
            raise self._body.refused(error) from None

    def _jobs(self) -> list[Job]:
        body = self._body
        params = self._with_tools(body.sampling_params()) if self._tools else body.sampling_params()
        prompt = read_conversation(self._reader, body, body.conversation, self._tools)
        return [Job(prompt.token_ids, params, media=prompt.media)]

    def _with_tools(self, params: SamplingParams) -> SamplingParams:
        """What the output must look like for the tools that may or must be called."""
        tool_format, choice = self._service.tool_format, self._choice
        chosen: str | Mapping[str, Any] = choice.model_dump() if isinstance(choice, NamedTool) else choice
        structure = tool_format.structured_output(
            self._tools or (), chosen, self._body.parallel_tool_calls, self._reader.special_tokens
        )
        if params.structured_output is not None:
            name = "response_format" if self._body.structured_output is None else "structured_output"
            raise invalid(f'{name} can be honoured beside tools only if tool_choice is "none"', name)
        if structure is not None and params.ignore_eos:
            raise invalid("ignore_eos must be false where tools have to be called", "ignore_eos")
        if tool_format.keeps_special_tokens or tool_format.marker in self._reader.special_tokens:
            params = replace(params, skip_special_tokens=False)
        return replace(params, structured_output=structure)

    def _spoken(self) -> SpokenChoice:
        if not self._tools:
            return SpokenChoice(None)
        parser = self._service.tool_format.parser(self._tools)
        return SpokenChoice(parser, max_calls=None if self._body.parallel_tool_calls else 1)

    async def whole(self, submission: Submission) -> ChatCompletion:
        """The answer once all choices have ended."""
        (output,) = await collect(submission)
        return ChatCompletion(
            **self._head,
            choices=[self._whole_choice(choice) for choice in output.choices],
            usage=UsageCount.of([output]),
            prompt_token_ids=self._prompt_token_ids(submission),
            prompt_logprobs=prompt_logprobs(self._reader, output.prompt_logprobs),
        )

    def _whole_choice(self, choice: Choice) -> ChatChoice:
        spoken = self._spoken()
        spoken.add(choice.text)
        spoken.finish()
        return ChatChoice(
            index=choice.index,
            message=spoken.message(),
            logprobs=chat_logprobs(self._reader, choice.logprobs) if choice.logprobs is not None else None,
            finish_reason=spoken.finish_reason(choice.finish_reason),
            **choice_extras(self._body, choice),
        )

    async def events(self, submission: Submission) -> AsyncIterator[bytes]:
        """The answer in pieces, as the steps bring them."""
        usage = UsageCount()
        spoken = [self._spoken() for _ in range(self._body.n)]
        given_ids = self._prompt_token_ids(submission)
        for index in range(self._body.n):
            first = ChatChunkChoice(index=index, delta=Delta(role="assistant", content=""))
            yield event(ChatChunk(**self._head, choices=[first], prompt_token_ids=given_ids))
            given_ids = None
        async for _, chunk in submission:
            if chunk.choice is not None:
                check_choice(chunk.choice)
            usage.add(chunk)
            choices = self._chunk_choices(spoken[chunk.index], chunk)
            scores = prompt_logprobs(self._reader, chunk.prompt_logprobs) if chunk.index == 0 else None
            for choice in choices:
                yield event(ChatChunk(**self._head, choices=[choice], prompt_logprobs=scores))
                scores = None
        if self._body.wants_usage:
            yield event(ChatChunk(**self._head, choices=[], usage=usage.usage()))

    def _chunk_choices(self, spoken: SpokenChoice, chunk: StreamChunk) -> list[ChatChunkChoice]:
        """What a chunk says: one piece for each delta; log-probabilities, our own fields and the end with the last."""
        deltas = spoken.add(chunk.text)
        if chunk.choice is not None:
            deltas += spoken.finish()
        extras = chunk_extras(self._body, chunk)
        logprobs = chat_logprobs(self._reader, chunk.logprobs) if self._body.logprobs and chunk.logprobs else None
        reason = spoken.finish_reason(chunk.choice.finish_reason) if chunk.choice is not None else None
        if not deltas:
            if not (logprobs or reason or chunk.prompt_logprobs or extras.get("token_ids") or extras.get("pieces")):
                return []
            deltas = [Delta()]
        last = ChatChunkChoice(index=chunk.index, delta=deltas[-1], logprobs=logprobs, finish_reason=reason, **extras)
        return [*(ChatChunkChoice(index=chunk.index, delta=delta) for delta in deltas[:-1]), last]

    def _prompt_token_ids(self, submission: Submission) -> list[int] | None:
        return list(submission.ticket.jobs[0].token_ids) if self._body.return_token_ids else None


def read_conversation(
    reader: PromptReader,
    body: TemplateFields,
    messages: list[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
) -> MediaPrompt:
    """A conversation as the chat template writes it, with what it shows; one that knows no tools gets them as text.

    Takes a while. Raises RequestError.
    """
    messages, media = take_media(messages, reader.media)
    has_calls = any(message["role"] == "tool" or message.get("tool_calls") for message in messages)
    if (tools or has_calls) and not reader.supports_tools:
        messages, tools = render_without_template(messages, tools or ()), None
    token_ids = reader.chat(messages, tools, **body.template_options)
    return MediaPrompt(token_ids) if reader.media is None else reader.media.prompt(token_ids, media, "messages")
