"""Calls as JSON between tags: Hermes, Qwen, and others with tags of their own; and Granite's list after one tag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foredraft.server.tools.call_grammar import CallGrammar, GrammarStart
from foredraft.server.tools.function import Function
from foredraft.server.tools.json_call import read_calls
from foredraft.server.tools.reader import Reader, Reading
from foredraft.server.tools.tool_format import Routine, ToolFormat


def _routine(opening: str, closing: str) -> Routine:
    def read(reader: Reader, functions: Mapping[str, Function]) -> Reading[None]:
        while (yield from reader.text_until([opening])):
            reader.begin()
            yield from reader.accept(opening)
            if (yield from read_calls(reader)) and closing:
                reader.begin()
                yield from reader.skip()
                if (yield from reader.accept(closing)):
                    reader.drop()
                else:
                    reader.give_back()

    return read


def _grammar(opening: str, closing: str) -> GrammarStart:
    def start(grammar: CallGrammar, functions: Sequence[Function], parallel: bool, follows_marker: bool) -> str:
        call = grammar.json_call(functions, "arguments")
        before, after = grammar.literal(f"{opening}\n"), grammar.literal(f"\n{closing}")
        first = f"{grammar.literal(chr(10)) if follows_marker else before} {call} {after}"
        return grammar.repeated(first, f"{grammar.literal(chr(10))} {before} {call} {after}", parallel=parallel)

    return start


def _granite(grammar: CallGrammar, functions: Sequence[Function], parallel: bool, follows_marker: bool) -> str:
    call = grammar.json_call(functions, "arguments")
    calls = grammar.repeated(call, f"{grammar.literal(', ')} {call}", parallel=parallel)
    before = grammar.literal("[" if follows_marker else f"{_GRANITE}[")
    return f"{before} {calls} {grammar.literal(']')}"


def _tagged(name: str, tag: str) -> ToolFormat:
    opening, closing = f"<{tag}>", f"</{tag}>"
    return ToolFormat(name, _routine(opening, closing), _grammar(opening, closing), opening)


_GRANITE = "<|tool_call|>"

HERMES = _tagged("hermes", "tool_call")
LONGCAT = _tagged("longcat", "longcat_tool_call")
GRANITE = ToolFormat("granite", _routine(_GRANITE, ""), _granite, _GRANITE, keeps_special_tokens=True)
