"""A real server over a real engine, in a thread of the test's own process."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from foredraft import LLM
from foredraft.server.serve import ModelServer, listen
from foredraft.server.settings import ServerSettings

WAIT_SECONDS = 60.0


class LiveServer:
    """Where a server listens, and what is behind it. `llm` belongs to the engine's thread: look, but do not call."""

    def __init__(self, server: ModelServer, url: str) -> None:
        self.server = server
        self.url = url

    @property
    def llm(self) -> LLM:
        return self.server.service.engine.llm

    def wait(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until something is so; fail, saying `what`, if it does not become so."""
        deadline = time.monotonic() + WAIT_SECONDS
        while not condition():
            assert time.monotonic() < deadline, f"it did not happen that {what}"
            time.sleep(0.005)

    def wait_until_idle(self) -> None:
        """Wait until the engine has no request, then check that nothing is held."""
        engine = self.llm.engine
        self.wait(lambda: self.server.service.engine.num_open == 0 and not engine.has_unfinished, "all requests ended")
        engine.cache.check_integrity()
        assert all(pool.num_free_blocks == pool.num_usable_blocks for pool in engine.cache.pools)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        """Send a body as JSON and read the whole answer."""
        return httpx.post(f"{self.url}{path}", json=body, timeout=WAIT_SECONDS, **options)


@contextmanager
def live_server(
    load: Callable[[], LLM], *, model_name: str = "model", is_loading: bool = False, **settings: Any
) -> Iterator[LiveServer]:
    """Serve what `load` makes, on a free port, until the block ends. is_loading: begin before it is ready."""
    wanted = ServerSettings(port=0, **{"drain_seconds": 0.0, **settings})
    listener = listen(wanted)
    server = ModelServer(load, wanted, model_name)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    live = LiveServer(server, f"http://127.0.0.1:{listener.getsockname()[1]}")
    try:
        live.wait(lambda: server.started, "the server listened")
        if not is_loading:
            live.wait(lambda: server.service.is_ready or server.failure is not None, "the model was ready")
        yield live
    finally:
        server.should_exit = True
        thread.join(WAIT_SECONDS)
        listener.close()
        assert not thread.is_alive(), "the server did not end"
