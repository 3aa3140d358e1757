"""Clients that go away: whatever their request was doing ends within a step, and nobody else notices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_models import byte_llama
from live_server import LiveServer, live_server
from server.event_streams import read_events
from server.held_steps import HeldSteps, held_steps
from server.open_connection import OpenConnection
from server.talking_server import CHAT, COMPLETIONS

from foredraft import LLM, SamplingParams

BLOCK = 4
CHUNK = 8  # rows of a step, so that prompts are read in pieces
SHORT = "abcde"
LONG = "The quick brown fox jumps over a dog"
PATHS = {"completions": COMPLETIONS, "chat": CHAT}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_llama(tmp_path_factory.mktemp("bytes"))


@pytest.fixture(scope="module")
def cold(checkpoint: Path) -> LLM:
    """Another engine, without cache or drafts, which says what is right."""
    settings: dict[str, Any] = {"num_blocks": 64, "block_size": BLOCK, "max_model_len": 80, "device": "cpu"}
    return LLM(checkpoint, num_speculative_tokens=0, enable_prefix_caching=False, dtype="float32", **settings)


@pytest.fixture(scope="module")
def live(checkpoint: Path) -> Iterator[LiveServer]:
    """One request at a time, in a pool that has little more room than that, and in pieces."""

    def load() -> LLM:
        return LLM(
            checkpoint,
            dtype="float32",
            device="cpu",
            block_size=BLOCK,
            num_blocks=24,
            max_model_len=80,
            max_num_seqs=1,
            max_num_batched_tokens=CHUNK,
        )

    with live_server(load) as live:
        yield live


@pytest.fixture
def held(live: LiveServer) -> Iterator[HeldSteps]:
    """The engine's steps, one at a time. At the end nothing is held, and the next request is served."""
    live.wait_until_idle()
    with held_steps(live.llm.engine) as held:
        yield held
    live.wait_until_idle()


@pytest.fixture(params=[0, 3], ids=["K=0", "K=3"])
def depth(request: pytest.FixtureRequest) -> int:
    """Drafts a step (K)."""
    return int(request.param)


@pytest.fixture(params=[False, True], ids=["whole", "stream"])
def is_stream(request: pytest.FixtureRequest) -> bool:
    return bool(request.param)


def expected_ids(cold: LLM, prompt: str, max_tokens: int) -> list[int]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    (output,) = cold.generate([list(prompt.encode())], params)
    return list(output.token_ids)


def asking(path: str, prompt: str, max_tokens: int, depth: int, **options: Any) -> dict[str, Any]:
    """The body of a greedy request for exactly so many tokens. A chat's template adds the last byte of its prompt."""
    if path == CHAT:
        assert prompt.endswith(":")
        options["messages"] = [{"role": "user", "content": prompt[:-1]}]
    else:
        options["prompt"] = prompt
    fixed = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
    return {**fixed, "max_tokens": max_tokens, "num_speculative_tokens": depth, **options}


def assert_served(live: LiveServer, cold: LLM, path: str, prompt: str, depth: int, **options: Any) -> dict[str, Any]:
    """A request for 12 tokens is answered with the target's own."""
    response = live.post(path, asking(path, prompt, 12, depth, **options))
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    assert answer["choices"][0]["token_ids"] == expected_ids(cold, prompt, 12)
    assert bytes(answer["prompt_token_ids"]) == prompt.encode()
    return answer


def num_open(live: LiveServer) -> int:
    return live.server.service.engine.num_open


@pytest.mark.parametrize("stage", ["prefill", "decode"])
@pytest.mark.parametrize("is_abrupt", [False, True], ids=["closed", "reset"])
@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_client_goes_away_from_a_request_that_runs(
    live: LiveServer, held: HeldSteps, cold: LLM, depth: int, is_stream: bool, stage: str, is_abrupt: bool, path: str
) -> None:
    """ROCm/ATOM#1562, pegainfer-project/pegainfer#215, vllm-project/vllm#9428: within the step that runs it ends."""
    prompt, salt = (
        f"{LONG}:",
        f"{depth} {is_stream} {stage} {is_abrupt} {path}",
    )  # so that no other test's rows are found
    body = asking(path, prompt, 40, depth, stream=is_stream, cache_salt=salt)
    connection = OpenConnection(live.url, path, body)
    held.wait_for_step()
    num_chunks = -(-len(prompt) // CHUNK)
    num_steps = 2 if stage == "prefill" else num_chunks + 2
    held.let(num_steps)
    first_rows = [plan.requests[0].first_row for plan in held.plans]
    assert len(first_rows) == num_steps + 1
    assert (first_rows[-1] >= len(prompt)) == (stage == "decode")
    if is_stream and stage == "decode":
        connection.read_until(b'"token_ids":[')
    connection.go_away(is_abrupt=is_abrupt)
    live.wait(lambda: num_open(live) == 0, "the server noticed it")
    num_plans = len(held.plans)
    held.let_one_go()
    live.wait_until_idle()  # all blocks are free, too
    assert len(held.plans) == num_plans
    held.free()
    assert_served(live, cold, path, prompt, depth, cache_salt=salt)


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)
def test_a_client_goes_away_from_a_request_that_waits(
    live: LiveServer, held: HeldSteps, cold: LLM, depth: int, is_stream: bool, path: str
) -> None:
    """The same reports: one that has its place in the queue leaves it, and what runs goes on."""
    running = OpenConnection(live.url, COMPLETIONS, asking(COMPLETIONS, SHORT, 30, depth))
    held.wait_for_step()
    engine = live.llm.engine
    gone = OpenConnection(live.url, path, asking(path, f"{LONG}:", 40, depth, stream=is_stream))
    live.wait(lambda: num_open(live) == 2, "both were handed in")
    held.let(1)
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 1)
    gone.go_away()
    live.wait(lambda: num_open(live) == 1, "the server noticed it")
    held.let(1)
    assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (1, 0)
    held.free()
    assert running.json()["choices"][0]["token_ids"] == expected_ids(cold, SHORT, 30)
    assert {len(plan.requests) for plan in held.plans} == {1}
    assert len({plan.requests[0].request_id for plan in held.plans}) == 1
    assert_served(live, cold, path, f"{LONG}:", depth)


