"""What a model's text consists of when it may call tools."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Text:
    """Text that is no part of a call."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """A call begins. `index` counts the calls of one output from 0; `call_id` is new and unlike all others."""

    index: int
    call_id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the JSON text of the arguments of call `index`, the last one begun; the pieces make up the whole."""

    index: int
    text: str


Event = Text | CallStart | CallArguments


class ToolParser(Protocol):
    """Reads one output as it comes. How the text is cut into pieces changes nothing but where the events are cut."""

    def add(self, text: str) -> list[Event]:
        """The next piece; what is certain after it. Text that may be the beginning of a call is held back."""
        ...

    def finish(self) -> list[Event]:
        """The end of the output; what was held back. A call that is not complete or not well formed comes as text.

        If its name was given out already, then its arguments stay as they came, and only the rest comes as text.
        """
        ...
