"""The official client: errors become its exceptions, and what it gives up ends within a step of the engine."""

from __future__ import annotations

import asyncio
import copy
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from live_server import LiveServer, live_server
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam
from server.clients.teller import NUM_DRAFTS, Teller, teller

from foredraft import LLM

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say something"}]
LONG = "abcdefgh" * 100
HELD_AFTER = 20  # tokens of the answer
STEP = NUM_DRAFTS + 1  # rows that one step runs on, when all drafts are right


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"n": 1000}, "n"),
        ({"stop": ["a"] * 99}, "stop"),
        ({"logit_bias": {"256": 1}}, "logit_bias"),
        ({"extra_body": {"num_speculative_tokens": -1}}, "num_speculative_tokens"),
        ({"extra_body": {"num_speculative_tokens": 9}}, "num_speculative_tokens"),
        ({"extra_body": {"not_a_field": 1}}, "not_a_field"),
        ({"extra_body": {"structured_output": {"regex": "("}}}, "structured_output"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": 1}}}}, None),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user", "content": "long" * 500}]}, "messages"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a"}}]}]}, None),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_bad_request_names_the_field(
    client: OpenAI, options: dict[str, Any], param: str | None, stream: bool
) -> None:
    body: dict[str, Any] = {"model": "model", "messages": MESSAGES, "stream": stream, **options}
    with pytest.raises(openai.BadRequestError) as caught:
        client.chat.completions.create(**body)
    error = caught.value
    assert error.type == "invalid_request_error"
    assert error.param is not None
    if param is not None:
        assert error.param == param
    body_message = error.body["message"] if isinstance(error.body, dict) else ""
    assert error.param in body_message
    assert len(body_message) <= 1000
    assert error.request_id


def test_a_prompt_out_of_the_vocabulary_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="model", prompt=[1, 256])
    assert caught.value.param == "prompt"


def test_a_stream_that_cannot_say_which_prompt_is_scored(client: OpenAI) -> None:
    options: dict[str, Any] = {"model": "model", "prompt": "a", "echo": True, "logprobs": 1, "n": 2, "max_tokens": 1}
    assert len(client.completions.create(**options).choices) == 2
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(**options, stream=True)
    assert caught.value.param == "n"


@pytest.mark.parametrize("kind", ["chat", "completion"])
def test_options_that_leave_no_token_fail_one_request(client: OpenAI, kind: str) -> None:
    extra = {"allowed_token_ids": [97], "bad_words": ["a"]}

    def ask(stream: bool) -> Any:
        options: dict[str, Any] = {"model": "model", "stream": stream, "extra_body": extra}
        if kind == "chat":
            return client.chat.completions.create(**options, messages=MESSAGES)
        return client.completions.create(**options, prompt=["a", "b"])

    with pytest.raises(openai.BadRequestError) as caught:
        ask(stream=False)
    assert caught.value.code == "generation_failed"
    with pytest.raises(openai.APIError) as in_stream:  # it has begun already: 200 was sent
        list(ask(stream=True))
    assert in_stream.value.code == "generation_failed"
    assert in_stream.value.message == caught.value.message.partition(" - ")[2]
    assert client.completions.create(model="model", prompt="a", max_tokens=1).choices


def test_a_model_that_is_not_served(client: OpenAI) -> None:
    def check(call: Callable[[], object]) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        assert (caught.value.code, caught.value.param) == ("model_not_found", "model")

    check(lambda: client.chat.completions.create(model="other", messages=MESSAGES))
    check(lambda: client.completions.create(model="other", prompt="a"))
    check(lambda: client.models.retrieve("other"))


def test_endpoints_that_do_not_exist(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="model", input="a")


def test_keys(byte_path: Path) -> None:
    with live_server(lambda: LLM(byte_path, dtype="float32"), api_key="the-key") as live:
        with OpenAI(base_url=f"{live.url}/v1", api_key="another", max_retries=0) as stranger:
            for call in (
                lambda: stranger.models.list(),
                lambda: stranger.chat.completions.create(model="model", messages=MESSAGES),
                lambda: stranger.completions.create(model="model", prompt="a", stream=True),
            ):
                with pytest.raises(openai.AuthenticationError) as caught:
                    call()
                assert (caught.value.code, caught.value.param) == ("invalid_api_key", None)
        with OpenAI(base_url=f"{live.url}/v1", api_key="the-key", max_retries=0) as known:
            assert [model.id for model in known.models.list()] == ["model"]
            answer = known.completions.create(model="model", prompt="a", max_tokens=2)
            assert answer.choices[0].finish_reason in ("stop", "length")
        live.wait_until_idle()


