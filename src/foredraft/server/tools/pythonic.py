"""Calls as a list of Python's: [f(a=1), g(b="x")], as small Llama 3.2 models and Llama 4 write them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from foredraft.errors import RequestError
from foredraft.server.tools.call_grammar import CallGrammar
from foredraft.server.tools.function import Function
from foredraft.server.tools.json_call import NAME_CHARACTER
from foredraft.server.tools.literal import literal_to_json
from foredraft.server.tools.reader import Reader, Reading
from foredraft.server.tools.tool_format import ToolFormat

_START, _END = "<|python_start|>", "<|python_end|>"
_WORD_CHARACTER = re.compile(r"\w")
_FIRST_CHARACTER = re.compile(r"[^\W\d]")


def _read(reader: Reader, functions: Mapping[str, Function]) -> Reading[None]:
    while (yield from reader.text_until([_START], "[")):
        reader.begin()
        yield from reader.accept(_START)
        yield from reader.skip()
        if not (yield from reader.accept("[")):
            reader.give_up()
            continue
        while (yield from _read_call(reader)):
            reader.begin()
            yield from reader.skip()
            if not (yield from reader.accept(",")):
                break
        else:
            reader.give_up()
            continue
        if (yield from reader.accept("]")):
            reader.begin()
            yield from reader.skip()
            if (yield from reader.accept(_END)):
                reader.drop()
            else:
                reader.give_back()
        else:
            reader.give_up()


def _read_call(reader: Reader) -> Reading[bool]:
    """A call as a whole; False at the first thing that no call has, and nothing is opened."""
    yield from reader.skip()
    name = yield from _read_name(reader, NAME_CHARACTER)
    if not name or not (yield from reader.accept("(")):
        return False
    arguments: dict[str, str] = {}
    yield from reader.skip()
    while not (yield from reader.accept(")")):
        key = yield from _read_name(reader, _WORD_CHARACTER)
        yield from reader.skip()
        if not key or key in arguments or not (yield from reader.accept("=")):
            return False
        value = literal_to_json((yield from _read_value(reader)))
        if value is None:
            return False
        arguments[key] = f"{json.dumps(key, ensure_ascii=False)}: {value}"
        if (yield from reader.accept(",")):
            yield from reader.skip()
        elif (yield from reader.peek()) != ")":
            return False
    reader.open_call(name)
    reader.arguments(f"{{{', '.join(arguments.values())}}}")
    return True


def _read_name(reader: Reader, character: re.Pattern[str]) -> Reading[str]:
    if not _FIRST_CHARACTER.match((yield from reader.peek())):
        return ""
    return (yield from reader.match(character))


def _read_value(reader: Reader) -> Reading[str]:
    """Up to the comma or the bracket that ends it."""
    pieces: list[str] = []
    while (character := (yield from reader.peek())) not in ("", ",", ")", "]", "}"):
        if character in "[{(":
            if not (yield from reader.nested(pieces.append, "\"'")):
                break
        elif character in "\"'":
            pieces.append(reader.take())
            while (inner := (yield from reader.peek())) not in ("", character):
                pieces.append(reader.take())
                if inner == "\\":
                    yield from reader.peek()
                    pieces.append(reader.take())
            pieces.append(reader.take())
        else:
            pieces.append(reader.take())
    return "".join(pieces)


def _grammar(grammar: CallGrammar, functions: Sequence[Function], parallel: bool, follows_marker: bool) -> str:
    call = grammar.rule(*(_call(grammar, function) for function in functions))
    calls = grammar.repeated(call, f"{grammar.literal(', ')} {call}", parallel=parallel)
    return f"{grammar.literal('[')} {calls} {grammar.literal(']')}"


def _call(grammar: CallGrammar, function: Function) -> str:
    parameters = []
    for name, is_required in grammar.named_parameters(function):
        if not name.isidentifier():
            raise RequestError(f"parameters of the function {function.name!r} must have names that Python allows")
        value = grammar.python_value(function, name)
        parameters.append((f"{grammar.literal(f'{name}=')} {value}", is_required))
    return f"{grammar.literal(f'{function.name}(')} {grammar.optional_list(parameters, ', ')} {grammar.literal(')')}"


PYTHONIC = ToolFormat("pythonic", _read, _grammar, None)
