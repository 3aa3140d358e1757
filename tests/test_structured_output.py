"""What StructuredOutput accepts, and how it keeps it."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import pytest

from foredraft.errors import RequestError
from foredraft.structured_output import MAX_CHARACTERS, StructuredOutput

SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"enum": [1, "é"]}}, "required": ["b"]}


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize("schema", [SCHEMA, json.dumps(SCHEMA, indent=2), MappingProxyType(SCHEMA)])
def test_a_schema_is_kept_as_text_in_its_own_order(schema: Any) -> None:
    spec = StructuredOutput(json_schema=schema)
    assert spec.kind == "json_schema"
    assert spec.schema_text == json.dumps(SCHEMA, separators=(",", ":"))
    assert spec == StructuredOutput(json_schema=SCHEMA)
    other_order = dict(reversed(SCHEMA.items()))
    assert spec != StructuredOutput(json_schema=other_order)


@pytest.mark.parametrize(
    "spec",
    [
        StructuredOutput(json_schema=True),
        StructuredOutput(json_schema={}),
        StructuredOutput(json_object=True, whitespace=False),
        StructuredOutput(regex="a+", after="</think>"),
        StructuredOutput(grammar='start: "a"', after=[3, 4]),
        StructuredOutput(choice=["yes", "no"]),
    ],
)
def test_it_is_hashable_and_travels(spec: StructuredOutput) -> None:
    assert hash(spec) == hash(replace(spec))
    assert pickle.loads(pickle.dumps(spec)) == spec


def test_kinds_and_their_schemas() -> None:
    assert StructuredOutput(json_schema=True).schema_text == "true"
    assert StructuredOutput(json_object=True).schema_text == '{"type":"object"}'
    assert StructuredOutput(choice=["a"]).kind == "choice"
    assert StructuredOutput(json_schema={}).kind == "json_schema"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "needs exactly one of json_schema, json_object, regex, grammar, choice; it has none"),
        ({"json_schema": False}, "it has none"),
        ({"regex": "a", "choice": ["a"]}, "it has regex and choice"),
        ({"json_object": 1}, "json_object must be true or false, not 1"),
        ({"regex": "a", "whitespace": "no"}, "whitespace must be true or false, not 'no'"),
        ({"regex": "a", "whitespace": False}, "whitespace has no effect with regex"),
        ({"json_schema": 3}, "json_schema must be a mapping, JSON text of an object, or True, not 3"),
        ({"json_schema": [1]}, "json_schema must be a mapping.*, not a list"),
        ({"json_schema": "[1]"}, "json_schema must be a mapping.*, not a list"),
        ({"json_schema": "false"}, "json_schema must be a mapping.*, not False"),
        ({"json_schema": ""}, "json_schema must be text that is not empty"),
        ({"json_schema": "{"}, "json_schema is not JSON: Expecting property name"),
        ({"json_schema": '{"minimum": NaN}'}, "json_schema is not JSON: NaN is not a JSON value"),
        ({"json_schema": {"minimum": float("inf")}}, "json_schema is not JSON: Out of range float"),
        ({"json_schema": {"enum": {1, 2}}}, "json_schema is not JSON: a set cannot be written as JSON"),
        ({"json_schema": {(1, 2): 3}}, "json_schema is not JSON: keys must be str"),
        ({"json_schema": '{"items":' * 50_000 + "{}" + "}" * 50_000}, "json_schema is nested too deeply"),
        ({"json_schema": nested(50_000)}, "json_schema is nested too deeply"),
        ({"json_schema": {"const": "x" * MAX_CHARACTERS}}, "json_schema may have 1000000 characters at most, not"),
        ({"regex": ""}, "regex must be text that is not empty, not ''"),
        ({"regex": b"a"}, "regex must be text that is not empty, not a bytes"),
        ({"regex": "\ud800"}, "regex is not valid Unicode"),
        ({"grammar": "x" * (MAX_CHARACTERS + 1)}, "grammar may have 1000000 characters at most, not 1000001"),
        ({"grammar": 5}, "grammar must be text that is not empty, not 5"),
        ({"choice": []}, "choice must be a list of one text or more, not a list"),
        ({"choice": "yes"}, "choice must be a list of one text or more, not 'yes'"),
        ({"choice": ["yes", ""]}, "choice must be text that is not empty, not ''"),
        ({"choice": ["yes", 3]}, "choice must be text that is not empty, not 3"),
        ({"choice": ["x" * MAX_CHARACTERS] * 2}, "choice may have 1000000 characters at most in all"),
        ({"regex": "a", "after": ""}, "after must be text that is not empty, not ''"),
        ({"regex": "a", "after": []}, "after must be text or a list of 1 to 1000 token ids, not a list"),
        ({"regex": "a", "after": 7}, "after must be text or a list of 1 to 1000 token ids, not 7"),
        ({"regex": "a", "after": [1, -2]}, "after must consist of token ids, integers from 0 on, not -2"),
        ({"regex": "a", "after": [True]}, "after must consist of token ids, integers from 0 on, not True"),
        ({"regex": "a", "after": "x" * 1001}, "after may have 1000 characters at most, not 1001"),
    ],
)
def test_what_is_wrong_is_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=f"structured_output.*{message}") as caught:
        StructuredOutput(**settings)
    assert len(str(caught.value)) < 400


def test_a_schema_that_holds_itself_is_refused() -> None:
    schema: dict[str, Any] = {}
    schema["items"] = schema
    with pytest.raises(RequestError, match="json_schema is not JSON: Circular reference"):
        StructuredOutput(json_schema=schema)


@pytest.mark.parametrize("schema", [True, "true", {}])
def test_any_json_value_is_a_schema(schema: object) -> None:
    assert StructuredOutput(json_schema=schema).kind == "json_schema"  # type: ignore[arg-type]
