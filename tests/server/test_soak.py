"""Hundreds of requests of all kinds at once, good and bad, many of them given up: nothing is left, nothing is lost."""

from __future__ import annotations

import asyncio
import gc
import json
import random
import tracemalloc
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_models import byte_llama
from live_server import LiveServer, live_server
from prometheus_client.parser import text_string_to_metric_families
from server.event_streams import split_events
from server.talking_server import CHAT, COMPLETIONS
from starlette.requests import Request as HttpRequest

from foredraft import LLM, SamplingParams
from foredraft.engine.async_engine import Submission
from foredraft.engine.open_request import OpenChoice, OpenRequest
from foredraft.engine.output_text import OutputText
from foredraft.engine.served import Ticket
from foredraft.request import Request
from foredraft.server.streaming import EventStream

NUM_REQUESTS = 300
CONCURRENCY = 32
MAX_WAITING = 24  # so that the queue is full at times
MAX_GROWTH = 1_000_000  # bytes; what the prefix cache knows and buffers of connections come and go by less than half
OF_REQUESTS = (Submission, Ticket, OpenRequest, OpenChoice, OutputText, Request, HttpRequest, EventStream)
"""What there is for each request; none may outlive it, but the very last that the engine's thread has looked at."""

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
BAD: list[tuple[str, Any]] = [
    (COMPLETIONS, b"{"),
    (COMPLETIONS, b"[1]"),
    (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}'),
    (COMPLETIONS, {"prompt": [256]}),
    (COMPLETIONS, {"prompt": "a", "n": 0}),
    (COMPLETIONS, {"prompt": "a", "stop_token_ids": [256], "min_tokens": 1}),
    (COMPLETIONS, {"prompt": "a" * 900}),
    (COMPLETIONS, {"prompt": ["a", "b" * 900]}),
    (
        COMPLETIONS,
        {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": 1}}},
    ),
    (CHAT, {"messages": []}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "tools": 3}),
    (CHAT, {"messages": [{"role": "user", "content": "a"}], "logit_bias": {"256": 1}}),
]


@dataclass
class Outcome:
    """What has become of the requests. wrong: what should not have been."""

    counts: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    num_tokens: int = 0


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_llama(tmp_path_factory.mktemp("bytes"), num_modules=2)


@pytest.fixture(scope="module")
def live(checkpoint: Path) -> Iterator[LiveServer]:
    """Eight requests run at once, at most, in a pool that has room for two of the longest."""

    def load() -> LLM:
        settings = {"block_size": 4, "num_blocks": 400, "max_model_len": 800, "max_num_seqs": 8}
        return LLM(checkpoint, dtype="float32", device="cpu", max_num_batched_tokens=48, **settings)

    with live_server(load, max_waiting=MAX_WAITING, max_body_mib=1) as live:
        yield live


def good_body(chance: random.Random) -> tuple[str, dict[str, Any]]:
    """A path, and a body that is right."""
    text = "".join(chance.choices("abcd ", k=chance.randint(1, 60)))
    body: dict[str, Any] = {"max_tokens": chance.randint(1, 24), "n": chance.choice([1, 1, 1, 2])}
    body["temperature"] = chance.choice([0, 0, 0.8])
    body["num_speculative_tokens"] = chance.randint(0, 2)
    body["return_token_ids"] = True
    if chance.random() < 0.2:
        body["stop"] = ["a", "zz"]
    if chance.random() < 0.2:
        body["logprobs"] = True
    if chance.random() < 0.5:
        if "logprobs" in body:
            body["logprobs"] = 2
        prompts = [text, text[::-1]] if chance.random() < 0.2 else text
        return COMPLETIONS, body | {"prompt": prompts, "cache_salt": chance.choice(["one", "two"])}
    if chance.random() < 0.2:
        body |= {"tools": [TOOL], "tool_choice": chance.choice(["auto", "none"])}
        text = text[:10]
    return CHAT, body | {"messages": [{"role": "user", "content": text}]}


async def one(client: httpx.AsyncClient, chance: random.Random, outcome: Outcome) -> None:
    """One request of a kind that chance has chosen."""
    kind = chance.choices(["good", "bad", "oversized", "leave", "leave at once"], [50, 15, 3, 20, 12])[0]
    if kind == "bad":
        path, body = chance.choice(BAD)
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        await expect(client, path, content, 400, outcome)
        return
    if kind == "oversized":
        await expect(client, COMPLETIONS, b" " * ((1 << 20) + 1), 413, outcome)
        return
    path, body = good_body(chance)
    body["stream"] = chance.random() < 0.5
    if kind == "good":
        await ask(client, path, body, outcome)
        return
    body["max_tokens"] = 200  # it would go on for long
    seconds = 0.001 if kind == "leave at once" else chance.uniform(0.002, 0.3)
    try:
        async with asyncio.timeout(seconds):
            await client.post(path, json=body)
    except TimeoutError:
        outcome.counts["left"] += 1


async def expect(client: httpx.AsyncClient, path: str, content: bytes, status: int, outcome: Outcome) -> None:
    """A body that is refused with that status."""
    try:
        response = await client.post(path, content=content, headers={"content-type": "application/json"})
    except (httpx.ReadError, httpx.WriteError) as error:
        outcome.wrong.append(f"{status} was not answered: {type(error).__name__}")
        return
    if response.status_code == 429:  # the queue is looked at first for some
        outcome.counts["full"] += 1
    elif response.status_code != status or "error" not in response.json():
        outcome.wrong.append(f"{response.status_code} instead of {status}: {response.text[:200]}")
    else:
        outcome.counts[f"{status}"] += 1


