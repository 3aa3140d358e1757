"""Python's literals, written as JSON."""

from __future__ import annotations

import json
import re

MAX_DEPTH = 100

_TOKEN = re.compile(
    r"""\s*(?:
    (?P<string>"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')
    |(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d+)?)(?![\w.])
    |(?P<word>[A-Za-z_]\w*)
    |(?P<mark>[\[\](){},:])
    )""",
    re.VERBOSE | re.DOTALL,
)
_SPACE = re.compile(r"\s*\Z")
_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|([0-7]{1,3})|(.))", re.DOTALL)
_NUMBER = re.compile(r"([+-]?)(\d*)(?:(\.)(\d*))?([eE][+-]?\d+)?")
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "0": "\0", "\n": ""}
_WORDS = {"True": "true", "False": "false", "None": "null", "true": "true", "false": "false", "null": "null"}


class _NotLiteralError(Exception):
    pass


def literal_to_json(text: str) -> str | None:
    """JSON for a literal: text, numbers, True, False, None, lists, tuples and dicts, in JSON's spelling as well.

    None if the text is anything else, or nested more than MAX_DEPTH deep.
    """
    try:
        tokens = _tokens(text)
        value, end = _value(tokens, 0, 0)
    except _NotLiteralError:
        return None
    return value if end == len(tokens) - 1 else None


def _tokens(text: str) -> list[tuple[str, str]]:
    tokens, position = [], 0
    while not _SPACE.match(text, position):
        token = _TOKEN.match(text, position)
        if token is None:
            raise _NotLiteralError
        assert token.lastgroup is not None
        tokens.append((token.lastgroup, token[token.lastgroup]))
        position = token.end()
    return [*tokens, ("end", "")]


def _value(tokens: list[tuple[str, str]], at: int, depth: int) -> tuple[str, int]:
    """The JSON of the value that begins at a token, and where the next one is."""
    kind, text = tokens[at]
    if kind == "string":
        strings = []
        while tokens[at][0] == "string":  # one after the other are one
            strings.append(_ESCAPE.sub(_character, tokens[at][1][1:-1]))
            at += 1
        return json_string("".join(strings)), at
    if kind == "number":
        return _number(text), at + 1
    if kind == "word" and text in _WORDS:
        return _WORDS[text], at + 1
    if text in ("[", "(", "{") and depth < MAX_DEPTH:
        return _items(tokens, at + 1, depth + 1, {"[": "]", "(": ")", "{": "}"}[text])
    raise _NotLiteralError


def _items(tokens: list[tuple[str, str]], at: int, depth: int, closing: str) -> tuple[str, int]:
    items = []
    has_comma = True
    while tokens[at][1] != closing or tokens[at][0] != "mark":
        if not has_comma:
            raise _NotLiteralError
        item, at = _value(tokens, at, depth)
        if closing == "}":
            if tokens[at] != ("mark", ":") or item[0] in "[{":
                raise _NotLiteralError
            value, at = _value(tokens, at + 1, depth)
            key = item if item.startswith('"') else json.dumps(item)
            item = f"{key}: {value}"
        items.append(item)
        has_comma = tokens[at] == ("mark", ",")
        at += has_comma
    if closing == ")" and len(items) == 1 and not has_comma:
        return items[0], at + 1  # brackets around a value
    joined = ", ".join(items)
    return f"{{{joined}}}" if closing == "}" else f"[{joined}]", at + 1


def _number(text: str) -> str:
    found = _NUMBER.fullmatch(text)
    assert found is not None
    sign, whole, point, fraction, exponent = found.groups(default="")
    if not point and not exponent and len(whole) > 1 and whole[0] == "0":
        raise _NotLiteralError
    decimals = f".{fraction or '0'}" if point else ""
    number = f"{sign.rstrip('+')}{whole.lstrip('0') or '0'}{decimals}{exponent}"
    if (point or exponent) and float(number) in (float("inf"), float("-inf")):
        raise _NotLiteralError
    return number


def _character(escape: re.Match[str]) -> str:
    short, octal, code = escape[5], escape[4], escape[1] or escape[2] or escape[3]
    if short is not None:
        return _SHORT.get(short, short if short in "\\'\"" else escape[0])
    value = int(octal, 8) if octal else int(code, 16)
    if value > 0x10FFFF:
        raise _NotLiteralError
    return chr(value)


def json_string(text: str) -> str:
    """Text as a JSON string, readable, and with escapes where it could not be sent otherwise."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return json.dumps(text)
    return json.dumps(text, ensure_ascii=False)
