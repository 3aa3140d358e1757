"""The official client: a stream says what the whole answer says, whatever is asked for."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from live_server import LiveServer
from openai import AsyncOpenAI, OpenAI
from openai.types.chat import ChatCompletionMessageParam

MESSAGES: list[ChatCompletionMessageParam] = [{"role": "user", "content": "Say something"}]
SALTS = count()
DEPTHS = (0, 3)
USAGE: Any = {"include_usage": True}


@dataclass
class Told:
    """What an answer, whole or in pieces, says of one choice."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    token_depths: list[int] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    top: list[Any] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    num_drafted: int | None = None

    def add_chat(self, choice: Any, said: Any) -> None:
        """said: the message or the delta of a choice."""
        text = said.content or ""
        if choice.logprobs is not None:
            for each in choice.logprobs.content:
                self.tokens.append(each.token)
                self.logprobs.append(each.logprob)
                self.top.append({bytes(top.bytes): top.logprob for top in each.top_logprobs})
        self._add(choice, text)

    def add_completion(self, choice: Any) -> None:
        if (scores := choice.logprobs) is not None:
            self.tokens += scores.tokens
            self.logprobs += scores.token_logprobs
            self.top += scores.top_logprobs or []
            self.offsets += scores.text_offset
        self._add(choice, choice.text)

    def _add(self, choice: Any, text: str) -> None:
        self.text += text
        extras = choice.model_extra or {}
        self.token_ids += extras.get("token_ids", [])
        if choice.finish_reason is not None:
            assert self.finish_reason is None, "a choice ends once"
            self.finish_reason = choice.finish_reason
        if (speculation := extras.get("speculation")) is not None:
            self.token_depths = speculation["token_depths"]
            self.num_drafted = speculation["num_drafted_tokens"]
        if "pieces" in extras:
            assert "".join(piece["text"] for piece in extras["pieces"]) == text

    def check_like(self, other: Told) -> None:
        """Everything is equal, floats nearly so: batches differ in the order of their sums."""
        for name in ("text", "token_ids", "token_depths", "tokens", "offsets", "finish_reason", "num_drafted"):
            assert getattr(self, name) == getattr(other, name), name
        assert self.logprobs == pytest.approx(other.logprobs, abs=1e-4)
        assert len(self.top) == len(other.top)
        for mine, others in zip(self.top, other.top):
            assert mine == (None if others is None else pytest.approx(others, abs=1e-4))


def check_usage(streamed: Any, whole: Any) -> None:
    assert streamed is not None
    assert streamed.model_dump() == whole.model_dump()


common = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0, 0.8]),
        "seed": st.integers(-5, 5),
        "n": st.sampled_from([1, 3]),
        "stop": st.sampled_from([None, ["e", "\x19"], "never found at all"]),
    }
)
ours = st.fixed_dictionaries(
    {
        "return_token_ids": st.booleans(),
        "return_speculation": st.booleans(),
        "include_stop_str_in_output": st.booleans(),
    }
)
max_tokens = st.sampled_from([1, 7, 16])


@pytest.mark.parametrize("depth", DEPTHS)
@given(options=common, extra=ours, limit=max_tokens, top=st.sampled_from([None, 0, 3]), prompts=st.integers(1, 2))
@settings(max_examples=12)
def test_a_streamed_completion_is_the_whole_one(
    client: OpenAI,
    depth: int,
    options: dict[str, Any],
    extra: dict[str, Any],
    limit: int,
    top: int | None,
    prompts: int,
) -> None:
    echo = options["n"] == 1 or top is None  # or the stream is refused
    body: dict[str, Any] = {
        "model": "model",
        "prompt": ["Once upon a time", "Two"][:prompts],
        "max_tokens": limit,
        "logprobs": top,
        "echo": echo,
        **options,
    }

    def extras() -> dict[str, Any]:
        return {"num_speculative_tokens": depth, "cache_salt": f"salt {next(SALTS)}", **extra}

    whole = client.completions.create(**body, extra_body=extras())
    told = [Told() for _ in range(prompts * options["n"])]
    chunks = list(client.completions.create(**body, extra_body=extras(), stream=True, stream_options=USAGE))
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        told[chunk.choices[0].index].add_completion(chunk.choices[0])
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    check_usage(chunks[-1].usage, whole.usage)
    assert [choice.index for choice in whole.choices] == list(range(len(told)))
    for choice, streamed in zip(whole.choices, told, strict=True):
        expected = Told()
        expected.add_completion(choice)
        streamed.check_like(expected)
    assert (chunks[0].model_extra or {}).get("prompt_token_ids") == (whole.model_extra or {}).get("prompt_token_ids")


