"""An engine that serves an event loop: it runs in a thread of its own, and nothing but steps happens there."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from enum import Enum
from typing import TypeVar

from foredraft.engine.llm import LLM
from foredraft.engine.observation import Observer
from foredraft.engine.served import Delivery, Job, ServedRequests, Ticket
from foredraft.errors import EngineBusyError, EngineUnavailableError, described
from foredraft.outputs import StreamChunk

Result = TypeVar("Result")

DEFAULT_MAX_WAITING = 256


class EngineState(Enum):
    """What an engine does with requests."""

    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"  # it finishes those that it has, and takes no more
    FAILED = "failed"
    CLOSED = "closed"


class Submission:
    """Jobs that were handed in together. Iterating gives (index of the job, chunk) as they come.

    It ends after the last job's output, or after `abort`. Raises EngineUnavailableError when the engine gives up.
    Belongs to the event loop of its engine.
    """

    def __init__(self, engine: AsyncEngine, jobs: Sequence[Job]) -> None:
        self.ticket = Ticket(tuple(jobs), time.perf_counter())
        self.num_choices = sum(job.params.n for job in jobs)
        self.is_waiting = True
        self._engine = engine
        self._chunks: deque[tuple[int, StreamChunk]] = deque()
        self._wake = asyncio.Event()
        self._num_open = len(jobs)
        self._is_accepted = False
        self._is_aborted = False
        self._error: Exception | None = None

    def abort(self) -> None:
        """Nobody wants it any more: what has not ended of it ends within a step."""
        if self._is_aborted or (not self._num_open and self._error is None):
            return
        self._is_aborted = True
        self._wake.set()
        self._engine.discard(self)

    def __aiter__(self) -> Submission:
        return self

    async def __anext__(self) -> tuple[int, StreamChunk]:
        while not self._chunks:
            if self._error is not None:
                raise self._error
            if self._is_aborted or not self._num_open:
                raise StopAsyncIteration
            self._wake.clear()
            await self._wake.wait()
        if self._is_aborted:
            raise StopAsyncIteration
        index, chunk = self._chunks.popleft()
        self._num_open -= chunk.output is not None
        return index, chunk

    async def accepted(self) -> None:
        """Return once all jobs are in the engine; whoever gives up waiting gives up the submission.

        Raises RequestError if one can never be served as asked.
        """
        try:
            while not self._is_accepted:
                if self._error is not None:
                    raise self._error
                if self._is_aborted:
                    raise EngineUnavailableError("the request was given up before it was taken")
                self._wake.clear()
                await self._wake.wait()
        except BaseException:
            self.abort()
            raise

    def deliver(self, delivery: Delivery) -> None:
        """Take what the engine's thread has sent."""
        self._chunks.extend(delivery.chunks)
        self._is_accepted = self._is_accepted or delivery.is_accepted
        self._error = self._error or delivery.error
        self.is_waiting = self.is_waiting and not delivery.is_started and delivery.error is None
        self._wake.set()


