"""DeepSeek's calls between tokens of their own: V3 and R1 with JSON in a code block, V3.1 with plain JSON."""

# ruff: noqa: RUF001 (the tokens have bars of full width in their names)

from __future__ import annotations

from collections.abc import Mapping, Sequence

from foredraft.server.tools.call_grammar import CallGrammar, GrammarStart
from foredraft.server.tools.function import Function
from foredraft.server.tools.json_call import NAME_CHARACTER
from foredraft.server.tools.reader import Reader, Reading
from foredraft.server.tools.tool_format import ToolFormat

CALLS_BEGIN, CALLS_END = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
CALL_BEGIN, CALL_END = "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"
SEPARATOR = "<｜tool▁sep｜>"
_FENCE = "```"


def _read(reader: Reader, functions: Mapping[str, Function]) -> Reading[None]:
    while (yield from reader.text_until([CALLS_BEGIN, CALL_BEGIN])):
        reader.begin()
        if (yield from reader.accept(CALLS_BEGIN)):
            yield from reader.skip()
        has_calls = False
        while (yield from reader.accept(CALL_BEGIN)):
            if not (yield from _read_call(reader)):
                break
            has_calls = True
            reader.begin()
            yield from reader.skip()
        else:
            if has_calls:
                if (yield from reader.accept(CALLS_END)):
                    reader.drop()
                else:
                    reader.give_back()
                continue
        reader.give_up()


def _read_call(reader: Reader) -> Reading[bool]:
    """What follows the token that begins a call, and the one that ends it."""
    yield from reader.skip()
    name = yield from reader.match(NAME_CHARACTER)
    if not name or not (yield from reader.accept(SEPARATOR)):
        return False
    yield from reader.skip()
    if (yield from reader.peek()) != "{":  # what came was the kind of tool
        name = yield from reader.match(NAME_CHARACTER)
        yield from reader.skip()
        if not name or not (yield from reader.accept(_FENCE)):
            return False
        yield from reader.accept("json")
        yield from reader.skip()
        if (yield from reader.peek()) != "{":
            return False
    reader.open_call(name)
    if not (yield from reader.nested(reader.arguments)):
        return False
    reader.begin()
    yield from reader.skip()
    yield from reader.accept(_FENCE)
    yield from reader.skip()
    if not (yield from reader.accept(CALL_END)):
        return False
    reader.drop()
    return True


def _grammar(head: str, ending: str) -> GrammarStart:
    def start(grammar: CallGrammar, functions: Sequence[Function], parallel: bool, follows_marker: bool) -> str:
        call = grammar.rule(
            *(
                f"{grammar.literal(CALL_BEGIN + head.format(function.name))} {grammar.arguments(function)} "
                f"{grammar.literal(ending + CALL_END)}"
                for function in functions
            )
        )
        more = f"{grammar.literal(separator)} {call}" if (separator := "\n" if ending else "") else call
        calls = grammar.repeated(call, more, parallel=parallel)
        before = "" if follows_marker else grammar.literal(CALLS_BEGIN)
        return f"{before} {calls} {grammar.literal(CALLS_END)}"

    return start


DEEPSEEK_V3 = ToolFormat(
    "deepseek_v3",
    _read,
    _grammar(f"function{SEPARATOR}{{}}\n{_FENCE}json\n", f"\n{_FENCE}"),
    CALLS_BEGIN,
    keeps_special_tokens=True,
)
DEEPSEEK_V31 = ToolFormat(
    "deepseek_v31", _read, _grammar(f"{{}}{SEPARATOR}", ""), CALLS_BEGIN, keeps_special_tokens=True
)