def test_a_client_goes_away_before_the_engine_has_looked(
    live: LiveServer, held: HeldSteps, cold: LLM, depth: int, is_stream: bool
) -> None:
    """The same reports: a request that is handed in and taken back within one step."""
    running = OpenConnection(live.url, COMPLETIONS, asking(COMPLETIONS, SHORT, 20, depth))
    held.wait_for_step()
    gone = OpenConnection(live.url, COMPLETIONS, asking(COMPLETIONS, LONG, 40, depth, stream=is_stream))
    live.wait(lambda: num_open(live) == 2, "both were handed in")
    gone.go_away()
    live.wait(lambda: num_open(live) == 1, "the server noticed it")
    held.free()
    assert running.json()["choices"][0]["token_ids"] == expected_ids(cold, SHORT, 20)
    assert len({plan.requests[0].request_id for plan in held.plans}) == 1
    assert_served(live, cold, COMPLETIONS, LONG, depth)


def test_all_choices_and_prompts_of_a_client_that_went_away_end(
    live: LiveServer, held: HeldSteps, cold: LLM, depth: int, is_stream: bool
) -> None:
    """The same reports: of two prompts with two choices each one runs and three wait; none is left."""
    body = asking(COMPLETIONS, "", 20, depth, stream=is_stream, n=2) | {"prompt": [SHORT, LONG]}
    gone = OpenConnection(live.url, COMPLETIONS, body)
    held.wait_for_step()
    held.let(3)
    scheduler = live.llm.engine.scheduler
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 3)
    gone.go_away()
    live.wait(lambda: num_open(live) == 0, "the server noticed it")
    held.let_one_go()
    live.wait_until_idle()
    held.free()
    assert_served(live, cold, COMPLETIONS, LONG, depth)


def test_the_same_request_at_once_after_a_disconnect(live: LiveServer, cold: LLM, depth: int, is_stream: bool) -> None:
    """sgl-project/sglang#36552: resent before the first has ended, it gets a normal reply, without unseen tokens."""
    for number in range(6):
        prompt = f"{number}{LONG}:"
        with ExitStack() as stack:
            gone = stack.enter_context(
                OpenConnection(live.url, CHAT, asking(CHAT, prompt, 40, depth, stream=True, cache_salt=f"{depth}"))
            )
            gone.read_until(b'"token_ids":[' if number % 2 else b"HTTP/1.1 200")
            gone.go_away()
            options = {"stream": is_stream, "cache_salt": f"{depth}", "stream_options": {"include_usage": True}}
            body = asking(CHAT, prompt, 12, depth, **(options if is_stream else {"cache_salt": f"{depth}"}))
            response = live.post(CHAT, body)
        expected = expected_ids(cold, prompt, 12)
        if is_stream:
            events = read_events(response)
            assert list(events.choice().token_ids) == expected
            assert bytes(events.chunks[0]["prompt_token_ids"]) == prompt.encode()
            usage = events.usage
        else:
            answer = response.json()
            assert answer["choices"][0]["token_ids"] == expected
            assert bytes(answer["prompt_token_ids"]) == prompt.encode()
            usage = answer["usage"]
        assert usage is not None
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), 12)
        assert usage["prompt_tokens_details"]["cached_tokens"] <= len(prompt)
    live.wait_until_idle()


def test_the_next_turn_of_a_conversation_that_was_left(live: LiveServer, cold: LLM, depth: int) -> None:
    """The same report: a turn that holds only what the client has seen is answered as by a cold engine."""
    gone = OpenConnection(live.url, COMPLETIONS, asking(COMPLETIONS, LONG, 40, depth, stream=True))
    gone.read_until(b'"token_ids":[')
    gone.go_away()
    live.wait_until_idle()
    seen = expected_ids(cold, LONG, 2)
    turn = [*LONG.encode(), *seen, *b" and then?"]
    body = asking(COMPLETIONS, "", 12, depth) | {"prompt": turn}
    answer = live.post(COMPLETIONS, body).json()
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    (output,) = cold.generate([turn], params)
    assert answer["choices"][0]["token_ids"] == list(output.token_ids)
    assert answer["prompt_token_ids"] == turn
    live.wait_until_idle()


def test_half_a_body_is_no_request(live: LiveServer) -> None:
    """A client that goes away while it sends leaves nothing; the server answers others."""
    before = live.llm.stats.num_requests
    for sent in (b"", b"{", b'{"prompt": "ab'):
        connection = OpenConnection(live.url, COMPLETIONS, sent, head="Content-Length: 100\r\n")
        connection.go_away()
        assert httpx.get(f"{live.url}/health").status_code == 200
    live.wait_until_idle()
    assert live.llm.stats.num_requests == before
