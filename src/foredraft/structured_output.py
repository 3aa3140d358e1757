"""What the text of one request must look like."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from foredraft.errors import RequestError

MAX_CHARACTERS = 1_000_000  # of a schema, a regular expression, a grammar, or all choices together
MAX_REGEX = 16_000  # characters of one: the time to compile it grows with their square
MAX_MARKER = 1_000  # characters or tokens of `after`

KINDS = ("json_schema", "json_object", "regex", "grammar", "choice")


@dataclass(frozen=True)
class StructuredOutput:
    """What the output must look like: exactly one of the first five fields says it. Validated on construction.

    json_schema: a JSON schema, as a mapping or as JSON text, or True for any JSON value. Kept as JSON text; the order
    of the properties is the order in which they are written.
    json_object: True for any JSON object.
    regex: a regular expression that the whole output matches (Rust's syntax: no look-around, no back references).
    grammar: a context-free grammar, in Lark's syntax (from the rule `start`), or in GBNF (`name ::= ...`, from `root`).
    choice: texts, one of which is the output.

    after: only what follows this text, or these token ids, must look so; the output up to it, marker included, is free,
    and to its end where the marker does not come.
    whitespace: JSON may have a space, or a line break and an indentation, between its parts; without, a draft more
    often has one way to go on.

    Raises RequestError, which names the field and the rule. Whether a schema or grammar can be followed is known once
    it is compiled: see GrammarCompiler.check.
    """

    json_schema: Mapping[str, Any] | str | bool | None = None
    json_object: bool = False
    regex: str | None = None
    grammar: str | None = None
    choice: Sequence[str] | None = None
    after: str | Sequence[int] | None = None
    whitespace: bool = True

    def __post_init__(self) -> None:
        for name in ("json_object", "whitespace"):
            if not isinstance(getattr(self, name), bool):
                _refuse(name, "must be true or false", getattr(self, name))
        given = [name for name in KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if len(given) != 1:
            found = " and ".join(given) or "none"
            raise RequestError(f"structured_output needs exactly one of {', '.join(KINDS)}; it has {found}")
        if self.json_schema is not None and self.json_schema is not False:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        for name, limit in (("regex", MAX_REGEX), ("grammar", MAX_CHARACTERS)):
            if getattr(self, name) is not None:
                _text(name, getattr(self, name), limit)
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        if not self.whitespace and self.kind not in ("json_schema", "json_object"):
            raise RequestError(f"structured_output.whitespace has no effect with {self.kind}: leave it out")
        if self.after is not None:
            object.__setattr__(self, "after", _marker(self.after))

    @property
    def kind(self) -> str:
        """The name of the one field that says what the output looks like."""
        return next(name for name in KINDS if getattr(self, name))

    @property
    def schema_text(self) -> str:
        """The JSON schema as text, if `kind` is json_schema or json_object."""
        return '{"type":"object"}' if self.json_object else str(self.json_schema)


def _schema_text(schema: object) -> str:
    """As JSON text on one line, with the order of its keys kept."""
    value = schema
    try:
        if isinstance(schema, str):
            _text("json_schema", schema)
            value = json.loads(schema, parse_constant=_not_json)
        if value is not True and not isinstance(value, Mapping):
            _refuse("json_schema", "must be a mapping, JSON text of an object, or True", value)
        text = json.dumps(value, separators=(",", ":"), allow_nan=False, default=_plain_mapping)
    except RecursionError:
        raise RequestError("structured_output.json_schema is nested too deeply") from None
    except (TypeError, ValueError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"structured_output.json_schema is not JSON: {error!s:.200}") from None
    return _text("json_schema", text)


def _plain_mapping(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} cannot be written as JSON")


def _not_json(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


def _choices(value: object) -> tuple[str, ...]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence) or not value:
        _refuse("choice", "must be a list of one text or more", value)
    choices = tuple(_text("choice", choice) for choice in value)
    if sum(map(len, choices)) > MAX_CHARACTERS:
        raise RequestError(f"structured_output.choice may have {MAX_CHARACTERS} characters at most in all")
    return choices


def _marker(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        return _text("after", value, MAX_MARKER)
    if isinstance(value, bytes) or not isinstance(value, Sequence) or not 1 <= len(value) <= MAX_MARKER:
        _refuse("after", f"must be text or a list of 1 to {MAX_MARKER} token ids", value)
    for token_id in value:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            _refuse("after", "must consist of token ids, integers from 0 on", token_id)
    return tuple(value)


def _text(name: str, value: object, max_characters: int = MAX_CHARACTERS) -> str:
    if not isinstance(value, str) or not value:
        _refuse(name, "must be text that is not empty", value)
    if len(value) > max_characters:
        raise RequestError(f"structured_output.{name} may have {max_characters} characters at most, not {len(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise RequestError(f"structured_output.{name} is not valid Unicode: {error!s:.200}") from None
    return value


def _refuse(name: str, rule: str, value: object) -> NoReturn:
    """The value is shown if it is simple: writing out a deep one could fail."""
    shown = f"{value!r:.60}" if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    raise RequestError(f"structured_output.{name} {rule}, not {shown}")
