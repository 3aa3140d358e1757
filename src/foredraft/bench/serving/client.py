"""A client of any OpenAI-compatible server that notes when each chunk of a stream came."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import httpx

from foredraft.bench.serving.figures import Failure, RequestFigures
from foredraft.bench.serving.request_body import PATHS, Endpoint
from foredraft.bench.serving.sse import EventParser
from foredraft.bench.serving.stream_record import StreamRecord
from foredraft.errors import ConfigError, ForedraftError, described, shown

MAX_ERROR_BYTES = 4096
MAX_PAGE_BYTES = 2**24


@dataclass(frozen=True)
class ServedModel:
    """A model that a server has. marks: what makes its output not its own, if the server is one of ours."""

    name: str
    marks: tuple[str, ...] = ()


class ServingClient:
    """Use it with `async with`. A request that fails is a record, never an exception.

    base_url: with or without /v1 at its end. timeout: seconds without a byte after which a request has failed.
    clock: seconds; read as soon as bytes arrive, before anything is parsed. No proxy is used.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        clock: Callable[[], float] = time.perf_counter,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self.clock = clock
        self._root = root = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
        try:
            url = httpx.URL(root)
        except httpx.InvalidURL as error:
            raise ConfigError(f"base_url is not a URL: {error}") from error
        if url.scheme not in ("http", "https") or not url.host:
            raise ConfigError(f"base_url must be like http://127.0.0.1:8000, not {shown(base_url)}")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise ConfigError("api_key must be printable ASCII text")
        self._http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key is not None else {},
            timeout=httpx.Timeout(timeout),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, error, trace)

    async def served_model(self, name: str | None = None) -> ServedModel:
        """The model of that name; the first one that the server has, if none is named. Raises ForedraftError."""
        try:
            cards = json.loads(await self._get("/v1/models"))["data"]
            card = next(card for card in cards if name in (None, card["id"]))
            return ServedModel(str(card["id"]), tuple(map(str, card.get("marks") or ())))
        except (ForedraftError, ValueError, LookupError, TypeError, AttributeError, StopIteration) as error:
            if name is not None:  # whatever the server lists: it may serve it all the same
                return ServedModel(name)
            if isinstance(error, ForedraftError):
                raise
            raise ForedraftError("GET /v1/models names no model: give one with --model") from error

    async def metrics(self) -> str | None:
        """The page /metrics; None if the server has none."""
        try:
            return (await self._get("/metrics")).decode("utf-8", "replace")
        except ForedraftError:
            return None

    async def _get(self, path: str) -> bytes:
        try:
            async with self._http.stream("GET", path) as response:
                page = await _read(response, MAX_PAGE_BYTES)
        except httpx.HTTPError as error:
            raise ForedraftError(f"GET {self._root}{path}: {described(error)}") from error
        if response.status_code != 200:
            raise ForedraftError(f"GET {self._root}{path}: HTTP {response.status_code} {_refusal(response, page)}")
        return page

    async def send(
        self, endpoint: Endpoint, body: Mapping[str, Any], num_prompt_tokens: int | None = None
    ) -> RequestFigures:
        """Send one request and read its stream to the end. num_prompt_tokens: where the sender knows it."""
        content = json.dumps(body).encode()
        record = StreamRecord()
        started = self.clock()
        try:
            failure = await self._read_stream(PATHS[endpoint], content, record)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            failure = Failure("cannot connect", described(error))
        except httpx.TimeoutException as error:
            failure = Failure("timeout", described(error))
        except (httpx.HTTPError, httpx.StreamError) as error:
            kind = "connection lost before output" if record.last_output is None else "stream cut"
            failure = Failure(kind, described(error))
        # A failure has no last output that counts: it ended when it was noticed.
        ended = self.clock() if failure is not None or record.last_output is None else record.last_output
        num_tokens, counted_by = record.count()
        return RequestFigures(
            started=started,
            ended=ended,
            arrivals=tuple(record.arrivals),
            num_tokens=num_tokens,
            num_prompt_tokens=record.num_prompt_tokens(num_prompt_tokens),
            num_cached_tokens=record.num_cached_tokens,
            counted_by=counted_by,
            token_ids=record.token_ids,
            failure=failure,
        )

    async def _read_stream(self, path: str, content: bytes, record: StreamRecord) -> Failure | None:
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        async with self._http.stream("POST", path, content=content, headers=headers) as response:
            if response.status_code != 200:
                return Failure(
                    f"HTTP {response.status_code}", _refusal(response, await _read(response, MAX_ERROR_BYTES))
                )
            kind = response.headers.get("content-type", "")
            if not kind.startswith("text/event-stream"):
                return Failure("not a stream", f"content type {kind!r:.80}: {await _read(response, 200)!r}")
            parser = EventParser()
            async for received in response.aiter_bytes():
                now = self.clock()
                try:
                    events = parser.feed(received)
                except ValueError as error:
                    return Failure("malformed event", str(error))
                for data in events:
                    record.add(data, now)
                    if record.failure is not None:
                        return record.failure
        if not record.is_done:
            return Failure("stream cut", "the stream ended without [DONE]")
        return None


async def _read(response: httpx.Response, max_bytes: int) -> bytes:
    """The body, no more than its first bytes."""
    page = bytearray()
    async for received in response.aiter_bytes():
        page += received
        if len(page) >= max_bytes:
            break
    return bytes(page[:max_bytes])


def _refusal(response: httpx.Response, page: bytes) -> str:
    text = page.decode("utf-8", "replace")
    with suppress(ValueError, LookupError, TypeError):
        text = json.loads(text)["error"]["message"]
    return f"{response.reason_phrase}: {text}"
