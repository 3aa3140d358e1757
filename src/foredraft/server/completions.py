"""POST /v1/completions: prompts, texts or token ids, continued."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

from foredraft.engine.async_engine import Submission
from foredraft.engine.served import Job
from foredraft.errors import RequestError
from foredraft.logprobs import TokenLogprob
from foredraft.outputs import Choice, RequestOutput, StreamChunk
from foredraft.server.answers import (
    CompletionLogprobsWriter,
    UsageCount,
    check_choice,
    choice_extras,
    chunk_extras,
    collect,
    new_id,
    prompt_logprobs,
)
from foredraft.server.protocol.completions import CompletionRequest
from foredraft.server.protocol.errors import invalid
from foredraft.server.protocol.responses import Completion, CompletionChoice, CompletionLogprobs
from foredraft.server.service import Service
from foredraft.server.streaming import event


class CompletionAnswer:
    """Answers one request, whole or as a stream."""

    def __init__(self, service: Service, body: CompletionRequest) -> None:
        self._service = service
        self._reader = service.reader
        self._body = body
        self._head: dict[str, Any] = {"id": new_id("cmpl"), "created": int(time.time()), "model": service.model_name}

    async def submit(self) -> Submission:
        """Read the prompts and hand them to the engine. Raises ApiError, or what the engine raises."""
        body = self._body
        if body.stream and body.echo and body.logprobs is not None and body.n > 1:
            raise invalid("n must be 1 for a stream that has logprobs with echo", "n")
        try:
            return await self._service.submit(len(body.prompts) * body.n, self._jobs)
        except RequestError as error:
            raise body.refused(error) from None

    def _jobs(self) -> list[Job]:
        params = self._body.sampling_params()
        jobs = []
        for prompt in self._body.prompts:
            if isinstance(prompt, str) and self._reader.media is not None:
                self._reader.media.check_text(prompt, "prompt")
            token_ids = self._reader.encode(prompt) if isinstance(prompt, str) else prompt
            echo = None
            if params.echo:
                skips = params.skip_special_tokens
                echo = prompt if isinstance(prompt, str) else self._reader.decode(prompt, skip_special_tokens=skips)
            jobs.append(Job(token_ids, params, echo))
        return jobs

    async def whole(self, submission: Submission) -> Completion:
        """The answer once all choices have ended."""
        outputs = await collect(submission)
        return Completion(
            **self._head,
            choices=[
                self._choice(index, output, choice) for index, output in enumerate(outputs) for choice in output.choices
            ],
            usage=UsageCount.of(outputs),
            prompt_token_ids=self._prompt_token_ids(submission),
        )

    def _choice(self, job: int, output: RequestOutput, choice: Choice) -> CompletionChoice:
        logprobs = self._logprobs(self._writer(), choice, output) if self._body.logprobs is not None else None
        is_first = choice.index == 0 and self._body.prompt_logprobs is not None
        return CompletionChoice(
            index=job * self._body.n + choice.index,
            text=choice.text,
            logprobs=logprobs,
            finish_reason=choice.finish_reason.value,
            prompt_logprobs=prompt_logprobs(self._reader, output.prompt_logprobs) if is_first else None,
            **choice_extras(self._body, choice),
        )

    def _writer(self) -> CompletionLogprobsWriter:
        return CompletionLogprobsWriter(self._reader, self._body.logprobs or 0)

    def _logprobs(self, writer: CompletionLogprobsWriter, choice: Choice, output: RequestOutput) -> CompletionLogprobs:
        token_ids, scores = choice.token_ids, (choice.logprobs or ())
        if self._body.echo:
            return writer.write((*output.prompt_token_ids, *token_ids), (*(output.prompt_logprobs or ()), *scores))
        return writer.write(token_ids, scores)

    async def events(self, submission: Submission) -> AsyncIterator[bytes]:
        """The answer in pieces, as the steps bring them."""
        usage = UsageCount()
        writers: dict[int, CompletionLogprobsWriter] = {}
        given_ids = self._prompt_token_ids(submission)
        async for job, chunk in submission:
            if chunk.choice is not None:
                check_choice(chunk.choice)
            usage.add(chunk)
            index = job * self._body.n + chunk.index
            choice = self._chunk(index, chunk, submission, job, writers.setdefault(index, self._writer()))
            if chunk.token_ids or choice.text or choice.finish_reason:
                yield event(Completion(**self._head, choices=[choice], prompt_token_ids=given_ids))
                given_ids = None
        if self._body.wants_usage:
            yield event(Completion(**self._head, choices=[], usage=usage.usage()))

    def _chunk(
        self, index: int, chunk: StreamChunk, submission: Submission, job: int, writer: CompletionLogprobsWriter
    ) -> CompletionChoice:
        body, logprobs = self._body, None
        if body.logprobs is not None:
            token_ids: Sequence[int] = chunk.token_ids
            scores: Sequence[TokenLogprob | None] = chunk.logprobs
            if body.echo and chunk.prompt_logprobs is not None:
                prompt = submission.ticket.jobs[job].token_ids
                token_ids, scores = (*prompt, *token_ids), (*chunk.prompt_logprobs, *scores)
            logprobs = writer.write(token_ids, scores)
        is_first = chunk.index == 0 and body.prompt_logprobs is not None
        return CompletionChoice(
            index=index,
            text=chunk.text,
            logprobs=logprobs,
            finish_reason=chunk.finish_reason.value if chunk.finish_reason is not None else None,
            prompt_logprobs=prompt_logprobs(self._reader, chunk.prompt_logprobs) if is_first else None,
            **chunk_extras(body, chunk),
        )

    def _prompt_token_ids(self, submission: Submission) -> list[int] | list[list[int]] | None:
        """One list for one prompt, a list of them for several."""
        if not self._body.return_token_ids:
            return None
        prompts = [list(job.token_ids) for job in submission.ticket.jobs]
        return prompts[0] if len(prompts) == 1 else prompts
