"""Calls with a tag for each parameter: Qwen3-Coder, MiniMax and GLM. Values stand without quotes."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from foredraft.errors import RequestError
from foredraft.server.tools.call_grammar import CallGrammar
from foredraft.server.tools.function import Function, json_type
from foredraft.server.tools.json_call import NAME_CHARACTER
from foredraft.server.tools.literal import json_string, literal_to_json
from foredraft.server.tools.reader import Reader, Reading
from foredraft.server.tools.tool_format import ToolFormat

_KEY_CHARACTER = re.compile(r"[^<>\"\s]")


@dataclass(frozen=True)
class Tags:
    """What stands before and after a block of calls, a function's name, a parameter's name, and its value.

    call_end: what ends a call; "" where each call is a block of its own, which begins with the function's name.
    line: what is between value and tag, "" or a line break.
    """

    block: tuple[str, str]
    name: tuple[str, str]
    call_end: str
    key: tuple[str, str]
    value: tuple[str, str]
    line: str

    def read(self, reader: Reader, functions: Mapping[str, Function]) -> Reading[None]:
        """The routine of the format."""
        markers = [marker for marker in (self.block[0], self.name[0]) if marker]
        while (yield from reader.text_until(markers)):
            reader.begin()
            yield from reader.accept(self.block[0])
            yield from reader.skip()
            is_complete = yield from self._read_call(reader, functions)
            while is_complete and self.call_end:
                reader.begin()
                yield from reader.skip()
                if (yield from reader.accept(self.block[1])):
                    reader.drop()
                    break
                if not (yield from reader.comes_next([self.name[0]])):
                    reader.give_back()
                    break
                is_complete = yield from self._read_call(reader, functions)
            if not is_complete:
                reader.give_up()

    def _read_call(self, reader: Reader, functions: Mapping[str, Function]) -> Reading[bool]:
        """A call up to its end; the name is given out with the first parameter, each parameter once it is complete."""
        if self.name[0] and not (yield from reader.accept(self.name[0])):
            return False
        name = yield from reader.match(NAME_CHARACTER)
        if not name or (self.name[1] and not (yield from reader.accept(self.name[1]))):
            return False
        function = functions.get(name, Function(name, "", {}, False))
        keys: set[str] = set()
        while True:
            yield from reader.skip()
            found = yield from reader.accept(self.key[0], self.call_end or self.block[1])
            if found != self.key[0]:
                break
            key = yield from reader.match(_KEY_CHARACTER)
            if not key or key in keys or not (yield from reader.accept(self.key[1])):
                return False
            if self.value[0]:
                yield from reader.skip()
                if not (yield from reader.accept(self.value[0])):
                    return False
            value = yield from reader.until(self.value[1])
            if value is None:
                return False
            value = value.removeprefix("\n").removesuffix("\n") if self.line else value
            if not keys:
                reader.open_call(name)
            reader.arguments(f"{', ' if keys else '{'}{json_string(key)}: {_as_json(value, key, function)}")
            keys.add(key)
            reader.begin()
        if not found:
            return False
        if not keys:
            reader.open_call(name)
        reader.arguments("}" if keys else "{}")
        reader.drop()
        return True

    def grammar(self, grammar: CallGrammar, functions: Sequence[Function], parallel: bool, follows_marker: bool) -> str:
        """The grammar of the format."""
        call = grammar.rule(*(self._call_grammar(grammar, function) for function in functions))
        line = "\n" if self.call_end else ""
        before = grammar.literal(f"{self.block[0]}{line}")
        after = grammar.literal(f"\n{self.block[1]}")  # in one with the line break, with which a parameter begins too
        first = f"{grammar.literal(line)} {call} {after}" if follows_marker else f"{before} {call} {after}"
        again = grammar.literal(f"\n{self.block[0]}{line}")
        return grammar.repeated(first, f"{again} {call} {after}", parallel=parallel)

    def _call_grammar(self, grammar: CallGrammar, function: Function) -> str:
        parts = [grammar.literal(f"{self.name[0]}{function.name}{self.name[1]}")]
        for name, is_required in grammar.named_parameters(function):
            if not name or not all(map(_KEY_CHARACTER.match, name)):
                raise RequestError(f"parameters of the function {function.name!r} must have names without marks")
            between = f"\n{self.value[0]}" if self.value[0] else ""
            before = grammar.literal(f"\n{self.key[0]}{name}{self.key[1]}{between}{self.line}")
            parameter = f"{before} {grammar.value(function, name, f'{self.line}{self.value[1]}')}"
            parts.append(parameter if is_required else f"({parameter})?")
        return " ".join([*parts, *([grammar.literal(f"\n{self.call_end}")] if self.call_end else [])])


def _as_json(value: str, name: str, function: Function) -> str:
    """JSON for the text of a parameter, by the type that its schema asks for."""
    types = function.types(function.properties.get(name, {}))
    if types == frozenset({"string"}):
        return json_string(value)
    text = value.strip()
    try:
        kind: str | None = json_type(json.loads(text, parse_constant=_refuse))
    except (ValueError, RecursionError):
        converted = literal_to_json(text)
        kind = None if converted is None or text[:1] in "\"'" else json_type(json.loads(converted))
        text = converted or text
    is_meant = kind is not None and (
        types is None or "string" not in types or kind in types or (kind == "integer" and "number" in types)
    )
    return text if is_meant else json_string(value)


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def _format(name: str, tags: Tags) -> ToolFormat:
    return ToolFormat(name, tags.read, tags.grammar, tags.block[0])


QWEN3_CODER = _format(
    "qwen3_coder",
    Tags(
        block=("<tool_call>", "</tool_call>"),
        name=("<function=", ">"),
        call_end="</function>",
        key=("<parameter=", ">"),
        value=("", "</parameter>"),
        line="\n",
    ),
)
MINIMAX_M2 = _format(
    "minimax_m2",
    Tags(
        block=("<minimax:tool_call>", "</minimax:tool_call>"),
        name=('<invoke name="', '">'),
        call_end="</invoke>",
        key=('<parameter name="', '">'),
        value=("", "</parameter>"),
        line="",
    ),
)
GLM45 = _format(
    "glm45",
    Tags(
        block=("<tool_call>", "</tool_call>"),
        name=("", ""),
        call_end="",
        key=("<arg_key>", "</arg_key>"),
        value=("<arg_value>", "</arg_value>"),
        line="",
    ),
)
