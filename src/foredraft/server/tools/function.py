"""A function that a model may call, as a request describes it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.errors import RequestError, shown

MAX_REFERENCES = 16  # followed one after the other

_TYPES = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


@dataclass(frozen=True)
class Function:
    """One of a request's tools. `parameters` is the JSON schema of its arguments, None if it takes none."""

    name: str
    description: str
    parameters: Mapping[str, Any] | None
    is_strict: bool

    @property
    def schema(self) -> dict[str, Any]:
        """The schema of the arguments, an object, with no other properties than the named ones if it names some."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        schema = {"type": "object", **self.parameters}
        is_plain = schema.keys().isdisjoint({"$ref", "allOf", "anyOf", "oneOf", "patternProperties"})
        if is_plain and "properties" in schema:
            schema.setdefault("additionalProperties", False)
        return schema

    @property
    def properties(self) -> Mapping[str, Any]:
        """The schemas of the arguments by name, as far as they are named."""
        properties = (self.parameters or {}).get("properties")
        return properties if isinstance(properties, Mapping) else {}

    def resolved(self, schema: object) -> Mapping[str, Any]:
        """A schema within that of the arguments, with a reference to another place of it followed."""
        for _ in range(MAX_REFERENCES):
            if not isinstance(schema, Mapping):
                return {}
            reference = schema.get("$ref")
            if not isinstance(reference, str):
                return schema
            schema = self.parameters or {}
            for part in reference.removeprefix("#").split("/")[1:]:
                schema = schema.get(part.replace("~1", "/").replace("~0", "~")) if isinstance(schema, Mapping) else None
        return {}

    def types(self, schema: object, depth: int = MAX_REFERENCES) -> frozenset[str] | None:
        """The JSON types that a value by this schema may have; None if it does not say."""
        schema = self.resolved(schema)
        if isinstance(kind := schema.get("type"), str):
            return frozenset({kind})
        if isinstance(kind, list):
            return frozenset(filter(lambda each: isinstance(each, str), kind))
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        if isinstance(values, list):
            return frozenset(map(json_type, values))
        branches = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(branches, list) and depth > 0:
            kinds = [self.types(branch, depth - 1) for branch in branches]
            return None if None in kinds else frozenset().union(*(kind for kind in kinds if kind is not None))
        return None


def json_type(value: object) -> str:
    """The name that JSON schema has for a value's type."""
    return _TYPES.get(type(value), "null")


def read_functions(tools: Sequence[Mapping[str, Any]]) -> tuple[Function, ...]:
    """The functions of a request's tools, which have OpenAI's form. RequestError names what is not as it must be."""
    return tuple(_read_all(tools))


def _read_all(tools: Sequence[Mapping[str, Any]]) -> Iterator[Function]:
    seen: set[str] = set()
    for index, tool in enumerate(tools):
        field = f"tools[{index}].function"
        function = tool.get("function")
        if not isinstance(function, Mapping):
            raise RequestError(f"{field} must be an object, not {shown(function)}")
        name, parameters = function.get("name"), function.get("parameters")
        if not isinstance(name, str) or not name:
            raise RequestError(f"{field}.name must be text that is not empty, not {shown(name)}")
        if name in seen:
            raise RequestError(f"{field}.name must be unlike the others, and {shown(name)} is there twice")
        if parameters is not None and not isinstance(parameters, Mapping):
            raise RequestError(f"{field}.parameters must be a JSON schema, an object, not {shown(parameters)}")
        seen.add(name)
        yield Function(name, str(function.get("description") or ""), parameters, function.get("strict") is True)


def json_text(value: object, field: str) -> str:
    """A value as JSON on one line; RequestError, with the field, if it has no such text."""
    try:
        text = json.dumps(value, ensure_ascii=False, allow_nan=False)
        text.encode()
    except (RecursionError, TypeError, ValueError) as error:
        raise RequestError(f"{field} cannot be written as JSON: {error!s:.200}") from None
    return text
