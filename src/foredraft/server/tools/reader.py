"""Text that comes in pieces, read by a routine that waits where it needs more of it."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from foredraft.server.tools.events import CallArguments, CallStart, Event, Text

T = TypeVar("T")
Reading: TypeAlias = Generator[None, None, T]  # yields where it waits for more text, returns what it has read

WHITESPACE = " \t\r\n"

_NO_SPACE = re.compile(r"[^ \t\r\n]")
_OUTSIDE_STRING = re.compile(r'["{}\[\]()]')
_CLOSING = {"{": "}", "[": "]", "(": ")"}


class Reader:
    """The output so far, and the events that it has given.

    `begin` marks where a call may begin; what is read from there on is kept, until `open_call` says that it is a call,
    `drop` that it is of no account, `give_up` that it is text, or `give_back` that it is to be read again. That aside,
    every character is read once, so time is linear.
    """

    def __init__(self, id_prefix: str = "call_", id_length: int = 24) -> None:
        self.is_open = False  # the call since `begin` has been announced
        self._id_prefix = id_prefix
        self._id_length = id_length
        self._num_calls = 0
        self._buffer = ""
        self._position = 0  # what is before it has been read
        self._has_ended = False
        self._kept: list[str] | None = None  # what was read since `begin`
        self._in_gap = True  # at the beginning, or after a call
        self._gap = ""  # white space before what may be a call, of no account if it is one
        self._line_is_blank = True  # so far
        self._events: list[Event] = []
        self._pieces: list[str] = []  # of the event that is last, not in `_events` yet
        self._pieces_are_text = True

    # What the parser does.

    def feed(self, text: str) -> None:
        """The next piece of the output."""
        self._buffer = self._buffer[self._position :] + text
        self._position = 0

    def end(self) -> None:
        """No more will come."""
        self._has_ended = True

    def drain(self) -> list[Event]:
        """The events since the last call, with neighbours of one kind joined."""
        self._flush()
        events, self._events = self._events, []
        return events

    # What becomes of the text.

    def begin(self) -> None:
        """Keep what is read from here on."""
        self._kept = []
        self.is_open = False

    def drop(self) -> None:
        """What was kept is of no account."""
        self._kept = None

    def give_up(self) -> None:
        """What was kept is text."""
        text, self._gap, self._kept = self._gap + "".join(self._kept or ()), "", None
        self._text(text)

    def give_back(self) -> None:
        """What was kept has not been read after all: for a look ahead, of white space mostly."""
        kept = "".join(self._kept or ())
        self._kept = None
        if self._buffer.endswith(kept, 0, self._position):
            self._position -= len(kept)
        else:
            self._buffer, self._position = kept + self._buffer[self._position :], 0

    def open_call(self, name: str) -> None:
        """What was kept is the beginning of a call of this function."""
        self._flush()
        number = secrets.token_hex(self._id_length)[: self._id_length]
        self._events.append(CallStart(self._num_calls, self._id_prefix + number, name))
        self._num_calls += 1
        self._kept, self._gap = None, ""
        self.is_open = self._in_gap = self._line_is_blank = True

    def arguments(self, text: str) -> None:
        """A piece of the arguments of the call that is open."""
        self._write(text, is_text=False)

    # Reading.

    def peek(self) -> Reading[str]:
        """The next character, without reading it; "" at the end."""
        while self._position == len(self._buffer):
            if self._has_ended:
                return ""
            yield
        return self._buffer[self._position]

    def take(self) -> str:
        """Read the character that `peek` has shown."""
        return self._take(1)

    def accept(self, *literals: str) -> Reading[str]:
        """Read the first of these that comes next; "" if none does, and nothing is read."""
        while True:
            for literal in literals:
                if self._buffer.startswith(literal, self._position):
                    self._take(len(literal))
                    return literal
            if self._has_ended or not self._may_come(literals):
                return ""
            yield

    def skip(self, characters: str = WHITESPACE) -> Reading[str]:
        """Read and return all of these characters that come next."""
        taken = []
        while (character := (yield from self.peek())) and character in characters:
            taken.append(self.take())
        return "".join(taken)

    def match(self, pattern: re.Pattern[str]) -> Reading[str]:
        """Read and return the characters that come next as long as each matches the pattern."""
        taken = []
        while (character := (yield from self.peek())) and pattern.match(character):
            taken.append(self.take())
        return "".join(taken)

    def until(self, literal: str) -> Reading[str | None]:
        """Read what is before a literal, and the literal as well; return the former. None if the output ends before."""
        taken = []
        while (found := self._buffer.find(literal, self._position)) < 0:
            num_held = 0 if self._has_ended else self._num_held((literal,))
            taken.append(self._take(len(self._buffer) - self._position - num_held))
            if self._has_ended:
                return None
            yield
        taken.append(self._take(found - self._position))
        self._take(len(literal))
        return "".join(taken)

    def nested(self, give: Callable[[str], None], quotes: str = '"') -> Reading[bool]:
        """Read what begins with a bracket here, to the bracket that closes it; give it out in pieces as it comes.

        Brackets within quotes do not count. False if a closing bracket is another (it is not read), or none comes.
        """
        closing: list[str] = []
        quote = ""
        is_escaped = False
        while True:
            text, start = self._buffer, self._position
            at = start
            while at < len(text):
                if is_escaped:
                    is_escaped = False
                    at += 1
                    continue
                found = _IN_STRING[quote].search(text, at) if quote else _OUTSIDE[quotes].search(text, at)
                if found is None:
                    at = len(text)
                    break
                character, at = found[0], found.end()
                if character == "\\":
                    is_escaped = True
                elif quote:
                    quote = ""
                elif character in quotes:
                    quote = character
                elif character in _CLOSING:
                    closing.append(_CLOSING[character])
                elif closing[-1] != character:
                    give(self._take(at - 1 - start))
                    return False
                else:
                    closing.pop()
                    if not closing:
                        give(self._take(at - start))
                        return True
            give(self._take(at - start))
            if self._has_ended:
                return False
            yield

    def text_until(self, markers: Sequence[str], line_markers: str = "") -> Reading[bool]:
        """Give out what comes as text up to where a call may begin, which is not read; False if the output ends before.

        markers: texts with which a call begins wherever they are. line_markers: characters with which it may begin if
        they are the first of a line, or the next after another call, white space aside.
        White space before the first call, between two, or after the last is not given out if there is nothing else.
        """
        if self._in_gap:
            self.begin()
            space = yield from self.skip()
            self._in_gap = False
            if (yield from self.comes_next(markers, line_markers)):
                self._gap = space
                self.drop()
                self._line_is_blank = True
            elif not (yield from self.peek()) and self._num_calls:
                self.drop()
            else:
                self.give_up()
        pattern = re.compile(
            "|".join([*map(re.escape, markers), f"[{re.escape(line_markers)}]" if line_markers else "(?!)"])
        )
        while True:
            if found := pattern.search(self._buffer, self._position):
                self._text(self._take(found.start() - self._position))
                if found[0] not in line_markers or self._line_is_blank:
                    return True
                self._text(self._take(1))
                continue
            num_held = 0 if self._has_ended else self._num_held(markers)
            self._text(self._take(len(self._buffer) - self._position - num_held))
            if self._has_ended:
                return False
            yield

    def comes_next(self, markers: Sequence[str], line_markers: str = "") -> Reading[bool]:
        """Whether one of the markers, or of these characters, is next; nothing is read."""
        while True:
            if any(self._buffer.startswith(marker, self._position) for marker in (*markers, *line_markers)):
                return True
            if self._has_ended or not self._may_come(markers):
                return False
            yield

    def _may_come(self, literals: Sequence[str]) -> bool:
        """Whether all there is may be the beginning of one of these."""
        num_left = len(self._buffer) - self._position
        return any(
            num_left < len(literal) and self._buffer.startswith(literal[:num_left], self._position)
            for literal in literals
        )

    def _num_held(self, markers: Sequence[str]) -> int:
        """How many characters at the end may be the beginning of a marker."""
        num_left = len(self._buffer) - self._position
        longest = min(num_left, max(map(len, markers), default=1) - 1)
        tails = (self._buffer[len(self._buffer) - num :] for num in range(longest, 0, -1))
        return next((len(tail) for tail in tails if any(marker.startswith(tail) for marker in markers)), 0)

    def _take(self, num_characters: int) -> str:
        text = self._buffer[self._position : self._position + num_characters]
        self._position += len(text)
        if self._kept is not None:
            self._kept.append(text)
        return text

    def _text(self, text: str) -> None:
        if not text:
            return
        last_line = text[text.rfind("\n") + 1 :]
        self._line_is_blank = (self._line_is_blank or "\n" in text) and not _NO_SPACE.search(last_line)
        self._write(text, is_text=True)

    def _write(self, text: str, *, is_text: bool) -> None:
        if text:
            if is_text is not self._pieces_are_text:
                self._flush()
            self._pieces_are_text = is_text
            self._pieces.append(text)

    def _flush(self) -> None:
        if self._pieces:
            text = "".join(self._pieces)
            self._events.append(Text(text) if self._pieces_are_text else CallArguments(self._num_calls - 1, text))
            self._pieces = []


_IN_STRING = {quote: re.compile(rf"[{quote}\\]") for quote in "\"'"}
_OUTSIDE = {'"': _OUTSIDE_STRING, "\"'": re.compile(r"""["'{}\[\]()]""")}


class StreamedParser:
    """A ToolParser that runs a routine over a reader."""

    def __init__(self, reader: Reader, routine: Reading[None]) -> None:
        self._reader = reader
        self._routine: Reading[None] | None = routine

    def add(self, text: str) -> list[Event]:
        """See ToolParser."""
        self._reader.feed(text)
        return self._run()

    def finish(self) -> list[Event]:
        """See ToolParser."""
        self._reader.end()
        return self._run()

    def _run(self) -> list[Event]:
        if self._routine is not None:
            try:
                next(self._routine)
            except StopIteration:
                self._routine = None
        return self._reader.drain()
