"""Every field of a generation: what is taken, what is refused, and what it means for the engine."""

from __future__ import annotations

import dataclasses
import json
import typing

import pytest

from foredraft.sampling_params import MAX_SEED, SamplingParams
from foredraft.server.protocol.body import read_body
from foredraft.server.protocol.chat import ChatCompletionRequest
from foredraft.server.protocol.completions import CompletionRequest
from foredraft.server.protocol.errors import ApiError
from foredraft.server.protocol.sampling import SamplingFields

COMPLETION = '"prompt": "x"'
CHAT = '"messages": [{"role": "user", "content": "x"}]'

NUMBERS = ["NaN", "Infinity", "-Infinity", "1e999", '"nan"', '"1"', "true", "[]", "{}"]
INTEGERS = [*NUMBERS, "1.5", "1.0"]
SWITCHES = ["0", "1", '"true"', "[]", "{}", "NaN"]
TEXTS = ["3", "true", "[]", "{}", '"\\ud800"', "NaN"]
IDS = ["3", '"x"', "[-1]", '["1"]', "[1.0]", "[true]", "[NaN]", "{}", "[null]"]

BAD = {
    "temperature": [*NUMBERS, "-1", "-0.001", "1e7", "1e-9", "9" * 400],
    "top_p": [*NUMBERS, "-1", "0", "1.01"],
    "min_p": [*NUMBERS, "-1", "1.01"],
    "typical_p": [*NUMBERS, "-1", "0", "2"],
    "presence_penalty": [*NUMBERS, "-2.1", "2.1"],
    "frequency_penalty": [*NUMBERS, "-2.1", "2.1"],
    "repetition_penalty": [*NUMBERS, "-1", "0", "1e7"],
    "top_k": [*INTEGERS, "-1", str(2**31)],
    "n": [*INTEGERS, "0", "-1", "129", str(2**70)],
    "seed": [*INTEGERS, str(2**63), str(-(2**63) - 1)],
    "min_tokens": [*INTEGERS, "-1"],
    "prompt_logprobs": [*INTEGERS, "-1", "21"],
    "num_speculative_tokens": [*INTEGERS, "-1"],
    "priority": [*INTEGERS, str(2**31)],
    "stream": SWITCHES,
    "ignore_eos": SWITCHES,
    "skip_special_tokens": SWITCHES,
    "include_stop_str_in_output": SWITCHES,
    "return_token_ids": SWITCHES,
    "return_speculation": SWITCHES,
    "model": TEXTS,
    "cache_salt": [*TEXTS, '""'],
    "user": TEXTS,
    "safety_identifier": TEXTS,
    "prompt_cache_key": TEXTS,
    "prompt_cache_retention": [*TEXTS, '"24h"'],
    "prompt_cache_options": [*TEXTS, '{"mode": "explicit"}'],
    "service_tier": [*TEXTS, '"priority"'],
    "store": [*SWITCHES[2:], "true"],
    "metadata": ["3", "[]", '{"a": 1}', '{"a": null}', json.dumps({str(index): "" for index in range(17)})],
    "stop": ["3", "true", "{}", '""', '[""]', "[3]", "[null]", '"\\ud800"', json.dumps(["x"] * 17)],
    "stop_token_ids": IDS,
    "allowed_token_ids": [*IDS, "[]"],
    "bad_words": ["3", '"x"', "[3]", "[[-1]]", '["\\ud800"]', "[[true]]", "{}", '[""]', "[[]]"],
    "logit_bias": [
        *("3", "[]", '"x"', '{"-1": 1}', '{"abc": 1}', '{"01": 1}', '{"1.0": 1}', '{"1": 1000}', '{"1": -101}'),
        *('{"1": NaN}', '{"1": "1"}', '{"1": true}', '{"1": null}', '{"": 1}', '{"\\ud800": 1}'),
    ],
    "stream_options": ["3", "[]", '{"include_usage": 1}', '{"x": 1}', "{}", '{"include_usage": true}'],
    "response_format": [
        *("3", '"text"', "{}", '{"type": "xml"}', '{"type": "json_schema"}', '{"type": "text", "json_schema": {}}'),
        *('{"type": "json_schema", "json_schema": {"name": "a b"}}', '{"type": "json_object", "x": 1}'),
        '{"type": "json_schema", "json_schema": {"name": "a", "schema": 3}}',
        '{"type": "json_schema", "json_schema": {"name": "a", "schema": {"a": NaN}}}',
        '{"type": "json_schema", "json_schema": {"name": "a", "strict": 1}}',
        '{"type": "json_object", "json_schema": {"name": "a"}}',
    ],
    "structured_output": [
        *("3", "{}", '{"regex": 3}', '{"regex": ""}', '{"grammar": []}', '{"choice": []}', '{"choice": "x"}'),
        *('{"choice": [""]}', '{"regex": "a", "choice": ["b"]}', '{"json_object": 1}', '{"json_schema": 3}'),
        *('{"json_schema": "{"}', '{"json_schema": {"a": NaN}}', '{"regex": "a", "after": []}', '{"x": 1}'),
        '{"json_schema": false}',
    ],
}
BAD_IN_COMPLETIONS = {
    "max_tokens": [*INTEGERS, "-1", "0"],
    "logprobs": [*INTEGERS, "-1", "21"],
    "echo": SWITCHES,
    "best_of": [*INTEGERS, "0", "2"],
    "suffix": ["3", '"x"'],
    "prompt": [
        *("null", "3", "true", "{}", "[]", "[[]]", "NaN", "[-1]", "[1.5]", "[true]", '[1, "x"]', '["x", 1]', "[null]"),
        *('[[1], "x"]', '["x", [1]]', "[[1], [-1]]", '[["x"]]', '"\\ud800"', "[NaN]", "[[[1]]]"),
    ],
    "messages": ["[]"],
    "tools": ["[]"],
    "top_logprobs": ["1"],
    "unknown": ["null", "1"],
}
BAD_IN_CHATS = {
    "max_tokens": [*INTEGERS, "-1", "0"],
    "max_completion_tokens": [*INTEGERS, "-1", "0"],
    "logprobs": SWITCHES,
    "top_logprobs": [*INTEGERS, "-1", "21", "1"],
    "parallel_tool_calls": SWITCHES,
    "add_generation_prompt": SWITCHES,
    "continue_final_message": SWITCHES,
    "chat_template_kwargs": ["3", "[]", '{"a": NaN}', '{"a": "\\ud800"}'],
    "audio": ["{}", "[]", "false"],
    "modalities": ["3", '["audio"]', '["text", "audio"]', '"text"'],
    "prediction": ["{}"],
    "reasoning_effort": ['"low"'],
    "verbosity": ['"low"', "3"],
    "web_search_options": ["{}"],
    "moderation": ["{}"],
    "functions": ["[]", '[{"name": "f"}]'],
    "function_call": ['"auto"', '{"name": "f"}'],
    "echo": ["true", "null"],
    "prompt": ['"x"'],
    "best_of": ["1"],
    "unknown": ["null", "1"],
}

