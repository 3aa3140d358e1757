"""The client: every time known from a clock that the stream moves, and each way to fail against a real server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from typing import Any

import httpx
import pytest
from scripted_peer import DONE, Answer, Peer, chunk, event, serving, usage

from foredraft.bench.serving.client import ServedModel, ServingClient
from foredraft.bench.serving.figures import MAX_MESSAGE, RequestFigures
from foredraft.bench.serving.request_body import Endpoint
from foredraft.errors import ConfigError, ForedraftError


class ScriptedStream(httpx.AsyncByteStream):
    """Its parts come at given times of `now`."""

    def __init__(self, now: list[float], parts: Sequence[tuple[float, bytes]]) -> None:
        self._now, self._parts = now, parts

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for time, part in self._parts:
            self._now[0] = time
            yield part


class ScriptedTransport(httpx.AsyncBaseTransport):
    """Answers every request with the same stream; the request is sent at 100."""

    def __init__(self, parts: Sequence[tuple[float, bytes]]) -> None:
        self.now = [100.0]
        self._parts = parts

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        headers = {"content-type": "text/event-stream; charset=utf-8"}
        return httpx.Response(200, headers=headers, stream=ScriptedStream(self.now, self._parts))


def timed(*parts: tuple[float, bytes], endpoint: Endpoint = "completions", sent: int | None = None) -> RequestFigures:
    transport = ScriptedTransport(parts)

    async def run() -> RequestFigures:
        async with ServingClient("http://peer", clock=lambda: transport.now[0], transport=transport) as client:
            return await client.send(endpoint, {}, sent)

    return asyncio.run(run())


def test_times_are_those_of_the_chunks() -> None:
    figures = timed(
        (100.5, chunk("a")),
        (100.75, chunk("bc")),
        (101.75, chunk("d", finish_reason="length")),
        (105.0, usage(7, 6, 3)),
        (106.0, DONE),
    )
    assert figures.failure is None
    assert (figures.ttft, figures.itl, figures.e2el) == (0.5, [0.25, 1.0], 1.75)
    assert figures.tpot == 1.25 / 5  # per token, not per chunk
    assert (figures.num_prompt_tokens, figures.num_cached_tokens, figures.num_tokens) == (7, 3, 6)
    assert figures.counted_by == "usage"
    assert [arrival.num_tokens for arrival in figures.arrivals] == [None, None, None]
    assert figures.timed_tokens == [(100.5, 2.0), (100.75, 2.0), (101.75, 2.0)]


def test_time_is_read_when_bytes_come_and_not_when_their_event_is_complete() -> None:
    whole = chunk("a")
    figures = timed((100.5, whole[:20]), (101.0, whole[20:] + chunk("b")), (103.0, DONE))
    assert figures.ttft == 1.0  # of the part that completes the event
    assert figures.itl == [0.0]


def test_tokens_are_counted_by_the_ids_of_the_chunks() -> None:
    figures = timed(
        (101.0, chunk("a", token_ids=[1], prompt_token_ids=[9, 9])),
        (102.0, chunk("", token_ids=[2, 3, 4])),  # no text, but tokens
        (104.0, chunk("z", token_ids=[5], finish_reason="stop")),
        (104.0, DONE),
    )
    assert figures.token_ids == (1, 2, 3, 4, 5)
    assert (figures.num_tokens, figures.counted_by, figures.num_prompt_tokens) == (5, "token_ids", 2)
    assert [tuple(arrival) for arrival in figures.arrivals] == [(101.0, 1), (102.0, 3), (104.0, 1)]


def test_without_usage_chunks_are_counted_and_it_is_said() -> None:
    figures = timed((101.0, chunk("a")), (102.0, chunk("b")), (102.0, DONE), sent=4)
    assert (figures.num_tokens, figures.counted_by, figures.num_prompt_tokens) == (2, "chunks", 4)
    assert timed((101.0, chunk("a")), (102.0, DONE)).num_prompt_tokens is None


def test_a_chat_begins_with_its_first_content_and_not_with_its_role() -> None:
    def delta(finish_reason: str | None = None, **fields: Any) -> bytes:
        return event({"choices": [{"index": 0, "delta": fields, "finish_reason": finish_reason}], "usage": None})

    figures = timed(
        (101.0, delta(role="assistant", content="")),
        (102.0, delta(reasoning_content="hm")),
        (103.0, delta(content="a")),
        (104.0, delta(tool_calls=[{"index": 0}])),
        (105.0, delta("stop")),
        (106.0, DONE),
        endpoint="chat",
    )
    assert (figures.ttft, figures.itl, figures.e2el) == (2.0, [1.0, 1.0], 5.0)


def test_tokens_without_any_text_have_the_time_of_the_end() -> None:
    figures = timed((102.0, chunk("")), (103.0, chunk("", finish_reason="length")), (104.0, usage(1, 5)), (104.0, DONE))
    assert (figures.ttft, figures.e2el, figures.tpot) == (3.0, 3.0, 0.0)


@pytest.mark.parametrize("number", [0, 1])
def test_no_token_or_one_has_no_time_per_token(number: int) -> None:
    figures = timed((101.0, chunk("", finish_reason="stop")), (101.0, usage(3, number)), (101.0, DONE))
    assert (figures.failure, figures.num_tokens, figures.tpot) == (None, number, None)


def ask(answer: Answer) -> RequestFigures:
    async def run(peer: Peer) -> RequestFigures:
        async with ServingClient(peer.base_url) as client:
            return await client.send("completions", {"prompt": "x"})

    with serving(Peer(lambda body: answer)) as peer:
        return asyncio.run(run(peer))


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (Answer((b'{"error": {"message": "the queue is full"}}',), status=429), "HTTP 429", "the queue is full"),
        (Answer((b"<h1>Oops</h1>",), status=500, content_type="text/html"), "HTTP 500", "<h1>Oops</h1>"),
        (Answer((b"x" * 100_000,), status=503, content_type="text/plain"), "HTTP 503", "xxxx"),
        (Answer((chunk("a"),), is_cut=True), "stream cut", "RemoteProtocolError"),
        (Answer((), is_cut=True), "connection lost before output", "RemoteProtocolError"),
        (Answer((chunk("a"), usage(1, 1))), "stream cut", "ended without [DONE]"),
        (Answer((b"data: {nonsense\n\n", DONE)), "malformed event", "{nonsense"),
        (Answer((event([1]), DONE)), "malformed event", "not a JSON object"),
        (Answer((event({"choices": ["no object"]}), DONE)), "malformed event", "AttributeError"),
        (Answer((event({"choices": [{"token_ids": 5}]}), DONE)), "malformed event", "TypeError"),
        (Answer((chunk("a"), event({"error": {"message": "out of memory"}}), DONE)), "error in the stream", "memory"),
        (Answer((chunk("a", finish_reason="error"), DONE)), "ended by the server", "finish_reason 'error'"),
        (Answer((b'{"choices": []}',), content_type="application/json"), "not a stream", "application/json"),
    ],
)
def test_each_way_to_fail_has_a_kind(answer: Answer, kind: str, message: str) -> None:
    figures = ask(answer)
    assert figures.failure is not None
    assert figures.failure.kind == kind
    assert message in figures.failure.message
    assert len(figures.failure.message) <= MAX_MESSAGE
    assert figures.ended >= figures.started


def test_a_server_that_is_not_there_is_a_failure_of_the_request() -> None:
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))

        async def run() -> RequestFigures:
            async with ServingClient(f"http://127.0.0.1:{taken.getsockname()[1]}") as client:
                assert await client.metrics() is None
                with pytest.raises(ForedraftError, match=r"GET http://127.0.0.1:.*/v1/models: ConnectError"):
                    await client.served_model()
                return await client.send("completions", {})

        figures = asyncio.run(run())
    assert figures.failure is not None
    assert figures.failure.kind == "cannot connect"


def test_a_server_that_says_nothing_is_a_timeout() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:

        async def run() -> RequestFigures:
            async with ServingClient(f"http://127.0.0.1:{silent.getsockname()[1]}", timeout=0.05) as client:
                return await client.send("completions", {})

        figures = asyncio.run(run())
    assert figures.failure is not None
    assert figures.failure.kind == "timeout"


def test_the_base_url_may_end_with_v1_and_the_key_is_sent() -> None:
    async def run(peer: Peer) -> ServedModel:
        async with ServingClient(f"{peer.base_url}/v1/", api_key="s3cret") as client:
            assert (await client.send("chat", {"messages": []})).failure is None
            assert await client.served_model("another") == ServedModel("another")
            return await client.served_model()

    with serving(Peer(lambda body: Answer((chunk("a"), DONE)))) as peer:
        assert asyncio.run(run(peer)) == ServedModel("scripted")
    assert peer.paths == ["/v1/chat/completions"]
    assert peer.authorizations == ["Bearer s3cret"]


@pytest.mark.parametrize("models", [{"data": []}, [], {"data": [{"name": "x"}]}])
def test_a_server_without_a_model_asks_for_one(models: Any) -> None:
    async def run(peer: Peer) -> ServedModel:
        async with ServingClient(peer.base_url) as client:
            return await client.served_model()

    with serving(Peer(lambda body: Answer(), models=models)) as peer, pytest.raises(ForedraftError, match="--model"):
        asyncio.run(run(peer))


@pytest.mark.parametrize("url", ["localhost:8000", "ftp://host", "", "http://", "http://[::1"])
def test_what_is_no_url_of_a_server_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="base_url"):
        ServingClient(url)


def test_bodies_are_sent_as_they_are() -> None:
    body = {"model": "m", "prompt": [1, 2], "stream": True}

    async def run(peer: Peer) -> None:
        async with ServingClient(peer.base_url) as client:
            await client.send("completions", body)

    with serving(Peer(lambda body: Answer((DONE,)))) as peer:
        asyncio.run(run(peer))
    assert json.loads(json.dumps(peer.bodies)) == [body]


@pytest.mark.parametrize("key", ["\xe9", "a\nb"])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(ConfigError, match="api_key must be printable ASCII"):
        ServingClient("http://127.0.0.1:1", api_key=key)