class Tries:
    """Watches what a client sends and gets. on_refusal is called between an answer other than 200 and the next try."""

    def __init__(self, on_refusal: Callable[[], None]) -> None:
        self.statuses: list[int] = []
        self.pauses: list[float] = []
        self._on_refusal = on_refusal
        self._refused = 0.0
        self.http = httpx2.Client(event_hooks={"request": [self._sent], "response": [self._answered]})

    def _sent(self, request: httpx2.Request) -> None:
        if self.statuses:
            self.pauses.append(time.monotonic() - self._refused)

    def _answered(self, response: httpx2.Response) -> None:
        self.statuses.append(response.status_code)
        if response.status_code != 200:
            self._on_refusal()
            self._refused = time.monotonic()


@contextmanager
def full_server(path: Path) -> Iterator[tuple[Teller, OpenAI]]:
    """A server with a request that runs, held up, and one that waits: it takes no more until it is let go."""
    with (
        teller(path, max_num_seqs=1, max_waiting=1) as told,
        OpenAI(base_url=f"{told.live.url}/v1", api_key="none", max_retries=0) as client,
        told.full(MESSAGES),
    ):
        yield told, client


def test_a_full_queue_says_when_to_try_again(tmp_path: Path) -> None:
    with full_server(tmp_path) as (_, client):
        for stream in (False, True):
            with pytest.raises(openai.RateLimitError) as caught:
                client.chat.completions.create(model="model", messages=MESSAGES, stream=stream)
            assert (caught.value.code, caught.value.param) == ("queue_full", None)
            assert caught.value.type == "rate_limit_error"
            assert caught.value.response.headers["retry-after"] == "1"


def test_the_client_tries_again_when_it_is_told_to(tmp_path: Path) -> None:
    with full_server(tmp_path) as (told, client):

        def make_room() -> None:
            told.let_go()
            told.live.wait_until_idle()

        tries = Tries(make_room)
        with tries.http:
            again = client.with_options(max_retries=1, http_client=tries.http)
            answer = again.chat.completions.create(model="model", messages=MESSAGES, temperature=0)
        assert answer.choices[0].message.content == "Hello"
        assert tries.statuses == [429, 200]
        assert tries.pauses[0] >= 0.99  # by itself the client waits for half a second at most


def test_the_client_waits_for_a_model_that_loads(byte_path: Path) -> None:
    gate = threading.Event()

    def load() -> LLM:
        assert gate.wait(60)
        return LLM(byte_path, dtype="float32")

    with live_server(load, is_loading=True) as live:

        def finish() -> None:
            gate.set()
            live.wait(lambda: live.server.service.is_ready, "the model was ready")

        with OpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0) as client:
            with pytest.raises(openai.InternalServerError) as caught:
                client.completions.create(model="model", prompt="a")
            assert (caught.value.status_code, caught.value.code) == (503, "engine_unavailable")
            assert caught.value.response.headers["retry-after"] == "1"
            tries = Tries(finish)
            with tries.http:
                again = client.with_options(max_retries=1, http_client=tries.http)
                assert again.completions.create(model="model", prompt="a", max_tokens=1).usage is not None
            assert tries.statuses == [503, 200]
        live.wait_until_idle()


def test_it_says_that_it_is_ready_only_when_it_takes_requests(byte_path: Path) -> None:
    copying, gate = threading.Event(), threading.Event()

    def load() -> LLM:
        llm = LLM(byte_path, dtype="float32")
        tokenizer: Any = llm.tokenizer

        def slow_copy(memo: dict[int, Any]) -> Any:  # the server reads prompts with a copy: of a large vocabulary, say
            del tokenizer.__deepcopy__
            copying.set()
            assert gate.wait(60)
            return copy.deepcopy(tokenizer, memo)

        tokenizer.__deepcopy__ = slow_copy
        return llm

    with live_server(load, is_loading=True) as live:
        try:
            live.wait(copying.is_set, "the server made its copy of the tokenizer")
            health = httpx2.get(f"{live.url}/health")
        finally:
            gate.set()
        live.wait(lambda: live.server.service.is_ready, "the model was ready")
        assert live.post("/v1/completions", {"prompt": "a", "max_tokens": 1}).status_code == 200
        live.wait_until_idle()
    assert (health.status_code, health.json()) == (503, {"status": "loading"})