GOOD = {
    "temperature": ["0", "1", "0.7", "1e6"],
    "top_p": ["1", "1e-9"],
    "top_k": ["0", "5"],
    "presence_penalty": ["-2", "2", "0"],
    "frequency_penalty": ["-1", "1.5"],
    "repetition_penalty": ["1.1", "1"],
    "n": ["1", "128"],
    "seed": ["0", str(2**63 - 1), str(-(2**63)), "-1"],
    "min_tokens": ["0", "3"],
    "num_speculative_tokens": ["0", "8"],
    "stop": ['"x"', "[]", '["a", "b"]'],
    "stop_token_ids": ["[]", "[5]", f"[{2**80}]"],
    "bad_words": ["[]", '["x", [1, 2]]'],
    "allowed_token_ids": ["[1]"],
    "logit_bias": ["{}", '{"0": -100, "7": 100}', '{"5": 1.5}'],
    "prompt_logprobs": ["0", "20"],
    "cache_salt": ['"x"'],
    "priority": ["-3"],
    "model": ['"m"'],
    "user": ['"u"', '""'],
    "metadata": ["{}", '{"a": "b"}'],
    "store": ["false"],
    "service_tier": ['"auto"', '"default"'],
    "safety_identifier": ['"x"'],
    "prompt_cache_key": ['"x"'],
    "prompt_cache_retention": ['"in_memory"'],
    "response_format": [
        *('{"type": "text"}', '{"type": "json_object"}', '{"type": "json_schema", "json_schema": {"name": "a"}}'),
        '{"type": "json_schema", "json_schema": {"name": "a", "schema": {"type": "object"}, "strict": true}}',
    ],
    "structured_output": [
        *('{"regex": "a+"}', '{"choice": ["a", "b"]}', '{"json_schema": true}', '{"json_schema": "{}"}'),
        *('{"json_object": true, "after": [1]}', '{"json_object": true, "after": "x", "whitespace": false}'),
        '{"json_schema": {"type": "object"}, "regex": null}',
    ],
}
GOOD_IN_COMPLETIONS = {
    "max_tokens": ["1", str(2**31), str(2**63), "1" * 400],
    "logprobs": ["0", "20"],
    "echo": ["true", "false"],
    "best_of": ["1"],
    "suffix": ['""'],
    "prompt": ['""', '["x", ""]', "[1, 2]", "[[1], [2, 3]]", f"[{2**70}]"],
}
GOOD_IN_CHATS = {
    "max_tokens": ["1", str(2**63)],
    "max_completion_tokens": ["1", str(2**31), "1" * 400],
    "logprobs": ["true", "false"],
    "modalities": ['["text"]'],
    "verbosity": ['"medium"'],
    "function_call": ['"none"'],
    "tools": ["[]"],
    "tool_choice": ['"none"'],
    "parallel_tool_calls": ["true"],
    "chat_template_kwargs": ["{}", '{"enable_thinking": false}'],
    "continue_final_message": ["true"],
}