@pytest.mark.parametrize("depth", DEPTHS)
@given(options=common, extra=ours, limit=max_tokens, top=st.sampled_from([None, 0, 3]))
@settings(max_examples=12)
def test_a_streamed_chat_is_the_whole_one(
    client: OpenAI, depth: int, options: dict[str, Any], extra: dict[str, Any], limit: int, top: int | None
) -> None:
    body: dict[str, Any] = {
        "model": "model",
        "messages": MESSAGES,
        "max_completion_tokens": limit,
        "logprobs": top is not None,
        "top_logprobs": top,
        **options,
    }

    def extras() -> dict[str, Any]:
        return {"num_speculative_tokens": depth, "cache_salt": f"salt {next(SALTS)}", **extra}

    whole = client.chat.completions.create(**body, extra_body=extras())
    told = [Told() for _ in range(options["n"])]
    roles = []
    chunks = list(client.chat.completions.create(**body, extra_body=extras(), stream=True, stream_options=USAGE))
    for chunk in chunks[:-1]:
        assert chunk.usage is None
        (choice,) = chunk.choices
        told[choice.index].add_chat(choice, choice.delta)
        roles += [(choice.index, choice.delta.role)] if choice.delta.role else []
    assert roles == [(index, "assistant") for index in range(options["n"])]
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    check_usage(chunks[-1].usage, whole.usage)
    for choice, streamed in zip(whole.choices, told, strict=True):
        expected = Told()
        expected.add_chat(choice, choice.message)
        streamed.check_like(expected)
        assert (expected.num_drafted is not None) == extra["return_speculation"]
        assert bool(expected.token_ids) == extra["return_token_ids"]
        if not depth:
            assert not expected.num_drafted
    assert (chunks[0].model_extra or {}).get("prompt_token_ids") == (whole.model_extra or {}).get("prompt_token_ids")


def test_a_stream_without_usage_says_none(client: OpenAI) -> None:
    chunks = list(client.chat.completions.create(model="model", messages=MESSAGES, max_tokens=3, stream=True))
    assert all(chunk.usage is None and len(chunk.choices) == 1 for chunk in chunks)
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "length"


def test_pieces_say_how_each_text_came(client: OpenAI) -> None:
    stream = client.chat.completions.create(
        model="model",
        messages=MESSAGES,
        max_completion_tokens=16,
        temperature=0,
        stream=True,
        extra_body={"return_speculation": True},
    )
    choices = [choice for chunk in stream for choice in chunk.choices]
    pieces = [piece for choice in choices for piece in (choice.model_extra or {}).get("pieces", [])]
    assert "".join(piece["text"] for piece in pieces) == "".join(choice.delta.content or "" for choice in choices)
    last = choices[-1].model_extra or {}
    assert {piece["depth"] for piece in pieces} <= set(last["speculation"]["token_depths"])


def test_async_streams_beside_each_other(byte_server: LiveServer, client: OpenAI) -> None:
    prompts = [f"Number {index}" for index in range(6)]

    async def read(found: AsyncOpenAI, prompt: str) -> str:
        stream = await found.completions.create(model="model", prompt=prompt, temperature=0, stream=True)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def run() -> list[str]:
        async with AsyncOpenAI(base_url=f"{byte_server.url}/v1", api_key="none") as found:
            return await asyncio.gather(*(read(found, prompt) for prompt in prompts))

    whole = client.completions.create(model="model", prompt=prompts, temperature=0)
    assert asyncio.run(run()) == [choice.text for choice in whole.choices]
