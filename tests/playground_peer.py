"""A peer for the playground: an app with the page's own routes that speaks the API by a script.

It lets a test decide what cannot be had from a model at will: depths of every kind, refusals, a cut stream, one that
never ends.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

from foredraft.server.playground import playground_router

Pieces = Sequence[tuple[str, int]]
NUM_DEPTHS = 8
EVERY_DEPTH: Pieces = (("Own", 0), *((f" depth{depth}", depth) for depth in range(1, NUM_DEPTHS + 1)), (".", 0))


@dataclass(frozen=True)
class Refusal:
    """An answer that is an error."""

    status: int
    message: str
    param: str | None = None
    retry_after: int | None = None

    def response(self) -> Response:
        error = {"message": self.message, "type": "invalid_request_error", "param": self.param, "code": None}
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return JSONResponse({"error": error}, self.status, headers)


@dataclass
class Peer:
    """What the peer answers next, and what it was asked. `url` has no slash at its end.

    ending: "whole" (a proper end); "cut" (the connection breaks after the pieces); "error" (an error is the last one);
    "never" (piece after piece until the reader goes, which sets `disconnected`). torn: in small parts.
    """

    url: str = ""
    pieces: Pieces = EVERY_DEPTH
    ending: str = "whole"
    torn: bool = False
    refusal: Refusal | None = None
    state: str = "ready"
    api_key: str | None = None
    bodies: list[dict[str, Any]] = field(default_factory=list)
    num_scrapes: int = 0
    disconnected: threading.Event = field(default_factory=threading.Event)

    def reset(self) -> None:
        """Forget what a test has set and asked."""
        vars(self).update(vars(Peer(url=self.url)))

    async def torn_chunks(self) -> AsyncIterator[bytes]:
        """The same events with the other line ends and comments between them, torn anywhere, inside characters too."""
        async for chunk in self.chunks():
            data = (": still here\n\n" + chunk).replace("\n", "\r\n").encode()
            for start in range(0, len(data), 31):
                yield data[start : start + 31]
                await asyncio.sleep(0.001)

    async def chunks(self) -> AsyncIterator[str]:
        """The events of a stream."""
        try:
            yield event(
                {"index": 0, "delta": {"role": "assistant", "content": ""}, "pieces": [], "finish_reason": None}
            )
            step: list[tuple[str, int]] = []
            for piece in [*self.pieces, ("", 0)]:
                if step and piece[1] == 0:  # a step ends with the target's own token; the next begins
                    yield event(choice_of(step))
                    step = []
                    await asyncio.sleep(0.01)
                step.append(piece)
            while self.ending == "never":
                yield event(choice_of([(" on", 1), (" and", 0)]))
                await asyncio.sleep(0.01)
            if self.ending == "cut":
                raise ConnectionResetError("as the test asked")
            if self.ending == "error":
                yield f"data: {json.dumps({'error': {'message': 'the engine failed', 'param': None}})}\n\n"
                return
            depths = [depth for _, depth in self.pieces]
            yield event(choice_of([]) | {"finish_reason": "stop", "speculation": statistics(depths)})
            usage = {"prompt_tokens": 7, "completion_tokens": len(depths), "total_tokens": 7 + len(depths)}
            yield f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.disconnected.set()

    def metrics(self) -> str:
        """Metrics as if the engine had worked on since the last look."""
        self.num_scrapes += 1
        n = self.num_scrapes
        counters = {
            "generation_tokens_total": 120 * n,
            "engine_steps_total": 40 * n,
            "prefix_cache_queries_total": 200 * n,
            "prefix_cache_hits_total": 150 * n,
            "spec_decode_num_drafts_total": 40 * n,
            "target_seconds_total": 0.6 * n,
            "draft_seconds_total": 0.2 * n,
            "verification_seconds_total": 0.1 * n,
            "host_seconds_total": 0.1 * n,
            "num_requests_running": 3,
            "num_requests_waiting": 2,
            "kv_cache_usage_perc": 0.25,
        }
        lines = [
            "# HELP foredraft:num_requests_running Requests that run.",
            "# TYPE foredraft:num_requests_running gauge",
        ]
        lines += [f'foredraft:{name}{{model_name="tiny"}} {value}' for name, value in counters.items()]
        accepted = "foredraft:spec_decode_num_accepted_tokens_per_pos_total"
        lines += [f'{accepted}{{model_name="tiny",position="{i}"}} {20 * n / (i + 1)}' for i in range(NUM_DEPTHS)]
        return "\n".join(lines) + "\n"


def choice_of(pieces: Pieces) -> dict[str, Any]:
    """A choice of a chunk."""
    text = "".join(text for text, _ in pieces)
    listed = [{"text": text, "depth": depth} for text, depth in pieces]
    return {"index": 0, "delta": {"content": text}, "pieces": listed, "finish_reason": None}


def event(choice: dict[str, Any]) -> str:
    """A server-sent event with one choice."""
    return f"data: {json.dumps({'object': 'chat.completion.chunk', 'choices': [choice]}, ensure_ascii=False)}\n\n"


def statistics(depths: Sequence[int]) -> dict[str, Any]:
    """What the server tells of an answer whose tokens came so; each of the target's own ends a step with drafts."""
    accepted = [sum(depth == at for depth in depths) for at in range(1, NUM_DEPTHS + 1)]
    num_drafts = max(1, sum(depth == 0 for depth in depths))
    return {
        "num_drafts": num_drafts,
        "accepted_by_depth": accepted,
        "accepted_rates": [count / num_drafts for count in accepted],
        "mean_acceptance_length": 1 + sum(accepted) / num_drafts,
    }


def peer_app(peer: Peer) -> FastAPI:
    """The page's routes, and as much of the API as the page uses."""
    app = FastAPI()
    app.include_router(playground_router())

    def barred(request: Request) -> Response | None:
        if peer.api_key is None or request.headers.get("authorization") == f"Bearer {peer.api_key}":
            return None
        return Refusal(401, "the API key is missing or wrong").response()

    @app.get("/health")
    async def health() -> Response:
        return JSONResponse({"status": peer.state}, 200 if peer.state == "ready" else 503)

    @app.get("/v1/models")
    async def models(request: Request) -> Response:
        listed = [{"id": "tiny", "object": "model", "max_num_speculative_tokens": NUM_DEPTHS}]
        return barred(request) or JSONResponse({"object": "list", "data": listed})

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(peer.metrics(), media_type="text/plain")

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        peer.bodies.append(await request.json())
        if answer := barred(request) or (peer.refusal and peer.refusal.response()):
            return answer
        peer.disconnected.clear()
        return StreamingResponse(peer.torn_chunks() if peer.torn else peer.chunks(), media_type="text/event-stream")

    return app


@contextmanager
def running_peer() -> Iterator[Peer]:
    """A peer on a free port of this machine, in a thread of its own."""
    peer = Peer()
    config = uvicorn.Config(peer_app(peer), port=0, log_level="critical", ws="none", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 20
    while not server.started:
        assert thread.is_alive(), "the peer did not start"
        assert time.monotonic() < deadline, "the peer takes too long to start"
        time.sleep(0.01)
    peer.url = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    try:
        yield peer
    finally:
        server.should_exit = True
        thread.join(timeout=20)