Case = tuple[type[SamplingFields], str, str, str]


def cases(*tables: tuple[type[SamplingFields], str, dict[str, list[str]]]) -> list[Case]:
    """Each value of each field, with a body around it."""
    return [(kind, base, name, value) for kind, base, table in tables for name in table for value in table[name]]


def read(kind: type[SamplingFields], base: str, name: str, value: str) -> SamplingParams:
    """What the engine is asked. The value stands last, so that it is the one that counts."""
    return read_body(f'{{{base}, "{name}": {value}}}'.encode(), kind).sampling_params()


@pytest.mark.parametrize(
    ("kind", "base", "name", "value"),
    cases(
        (CompletionRequest, COMPLETION, BAD | BAD_IN_COMPLETIONS),
        (ChatCompletionRequest, CHAT, BAD | BAD_IN_CHATS),
    ),
)
def test_a_bad_value_is_refused_by_name(kind: type[SamplingFields], base: str, name: str, value: str) -> None:
    with pytest.raises(ApiError) as caught:
        read(kind, base, name, value)
    assert caught.value.status == 400
    assert caught.value.param is not None
    assert caught.value.param.split(".")[0] == name
    assert caught.value.message.startswith(name)
    text = json.dumps(caught.value.body(), allow_nan=False, ensure_ascii=False)
    assert len(text.encode()) < 1_500


@pytest.mark.parametrize(
    ("kind", "base", "name", "value"),
    cases(
        (CompletionRequest, COMPLETION, GOOD | GOOD_IN_COMPLETIONS),
        (ChatCompletionRequest, CHAT, GOOD | GOOD_IN_CHATS),
    ),
)
def test_a_good_value_is_taken(kind: type[SamplingFields], base: str, name: str, value: str) -> None:
    params = read(kind, base, name, value)
    if name in {field.name for field in dataclasses.fields(params)} - {"logprobs", "structured_output"}:
        found = getattr(params, name)
        wanted = json.loads(value)
        if name == "logit_bias":
            wanted = {int(key): bias for key, bias in wanted.items()}
            found = dict(found)
        elif name == "seed":
            wanted %= MAX_SEED + 1
        elif isinstance(found, tuple):
            wanted = [wanted] if isinstance(wanted, str) else wanted
            found = [list(item) if isinstance(item, tuple) else item for item in found]
        assert found == wanted
    if name in ("response_format", "structured_output"):
        assert (params.structured_output is None) == ('"text"' in value)


@pytest.mark.parametrize(
    ("kind", "base"), [(CompletionRequest, COMPLETION), (ChatCompletionRequest, CHAT)], ids=["completion", "chat"]
)
def test_null_is_the_default_of_every_optional_field(kind: type[SamplingFields], base: str) -> None:
    plain = read_body(f"{{{base}}}".encode(), kind)
    for name, field in kind.model_fields.items():
        if not field.is_required():
            assert read_body(f'{{{base}, "{name}": null}}'.encode(), kind) == plain, name
    schema = kind.model_json_schema()
    for name, field in schema["properties"].items():
        if name not in schema["required"]:
            assert {"type": "null"} in field.get("anyOf", [field]) or field.get("type") == "null", name


def test_every_field_of_the_official_client_is_known() -> None:
    from openai.types import chat, completion_create_params

    official = typing.get_type_hints(completion_create_params.CompletionCreateParamsBase)
    assert official.keys() - CompletionRequest.model_fields.keys() - {"stream"} == set()
    official = typing.get_type_hints(chat.completion_create_params.CompletionCreateParamsBase)
    assert official.keys() - ChatCompletionRequest.model_fields.keys() - {"stream"} == set()


def test_defaults_are_the_official_ones() -> None:
    completion = read_body(b'{"prompt": "x"}', CompletionRequest).sampling_params()
    assert completion == SamplingParams(temperature=1.0, max_tokens=16)
    chat = read_body(f"{{{CHAT}}}".encode(), ChatCompletionRequest).sampling_params()
    assert chat == SamplingParams(temperature=1.0)
