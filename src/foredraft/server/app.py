"""The endpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi_offline import FastAPIOffline
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from foredraft import __version__
from foredraft.engine.async_engine import Submission
from foredraft.errors import EngineBusyError, EngineUnavailableError, RequestError
from foredraft.server.answers import api_error, guarded
from foredraft.server.chat import ChatAnswer, read_conversation
from foredraft.server.completions import CompletionAnswer
from foredraft.server.gate import Gate
from foredraft.server.openapi import describe_bodies, responses
from foredraft.server.playground import playground_router
from foredraft.server.protocol.body import Body, BodyT, read_body
from foredraft.server.protocol.chat import ChatCompletionRequest
from foredraft.server.protocol.completions import CompletionRequest
from foredraft.server.protocol.errors import ApiError, from_validation
from foredraft.server.protocol.responses import (
    ChatCompletion,
    Completion,
    Detokenized,
    Model,
    ModelList,
    Tokenized,
)
from foredraft.server.protocol.tokenization import DetokenizeRequest, TokenizeRequest
from foredraft.server.service import Service
from foredraft.server.streaming import EventStream, unless_gone

CLIENT_GONE = 499
"""Status of an answer that nobody waits for any more; only logs show it."""

LARGE_BODY = 1 << 16
"""Bytes from which a body is read apart from the event loop."""

BODIES: dict[str, type[Body]] = {
    "/v1/completions": CompletionRequest,
    "/v1/chat/completions": ChatCompletionRequest,
    "/tokenize": TokenizeRequest,
    "/detokenize": DetokenizeRequest,
}


def create_app(service: Service) -> FastAPI:
    """The application for one model. Who runs it starts `service.engine`."""
    app = FastAPIOffline(
        title="Foredraft",
        version=__version__,
        summary="OpenAI-compatible API",
        docs_url="/docs",
        redoc_url=None,
        static_url="/docs-files",
        redirect_slashes=False,
    )
    app.include_router(_state_router(service))
    app.include_router(_text_router(service))
    app.include_router(_generation_router(service))
    app.include_router(playground_router())
    describe_bodies(app, BODIES)
    _handle_errors(app)
    settings = service.settings
    app.add_middleware(Gate, settings.read_api_keys(), service.bodies, service.count_rejection)
    if settings.traces_endpoint is not None:
        service.trace(app, settings.traces_endpoint)
    if settings.cors_origin is not None:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=[settings.cors_origin],
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=["x-request-id", "retry-after"],
        )
    return app


def _handle_errors(app: FastAPI) -> None:
    def answer(error: ApiError) -> JSONResponse:
        return JSONResponse(error.body(), error.status, error.headers)

    async def known(request: Request, error: Exception) -> JSONResponse:
        found = api_error(error)
        assert found is not None
        return answer(found)

    async def http(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        found = answer(ApiError(error.status_code, f"{request.method} {request.url.path}: {error.detail}"))
        found.headers.update(error.headers or {})
        return found

    async def invalid_query(request: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        return answer(from_validation(error.errors()))

    for kind in (ApiError, RequestError, EngineBusyError, EngineUnavailableError):
        app.add_exception_handler(kind, known)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(RequestValidationError, invalid_query)


async def _read(service: Service, request: Request, kind: type[BodyT]) -> BodyT:
    """The body of a request. Raises ApiError.

    A page elsewhere may send anything but JSON to a server on the reader's own machine without asking it (CORS).
    """
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json" and not content_type.endswith("+json"):
        raise ApiError(415, "the header Content-Type must be application/json")
    raw = await request.body()
    return await service.apart(read_body, raw, kind) if len(raw) > LARGE_BODY else read_body(raw, kind)


def _state_router(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/health", summary="Whether requests are taken", responses=responses(503))
    async def health() -> JSONResponse:
        """200 when ready; 503 while the model loads, while the server drains, and after a fault."""
        return JSONResponse({"status": service.engine.state.value}, 200 if service.is_ready else 503)

    router.add_api_route("/health", health, methods=["HEAD"], include_in_schema=False)

    @router.get("/version", summary="The version of the server")
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @router.get("/metrics", summary="Metrics for Prometheus", response_class=Response)
    async def metrics(request: Request) -> Response:
        body, content_type = service.metrics.exposition(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    @router.get("/v1/models", summary="The model that is served", responses=responses(401, 503))
    async def models() -> ModelList:
        return ModelList(data=[service.model_card()])

    @router.get("/v1/models/{name:path}", summary="One model", responses=responses(401, 404, 503))
    async def model(name: str) -> Model:
        service.check_model(name)
        return service.model_card()

    return router


def _text_router(service: Service) -> APIRouter:
    router = APIRouter()
    errors = responses(400, 401, 404, 408, 413, 415, 503)

    @router.post(
        "/tokenize", summary="Token ids of a text or a conversation", response_model=Tokenized, responses=errors
    )
    async def tokenize(request: Request) -> Tokenized:
        with service.counting_rejections():
            body = await _read(service, request, TokenizeRequest)
            service.check_model(body.model)
            reader = service.reader

            def tokens() -> Sequence[int]:
                if body.conversation is not None:
                    return read_conversation(reader, body, body.conversation, body.plain_tools).token_ids
                assert body.prompt is not None
                return reader.encode(body.prompt, body.add_special_tokens is not False)

            token_ids = await service.apart(tokens)
        texts = [reader.token_text(token_id) for token_id in token_ids] if body.return_token_strs else None
        limit = service.engine.llm.engine.limits.max_model_len
        return Tokenized(count=len(token_ids), max_model_len=limit, tokens=list(token_ids), token_strs=texts)

    @router.post("/detokenize", summary="The text of tokens", response_model=Detokenized, responses=errors)
    async def detokenize(request: Request) -> Detokenized:
        with service.counting_rejections():
            body = await _read(service, request, DetokenizeRequest)
            service.check_model(body.model)
            service.check_token_ids("tokens", body.tokens)
            decode = service.reader.decode
            text = await service.apart(decode, body.tokens, skip_special_tokens=body.skip_special_tokens)
        return Detokenized(prompt=text)

    return router


def _generation_router(service: Service) -> APIRouter:
    router = APIRouter()
    errors = responses(400, 401, 404, 408, 413, 415, 429, 503)

    @router.post("/v1/completions", summary="Continue prompts", response_model=Completion, responses=errors)
    async def completions(request: Request) -> Response:
        return await _generate(service, request, CompletionRequest, CompletionAnswer)

    @router.post(
        "/v1/chat/completions", summary="Answer a conversation", response_model=ChatCompletion, responses=errors
    )
    async def chat_completions(request: Request) -> Response:
        return await _generate(service, request, ChatCompletionRequest, ChatAnswer)

    return router


async def _generate(service: Service, request: Request, kind: Any, answer_kind: Callable[..., Any]) -> Response:
    with service.counting_rejections():
        body = await _read(service, request, kind)
        service.check_model(body.model)
        service.check_priority(body.priority)
        answer = answer_kind(service, body)

    async def submit() -> Submission:
        with service.counting_rejections():
            found: Submission = await answer.submit()
            return found

    if body.stream:
        submission = await unless_gone(request.receive, submit())
        if submission is None:
            return Response(status_code=CLIENT_GONE)
        return EventStream(guarded(answer.events(submission)), submission.abort)

    async def whole() -> bytes:
        text: str = (await answer.whole(await submit())).model_dump_json()
        return text.encode()

    content = await unless_gone(request.receive, whole())
    if content is None:
        return Response(status_code=CLIENT_GONE)
    return Response(content, media_type="application/json")