async def ask(client: httpx.AsyncClient, path: str, body: dict[str, Any], outcome: Outcome) -> None:
    """A right body: answered, or refused because too many wait."""
    response = await client.post(path, json=body)
    if response.status_code == 429:
        outcome.counts["full"] += 1
        return
    if response.status_code != 200:
        outcome.wrong.append(f"{response.status_code}: {response.text[:200]}")
        return
    prompts = body.get("prompt")
    num_choices = body["n"] * (len(prompts) if isinstance(prompts, list) else 1)
    if body["stream"]:
        *events, last = split_events(response.text)
        choices = [choice for event in events for choice in json.loads(event).get("choices", ())]
        reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"] is not None]
        is_whole = last == "[DONE]" and len(reasons) == num_choices
    else:
        choices = response.json()["choices"]
        is_whole = len(choices) == num_choices
        num_tokens = sum(len(choice["token_ids"]) for choice in choices)
        is_whole = is_whole and num_tokens == response.json()["usage"]["completion_tokens"]
    outcome.num_tokens += sum(len(choice.get("token_ids") or ()) for choice in choices)
    outcome.counts["choices"] += num_choices
    if not is_whole:
        outcome.wrong.append(f"not whole: {response.text[-300:]}")


async def soak(url: str, seed: int, num_requests: int) -> Outcome:
    """So many requests, a fixed number of them at a time."""
    outcome, places = Outcome(), asyncio.Semaphore(CONCURRENCY)
    limits = httpx.Limits(max_connections=CONCURRENCY, max_keepalive_connections=CONCURRENCY)
    async with httpx.AsyncClient(base_url=url, timeout=60.0, limits=limits) as client:

        async def placed(number: int) -> None:
            async with places:
                await one(client, random.Random(f"{seed} {number}"), outcome)

        await asyncio.gather(*(placed(number) for number in range(num_requests)))
    return outcome


def metrics(url: str) -> dict[str, float]:
    """Every sample of ours by its name and labels other than the model's."""
    found = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for sample in family.samples:
            labels = [value for name, value in sorted(sample.labels.items()) if name != "model_name"]
            found[" ".join([sample.name, *labels])] = sample.value
    return found


def assert_nothing_runs(live: LiveServer, before: dict[str, float], outcomes: list[Outcome]) -> None:
    """Gauges are back at 0, and counters agree with each other and with what the clients saw."""
    now = metrics(live.url)
    for gauge in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert now[f"foredraft:{gauge}"] == 0
    grown = {name: value - before.get(name, 0.0) for name, value in now.items() if name.startswith("foredraft:")}
    assert all(value >= 0 for value in grown.values())
    ended = {reason: grown[f"foredraft:request_success_total {reason}"] for reason in ("stop", "length", "abort")}
    assert grown["foredraft:request_success_total error"] == 0
    assert ended["stop"] + ended["length"] >= sum(outcome.counts["choices"] for outcome in outcomes)
    assert ended["abort"] > 0
    assert grown["foredraft:e2e_request_latency_seconds_count"] == sum(ended.values())
    assert grown["foredraft:request_generation_tokens_sum"] == grown["foredraft:generation_tokens_total"]
    assert grown["foredraft:generation_tokens_total"] >= sum(outcome.num_tokens for outcome in outcomes)
    drafted = grown["foredraft:spec_decode_num_verified_tokens_total"]
    assert 0 <= grown["foredraft:spec_decode_num_accepted_tokens_total"] <= drafted
    rejected = grown["foredraft:requests_rejected_total queue_full"]
    assert rejected >= sum(outcome.counts["full"] for outcome in outcomes)


def what_is_left() -> Counter[str]:
    """How many objects of requests there are."""
    gc.collect()
    return Counter(type(each).__name__ for each in gc.get_objects() if type(each) in OF_REQUESTS)


def test_a_soak(live: LiveServer, checkpoint: Path) -> None:
    """300 mixed requests at concurrency 32; then all blocks are free, memory is flat and the next answer is right."""
    alone = LLM(checkpoint, dtype="float32", device="cpu", num_speculative_tokens=0, num_blocks=16, max_model_len=100)
    question = {"prompt": "The quick brown fox", "max_tokens": 20, "temperature": 0, "return_token_ids": True}
    (expected,) = alone.generate(["The quick brown fox"], SamplingParams(max_tokens=20, temperature=0))
    before, others = metrics(live.url), what_is_left()  # other tests in this process may have their own
    outcomes = [asyncio.run(soak(live.url, 0, NUM_REQUESTS // 5))]  # warm: whatever is made once is there
    live.wait_until_idle()
    sizes = []
    tracemalloc.start()
    try:
        for seed in (1, 2):
            outcomes.append(asyncio.run(soak(live.url, seed, NUM_REQUESTS * 2 // 5)))
            live.wait_until_idle()
            gc.collect()
            sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    counts = sum((outcome.counts for outcome in outcomes), Counter[str]())
    assert [wrong for outcome in outcomes for wrong in outcome.wrong] == []
    assert min(counts[kind] for kind in ("choices", "400", "413", "left", "full")) > 0, counts
    live.wait(lambda: max((what_is_left() - others).values(), default=0) <= 1, "all made for requests was gone")
    assert sizes[1] - sizes[0] < MAX_GROWTH, (sizes, counts)
    assert_nothing_runs(live, before, outcomes)
    for depth in (0, 2):
        answer = live.post(COMPLETIONS, question | {"num_speculative_tokens": depth}).json()
        assert answer["choices"][0]["token_ids"] == list(expected.token_ids)
    live.wait_until_idle()
