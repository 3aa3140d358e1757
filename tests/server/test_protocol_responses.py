"""What answers look like on the wire, and that the official client can read them."""

from __future__ import annotations

import json
import math

import pytest
from openai.types import Completion as OfficialCompletion
from openai.types.chat import ChatCompletion as OfficialChat
from openai.types.chat import ChatCompletionChunk as OfficialChunk
from pydantic import ValidationError

from foredraft.server.protocol import responses as r
from foredraft.statistics import SpeculationStats

HEAD = {"id": "1", "created": 5, "model": "m"}


def test_a_completion_has_official_nulls_and_nothing_of_ours() -> None:
    usage = r.Usage.of(3, 4, 2)
    answer = r.Completion(**HEAD, choices=[r.CompletionChoice(index=0, text="x")], usage=usage)  # type: ignore[arg-type]
    assert json.loads(answer.model_dump_json()) == HEAD | {
        "object": "text_completion",
        "choices": [{"index": 0, "text": "x", "logprobs": None, "finish_reason": None}],
        "usage": {
            "prompt_tokens": 3,
            "completion_tokens": 4,
            "total_tokens": 7,
            "prompt_tokens_details": {"cached_tokens": 2},
        },
    }


def test_our_own_fields_are_there_if_asked_for() -> None:
    stats = SpeculationStats()
    stats.observe(3, 2)
    speculation = r.Speculation(**stats.to_dict(), token_depths=[1, 2, 0])
    choice = r.CompletionChoice(
        index=0, text="x", token_ids=[1, 2, 3], speculation=speculation, pieces=[r.Piece(text="x", depth=1)]
    )
    found = json.loads(r.Completion(**HEAD, choices=[choice], prompt_token_ids=[7]).model_dump_json())  # type: ignore[arg-type]
    assert found["prompt_token_ids"] == [7]
    assert found["choices"][0]["token_ids"] == [1, 2, 3]
    assert found["choices"][0]["speculation"] == stats.to_dict() | {"token_depths": [1, 2, 0]}
    assert found["choices"][0]["pieces"] == [{"text": "x", "depth": 1}]
    assert "usage" not in found


def test_a_chunk_of_a_chat_says_what_it_adds() -> None:
    delta = r.Delta(role="assistant", content="")
    chunk = r.ChatChunk(**HEAD, choices=[r.ChatChunkChoice(index=1, delta=delta)])  # type: ignore[arg-type]
    assert json.loads(chunk.model_dump_json())["choices"] == [
        {"index": 1, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert json.loads(r.Delta().model_dump_json()) == {}
    call = r.ToolCallDelta(index=0, function=r.FunctionDelta(arguments="{"))
    assert json.loads(r.Delta(tool_calls=[call]).model_dump_json()) == {
        "tool_calls": [{"index": 0, "function": {"arguments": "{"}}]
    }


def test_an_impossible_token_has_a_finite_logprob() -> None:
    top = r.TopLogprob(token="x", logprob=-math.inf, bytes=[120])
    entry = r.ChatLogprob(token="x", logprob=-0.5, bytes=[120], top_logprobs=[top])
    found = json.loads(r.ChatLogprobs(content=[entry]).model_dump_json())
    assert found["content"][0]["top_logprobs"] == [{"token": "x", "logprob": -9999.0, "bytes": [120]}]
    assert found["refusal"] is None


def test_a_wrong_field_is_a_fault_of_ours() -> None:
    with pytest.raises(ValidationError):
        r.Delta(text="x")  # type: ignore[call-arg]


def test_the_official_types_read_them() -> None:
    message = r.ChatMessage(
        content=None,
        tool_calls=[r.MadeToolCall(id="c", function=r.CalledFunction(name="f", arguments="{}"))],
    )
    choice = r.ChatChoice(index=0, message=message, finish_reason="tool_calls")
    answer = r.ChatCompletion(**HEAD, choices=[choice], usage=r.Usage.of(1, 2, 0))  # type: ignore[arg-type]
    read = OfficialChat.model_validate_json(answer.model_dump_json(), strict=True)
    assert read.choices[0].message.tool_calls is not None
    assert read.usage is not None
    assert read.usage.total_tokens == 3
    chunk = r.ChatChunk(**HEAD, choices=[], usage=r.Usage.of(1, 2, 0))  # type: ignore[arg-type]
    assert OfficialChunk.model_validate_json(chunk.model_dump_json(), strict=True).usage == read.usage
    logprobs = r.CompletionLogprobs(tokens=["a"], token_logprobs=[-1.5], top_logprobs=[{"b": -0.5}], text_offset=[0])
    plain = r.CompletionChoice(index=0, text="x", logprobs=logprobs, finish_reason="stop")
    completion = r.Completion(**HEAD, choices=[plain])  # type: ignore[arg-type]
    official = OfficialCompletion.model_validate_json(completion.model_dump_json()).choices[0].logprobs
    assert official is not None
    assert official.top_logprobs == [{"b": -0.5}]


def test_the_first_token_of_an_echoed_prompt_has_no_logprob() -> None:
    logprobs = r.CompletionLogprobs(tokens=["a"], token_logprobs=[None], top_logprobs=[None], text_offset=[0])
    assert json.loads(logprobs.model_dump_json())["token_logprobs"] == [None]
