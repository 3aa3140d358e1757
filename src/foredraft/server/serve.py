"""Running the server: it listens while the model loads, drains before it ends, and ends when the engine fails."""

from __future__ import annotations

import asyncio
import copy
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import uvicorn

from foredraft import LLM
from foredraft.engine.async_engine import EngineState
from foredraft.errors import ConfigError, EngineUnavailableError, ForedraftError
from foredraft.server.app import create_app
from foredraft.server.service import Service
from foredraft.server.settings import ServerSettings

ANSWER_SECONDS = 5
"""How long answers that are being written when the server ends may take to be sent."""


def serve(load: Callable[[], LLM], settings: ServerSettings, model_name: str) -> None:
    """Serve until SIGTERM or Ctrl-C; then requests go on for `drain_seconds` at most, and a second signal ends that.

    load: makes the model ready; it is called in the thread of the engine, after the server has begun to listen.
    Raises ForedraftError if the server cannot listen, the model cannot be loaded, or the engine has failed.
    """
    listener = listen(settings)
    server = ModelServer(load, settings, model_name)
    try:
        server.run(sockets=[listener])
    finally:
        listener.close()
    if server.failure is not None:
        if not isinstance(server.failure, ForedraftError):
            traceback.print_exception(server.failure)
            raise ForedraftError(f"the engine has failed: {type(server.failure).__name__}: {server.failure}")
        raise server.failure


def listen(settings: ServerSettings) -> socket.socket:
    """A socket at the address of the settings. Raises ConfigError if it cannot be had."""
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot listen on host {settings.host}, port {settings.port}: {error}") from error
    # Connections inherit it. asyncio sets it only for sockets that say that they are TCP, as this one does not; without
    # it a small answer waits some 40 ms for the client to confirm the one before.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    listener.setblocking(False)
    return listener


class ModelServer(uvicorn.Server):
    """uvicorn, but for what a signal does, and what becomes of the engine."""

    def __init__(self, load: Callable[[], LLM], settings: ServerSettings, model_name: str) -> None:
        self.failure: BaseException | None = None
        self._settings = settings
        self._is_ending = False
        self._signal = ""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._draining: asyncio.Task[None] | None = None
        self._announcing: asyncio.Task[None] | None = None
        self.service = Service(load, settings, model_name, on_end=self._engine_ended)
        self._engine = self.service.engine
        super().__init__(
            uvicorn.Config(
                create_app(self.service),
                log_config=_log_config(is_verbose=settings.access_log),
                access_log=settings.access_log,
                timeout_graceful_shutdown=ANSWER_SECONDS,
                server_header=False,
                lifespan="off",
                ws="none",
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().startup(sockets)
        for listener in sockets or ():
            host, port = listener.getsockname()[:2]
            _say(f"Serving on http://{f'[{host}]' if ':' in host else host}:{port}")
        self._engine.start()
        self._announcing = asyncio.create_task(self._announce(time.monotonic()))

    async def _announce(self, started: float) -> None:
        with suppress(EngineUnavailableError):
            await self._engine.ready()
            depth = self._engine.llm.engine.limits.max_depth
            seconds = time.monotonic() - started
            _say(f"Ready after {seconds:.1f} s: {self.service.model_name}, up to {depth} draft tokens a step")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.service.bodies.close()
        await self._engine.close()
        await super().shutdown(sockets)
        self.service.close()

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        """Signals are ours from here on, and stay so: one more while the process ends must not change its exit code."""
        if threading.current_thread() is threading.main_thread():
            for sig in (signal.SIGINT, signal.SIGTERM):
                signal.signal(sig, self.handle_exit)
        yield

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; a second one, or one while there is nothing to drain, ends at once."""
        if self._is_ending or self._engine.state is not EngineState.READY:
            self.should_exit = self.force_exit = True
            return
        self._is_ending = True
        self._signal = signal.Signals(sig).name
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        seconds = self._settings.drain_seconds
        if not self._engine.is_idle:
            _say(f"{self._signal}: requests in flight have {seconds:g} s, or until a second signal")
        if not await self._engine.drain(seconds):
            _say("not all requests have ended in time: the others get an error")
        self.should_exit = True

    def _engine_ended(self, error: BaseException | None) -> None:
        self.failure = error
        self.should_exit = True


def _log_config(*, is_verbose: bool) -> dict[str, Any]:
    """uvicorn's, all on standard error: warnings, and a line for each request if that is wanted."""
    config: dict[str, Any] = copy.deepcopy(uvicorn.config.LOGGING_CONFIG)
    config["handlers"]["access"]["stream"] = "ext://sys.stderr"
    config["loggers"]["uvicorn"]["level"] = "WARNING"
    config["loggers"]["uvicorn.error"]["level"] = "WARNING"
    config["loggers"]["uvicorn.access"]["level"] = "INFO" if is_verbose else "WARNING"
    return config


def _say(line: str) -> None:
    print(f"foredraft: {line}", file=sys.stderr, flush=True)
