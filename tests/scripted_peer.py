"""A little HTTP server that answers as a test tells it: a peer for clients of OpenAI's interface, not a model."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse

DONE = b"data: [DONE]\n\n"


@dataclass(frozen=True)
class Answer:
    """What one POST gets: the parts of a stream, cut off after them or not; or another status with a body."""

    parts: tuple[bytes, ...] = ()
    is_cut: bool = False
    status: int = 200
    content_type: str = "text/event-stream"


@dataclass
class Peer:
    """What the server answers, and what it was asked. `waiting` requests are held until all of them have come."""

    answer: Callable[[dict[str, Any]], Answer]
    metrics: list[str | None] = field(default_factory=lambda: [None])
    models: Any = field(default_factory=lambda: {"data": [{"id": "scripted"}]})
    bodies: list[dict[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)
    num_open: int = 0
    most_open: int = 0
    base_url: str = ""

    def app(self) -> FastAPI:
        """The application."""
        app = FastAPI()

        @app.post("/v1/{kind:path}")
        async def generate(kind: str, request: Request) -> Response:
            body = await request.json()
            self.paths.append(f"/v1/{kind}")
            self.bodies.append(body)
            self.authorizations.append(request.headers.get("authorization"))
            answer = self.answer(body)
            if answer.status != 200:
                return Response(b"".join(answer.parts), answer.status, media_type=answer.content_type)
            return StreamingResponse(self._stream(answer), media_type=answer.content_type)

        @app.get("/v1/models")
        async def models() -> Response:
            return JSONResponse(self.models)

        @app.get("/metrics")
        async def metrics() -> Response:
            page = self.metrics.pop(0) if len(self.metrics) > 1 else self.metrics[0]
            return PlainTextResponse(page) if page is not None else Response(status_code=404)

        return app

    async def _stream(self, answer: Answer) -> AsyncIterator[bytes]:
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            for part in answer.parts:
                await asyncio.sleep(0)
                yield part
            if answer.is_cut:
                raise ConnectionAbortedError
        finally:
            self.num_open -= 1


@contextmanager
def serving(peer: Peer) -> Iterator[Peer]:
    """Serve on a free port, in a thread."""
    config = uvicorn.Config(peer.app(), host="127.0.0.1", port=0, log_config=None, ws="none", lifespan="off")
    server = uvicorn.Server(config)
    listening = threading.Event()

    async def run() -> None:
        task = asyncio.create_task(server.serve())
        while not server.started and not task.done():
            await asyncio.sleep(0.005)
        listening.set()
        await task

    thread = threading.Thread(target=lambda: asyncio.run(run()))
    thread.start()
    try:
        assert listening.wait(20)
        peer.base_url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
        yield peer
    finally:
        server.should_exit = True
        thread.join()


def event(fields: Any) -> bytes:
    """One event of a stream."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def chunk(
    text: str = "", *, token_ids: list[int] | None = None, finish_reason: str | None = None, **fields: Any
) -> bytes:
    """One chunk of /v1/completions."""
    choice: dict[str, Any] = {"index": 0, "text": text, "finish_reason": finish_reason}
    if token_ids is not None:
        choice["token_ids"] = token_ids
    return event({"choices": [choice], **fields})


def usage(num_prompt: int, num_new: int, num_cached: int | None = None) -> bytes:
    """The last chunk before the end, with the numbers of tokens."""
    record: dict[str, Any] = {"prompt_tokens": num_prompt, "completion_tokens": num_new}
    if num_cached is not None:
        record["prompt_tokens_details"] = {"cached_tokens": num_cached}
    return event({"choices": [], "usage": record})
