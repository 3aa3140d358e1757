"""The requests that an engine's thread serves: what each step brings to whom, and when."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from foredraft.engine.observation import ChoiceTimes, EngineSnapshot, Observer
from foredraft.engine.open_request import OpenChoice, OpenRequest
from foredraft.engine.open_requests import OpenRequests
from foredraft.media import Media
from foredraft.outputs import StreamChunk
from foredraft.sampling_params import SamplingParams
from foredraft.stopping import FinishReason


@dataclass(frozen=True)
class Job:
    """One prompt to continue. echo: the text of the prompt, where it is to come first. media: what it shows."""

    token_ids: Sequence[int]
    params: SamplingParams
    echo: str | None = None
    media: Sequence[Media] = ()


@dataclass(frozen=True, eq=False)
class Ticket:
    """Jobs that were handed in together, at a time of `time.perf_counter`."""

    jobs: tuple[Job, ...]
    arrival: float


@dataclass
class Delivery:
    """What there is for a ticket since the last delivery: chunks, each with the index of its job.

    is_accepted: all jobs are in the engine. is_started: a step has run each. error: they were refused, or have failed.
    is_last: nothing comes any more.
    """

    chunks: list[tuple[int, StreamChunk]]
    is_accepted: bool = False
    is_started: bool = False
    error: Exception | None = None
    is_last: bool = False


@dataclass
class _Watched:
    """A choice that has not ended, and when things happened to it."""

    ticket: Ticket
    choice: OpenChoice
    num_prompt_tokens: int
    started: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class ServedRequests:
    """Belongs to the thread of the engine. Nothing that is asked of it fails but `step`."""

    def __init__(self, requests: OpenRequests, observer: Observer | None = None) -> None:
        self._requests = requests
        self._observer = observer
        self._opened: dict[Ticket, list[OpenRequest]] = {}
        self._places: dict[OpenRequest, tuple[Ticket, int]] = {}
        self._watched: dict[OpenRequest, list[_Watched]] = {}
        self._not_started: dict[Ticket, list[_Watched]] = {}
        self._deliveries: dict[Ticket, Delivery] = {}

    @property
    def has_open(self) -> bool:
        return bool(self._places)

    def submit(self, ticket: Ticket) -> None:
        """Take all jobs of a ticket, or none."""
        opened: list[OpenRequest] = []
        delivery = self._delivery(ticket)
        try:
            for job in ticket.jobs:
                opened.append(self._requests.submit(job.token_ids, job.params, self._echo(job), job.media))
        except Exception as error:  # whatever it is, it is the business of this ticket alone
            for request in opened:
                self._requests.discard(request)
            delivery.error, delivery.is_last = error, True
            return
        delivery.is_accepted = True
        self._opened[ticket] = opened
        self._not_started[ticket] = []
        for index, request in enumerate(opened):
            self._places[request] = ticket, index
            self._watched[request] = [
                _Watched(ticket, choice, len(ticket.jobs[index].token_ids) if choice.index == 0 else 0)
                for choice in request.choices
            ]
            self._not_started[ticket] += self._watched[request]

    @staticmethod
    def _echo(job: Job) -> Callable[[], str] | None:
        text = job.echo
        return None if text is None else lambda: text

    def discard(self, ticket: Ticket) -> None:
        """End what has not ended of a ticket; nothing more is delivered."""
        now = time.perf_counter()
        for request in self._opened.get(ticket, ()):
            self._requests.discard(request)
            for watched in self._watched.get(request, ()):
                if watched.choice.output is None:
                    self._observe_end(watched, now)
        self._forget(ticket)
        self._deliveries.pop(ticket, None)
        self.observe_step()

    def step(self) -> None:
        """Run one step. A failure is raised, and leaves nothing open."""
        before = time.perf_counter()
        changed = self._requests.step()
        now = time.perf_counter()
        self._note_starts(before)
        for request in changed:
            self._collect(request, now)
        self.observe_step()

    def _note_starts(self, now: float) -> None:
        for ticket, waiting in list(self._not_started.items()):
            for watched in waiting:
                if watched.choice.request.num_cached_tokens is not None:
                    watched.started = now
            waiting[:] = [watched for watched in waiting if watched.started is None]
            if not waiting:
                del self._not_started[ticket]
                self._delivery(ticket).is_started = True

    def _collect(self, request: OpenRequest, now: float) -> None:
        """Take a request's new chunks."""
        ticket, index = self._places[request]
        delivery = self._delivery(ticket)
        for chunk in request.chunks:
            delivery.chunks.append((index, chunk))
            self._note_chunk(self._watched[request][chunk.index], chunk, now)
        request.chunks.clear()
        if request.output is not None:
            self._requests.discard(request)
            del self._places[request], self._watched[request]
            if not any(other in self._places for other in self._opened[ticket]):
                delivery.is_last = True
                self._forget(ticket)

    def _note_chunk(self, watched: _Watched, chunk: StreamChunk, now: float) -> None:
        if chunk.token_ids:
            if watched.last_token is not None and self._observer is not None:
                self._observer.observe_gap(now - watched.last_token, len(chunk.token_ids))
            watched.first_token = watched.first_token or now
            watched.last_token = now
        if chunk.finish_reason is not None:
            self._observe_end(watched, now)

    def take_deliveries(self) -> list[tuple[Ticket, Delivery]]:
        """What has come about since the last call."""
        deliveries = list(self._deliveries.items())
        self._deliveries = {}
        return deliveries

    def _delivery(self, ticket: Ticket) -> Delivery:
        if (delivery := self._deliveries.get(ticket)) is None:
            delivery = self._deliveries[ticket] = Delivery([])
        return delivery

    def _forget(self, ticket: Ticket) -> None:
        for request in self._opened.pop(ticket, ()):
            self._places.pop(request, None)
            self._watched.pop(request, None)
        self._not_started.pop(ticket, None)

    def _observe_end(self, watched: _Watched, now: float) -> None:
        if self._observer is None:
            return
        request = watched.choice.request
        times = ChoiceTimes(
            arrival=watched.ticket.arrival,
            started=watched.started,
            first_token=watched.first_token,
            last_token=watched.last_token,
            ended=now,
            num_prompt_tokens=watched.num_prompt_tokens,
            num_generated_tokens=len(request.output_token_ids),
            finish_reason=request.finish_reason or FinishReason.ABORT,
        )
        self._observer.observe_end(times)

    def observe_step(self) -> None:
        """Tell the observer how the engine stands."""
        if self._observer is None:
            return
        engine = self._requests.engine
        stats, speculation = engine.stats, engine.stats.speculation
        copied = replace(
            speculation,
            drafted_by_depth=list(speculation.drafted_by_depth),
            accepted_by_depth=list(speculation.accepted_by_depth),
        )
        self._observer.observe_step(
            EngineSnapshot(
                num_running=engine.scheduler.num_running,
                num_waiting=engine.scheduler.num_waiting,
                cache_usage=engine.cache.usage,
                stats=replace(stats, speculation=copied),
            )
        )
