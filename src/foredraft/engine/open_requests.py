"""The requests that callers wait for: from their choices in the engine to what each step adds to them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from foredraft.engine.engine import Engine
from foredraft.engine.handover import Handover
from foredraft.engine.open_request import OpenChoice, OpenRequest
from foredraft.media import Media
from foredraft.sampling_params import SamplingParams
from foredraft.scheduler.scheduler import Committed


class OpenRequests:
    """Hands requests to an engine, runs its steps, and puts what comes back where the callers find it.

    Others may drive the same engine by themselves: updates of their requests are left alone.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._ids = itertools.count()
        self._open: dict[str, OpenRequest] = {}  # by the id of each choice that has not ended

    def next_id(self) -> str:
        """An id that no other request has."""
        return f"request-{next(self._ids)}"

    def submit(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        echo: Callable[[], str] | None = None,
        media: Sequence[Media] = (),
    ) -> OpenRequest:
        """Add all choices of a request to the engine, or none.

        echo: gives the text that each choice begins with. media: what the prompt shows.

        Raises RequestError if it can never be served as asked.
        """
        request_id = self.next_id()
        opened = OpenRequest(request_id, [])
        choice_ids: list[str] = []
        try:
            for index in range(params.n):
                choice_id = request_id if index == 0 else f"{request_id}.{index}"
                leader = opened.choices[0].request if index else None
                choice_ids.append(choice_id)
                request = self.engine.add_request(
                    choice_id, token_ids, params, choice=index, leader=leader, media=media
                )
                text = self.engine.text_of(choice_id)
                opened.choices.append(OpenChoice(request, index, text, echo() if echo is not None else ""))
                self._open[choice_id] = opened
        except BaseException:
            for choice_id in choice_ids:
                self._open.pop(choice_id, None)
                self.engine.abort(choice_id)
            raise
        return opened

    def resume(self, handover: Handover, echo: Callable[[], str] | None = None) -> OpenRequest:
        """Go on with a request that another engine has begun. Its first chunk is all that there was of it.

        echo: as for `submit`. Raises what `Engine.import_request` does, but finds room sooner or later.
        """
        opened = OpenRequest(self.next_id(), [])
        request = self.engine.import_request(handover, opened.request_id, recompute=True)
        text = self.engine.text_of(opened.request_id)
        opened.choices.append(OpenChoice(request, 0, text, echo() if echo is not None else ""))
        self._open[opened.request_id] = opened
        tokens, depths = tuple(request.output_token_ids), tuple(request.token_depths)
        opened.take(Committed(request, tokens, depths, tuple(request.logprobs)))
        return opened

    def step(self, *, ahead: bool = True) -> list[OpenRequest]:
        """Run one step for all requests; returns those that have new chunks. ahead: as for `Engine.step`.

        A failure ends each of them with the error, and is raised.
        """
        opened = list(dict.fromkeys(self._open.values()))
        ended = [request for request in opened if request.notice_end()]
        if ended:
            return ended
        changed: dict[OpenRequest, None] = {}
        try:
            for update in self.engine.step(ahead=ahead):
                choice_id = update.request.request_id
                if (request := self._open.get(choice_id)) is not None:
                    request.take(update)
                    changed[request] = None
        except BaseException as error:
            for request in opened:
                request.fail(error)
                self._abort(request)
            raise
        return list(changed)

    def discard(self, request: OpenRequest) -> None:
        """Forget a request; what has not ended of it is aborted."""
        removed = [self._open.pop(choice.request.request_id, None) for choice in request.choices]
        if any(removed):
            self._abort(request)

    def close(self) -> None:
        """The engine has ended all requests: so have those that were open here."""
        for request in self._open.values():
            request.notice_end()
        self._open.clear()

    def _abort(self, request: OpenRequest) -> None:
        for choice in request.choices:
            self.engine.abort(choice.request.request_id)
