"""What all endpoints share: the engine, the model's texts and names, and a thread for work that takes a while."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypeVar

from fastapi import FastAPI

from foredraft import LLM
from foredraft.engine.async_engine import AsyncEngine, EngineState, Submission
from foredraft.engine.media_limits import MediaLimits
from foredraft.engine.media_reader import MediaReader
from foredraft.engine.observation import Observer
from foredraft.engine.served import Job
from foredraft.errors import EngineUnavailableError, shown
from foredraft.server.answers import api_error
from foredraft.server.body_reader import BodyReader
from foredraft.server.metrics import Metrics, RejectionReason
from foredraft.server.prompts import PromptReader
from foredraft.server.protocol.errors import ApiError, invalid
from foredraft.server.protocol.responses import Model
from foredraft.server.settings import ServerSettings
from foredraft.server.tools.formats import TOOL_FORMATS, detect_format
from foredraft.server.tools.tool_format import ToolFormat
from foredraft.server.tracing import ChoiceTracer, trace_app

Result = TypeVar("Result")

DEFAULT_TOOL_FORMAT = "hermes"
"""For a chat template that knows no tools: they are described to the model in this form."""


class Service:
    """One model behind the API. All but `prepare` belongs to the event loop.

    observer: who watches the engine, the metrics at first; another may be put before it until the engine starts.
    on_end: see AsyncEngine.
    """

    def __init__(
        self,
        load: Callable[[], LLM],
        settings: ServerSettings,
        model_name: str,
        on_end: Callable[[BaseException | None], None] = lambda error: None,
    ) -> None:
        self.settings = settings
        self.model_name = settings.served_model_name or model_name
        self.created = int(time.time())
        self.engine = AsyncEngine(load, max_waiting=settings.max_waiting, observe=self.prepare, on_end=on_end)
        self.metrics = Metrics(self.model_name)
        self.bodies = BodyReader(settings.max_body_mib << 20)
        self.observer: Observer = self.metrics
        self._reader: PromptReader | None = None
        self._tracer: ChoiceTracer | None = None
        # One thread: prompts are read in the order in which they come, and never two at once by one tokenizer.
        self._pool = ThreadPoolExecutor(1, "foredraft-prompts")
        self._compilers = ThreadPoolExecutor(1, "foredraft-grammars")  # slow ones do not hold up all other prompts

    def prepare(self, llm: LLM) -> Observer:
        """Called in the engine's thread when the model is loaded, before requests are taken."""
        limits = llm.engine.limits
        self._reader = PromptReader(llm.tokenizer, limits.max_model_len, _media_reader(self.settings, llm))
        self.metrics.announce(limits.max_depth)
        return self.observer

    @property
    def reader(self) -> PromptReader:
        """The model's texts. Raises EngineUnavailableError before they are there."""
        if self._reader is None:
            raise EngineUnavailableError(f"the engine is {self.engine.state.value}")
        return self._reader

    @cached_property
    def tool_format(self) -> ToolFormat:
        """How the model writes its calls."""
        name = self.settings.tool_format or detect_format(self.reader.chat_template)
        return TOOL_FORMATS[name or DEFAULT_TOOL_FORMAT]

    def check_model(self, name: str | None) -> None:
        """Raise ApiError 404 for a model that is not served; None is the one that is."""
        if name is not None and name != self.model_name:
            message = f"model {name!r:.200} is not served here; {self.model_name!r} is"
            raise ApiError(404, message, param="model", code="model_not_found")

    def model_card(self) -> Model:
        """The model as /v1/models lists it."""
        llm = self.engine.llm
        return Model(
            id=self.model_name,
            created=self.created,
            max_model_len=llm.engine.limits.max_model_len,
            max_num_speculative_tokens=llm.engine.limits.max_depth,
            marks=list(llm.config.marks) or None,
        )

    def check_priority(self, priority: int) -> None:
        """Raise ApiError for one that would have no effect."""
        policy = self.engine.llm.config.scheduling_policy
        if priority and policy != "priority":
            raise invalid(f"priority has an effect only with --scheduling-policy priority; it is {policy}", "priority")

    def check_token_ids(self, field: str, token_ids: Sequence[int]) -> None:
        """Raise ApiError for an id that the model does not have."""
        vocab_size = self.engine.llm.engine.limits.vocab_size
        if (largest := max(token_ids, default=0)) >= vocab_size:
            raise invalid(f"{field} must be below {vocab_size}, the number of token ids, not {shown(largest)}", field)

    async def apart(self, function: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
        """Run what takes a while apart from the event loop and from the engine."""
        call = partial(function, *arguments, **options)
        return await asyncio.get_running_loop().run_in_executor(self._pool, call)

    async def submit(self, num_choices: int, read: Callable[[], Sequence[Job]]) -> Submission:
        """Hand the engine what `read` makes of a request; it takes a while. Grammars are compiled here, not there."""
        with self.engine.reading(num_choices):
            jobs = await self.engine.unless_closed(self.apart(read))
            if any(job.params.structured_output is not None for job in jobs):
                compiling = asyncio.get_running_loop().run_in_executor(self._compilers, self._compile, jobs)
                await self.engine.unless_closed(compiling)
            submission = self.engine.hand_in(jobs)
        await submission.accepted()
        return submission

    def _compile(self, jobs: Sequence[Job]) -> None:
        for job in jobs:
            self.engine.llm.engine.compile_grammar(job.params)

    @contextmanager
    def counting_rejections(self) -> Iterator[None]:
        """Count what is refused within, before the engine has taken it."""
        try:
            yield
        except Exception as error:
            if (known := api_error(error)) is not None:
                self.count_rejection(known)
            raise

    def count_rejection(self, error: ApiError) -> None:
        """Count a request that was refused with this error."""
        reasons: dict[int, RejectionReason] = {429: "queue_full", 503: "unavailable"}
        self.metrics.observe_rejected(reasons.get(error.status, "invalid"))

    @property
    def is_ready(self) -> bool:
        return self.engine.state is EngineState.READY

    def trace(self, app: FastAPI, endpoint: str) -> None:
        """Send a trace of each request to an OTLP endpoint. Before the engine starts. Raises ConfigError."""
        self._tracer = trace_app(app, endpoint, self.model_name, self.metrics)
        self.observer = self._tracer

    def close(self) -> None:
        """After the last request."""
        for pool in (self._pool, self._compilers):
            pool.shutdown(wait=False, cancel_futures=True)
        if self._tracer is not None:
            self._tracer.close()


def _media_reader(settings: ServerSettings, llm: LLM) -> MediaReader | None:
    """What reads the images and sound of messages; None for a model that takes text only."""
    if (processor := llm.loaded.processor) is None:
        return None
    path = settings.allowed_local_media_path
    limits = MediaLimits(
        max_bytes=settings.max_media_mib << 20,
        max_pixels=settings.max_image_pixels,
        max_seconds=settings.max_audio_seconds,
        max_tokens=llm.engine.limits.max_model_len,
    )
    return MediaReader(
        processor,
        allowed_local_path=None if path is None else Path(path),
        allowed_hosts=settings.media_hosts,
        limits=limits,
    )
