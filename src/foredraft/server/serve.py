"""Running the server: it listens while the model loads, drains before it ends, and ends when the engine fails."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from types import FrameType

import uvicorn

from foredraft import LLM
from foredraft.engine.async_engine import EngineState
from foredraft.errors import ConfigError, ForedraftError
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
    listener = _listen(settings)
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


def _listen(settings: ServerSettings) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
        listener = socket.create_server((settings.host, settings.port), family=family, backlog=2048)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot listen on host {settings.host}, port {settings.port}: {error}") from error
    listener.setblocking(False)
    return listener


class ModelServer(uvicorn.Server):
    """uvicorn, but for what a signal does, and what becomes of the engine."""

    def __init__(self, load: Callable[[], LLM], settings: ServerSettings, model_name: str) -> None:
        self.failure: BaseException | None = None
        self._settings = settings
        self._is_ending = False
        self._signal = ""
        self._draining: asyncio.Task[None] | None = None
        self.service = Service(load, settings, model_name, on_end=self._engine_ended)
        self._engine = self.service.engine
        super().__init__(
            uvicorn.Config(
                create_app(self.service),
                log_level="warning",
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

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await self._engine.close()
        await super().shutdown(sockets)
        self.service.close()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal drains; a second one, or one while there is nothing to drain, ends at once."""
        if self._is_ending or self._engine.state is not EngineState.READY:
            self.should_exit = self.force_exit = True
            return
        self._is_ending = True
        self._signal = signal.Signals(sig).name
        self._loop.call_soon_threadsafe(self._begin_to_drain)

    def _begin_to_drain(self) -> None:
        self._draining = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        seconds = self._settings.drain_seconds
        _say(f"{self._signal}: {self._engine.num_open} requests go on for {seconds:g} s at most; no more are taken")
        if not await self._engine.drain(seconds):
            _say(f"{self._engine.num_open} requests have not ended in time")
        self.should_exit = True

    def _engine_ended(self, error: BaseException | None) -> None:
        self.failure = error
        self.should_exit = True


def _say(line: str) -> None:
    print(f"foredraft: {line}", file=sys.stderr, flush=True)