def check_given_up(told: Teller) -> None:
    """The server knows that nobody waits; then the engine, let go, ends the request without another step."""
    engine = told.live.server.service.engine
    told.live.wait(lambda: engine.num_open == 0, "the server noticed that the client has gone")
    before = told.furthest
    told.let_go()
    told.live.wait_until_idle()
    assert told.furthest - before < STEP  # it was held in the midst of a step: its rows come one by one


@pytest.mark.parametrize("n", [1, 3])
def test_closing_a_stream_ends_the_request(told: Teller, told_client: OpenAI, n: int) -> None:
    told.tell(LONG, MESSAGES, held_after=HELD_AFTER)
    stream = told_client.chat.completions.create(model="model", messages=MESSAGES, temperature=0, n=n, stream=True)
    next(chunk for chunk in stream if chunk.choices[0].delta.content)
    told.wait_until_held()
    stream.close()
    check_given_up(told)


def test_leaving_the_client_ends_the_request(told: Teller) -> None:
    told.tell(LONG, MESSAGES, held_after=HELD_AFTER)
    with OpenAI(base_url=f"{told.live.url}/v1", api_key="none") as client:
        prompt = "user Say something\n:"  # as the chat template writes it
        stream = client.completions.create(model="model", prompt=prompt, max_tokens=200, temperature=0, stream=True)
        next(iter(stream))
        told.wait_until_held()
    check_given_up(told)


def test_closing_an_async_stream_ends_the_request(told: Teller) -> None:
    told.tell(LONG, MESSAGES, held_after=HELD_AFTER)

    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{told.live.url}/v1", api_key="none", max_retries=0) as client:
            async with await client.chat.completions.create(
                model="model", messages=MESSAGES, temperature=0, stream=True
            ) as stream:
                async for chunk in stream:
                    if chunk.choices[0].delta.content:
                        break
                await asyncio.to_thread(told.wait_until_held)
            await asyncio.to_thread(check_given_up, told)
            told.tell("Next", MESSAGES)
            answer = await client.chat.completions.create(model="model", messages=MESSAGES, temperature=0)
            assert answer.choices[0].message.content == "Next"

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_cancelling_a_task_ends_the_request(told: Teller, stream: bool) -> None:
    told.tell(LONG, MESSAGES, held_after=HELD_AFTER)

    async def ask(client: AsyncOpenAI) -> None:
        answer: Any = await client.chat.completions.create(
            model="model", messages=MESSAGES, temperature=0, stream=stream
        )
        async for _ in answer:  # a whole answer never comes
            pass

    async def run() -> None:
        async with AsyncOpenAI(base_url=f"{told.live.url}/v1", api_key="none", max_retries=0) as client:
            task = asyncio.create_task(ask(client))
            await asyncio.to_thread(told.wait_until_held)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            await asyncio.to_thread(check_given_up, told)

    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_runs_out_of_patience_ends_the_request(told: Teller, told_client: OpenAI, stream: bool) -> None:
    told.tell(LONG, MESSAGES, held_after=HELD_AFTER)
    impatient = told_client.with_options(timeout=1)

    def ask() -> Any:
        answer: Any = impatient.chat.completions.create(model="model", messages=MESSAGES, temperature=0, stream=stream)
        return list(answer)

    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(ask)
        told.wait_until_held()
        with pytest.raises(openai.APITimeoutError):
            asked.result()
    check_given_up(told)


def test_the_next_answer_is_right_after_all_that(told: Teller, told_client: OpenAI, byte_server: LiveServer) -> None:
    told.tell("Still here", MESSAGES)
    answer = told_client.chat.completions.create(model="model", messages=MESSAGES, temperature=0)
    assert answer.choices[0].message.content == "Still here"
    assert answer.choices[0].finish_reason == "stop"
    byte_server.wait_until_idle()
