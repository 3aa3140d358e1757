"""Grammars, in Lark's syntax, for what a model may write when it calls functions."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from foredraft.errors import RequestError
from foredraft.server.tools.function import Function, json_text

# As json.dumps writes JSON, which is how chat templates write calls.
_LAYOUT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}

# What says more about the arguments than the schema of each does.
_JOINT_RULES = (
    *("$ref", "allOf", "anyOf", "oneOf", "not", "if", "const", "enum", "patternProperties", "propertyNames"),
    *("minProperties", "maxProperties", "dependentRequired", "dependentSchemas", "dependencies"),
)


class CallGrammar:
    """Collects the rules of one grammar; its methods return expressions to put into others.

    special_tokens: the ids of the tokenizer's special tokens by their text. A grammar has to name these as tokens,
    where it would otherwise spell them out.
    """

    def __init__(self, special_tokens: Mapping[str, int]) -> None:
        self._special_tokens = special_tokens
        self._rules: list[str] = []

    def text(self, start: str) -> str:
        """The whole grammar, which begins with this expression."""
        return "\n".join([f"start: {start}", *self._rules, ""])

    def literal(self, text: str) -> str:
        """Just this text, with special tokens where it has their names."""
        if not text:
            return '""'
        names = sorted(filter(None, self._special_tokens), key=len, reverse=True)
        parts = re.split(f"({'|'.join(map(re.escape, names))})", text) if names else [text]
        return " ".join(
            f"<[{self._special_tokens[part]}]>"
            if part in self._special_tokens
            else json.dumps(part, ensure_ascii=False)
            for part in parts
            if part
        )

    def rule(self, *alternatives: str) -> str:
        """A rule of its own: one of these."""
        return self._add("r", " | ".join(alternatives))

    def repeated(self, first: str, more: str, *, parallel: bool) -> str:
        """One call, or any number from one on if `parallel`."""
        return f"{first} ({more})*" if parallel else first

    def json(self, schema: Mapping[str, Any], field: str) -> str:
        """JSON by a schema."""
        return self._add("r", f"%json {json_text({**schema, 'x-guidance': _LAYOUT}, field)}")

    def arguments(self, function: Function) -> str:
        """The arguments of a function as one JSON object."""
        return self.json(function.schema, f"parameters of the function {function.name!r}")

    def json_call(self, functions: Sequence[Function], key: str) -> str:
        """One of these functions as {"name": "f", "arguments": {...}}, with this key for the arguments."""
        return self.rule(
            *(
                " ".join(
                    [
                        self.literal(f'{{"name": {json.dumps(function.name, ensure_ascii=False)}, "{key}": '),
                        self.arguments(function),
                        self.literal("}"),
                    ]
                )
                for function in functions
            )
        )

    def raw_text(self, ending: str, schema: Mapping[str, Any], field: str, *, no_json: bool = False) -> str:
        """Text by a schema's length and pattern, then `ending`, which the text does not hold.

        no_json: it does not begin as a number, a list or an object does either.
        One terminal for all: a lexer takes the longest, and would take the beginning of the ending for text.
        """
        end = _escaped(ending)
        shortest, longest = (schema.get(key, default) for key, default in (("minLength", 0), ("maxLength", "")))
        if any(not isinstance(each, int) or isinstance(each, bool) or each < 0 for each in (shortest, longest or 0)):
            raise RequestError(f"{field} must have a length that is an integer, 0 or more")
        parts = [f"/(?s:.{{{shortest},{longest}}}){end}/", f"~/(?s:.*){_escaped(ending.strip())}(?s:.+)/"]
        if no_json:
            parts.append(f"~/(?s:\\s*[-+.0-9(\\[{{].*){end}/")
        if (pattern := schema.get("pattern")) is not None:
            if not isinstance(pattern, str) or re.search(r"(?<!\\)(?:\\\\)*/|\n", pattern):
                raise RequestError(f"{field} has a pattern that this format of calls cannot follow")
            before = "" if pattern.startswith("^") else "(?s:.*)"
            after = "" if re.search(r"(?<!\\)(?:\\\\)*\$$", pattern) else "(?s:.*)"
            middle = pattern.removeprefix("^")
            parts.append(f"/{before}(?:{middle if after else middle[:-1]}){after}{end}/")
        return self._add("T", " & ".join(parts))

    def value(self, function: Function, name: str, ending: str) -> str:
        """A value of a parameter as it stands in a format where text has no quotes and all else is JSON."""
        schema = function.properties.get(name, {})
        types = function.types(schema) or frozenset()
        # What begins as JSON does is JSON, if both may be: the lexer could not go back from text to a number.
        no_json = bool(types & {"integer", "number", "array", "object"})
        return self.rule(*self._values(function, schema, ending, f"{function.name}.{name}", 8, no_json))

    def _values(
        self, function: Function, schema: object, ending: str, name: str, depth: int, no_json: bool
    ) -> Iterator[str]:
        field = f"parameter {name!r}"
        schema = function.resolved(schema)
        types = function.types(schema)
        values = [schema["const"]] if "const" in schema else schema.get("enum")
        branches = schema.get("anyOf", schema.get("oneOf"))
        if isinstance(values, list):
            for value in values:
                text = value if isinstance(value, str) else json_text(value, field)
                if ending.strip() in text:
                    raise RequestError(
                        f"{field} may be text with {ending.strip()}, which this format of calls cannot hold"
                    )
                yield self.literal(text + ending)
        elif isinstance(branches, list) and depth > 0 and "type" not in schema:
            for branch in branches:
                yield from self._values(function, branch, ending, name, depth - 1, no_json)
        elif types is not None and "string" not in types:
            yield from self._json_values(function, schema, ending, field, types)
        elif any(rule in schema for rule in ("allOf", "anyOf", "oneOf", "not", "if")):
            raise RequestError(f"{field} has a schema that this format of calls cannot follow: use plain types")
        else:
            yield self.raw_text(ending, schema, field, no_json=no_json)
            yield from self._json_values(function, schema, ending, field, (types or frozenset()) - {"string"})

    def _json_values(
        self, function: Function, schema: Mapping[str, Any], ending: str, field: str, types: frozenset[str]
    ) -> Iterator[str]:
        """JSON of these types, then the ending; in one terminal where text may be alike."""
        words = {"null": ("null",), "boolean": ("true", "false")}
        for kind in sorted(types):
            if kind in words:
                yield from (self.literal(word + ending) for word in words[kind])
            else:
                whole = self._with_definitions(function, {**schema, "type": kind})
                yield f"{self.json(whole, field)} {self.literal(ending)}"

    def python_value(self, function: Function, name: str) -> str:
        """A value of a parameter as Python writes it, or as JSON inside of lists and dicts."""
        field = f"parameter {f'{function.name}.{name}'!r}"
        schema = function.resolved(function.properties.get(name, {}))
        types = function.types(schema)
        if types == frozenset({"boolean"}) and schema.keys().isdisjoint({"enum", "const"}):
            return self.rule('"True"', '"False"')
        return self.json(self._with_definitions(function, schema), field)

    def named_parameters(self, function: Function) -> list[tuple[str, bool]]:
        """The names of a function's parameters, and which of them it must have, in order.

        RequestError if its schema says what cannot be said parameter by parameter.
        """
        schema = function.parameters or {}
        if found := [rule for rule in _JOINT_RULES if rule in schema]:
            raise RequestError(
                f"parameters of the function {function.name!r} have {found[0]}: this format of calls cannot follow it"
            )
        required = schema.get("required")
        names = [name for name in required if isinstance(name, str)] if isinstance(required, list) else []
        every = dict.fromkeys([*function.properties, *names])
        return [(name, name in names) for name in every]

    def optional_list(self, items: Sequence[tuple[str, bool]], separator: str) -> str:
        """Items in order, separated; those that are not required may be left out."""
        first = following = '""'
        for item, is_required in reversed(items):
            with_first, with_more = f"{item} {following}", f"{self.literal(separator)} {item} {following}"
            first, following = (
                self.rule(with_first, *([] if is_required else [first])),
                self.rule(with_more, *([] if is_required else [following])),
            )
        return first

    @staticmethod
    def _with_definitions(function: Function, schema: Mapping[str, Any]) -> dict[str, Any]:
        root = function.parameters or {}
        return {**{key: root[key] for key in ("$defs", "definitions") if key in root}, **schema}

    def _add(self, kind: str, expression: str) -> str:
        name = f"{kind}{'_' if kind.islower() else 'X'}{len(self._rules)}"
        self._rules.append(f"{name}: {expression}")
        return name


GrammarStart = Callable[[CallGrammar, Sequence[Function], bool, bool], str]


def _escaped(text: str) -> str:
    """As a regular expression between slashes."""
    return "".join(each if each.isalnum() else f"\\x{{{ord(each):x}}}" for each in text)
