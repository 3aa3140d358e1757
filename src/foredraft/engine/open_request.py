"""A caller's request on its way: its choices, what they have said so far, and in the end its output."""

from __future__ import annotations

from dataclasses import replace

from foredraft.engine.output_text import OutputText
from foredraft.logprobs import TokenLogprob
from foredraft.outputs import Choice, RequestOutput, StreamChunk, TextPiece
from foredraft.request import Request
from foredraft.scheduler.scheduler import Committed
from foredraft.stopping import FinishReason


class OpenChoice:
    """One choice. Its text grows in the engine; here it is handed on and put into the output."""

    def __init__(self, request: Request, index: int, text: OutputText, echo: str = "") -> None:
        self.request = request
        self.index = index
        self._text = text
        self._echo = echo
        self._is_echoed = not echo
        self._has_given_scores = False
        self.output: Choice | None = None

    def take(self, update: Committed) -> StreamChunk:
        """What a step has added."""
        if self.request.finish_reason is not None:
            self.output = self._build_output(self.request.finish_reason, self.request.error)
        return self._chunk(update.token_ids, update.logprobs)

    def notice_end(self) -> StreamChunk | None:
        """The end, if others than a step brought it about (`LLM.close`, `Engine.abort`) and nobody knows yet."""
        if self.request.finish_reason is None or self.output is not None:
            return None
        self.output = self._build_output(self.request.finish_reason, self.request.error)
        return self._chunk((), ())

    def fail(self, error: BaseException) -> StreamChunk | None:
        """End here because the engine failed; what there is of the text stays."""
        if self.output is not None:
            return None
        self.output = self._build_output(FinishReason.ERROR, f"{type(error).__name__}: {error}")
        return self._chunk((), ())

    def _chunk(self, token_ids: tuple[int, ...], logprobs: tuple[TokenLogprob, ...]) -> StreamChunk:
        pieces = self._text.take_pieces()
        if not self._is_echoed:
            self._is_echoed = True
            pieces = (TextPiece(self._echo, 0), *pieces)
        scores = None if self._has_given_scores else self.request.prompt_logprobs
        self._has_given_scores = self._has_given_scores or scores is not None
        return StreamChunk(token_ids, pieces, None, self.index, logprobs, self.output, scores)

    def _build_output(self, reason: FinishReason, error: str | None) -> Choice:
        request = self.request
        return Choice(
            index=self.index,
            token_ids=tuple(request.output_token_ids),
            token_depths=tuple(request.token_depths),
            text=self._echo + self._text.text,
            finish_reason=reason,
            error=error,
            logprobs=tuple(request.logprobs) if request.params.logprobs is not None else None,
            stats=request.stats,
        )


class OpenRequest:
    """All choices of a request. `chunks` are those that were not read yet; `output` is there when all have ended."""

    def __init__(self, request_id: str, choices: list[OpenChoice]) -> None:
        self.request_id = request_id
        self.choices = choices
        self.chunks: list[StreamChunk] = []
        self.output: RequestOutput | None = None

    def take(self, update: Committed) -> None:
        """What a step has added to one choice."""
        choice = next(choice for choice in self.choices if choice.request is update.request)
        self._add(choice.take(update))

    def notice_end(self) -> bool:
        """Whether choices have ended that nobody knew of."""
        chunks = [choice.notice_end() for choice in self.choices]
        for chunk in chunks:
            self._add(chunk)
        return any(chunk is not None for chunk in chunks)

    def fail(self, error: BaseException) -> None:
        """End here because the engine failed."""
        for choice in self.choices:
            self._add(choice.fail(error))

    def _add(self, chunk: StreamChunk | None) -> None:
        if chunk is None:
            return
        outputs = tuple(choice.output for choice in self.choices if choice.output is not None)
        if len(outputs) == len(self.choices):
            first = self.choices[0].request
            self.output = RequestOutput(
                request_id=self.request_id,
                prompt_token_ids=first.prompt_token_ids,
                choices=outputs,
                num_cached_tokens=first.num_cached_tokens or 0,
                prompt_logprobs=first.prompt_logprobs,
            )
            chunk = replace(chunk, output=self.output)
        self.chunks.append(chunk)
