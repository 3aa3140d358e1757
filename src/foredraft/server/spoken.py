"""What one choice of a chat says: text, and calls of tools, told apart as it comes."""

from __future__ import annotations

import json

from foredraft.server.protocol.responses import (
    CalledFunction,
    ChatMessage,
    Delta,
    FunctionDelta,
    MadeToolCall,
    ToolCallDelta,
)
from foredraft.server.protocol.responses import FinishReason as AnswerReason
from foredraft.server.tools.events import CallArguments, CallStart, Event, Text, ToolParser
from foredraft.stopping import FinishReason


class SpokenChoice:
    """Reads the text of a choice. parser None: all of it is text. max_calls: further calls are left out, and text
    after them."""

    def __init__(self, parser: ToolParser | None, max_calls: int | None = None) -> None:
        self._parser = parser
        self._max_calls = max_calls
        self._is_full = False
        self._texts: list[str] = []
        self._calls: list[tuple[CallStart, list[str]]] = []

    def add(self, text: str) -> list[Delta]:
        """The next piece of the text; what it adds to the answer."""
        if self._parser is not None:
            return self._read(self._parser.add(text))
        return self._read([Text(text)] if text else [])

    def finish(self) -> list[Delta]:
        """The end of the text; what was held back."""
        return self._read(self._parser.finish()) if self._parser is not None else []

    def _read(self, events: list[Event]) -> list[Delta]:
        return [delta for each in events if (delta := self._delta(each)) is not None]

    def _delta(self, each: Event) -> Delta | None:
        if isinstance(each, CallStart) and self._max_calls is not None and each.index >= self._max_calls:
            self._is_full = True
        if self._is_full:
            return None
        match each:
            case Text(text):
                self._texts.append(text)
                return Delta(content=text)
            case CallStart(index, call_id, name):
                self._calls.append((each, []))
                function = FunctionDelta(name=name, arguments="")
                return Delta(tool_calls=[ToolCallDelta(index=index, id=call_id, type="function", function=function)])
            case CallArguments(index, text):
                self._calls[index][1].append(text)
                return Delta(tool_calls=[ToolCallDelta(index=index, function=FunctionDelta(arguments=text))])

    def message(self) -> ChatMessage:
        """All that was said. A message that only calls has no content."""
        text = "".join(self._texts)
        calls = [
            MadeToolCall(id=start.call_id, function=CalledFunction(name=start.name, arguments="".join(pieces)))
            for start, pieces in self._calls
        ]
        return ChatMessage(content=text if text or not calls else None, tool_calls=calls or None)

    def finish_reason(self, reason: FinishReason) -> AnswerReason:
        """Why it ended, as chats say it: with calls, if it did not run out of tokens or stop within the last one."""
        if self._calls and reason is FinishReason.STOP and _is_json("".join(self._calls[-1][1])):
            return "tool_calls"
        found: AnswerReason = reason.value
        return found


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
