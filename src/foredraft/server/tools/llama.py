"""Llama 3's calls: JSON objects, with nothing around them or after <|python_tag|>, separated by semicolons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foredraft.server.tools.call_grammar import CallGrammar
from foredraft.server.tools.function import Function
from foredraft.server.tools.json_call import read_call
from foredraft.server.tools.reader import Reader, Reading
from foredraft.server.tools.tool_format import ToolFormat

_TAG = "<|python_tag|>"


def _read(reader: Reader, functions: Mapping[str, Function]) -> Reading[None]:
    while (yield from reader.text_until([_TAG], "{")):
        reader.begin()
        has_tag = bool((yield from reader.accept(_TAG)))
        yield from reader.skip()
        is_complete = yield from read_call(reader, must_look_like_one=not has_tag)
        if not reader.is_open:
            reader.give_up()
        elif is_complete:
            reader.begin()
            yield from reader.skip()
            yield from reader.accept(";")
            yield from reader.skip()
            if (yield from reader.comes_next([_TAG], "{")) or not (yield from reader.peek()):
                reader.drop()
            else:
                reader.give_up()


def _grammar(grammar: CallGrammar, functions: Sequence[Function], parallel: bool, follows_marker: bool) -> str:
    call = grammar.json_call(functions, "parameters")
    return grammar.repeated(call, f"{grammar.literal('; ')} {call}", parallel=parallel)


LLAMA3_JSON = ToolFormat("llama3_json", _read, _grammar, None, keeps_special_tokens=True)