class AsyncEngine:
    """Serves requests of one event loop with an LLM that a thread of its own loads and steps.

    All methods belong to the event loop in which `start` was called. max_waiting: choices that may wait to start; when
    so many do, more are refused (EngineBusyError). on_end is called in the loop when the thread has ended, with what
    made it fail, or None.
    """

    def __init__(
        self,
        load: Callable[[], LLM],
        *,
        max_waiting: int = DEFAULT_MAX_WAITING,
        observe: Callable[[LLM], Observer] | None = None,
        on_end: Callable[[BaseException | None], None] = lambda error: None,
    ) -> None:
        self.state = EngineState.LOADING
        self.max_waiting = max_waiting
        self.failure: BaseException | None = None
        self._load = load
        self._observe = observe
        self._on_end = on_end
        self._llm: LLM | None = None
        self._open: dict[Ticket, Submission] = {}
        self._num_reading = 0  # choices
        self._idle = asyncio.Event()
        self._closed = asyncio.Event()
        self._ready = asyncio.Event()
        self._commands: queue.SimpleQueue[Callable[[ServedRequests], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="foredraft-engine", daemon=True)

    # -- the event loop's side ---------------------------------------------------------------------------------------

    @property
    def llm(self) -> LLM:
        """The model, once it is ready. Only its records may be read here: its methods belong to the engine's thread."""
        if self._llm is None:
            raise EngineUnavailableError(f"the engine is {self.state.value}")
        return self._llm

    @property
    def num_waiting(self) -> int:
        """Choices that were taken and have not started, and those of requests that are still read."""
        waiting = sum(submission.num_choices for submission in self._open.values() if submission.is_waiting)
        return waiting + self._num_reading

    @property
    def num_open(self) -> int:
        """Submissions that have not ended."""
        return len(self._open)

    @property
    def is_idle(self) -> bool:
        """Whether nobody waits for anything."""
        return not self._open and not self._num_reading

    def start(self) -> None:
        """Begin to load, and to serve when that is done."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def ready(self) -> None:
        """Return once requests are taken. Raises EngineUnavailableError if loading fails."""
        await self._ready.wait()
        if self.state is EngineState.FAILED:
            raise EngineUnavailableError(f"the engine has failed: {described(self.failure or RuntimeError())}")

    async def submit(self, jobs: Sequence[Job]) -> Submission:
        """Hand in jobs that are taken together or not at all.

        Raises RequestError, EngineBusyError or EngineUnavailableError; then nothing has changed.
        """
        with self.reading(sum(job.params.n for job in jobs)):
            submission = self.hand_in(jobs)
        await submission.accepted()
        return submission

    @contextmanager
    def reading(self, num_choices: int) -> Iterator[None]:
        """A place for a request that is still to be read: it waits, and is waited for when the engine drains.

        Raises EngineBusyError or EngineUnavailableError if none is taken now. Within, `hand_in` is sure of its place.
        """
        if self.state is not EngineState.READY:
            raise EngineUnavailableError(f"the engine is {self.state.value}")
        if (num_waiting := self.num_waiting) >= self.max_waiting:
            raise EngineBusyError(f"as many choices wait as may: {num_waiting}, of at most {self.max_waiting}")
        self._num_reading += num_choices
        try:
            yield
        finally:
            self._num_reading -= num_choices
            self._note_idle()

    async def unless_closed(self, work: Awaitable[Result]) -> Result:
        """What `work` gives. Raises EngineUnavailableError as soon as the engine is closed, and gives the work up."""
        task, closed = asyncio.ensure_future(work), asyncio.ensure_future(self._closed.wait())
        try:
            await asyncio.wait((task, closed), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise EngineUnavailableError("the server shuts down")
            return task.result()
        finally:
            task.cancel()
            closed.cancel()

    def hand_in(self, jobs: Sequence[Job]) -> Submission:
        """Give jobs to the engine's thread, within `reading`. Await `Submission.accepted` before anything else.

        Raises EngineUnavailableError if the engine has ended meanwhile.
        """
        if self.state not in (EngineState.READY, EngineState.DRAINING):
            raise EngineUnavailableError(f"the engine is {self.state.value}")
        submission = Submission(self, jobs)
        ticket = submission.ticket
        self._open[ticket] = submission
        self._commands.put(lambda requests: requests.submit(ticket))
        return submission

    def discard(self, submission: Submission) -> None:
        """End what has not ended of a submission, within a step."""
        ticket = submission.ticket
        if self._open.pop(ticket, None) is not None:
            self._commands.put(lambda requests: requests.discard(ticket))
            self._note_idle()

    async def drain(self, seconds: float) -> bool:
        """Take no more requests, and wait for those that there are. Returns whether all have ended in time."""
        if self.state in (EngineState.LOADING, EngineState.READY):
            self.state = EngineState.DRAINING
        if self.is_idle:
            return True
        self._idle.clear()
        try:
            await asyncio.wait_for(self._idle.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """End what is left with an error, and the thread; with `cache_dir` it saves the cache first."""
        if self.state is not EngineState.FAILED:
            self.state = EngineState.CLOSED
        self._closed.set()
        self._end_all(EngineUnavailableError("the server shuts down"))
        self._commands.put(None)
        if self._llm is not None:  # loading cannot be broken off: the thread ends with the process
            await asyncio.to_thread(self._thread.join)

    def _deliver(self, deliveries: Iterable[tuple[Ticket, Delivery]]) -> None:
        for ticket, delivery in deliveries:
            if (submission := self._open.get(ticket)) is not None:
                submission.deliver(delivery)
                if delivery.is_last:
                    del self._open[ticket]
        self._note_idle()

    def _note_idle(self) -> None:
        if self.is_idle:
            self._idle.set()

    def _end_all(self, error: Exception) -> None:
        for submission in list(self._open.values()):
            submission.deliver(Delivery([], error=error, is_last=True))
            self.discard(submission)

    def _become_ready(self, llm: LLM) -> None:
        self._llm = llm
        if self.state is EngineState.LOADING:
            self.state = EngineState.READY
        self._ready.set()

    def _end(self, error: BaseException | None) -> None:
        if error is not None:
            self.state, self.failure = EngineState.FAILED, error
            self._end_all(EngineUnavailableError(f"the engine has failed: {described(error)}"))
        self._ready.set()
        self._on_end(error)

    # -- the thread's side -------------------------------------------------------------------------------------------

    def _run(self) -> None:
        failure: BaseException | None = None
        try:
            llm = self._load()
            with llm:
                requests = ServedRequests(llm.requests, self._observe(llm) if self._observe is not None else None)
                self._call(self._become_ready, llm)
                self._serve(requests)
        except BaseException as error:  # whatever it is, those who wait must hear of it
            failure = error
        self._call(self._end, failure)

    def _serve(self, requests: ServedRequests) -> None:
        while True:
            while not self._commands.empty() or not requests.has_open:
                command = self._commands.get()
                if command is None:
                    return
                command(requests)
                self._send(requests)
            requests.step()
            self._send(requests)

    def _send(self, requests: ServedRequests) -> None:
        if deliveries := requests.take_deliveries():
            self._call(self._deliver, deliveries)

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        with suppress(RuntimeError):  # the loop has ended: nobody waits
            self._loop.call_soon_threadsafe(function, *arguments)
