"""What a client is told, and that it is always JSON of a bounded length."""

from __future__ import annotations

import json

import pytest

from foredraft.errors import RequestError
from foredraft.server.protocol.body import read_body, validated
from foredraft.server.protocol.completions import CompletionRequest
from foredraft.server.protocol.errors import ApiError, from_request_error, from_validation, invalid
from foredraft.server.protocol.responses import ErrorBody


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (400, "invalid_request_error"),
        (401, "authentication_error"),
        (404, "not_found_error"),
        (413, "invalid_request_error"),
        (429, "rate_limit_error"),
        (500, "internal_server_error"),
        (503, "service_unavailable_error"),
    ],
)
def test_the_type_follows_from_the_status(status: int, kind: str) -> None:
    error = ApiError(status, "no", param="n", code="c")
    assert error.body() == {"error": {"message": "no", "type": kind, "param": "n", "code": "c"}}
    assert ErrorBody.model_validate(error.body()).model_dump() == error.body()


def test_the_head_says_when_to_come_back_and_how_to_log_in() -> None:
    assert ApiError(429, "full", retry_after=2).headers == {"Retry-After": "2"}
    assert ApiError(401, "who?").headers == {"WWW-Authenticate": "Bearer"}
    assert invalid("no").headers == {}


def test_message_and_param_are_bounded_and_valid_unicode() -> None:
    error = invalid("\ud800" + "x" * 5_000, "\udfff" * 5_000)
    assert len(error.message) <= 1_010
    assert len(json.dumps(error.body()).encode()) < 3_000
    assert json.loads(json.dumps(error.body(), ensure_ascii=False, allow_nan=False).encode()) == error.body()


@pytest.mark.parametrize(
    ("message", "param"),
    [
        ("temperature must be 0", "temperature"),
        ("logit_bias token ids must be between 0 and 5, not 7", "logit_bias"),
        ("structured_output.json_schema is not JSON", "structured_output"),
        ("the prompt has 3 tokens", "prompt"),
        ("prompt_token_ids must be between 0 and 5", "prompt_token_ids"),
        ("the tokenizer failed", None),
        ("", None),
    ],
)
def test_the_field_is_what_the_message_begins_with(message: str, param: str | None) -> None:
    error = from_request_error(RequestError(message))
    assert (error.status, error.param, error.message) == (400, param, message)


def test_a_field_is_called_what_the_api_calls_it() -> None:
    error = from_request_error(RequestError("logprobs must be at most 5"), {"logprobs": "top_logprobs"})
    assert (error.param, error.message) == ("top_logprobs", "top_logprobs: logprobs must be at most 5")


def test_errors_as_a_web_framework_lists_them() -> None:
    missing = {"type": "missing", "loc": ("body", "prompt"), "msg": "Field required", "input": {}}
    error = from_validation([missing, missing])
    assert (error.param, error.message) == ("prompt", "prompt is required (and 1 more)")
    broken = {
        "type": "json_invalid",
        "loc": ("body", 3),
        "msg": "JSON decode error",
        "input": {},
        "ctx": {"error": "x"},
    }
    error = from_validation([broken])
    assert (error.param, error.message) == (None, "the body is not JSON: x")
    assert from_validation([]).status == 400


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"5",
        b'"x"',
        b"NaN",
        b"\xff\xfe\x00",
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b'{"prompt": "x", "n": ' + b"9" * 5_000 + b"}",
    ],
)
def test_what_is_no_object_is_refused(raw: bytes) -> None:
    with pytest.raises(ApiError, match=r"^the body ") as caught:
        read_body(raw, CompletionRequest)
    assert (caught.value.status, caught.value.param) == (400, None)
    json.dumps(caught.value.body(), allow_nan=False)


@pytest.mark.parametrize("depth", [110, 500])
def test_deep_values_are_refused_by_name(depth: int) -> None:
    deep = '{"a":' * depth + "1" + "}" * depth
    wrong = "[" * depth + "]" * depth
    for body, param in (
        (f'{{"prompt": "x", "structured_output": {{"json_schema": {deep}}}}}', "structured_output.json_schema"),
        (f'{{"prompt": "x", "temperature": {wrong}}}', "temperature"),
        (f'{{"prompt": {wrong}}}', "prompt.0.0"),
        (f'{{"prompt": "x", "metadata": {deep}}}', "metadata.a"),
        (f'{{"prompt": "x", "unknown": {deep}}}', "unknown"),
    ):
        with pytest.raises(ApiError) as caught:
            read_body(body.encode(), CompletionRequest)
        assert (caught.value.param, len(caught.value.message) < 200) == (param, True)


def test_a_huge_bad_input_is_not_echoed_and_costs_one_error() -> None:
    for body, param in (
        ({"prompt": ["x" * 100_000, 3]}, "prompt.1"),
        ({"prompt": "x", "temperature": "y" * 1_000_000}, "temperature"),
        ({"prompt": ["x"] * 100_000}, "prompt"),
        ({"prompt": [1] + ["x"] * 100_000}, "prompt.1"),
        ({"prompt": "x", "logit_bias": {str(index): 0 for index in range(10_000)}}, "logit_bias"),
        ({"prompt": "x"} | {f"unknown_{index}": 0 for index in range(10_000)}, "unknown_0"),
    ):
        with pytest.raises(ApiError) as caught:
            validated(body, CompletionRequest)
        assert caught.value.param == param
        assert len(caught.value.message) < 300
        assert "more)" not in caught.value.message
