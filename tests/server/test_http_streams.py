"""Faults seen in other servers' streams: characters, usage and finish reasons, whole and in pieces."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from byte_models import EOS_ID
from server.talking_server import CHAT, COMPLETIONS, TalkingServer, talking_server

PROMPT = "abcdef"
START = len(PROMPT)
ASKED: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": PROMPT},
    CHAT: {"messages": [{"role": "user", "content": PROMPT[:-1]}]},  # the template adds one byte
}
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
CHARACTERS = "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{PERSONAL COMPUTER} 漢字 žluťoučký kůň"


@pytest.fixture(scope="module")
def talking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TalkingServer]:
    with talking_server(tmp_path_factory.mktemp("talking"), max_model_len=1000) as talking:
        yield talking


@pytest.fixture(params=[0, 3], ids=["K=0", "K=3"])
def depth(request: pytest.FixtureRequest) -> int:
    """Drafts a step (K)."""
    return int(request.param)


@pytest.fixture(params=[COMPLETIONS, CHAT], ids=["completions", "chat"])
def path(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def text_of(path: str, choice: dict[str, Any]) -> str:
    return str(choice["message"]["content"] if path == CHAT else choice["text"])


@pytest.mark.parametrize("num_right", [8, 2, 0])
def test_characters_of_several_tokens(talking: TalkingServer, path: str, depth: int, num_right: int) -> None:
    """exo-explore/exo#1691, waybarrios/vllm-mlx#109, antonellof/ferrox#124: never half a character."""
    talking.says(CHARACTERS.encode() + bytes([EOS_ID]), START, num_right)
    body = {**ASKED[path], "num_speculative_tokens": depth, "max_tokens": 100}
    whole = talking.ask(path, **body)["choices"][0]
    assert text_of(path, whole) == CHARACTERS
    said = talking.stream(path, **body).choice()
    assert said.text == CHARACTERS
    assert len(said.pieces) > 5
    assert all(REPLACEMENT not in piece for piece in said.pieces)


@pytest.mark.parametrize("num_bytes", [1, 2, 3, 4])
def test_a_character_that_the_budget_cuts(talking: TalkingServer, path: str, depth: int, num_bytes: int) -> None:
    """The same reports: what there is of a cut character is one replacement mark, at the very end."""
    character = "\N{WOMAN}"
    talking.says(f"日{character}", START)
    body = {**ASKED[path], "num_speculative_tokens": depth, "max_tokens": 3 + num_bytes}
    expected = f"日{character}" if num_bytes == 4 else f"日{REPLACEMENT}"
    whole = talking.ask(path, **body)["choices"][0]
    assert (text_of(path, whole), whole["finish_reason"]) == (expected, "length")
    said = talking.stream(path, **body).choice()
    assert said.text == expected
    assert [REPLACEMENT in piece for piece in said.pieces].count(True) == (num_bytes < 4)


@pytest.mark.parametrize("options", [{}, {"stream_options": None}, {"stream_options": {"include_usage": False}}])
def test_usage_that_nobody_wants_is_not_sent(talking: TalkingServer, path: str, options: dict[str, Any]) -> None:
    """Arthur-Ficial/apfel#100, ROCm/ATOM#1711: without include_usage every chunk has choices, and none has usage."""
    talking.says("hello", START)
    events = talking.stream(path, with_usage=False, **ASKED[path], **options, max_tokens=5)
    assert events.choice().text == "hello"
    assert all(len(chunk["choices"]) == 1 and chunk.get("usage") is None for chunk in events.chunks)


def test_usage_that_is_wanted_is_the_last_chunk(talking: TalkingServer, path: str, depth: int) -> None:
    """The same reports: one last chunk with empty choices and the usage, before the end of the stream."""
    talking.says("hello", START)
    events = talking.stream(path, **ASKED[path], max_tokens=5, num_speculative_tokens=depth)
    *chunks, last = events.chunks
    assert last["choices"] == []
    assert (last["usage"]["prompt_tokens"], last["usage"]["completion_tokens"]) == (START, 5)
    assert last["usage"]["total_tokens"] == START + 5
    assert all(len(chunk["choices"]) == 1 and chunk.get("usage") is None for chunk in chunks)


