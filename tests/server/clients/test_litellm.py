"""LiteLLM, which many frameworks call models with, as a client."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from live_server import LiveServer, live_server
from server.clients.teller import Teller, teller

from foredraft import LLM, SamplingParams

PROGRAM = Path(__file__).with_name("litellm_process.py")
MESSAGES = [{"role": "user", "content": "Weather?"}]
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": SCHEMA}}
SPOKEN = 'Let me look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call>'


class LiteLlm:
    """The library, in a process of its own."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def ask(self, kind: str, *calls: dict[str, Any]) -> dict[str, Any]:
        """See litellm_process.py."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"kind": kind, "calls": calls}) + "\n")
        self._process.stdin.flush()
        result: dict[str, Any] = json.loads(self._process.stdout.readline())
        return result

    def answer(self, kind: str, options: dict[str, Any]) -> dict[str, Any]:
        """The one answer to one call."""
        result = self.ask(kind, options)
        assert "error" not in result, result
        (answer,) = result["answers"]
        return dict(answer)

    def complete(self, options: dict[str, Any]) -> dict[str, Any]:
        """The answer to a conversation."""
        return self.answer("completion", options)


@pytest.fixture(scope="module")
def litellm() -> Iterator[LiteLlm]:
    """The library."""
    with subprocess.Popen(
        [sys.executable, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield LiteLlm(process)
        assert process.stdin is not None
        process.stdin.close()
        assert process.wait(60) == 0


def at(live: LiveServer, **options: Any) -> dict[str, Any]:
    here = {"model": "openai/model", "api_base": f"{live.url}/v1", "api_key": "none", "max_retries": 0}
    return {**here, "messages": MESSAGES, "temperature": 0, **options}


def test_chat(litellm: LiteLlm, byte_server: LiveServer, byte_llm: LLM) -> None:
    answer = litellm.complete(at(byte_server, max_tokens=12))
    (right,) = byte_llm.generate(["Weather?:"], SamplingParams(max_tokens=12))
    assert answer["choices"][0]["message"]["content"] == right.text
    assert answer["choices"][0]["finish_reason"] == "length"
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (9, 12)


def test_text_completion(litellm: LiteLlm, byte_server: LiveServer, byte_llm: LLM) -> None:
    options = at(byte_server, model="text-completion-openai/model", prompt="Once upon", max_tokens=9)
    del options["messages"]
    answer = litellm.answer("text_completion", options)
    (right,) = byte_llm.generate(["Once upon"], SamplingParams(max_tokens=9))
    assert answer["choices"][0]["text"] == right.text


def test_a_stream_is_the_whole_answer(litellm: LiteLlm, byte_server: LiveServer) -> None:
    options = at(byte_server, max_tokens=16, extra_body={"num_speculative_tokens": 2})
    whole = litellm.complete(options)
    streamed = litellm.ask("stream", options | {"stream_options": {"include_usage": True}})
    assert "error" not in streamed, streamed
    choices = [choice for chunk in streamed["chunks"] for choice in chunk["choices"]]
    text = "".join(choice["delta"]["content"] or "" for choice in choices)
    assert text == whole["choices"][0]["message"]["content"]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["length"]
    (counted,) = [chunk["usage"] for chunk in streamed["chunks"] if chunk.get("usage") is not None]
    assert counted["completion_tokens"] == whole["usage"]["completion_tokens"] == 16
    assert streamed["answers"][0]["choices"][0]["message"]["content"] == text


def test_async_calls_beside_each_other(litellm: LiteLlm, byte_server: LiveServer, byte_llm: LLM) -> None:
    prompts = [f"Number {index}" for index in range(6)]
    calls = [at(byte_server, messages=[{"role": "user", "content": each}], max_tokens=8) for each in prompts]
    answers = litellm.ask("together", *calls)["answers"]
    outputs = byte_llm.generate([f"{each}:" for each in prompts], SamplingParams(max_tokens=8))
    assert [each["choices"][0]["message"]["content"] for each in answers] == [output.text for output in outputs]


def test_tools_are_called_and_their_results_sent_back(litellm: LiteLlm, told: Teller) -> None:
    told.tell(SPOKEN, MESSAGES, [TOOL])
    options = at(told.live, tools=[TOOL])
    (choice,) = litellm.complete(options)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert choice["finish_reason"] == "tool_calls"
    assert call["function"]["name"] == "get_weather"
    assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}
    streamed = litellm.ask("stream", options)
    assert "error" not in streamed, streamed
    (rebuilt,) = streamed["answers"][0]["choices"][0]["message"]["tool_calls"]
    assert rebuilt["function"] == call["function"]

    said = {key: value for key, value in choice["message"].items() if value is not None}
    said.pop("provider_specific_fields", None)
    turns = [*MESSAGES, said, {"role": "tool", "tool_call_id": call["id"], "content": "sunny"}]
    told.tell("It is sunny.", turns, [TOOL])
    second = litellm.complete(at(told.live, messages=turns, tools=[TOOL]))
    assert second["choices"][0]["message"]["content"] == "It is sunny."


def test_a_tool_that_has_to_be_called(litellm: LiteLlm, byte_server: LiveServer) -> None:
    answer = litellm.complete(at(byte_server, tools=[TOOL], tool_choice="required", parallel_tool_calls=False))
    (call,) = answer["choices"][0]["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"])["city"] in ("Rome", "Oslo")


def test_a_json_schema(litellm: LiteLlm, byte_server: LiveServer) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "place", "schema": SCHEMA, "strict": True}}
    no_space = {str(byte): -100 for byte in b" \t\r\n"}
    answer = litellm.complete(at(byte_server, response_format=wanted, logit_bias=no_space))
    assert json.loads(answer["choices"][0]["message"]["content"])["city"] in ("Rome", "Oslo")


def test_logprobs(litellm: LiteLlm, byte_server: LiveServer) -> None:
    answer = litellm.complete(at(byte_server, max_tokens=3, logprobs=True, top_logprobs=2))
    content = answer["choices"][0]["logprobs"]["content"]
    assert len(content) == 3
    assert all(each["logprob"] == each["top_logprobs"][0]["logprob"] for each in content)  # greedy


def test_errors(litellm: LiteLlm, byte_server: LiveServer, byte_path: Path) -> None:
    def error(options: dict[str, Any]) -> tuple[str, int, str]:
        found = litellm.ask("completion", options)["error"]
        return found["kind"], found["status"], found["message"]

    kind, status, message = error(at(byte_server, extra_body={"num_speculative_tokens": -1}))
    assert (kind, status) == ("BadRequestError", 400)
    assert "num_speculative_tokens must be" in message
    kind, status, message = error(at(byte_server, model="openai/other"))
    assert (kind, status) == ("NotFoundError", 404)
    assert "'other'" in message
    with live_server(lambda: LLM(byte_path, dtype="float32"), api_key="the-key") as live:
        assert error(at(live))[:2] == ("AuthenticationError", 401)
        assert litellm.complete(at(live, api_key="the-key", max_tokens=1))["usage"]["completion_tokens"] == 1


def test_a_full_queue_is_a_rate_limit(litellm: LiteLlm, tmp_path: Path) -> None:
    with teller(tmp_path, max_num_seqs=1, max_waiting=1) as told, told.full(MESSAGES):
        found = litellm.ask("completion", at(told.live))["error"]
    assert (found["kind"], found["status"]) == ("RateLimitError", 429)
