"""Mistral's calls: [TOOL_CALLS] and a JSON list, or, of later models, [TOOL_CALLS]name[ARGS]{...} for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foredraft.server.tools.call_grammar import CallGrammar
from foredraft.server.tools.function import Function
from foredraft.server.tools.json_call import NAME_CHARACTER, read_calls
from foredraft.server.tools.reader import Reader, Reading
from foredraft.server.tools.tool_format import ToolFormat

_MARKER, _ARGS, _CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def _read(reader: Reader, functions: Mapping[str, Function]) -> Reading[None]:
    while (yield from reader.text_until([_MARKER])):
        reader.begin()
        yield from reader.accept(_MARKER)
        yield from reader.skip()
        if (yield from reader.peek()) in ("[", "{"):
            yield from read_calls(reader)
            continue
        name = yield from reader.match(NAME_CHARACTER)
        while found := (yield from reader.accept(_CALL_ID, _ARGS)):
            if found == _CALL_ID:
                yield from reader.match(NAME_CHARACTER)
        yield from reader.skip()
        if not name or (yield from reader.peek()) != "{":
            reader.give_up()
            continue
        reader.open_call(name)
        yield from reader.nested(reader.arguments)


def _list_grammar(grammar: CallGrammar, functions: Sequence[Function], parallel: bool, follows_marker: bool) -> str:
    call = grammar.json_call(functions, "arguments")
    calls = grammar.repeated(call, f"{grammar.literal(', ')} {call}", parallel=parallel)
    return f"{grammar.literal('[' if follows_marker else f'{_MARKER}[')} {calls} {grammar.literal(']')}"


def _args_grammar(grammar: CallGrammar, functions: Sequence[Function], parallel: bool, follows_marker: bool) -> str:
    call = grammar.rule(
        *(f"{grammar.literal(f'{function.name}{_ARGS}')} {grammar.arguments(function)}" for function in functions)
    )
    marked = f"{grammar.literal(_MARKER)} {call}"
    return grammar.repeated(call if follows_marker else marked, marked, parallel=parallel)


MISTRAL = ToolFormat("mistral", _read, _list_grammar, _MARKER, keeps_special_tokens=True, short_ids=True)
MISTRAL_ARGS = ToolFormat("mistral_args", _read, _args_grammar, _MARKER, keeps_special_tokens=True, short_ids=True)