ENDINGS: dict[str, dict[str, Any]] = {
    "length": {"max_tokens": 7},
    "stop string": {"max_tokens": 20, "stop": "lo w"},
    "stop token": {"max_tokens": 20, "stop_token_ids": [ord("w")]},
    "EOS": {"max_tokens": 20},
    "n=2": {"max_tokens": 20, "n": 2, "temperature": 0.7, "seed": 3, "logit_bias": {"33": 5}},
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_streamed_usage_is_that_of_the_whole_answer(talking: TalkingServer, path: str, depth: int, ending: str) -> None:
    """vllm-project/vllm#8625: with several tokens a step, whatever ends the output, and for each of two choices."""
    talking.says(b"hello world" + bytes([EOS_ID]), START)
    body = {**ASKED[path], **ENDINGS[ending], "num_speculative_tokens": depth, "return_token_ids": True}
    whole, events = talking.ask(path, **body), talking.stream(path, **body)
    assert events.usage is not None
    for key in ("prompt_tokens", "completion_tokens", "total_tokens"):
        assert events.usage[key] == whole["usage"][key]
    lengths = [len(choice["token_ids"]) for choice in whole["choices"]]
    assert whole["usage"]["completion_tokens"] == sum(lengths)
    for choice in whole["choices"]:
        said = events.choice(choice["index"])
        assert said.token_ids == tuple(choice["token_ids"])
        assert said.text == text_of(path, choice)
        assert said.reasons[-1] == choice["finish_reason"]
    expected = {"length": 7, "stop string": 7, "stop token": 7, "EOS": 12}
    assert lengths == [expected[ending]] if ending in expected else [12, 12]
    assert whole["usage"]["prompt_tokens"] == START


@pytest.mark.parametrize("ending", ["length", "stop string", "EOS", "n=2"])
def test_one_finish_reason_a_choice_and_null_before(talking: TalkingServer, path: str, depth: int, ending: str) -> None:
    """waybarrios/vllm-mlx#628, vllm-project/vllm#19662: exactly one reason each, an explicit null in other chunks."""
    talking.says(b"hello world" + bytes([EOS_ID]), START)
    events = talking.stream(path, **ASKED[path], **ENDINGS[ending], num_speculative_tokens=depth, with_usage=False)
    num_choices = ENDINGS[ending].get("n", 1)
    for index in range(num_choices):
        reasons = events.choice(index).reasons
        assert reasons[:-1] == (None,) * (len(reasons) - 1)
        assert reasons[-1] == ("length" if ending == "length" else "stop")
        assert len(reasons) > 2
    indices = {choice["index"] for chunk in events.chunks for choice in chunk["choices"]}
    assert indices == set(range(num_choices))


TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def test_a_tool_call_ends_with_its_own_reason(talking: TalkingServer, depth: int) -> None:
    """The same reports, for a call: `tool_calls`, once, in the last chunk."""
    call = '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call>'
    messages = [{"role": "user", "content": "x"}]
    body: dict[str, Any] = {"messages": messages, "tools": [TOOL], "num_speculative_tokens": depth}
    prompt = talking.ask("/tokenize", messages=messages, tools=[TOOL])
    talking.says(call.encode() + bytes([EOS_ID]), prompt["count"])
    body["max_tokens"] = 80
    (whole,) = talking.ask(CHAT, **body)["choices"]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": "{}"}
    events = talking.stream(CHAT, **body)
    reasons = events.choice().reasons
    assert [reason for reason in reasons if reason is not None] == ["tool_calls"]
    assert reasons[-1] == "tool_calls"
    deltas = [choice["delta"] for chunk in events.chunks for choice in chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls") or ()]
    assert [each["function"]["name"] for each in calls if each["function"].get("name")] == ["add"]
    assert "".join(each["function"].get("arguments") or "" for each in calls) == "{}"


@pytest.mark.parametrize("num_choices", [1, 2, 4])
def test_choices_do_not_multiply_the_prompt(talking: TalkingServer, path: str, num_choices: int) -> None:
    """inclusionAI/AReno#460: prompt_tokens are those of the prompt for any n."""
    talking.says("hello", START)
    body = {**ASKED[path], "n": num_choices, "max_tokens": 5, "temperature": 1.0, "ignore_eos": True}
    for usage in (talking.ask(path, **body)["usage"], talking.stream(path, **body).usage):
        assert usage is not None
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (START, 5 * num_choices)
        assert usage["prompt_tokens_details"]["cached_tokens"] <= START


@pytest.mark.parametrize("is_cached_first", [True, False])
@pytest.mark.parametrize("ends_first", ["cached", "cold"])
def test_cached_tokens_of_several_prompts_are_added_up(
    talking: TalkingServer, is_cached_first: bool, ends_first: str, depth: int
) -> None:
    """vllm-project/vllm#58116: two prompts of which one is cached, whichever stands or ends first."""
    salt = f"{is_cached_first}{ends_first}{depth}"
    end = 40  # both say EOS at the same position, so the longer prompt ends first
    short, long = "s" * 13, "l" * 30
    cached, cold = (long, short) if ends_first == "cached" else (short, long)
    talking.says(b"a" * (end - 13) + bytes([EOS_ID]), 13)
    options: dict[str, Any] = {"cache_salt": salt, "num_speculative_tokens": depth, "max_tokens": 60}
    first = talking.ask(COMPLETIONS, prompt=cached, **options)
    assert first["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    prompts = [cached, cold] if is_cached_first else [cold, cached]
    hit = len(cached) // 4 * 4  # whole blocks
    whole = talking.ask(COMPLETIONS, prompt=prompts, **options)["usage"]
    streamed = talking.stream(COMPLETIONS, prompt=prompts, **options).usage
    for usage, more in zip((whole, streamed), (0, len(cold) // 4 * 4)):  # then the other one is cached too
        assert usage is not None
        assert usage["prompt_tokens_details"]["cached_tokens"] == hit + more
        assert usage["prompt_tokens"] == len(cached) + len(cold)
