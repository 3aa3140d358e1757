"""Whatever the body is, it is a request or an error that is valid JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.sampling_params import SamplingParams
from foredraft.server.protocol.body import Body, read_body
from foredraft.server.protocol.chat import ChatCompletionRequest
from foredraft.server.protocol.completions import CompletionRequest
from foredraft.server.protocol.errors import ApiError
from foredraft.server.protocol.sampling import SamplingFields
from foredraft.server.protocol.tokenization import DetokenizeRequest, TokenizeRequest

KINDS: list[type[Body]] = [CompletionRequest, ChatCompletionRequest, TokenizeRequest, DetokenizeRequest]

WORDS = ["type", "text", "function", "name", "role", "user", "assistant", "content", "json_schema", "regex", "a"]
LETTERS = st.characters(exclude_categories=())  # lone surrogates included
TEXTS = st.sampled_from(WORDS) | st.text(LETTERS, max_size=8)
SCALARS = st.none() | st.booleans() | st.integers() | st.integers(0, 3) | st.floats() | TEXTS
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)
GOOD_PARTS: dict[str, Any] = {
    "prompt": "x",
    "messages": [{"role": "user", "content": "x"}],
    "tokens": [1],
}


def check(raw: bytes, kind: type[Body]) -> None:
    """The property."""
    error = refusal_of(raw, kind)
    if error is not None:
        assert error.status == 400
        text = json.dumps(error.body(), allow_nan=False, ensure_ascii=False).encode()
        assert len(text) < 5_000


def refusal_of(raw: bytes, kind: type[Body]) -> ApiError | None:
    """What is wrong with a body; None if it can be used in every way."""
    try:
        request = read_body(raw, kind)
        if isinstance(request, SamplingFields):
            assert isinstance(request.sampling_params(), SamplingParams)
        if isinstance(request, ChatCompletionRequest):
            json.dumps([request.conversation, request.plain_tools, request.template_options], allow_nan=False)
        if isinstance(request, CompletionRequest):
            assert request.prompts
    except ApiError as error:
        return error
    return None


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
def test_any_values_of_known_fields(kind: type[Body], data: st.DataObject) -> None:
    fields = st.dictionaries(st.sampled_from(sorted(kind.model_fields)) | TEXTS, VALUES, max_size=4)
    needed = {name: value for name, value in GOOD_PARTS.items() if name in kind.model_fields}
    body = (needed if data.draw(st.booleans()) else {}) | data.draw(fields)
    check(json.dumps(body).encode(), kind)


@pytest.mark.parametrize("kind", KINDS)
@given(value=VALUES)
def test_any_json(kind: type[Body], value: object) -> None:
    check(json.dumps(value).encode(), kind)


@given(
    raw=st.binary(max_size=40)
    | st.text(st.sampled_from('{}[]",:0123456789eE+-.truefalsn\\u'), max_size=40).map(str.encode)
)
def test_any_bytes(raw: bytes) -> None:
    check(raw, CompletionRequest)


@pytest.mark.parametrize("kind", KINDS)
def test_schemas_are_json(kind: type[Body]) -> None:
    schema = kind.model_json_schema()
    assert json.loads(json.dumps(schema, allow_nan=False)) == schema
    assert schema["additionalProperties"] is False
