"""A call that is written as a JSON object, with the function's name and its arguments."""

from __future__ import annotations

import json
import re

from foredraft.server.tools.reader import Reader, Reading

NAME_CHARACTER = re.compile(r"[\w.-]")

_KEYS = ("name", "arguments", "parameters", "type", "id")
_SCALAR = re.compile(r"[\w.+-]")


def read_calls(reader: Reader) -> Reading[bool]:
    """One object, or a list of them; False at the first that is not well formed: what was read of it is text then."""
    yield from reader.skip()
    if (yield from reader.peek()) != "[":
        return (yield from _read_marked(reader))
    reader.take()
    while True:
        yield from reader.skip()
        if not (yield from _read_marked(reader)):
            return False
        reader.begin()
        yield from reader.skip()
        if not (yield from reader.accept(",")):
            if (yield from reader.accept("]")):
                reader.drop()
                return True
            reader.give_up()
            return False


def _read_marked(reader: Reader) -> Reading[bool]:
    is_complete = yield from read_call(reader)
    if not reader.is_open:
        reader.give_up()
    return is_complete


def read_call(reader: Reader, *, must_look_like_one: bool = False) -> Reading[bool]:
    """An object such as {"name": "f", "arguments": {}}, in any order, with `parameters` for `arguments` as well.

    Opens the call once its name is known and its arguments begin, and gives these as they come. False if it is not
    well formed: nothing is read of what does not fit, and `is_open` says whether it was opened before.
    must_look_like_one: an object with other keys than calls have, or without arguments, is none.
    """
    name: str | None = None
    arguments: list[str] = []
    if (yield from reader.accept("{")) == "":
        return False
    while True:
        yield from reader.skip()
        key = yield from _read_key(reader, any_key=not must_look_like_one)
        yield from reader.skip()
        if key is None or not (yield from reader.accept(":")):
            return False
        yield from reader.skip()
        if key == "name":
            name = decoded_name((yield from read_string(reader))) if name is None else None
            if name is None:
                return False
        elif key in ("arguments", "parameters"):
            if arguments or reader.is_open:
                return False
            if name is not None and (yield from reader.peek()) == "{":
                reader.open_call(name)
                if not (yield from reader.nested(reader.arguments)):
                    return False
            elif not (yield from _read_arguments(reader, arguments)):
                return False
        elif not (yield from _skip_value(reader)):
            return False
        yield from reader.skip()
        if (yield from reader.accept(",")):
            continue
        if (yield from reader.peek()) != "}":
            return False
        break
    if not reader.is_open:
        if name is None or (must_look_like_one and not arguments):
            return False
        reader.take()
        reader.open_call(name)
        for piece in arguments or ["{}"]:
            reader.arguments(piece)
    else:
        reader.take()
    return True


def decoded_name(text: str | None) -> str | None:
    """The name that a JSON string holds; None if it is no string, or not one that can be sent."""
    try:
        name = json.loads(text or "")
        return name if isinstance(name, str) and name.encode() else None
    except ValueError:  # of JSON, or a lone surrogate
        return None


def read_string(reader: Reader) -> Reading[str | None]:
    """A JSON string, with its quotes; None if there is none, or not all of it."""
    if (yield from reader.accept('"')) == "":
        return None
    pieces = ['"']
    while character := (yield from reader.peek()):
        pieces.append(reader.take())
        if character == '"':
            return "".join(pieces)
        if character == "\\":
            yield from reader.peek()
            pieces.append(reader.take())
    return None


def _read_key(reader: Reader, *, any_key: bool) -> Reading[str | None]:
    if any_key:
        text = yield from read_string(reader)
        try:
            return str(json.loads(text or ""))
        except ValueError:
            return None
    # A character at a time, so that other objects are held back no further than they look like calls.
    if (yield from reader.accept('"')) == "":
        return None
    key = yield from reader.accept(*_KEYS)
    return key if key and (yield from reader.accept('"')) else None


def _read_arguments(reader: Reader, arguments: list[str]) -> Reading[bool]:
    """Arguments that cannot be given out yet: an object, null, or an object's JSON text as a string."""
    if (yield from reader.peek()) == "{":
        return (yield from reader.nested(arguments.append))
    if (yield from reader.accept("null")):
        arguments.append("{}")
        return True
    try:
        text = json.loads((yield from read_string(reader)) or "")
        if isinstance(json.loads(text), dict) and text.encode():
            arguments.append(text)
            return True
    except (ValueError, RecursionError):
        pass
    return False


def _skip_value(reader: Reader) -> Reading[bool]:
    character = yield from reader.peek()
    if character == '"':
        return (yield from read_string(reader)) is not None
    if character in ("{", "["):
        return (yield from reader.nested(lambda piece: None))
    return bool((yield from reader.match(_SCALAR)))
