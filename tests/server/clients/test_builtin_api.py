"""The shipped prompts through the API with and without drafts: the same answers, token by token."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server
from openai import AsyncOpenAI

from foredraft import LLM

PROMPTS = Path(__file__).parents[3] / "benchmarks" / "data" / "gsm8k_64.jsonl"
CONCURRENCY = 8
MAX_DEPTH = 8


@pytest.fixture(scope="module")
def builtin_server() -> Iterator[LiveServer]:
    """A server of the built-in model in float32."""
    load = lambda: LLM(dtype="float32", device="cpu", num_speculative_tokens=MAX_DEPTH)  # noqa: E731
    with live_server(load, model_name="builtin") as live:
        yield live


def shipped_prompts(number: int) -> list[str]:
    lines = PROMPTS.read_text(encoding="utf-8").splitlines()
    prompts = [str(json.loads(line)["prompt"]) for line in lines]
    assert len(prompts) == 64
    return prompts[:number]


def answers(live: LiveServer, prompts: list[str], depth: int, max_tokens: int) -> list[Any]:
    """The choices for the prompts, eight at a time."""

    async def run() -> list[Any]:
        places = asyncio.Semaphore(CONCURRENCY)
        async with AsyncOpenAI(base_url=f"{live.url}/v1", api_key="none", max_retries=0, timeout=1200) as client:

            async def ask(prompt: str) -> Any:
                async with places:
                    answer = await client.chat.completions.create(
                        model="builtin",
                        messages=[{"role": "user", "content": prompt}],
                        max_completion_tokens=max_tokens,
                        temperature=0,
                        extra_body={
                            "num_speculative_tokens": depth,
                            "cache_salt": f"depth {depth}",
                            "return_token_ids": True,
                            "return_speculation": True,
                        },
                    )
                return answer.choices[0]

            return list(await asyncio.gather(*map(ask, prompts)))

    found = asyncio.run(run())
    live.wait_until_idle()
    return found


def check_same_answers(live: LiveServer, num_prompts: int, max_tokens: int) -> None:
    prompts = shipped_prompts(num_prompts)
    plain = answers(live, prompts, 0, max_tokens)
    drafted = answers(live, prompts, MAX_DEPTH, max_tokens)
    for prompt, one, other in zip(prompts, plain, drafted, strict=True):
        assert one.token_ids == other.token_ids, prompt
        assert one.message.content == other.message.content
        assert one.finish_reason == other.finish_reason
        assert len(one.token_ids) <= max_tokens
    assert all(choice.speculation["num_drafted_tokens"] == 0 for choice in plain)
    assert all(choice.speculation["accepted_by_depth"][0] > 0 for choice in drafted)
    assert any(choice.speculation["accepted_by_depth"][MAX_DEPTH - 1] > 0 for choice in drafted)
    assert any(choice.message.content.strip() for choice in plain)


def test_the_same_answers_with_and_without_drafts(builtin_server: LiveServer) -> None:
    check_same_answers(builtin_server, 8, 32)


@pytest.mark.slow
def test_the_same_answers_to_all_shipped_prompts(builtin_server: LiveServer) -> None:
    check_same_answers(builtin_server, 64, 256)
