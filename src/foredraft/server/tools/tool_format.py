"""A format in which models write calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from foredraft.errors import RequestError, shown
from foredraft.server.tools.call_grammar import CallGrammar, GrammarStart
from foredraft.server.tools.events import ToolParser
from foredraft.server.tools.function import Function, read_functions
from foredraft.server.tools.reader import Reader, Reading, StreamedParser
from foredraft.structured_output import StructuredOutput

Routine = Callable[[Reader, Mapping[str, Function]], Reading[None]]


@dataclass(frozen=True)
class ToolFormat:
    """How to read calls in one format, and how to make a model write them.

    routine: reads one output, given the functions by name.
    grammar: the start of a grammar for one call or more (third argument: more than one are allowed), all of it or only
        what follows the marker (fourth argument).
    marker: the text with which the first call begins, if it always does.
    keeps_special_tokens: the markers are special tokens in the usual checkpoints: a request has to run with
        skip_special_tokens=False, or there is nothing to read.
    short_ids: the format's templates want call ids of nine characters.
    """

    name: str
    routine: Routine
    grammar: GrammarStart
    marker: str | None
    keeps_special_tokens: bool = False
    short_ids: bool = False

    def parser(self, tools: Sequence[Mapping[str, Any]] = ()) -> ToolParser:
        """A parser for one output. The tools say what is text and what a number in formats that write no quotes."""
        functions = {function.name: function for function in read_functions(tools)}
        reader = Reader("", 9) if self.short_ids else Reader()
        return StreamedParser(reader, self.routine(reader, functions))

    def structured_output(
        self,
        tools: Sequence[Mapping[str, Any]],
        tool_choice: str | Mapping[str, Any],
        parallel: bool,
        special_tokens: Mapping[str, int] | None = None,
    ) -> StructuredOutput | None:
        """What the output must look like, so that it can only be calls that the tools' schemas allow; None if anything.

        "required": one call of any function, or more if `parallel`. A named function: one call of it. "auto": free up
        to the format's marker, and calls from there on, if a tool is strict and the format has a marker; the arguments
        of the tools that are not strict are then any object. "none": None.
        special_tokens: see CallGrammar. Raises RequestError, which names the tool or the choice.
        """
        functions = read_functions(tools)
        grammar = CallGrammar(special_tokens or {})
        if tool_choice == "none":
            return None
        if tool_choice == "auto":
            if self.marker is None or not any(function.is_strict for function in functions):
                return None
            free = {"type": "object"}
            allowed = [each if each.is_strict else Function(each.name, "", free, False) for each in functions]
            start = self.grammar(grammar, allowed, parallel, True)
            return StructuredOutput(grammar=grammar.text(start), after=self.marker)
        if tool_choice == "required":
            if not functions:
                raise RequestError('tool_choice may be "required" only with tools')
            return StructuredOutput(grammar=grammar.text(self.grammar(grammar, functions, parallel, False)))
        chosen = [function for function in functions if function.name == _named(tool_choice)]
        if not chosen:
            raise RequestError(f"tool_choice must name one of the tools, not {shown(_named(tool_choice))}")
        return StructuredOutput(grammar=grammar.text(self.grammar(grammar, chosen, False, False)))


def _named(tool_choice: object) -> object:
    function = tool_choice.get("function") if isinstance(tool_choice, Mapping) else None
    if not isinstance(function, Mapping) or "name" not in function:
        raise RequestError(
            f'tool_choice must be "none", "auto", "required" or {{"type": "function", "function": {{"name": ...}}}}, '
            f"not {shown(tool_choice)}"
        )
    return function["name"]
