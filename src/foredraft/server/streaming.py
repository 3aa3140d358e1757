"""Answers to a client that may go away: work is given up within a step of the engine when it does."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from pydantic import BaseModel
from starlette.background import BackgroundTask
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

Result = TypeVar("Result")

DONE = b"data: [DONE]\n\n"


def event(data: BaseModel | dict[str, Any]) -> bytes:
    """One server-sent event that holds JSON."""
    text = data.model_dump_json() if isinstance(data, BaseModel) else json.dumps(data, allow_nan=False)
    return f"data: {text}\n\n".encode()


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result | None:
    """What `work` returns; None if the client went away first: then it was cancelled, and has ended.

    receive: the request's, whose body must have been read.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait((task, watcher), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (watcher, task):
            each.cancel()
        await asyncio.wait((task, watcher))
    return None if task.cancelled() else task.result()


async def _gone(receive: Receive) -> None:
    """Return when the client has gone."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """Server-sent events, from a generator that is closed when the client goes away; on_end is called in any case."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes], on_end: Callable[[], None]) -> None:
        self._events = events
        self._on_end = on_end
        self.status_code = 200
        self.background: BackgroundTask | None = None
        # Proxies must not collect events: who reads wants each at once.
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See the ASGI specification."""
        try:
            await unless_gone(receive, self._send(send))
        finally:
            self._on_end()

    async def _send(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            async for data in events:
                await send({"type": "http.response.body", "body": data, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})
