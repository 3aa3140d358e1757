"""How deeply a schema or grammar is nested through its definitions, known before it is compiled.

The library that compiles them follows `$ref`, rules and terminals by recursion on the native stack, and a chain of some
hundred objects or some thousand rules ends the process. So the depth is bounded here first, from above and in linear
time, without recursion of its own.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from urllib.parse import unquote

from foredraft.errors import RequestError
from foredraft.structured_output import MAX_REGEX

MAX_DEPTH = 1_000  # rules, groups and objects on one path; a third to a half of what the library has stack for
MAX_GROUPS = 64  # within each other in one rule; the library refuses half as many, with a better message
MAX_CONVERSION = 5_000_000  # rules times depth: the converter of GBNF goes over all rules that often, seconds in all

# As the library reads them: a longer reading goes before a shorter one, and what fits nowhere is an error there.
_LARK = re.compile(
    r"""(?P<skipped> (?:\#|//)[^\n]*+ | [ \t]++ | /(?:\\.|[^/\\])++/[imslux]*+ | <[^<>\s]++> | @[a-zA-Z0-9_\-]++
        | "(?:\\(?:["\\/bfnrt]|u[a-fA-F0-9]{4}|x[a-fA-F0-9]{2})|[^"\\\x00-\x1F\x7F])*+"i? | :: | ->
        | 0[xX][0-9a-fA-F]++ | [+\-]?[0-9]++(?:\.[0-9]*+)?(?:[eE][+\-]?[0-9]++)?
        | %(?:ignore|import|override|declare|if) )
    | (?P<line>\n) | (?P<name> _?[a-z][_a-z0-9\-]*+ | _?[A-Z][_A-Z0-9\-]*+ ) | (?P<lark>%lark)
    | (?P<json> %(?:json|llguidance|regex) ) | (?P<open>[(\[{]) | (?P<close>[)\]}]) | (?P<colon>:)""",
    re.VERBOSE,
)
_GBNF = re.compile(
    r"""(?P<skipped> \#[^\r\n]*+ | "(?:\\.|[^"\\])*+" | \[(?:\\.|[^\]\\])*+\] )
    | (?P<line>\n) | (?P<name>[\w\-]++) | (?P<open>\() | (?P<close>\)) | (?P<colon>::=)""",
    re.VERBOSE | re.DOTALL,
)
_JSON_START = re.compile(r"[ \t\r\n]*")
_REFERENCES = ("$ref", "$dynamicRef", "$recursiveRef")
_ANCHORS = ("$anchor", "$dynamicAnchor")
_INDEX = re.compile(r"\+?[0-9]{1,9}")


def check_schema(text: str, field: str) -> None:
    """Raise RequestError, naming the field, if a JSON schema is nested too deeply through its `$ref`, or has too much
    of regular expressions."""
    schema, _ = _parsed(text, 0, field)
    _refuse_beyond(_schema_depth(schema), field)
    _refuse_regexes(_regex_length(schema), field)


def check_lark(text: str, field: str) -> None:
    """Raise RequestError, naming the field, if a grammar in Lark's syntax is nested too deeply through its rules."""
    rules = _read_rules(text, _LARK, field)
    _refuse_beyond(rules.depth(), field)
    _refuse_regexes(rules.num_regex_characters, field)


def check_gbnf(text: str, field: str) -> None:
    """Raise RequestError, naming the field, if a grammar in GBNF is nested too deeply, or too large to be converted."""
    rules = _read_rules(text, _GBNF, field)
    depth = rules.depth()
    _refuse_beyond(depth, field)
    if len(rules.weights) * depth > MAX_CONVERSION:
        raise RequestError(
            f"{field} is too large: its {len(rules.weights)} rules times their depth of {depth} may be at most "
            f"{MAX_CONVERSION} in GBNF; Lark's syntax has no such limit"
        )


def _refuse_regexes(num_characters: int, field: str) -> None:
    if num_characters > MAX_REGEX:
        raise RequestError(f"{field} may have {MAX_REGEX} characters of regular expressions, not {num_characters}")


def _regex_length(schema: object) -> int:
    """Characters of all regular expressions in a schema."""
    total, stack = 0, [schema]
    while stack:
        value = stack.pop()
        if isinstance(value, dict):
            total += len(pattern) if isinstance(pattern := value.get("pattern"), str) else 0
            if isinstance(patterns := value.get("patternProperties"), dict):
                total += sum(map(len, patterns))
        if isinstance(value, dict | list):
            stack += value.values() if isinstance(value, dict) else value
    return total


def _refuse_beyond(depth: int, field: str) -> None:
    if depth > MAX_DEPTH:
        raise RequestError(
            f"{field} is nested too deeply through its rules: up to {depth} of them within each other, at most "
            f"{MAX_DEPTH} (those that refer to each other in a circle count together)"
        )


@dataclass
class _Definitions:
    """What refers to what, and how much each holds on its own."""

    weights: dict[Hashable, int] = field(default_factory=dict)
    edges: list[tuple[Hashable, Hashable]] = field(default_factory=list)
    num_regex_characters: int = 0

    def depth(self) -> int:
        """The heaviest path at most; what lies in a circle counts in full."""
        total = sum(self.weights.values())
        if total <= MAX_DEPTH:
            return total  # as nearly always
        import networkx as nx  # type: ignore[import-untyped]  # not before it is needed: it takes tenths of a second

        graph = nx.DiGraph()
        graph.add_nodes_from(self.weights)
        graph.add_edges_from((tail, head) for tail, head in self.edges if tail in self.weights and head in self.weights)
        components = nx.condensation(graph)
        depths: dict[int, int] = {}
        for component in nx.topological_sort(components):
            own = sum(self.weights[member] for member in components.nodes[component]["members"])
            depths[component] = own + max((depths[each] for each in components.predecessors(component)), default=0)
        return max(depths.values())


def _read_rules(text: str, pattern: re.Pattern[str], field: str) -> _Definitions:
    """The rules of a grammar: each weighs one, its innermost group, and its heaviest schema."""
    reader = _Reader()
    position = 0
    while position < len(text):
        match = pattern.match(text, position)
        position = match.end() if match else position + 1
        kind = match.lastgroup if match else None
        if match is not None and match[0] == "::":  # such a rule counts, and a mask may have to count very far
            raise RequestError(f"{field} has rules with parameters (::), which cannot be followed in bounded time")
        if match is None or kind == "skipped":
            is_regex = match is not None and match[0].startswith("/") and not match[0].startswith("//")
            reader.found.num_regex_characters += len(match[0]) if match is not None and is_regex else 0
            continue
        if kind == "json":
            value, position = _parsed(text, position, field)
            if match[0] == "%json":
                reader.schema = max(reader.schema, _schema_depth(value))
                reader.found.num_regex_characters += _regex_length(value)
        else:
            reader.read(kind, match[0])
    reader.end_line()
    reader.end_rule()
    return reader.found


class _Reader:
    """Puts the symbols of a grammar together to rules."""

    def __init__(self) -> None:
        self.found = _Definitions()
        self.schema = 0  # the heaviest of the rule
        self._owner = ""  # the rule
        self._line: list[str] = []  # names that are the rule's, unless a colon shows that one begins another rule
        self._begins = -1  # which of them would: the last outside of brackets
        self._level = self._deepest = 0  # brackets
        self._awaits_grammar = False  # after %lark
        self._num_braces = self._num_grammars = 0
        self._scope = ""  # the grammar in a grammar
        self._outer: list[tuple[str, str, int, int, int, int]] = []  # what holds it

    def read(self, kind: str | None, symbol: str) -> None:
        """The next symbol, but for JSON."""
        if kind == "line":
            self.end_line()
        elif kind == "name":
            self._begins = self._begins if self._level else len(self._line)
            self._line.append(self._scope + symbol)
        elif kind == "colon" and self._begins >= 0 and not self._level:
            name, of_new = self._line[self._begins], self._line[self._begins + 1 :]
            del self._line[self._begins :]
            self.end_line()
            self.end_rule()
            self._owner, self._line, self._deepest, self.schema = name, of_new, 0, 0
        elif kind == "open":
            self._open(symbol)
        elif kind == "close":
            self._close(symbol)
        self._awaits_grammar = kind == "lark"

    def end_line(self) -> None:
        """The names of the line are what the rule refers to."""
        self.found.edges += [(self._owner, name) for name in self._line]
        self._line, self._begins = [], -1

    def end_rule(self) -> None:
        """A name that is defined again, which the library may refuse, weighs what the heaviest does."""
        weight = 1 + min(self._deepest, MAX_GROUPS) + self.schema
        self.found.weights[self._owner] = max(self.found.weights.get(self._owner, 0), weight)

    def _open(self, symbol: str) -> None:
        self._num_braces += symbol == "{"
        if not self._awaits_grammar:
            self._level += 1
            self._deepest = max(self._deepest, self._level)
            return
        self.end_line()
        self._outer.append((self._owner, self._scope, self._level, self._deepest, self.schema, self._num_braces))
        self._num_grammars += 1
        self._scope = f"{self._num_grammars}:"
        self.found.edges += [(self._owner, self._scope), (self._owner, f"{self._scope}start")]
        self._owner, self._level, self._deepest, self.schema = self._scope, 0, 0, 0

    def _close(self, symbol: str) -> None:
        if symbol == "}" and self._outer and self._outer[-1][5] == self._num_braces:
            self.end_line()
            self.end_rule()
            self._owner, self._scope, self._level, self._deepest, self.schema, _ = self._outer.pop()
        else:
            self._level = max(self._level - 1, 0)
        self._num_braces -= symbol == "}"


def _parsed(text: str, position: int, field: str) -> tuple[object, int]:
    """The JSON that begins here, and where it ends."""
    start = _JSON_START.match(text, position)
    try:
        value, end = json.JSONDecoder().raw_decode(text, start.end() if start else position)
        return value, end
    except RecursionError:
        raise RequestError(f"{field} is nested too deeply") from None
    except ValueError as error:
        raise RequestError(f"{field} holds JSON that is not valid: {error!s:.200}") from None


def _schema_depth(schema: object) -> int:
    """Of objects in each other, in the text and through references."""
    return _Schema(schema).depth() if isinstance(schema, dict) else 0


class _Schema:
    """A JSON schema by its definitions, which are whatever its references name, and the whole."""

    def __init__(self, root: dict[str, object]) -> None:
        self._root = root
        self._anchors: dict[str, object] = {}
        self._num_bases = 1
        self._is_plain = True  # every reference is to a place within, known here
        self._references = dict.fromkeys(self._find_references())
        # By the references that name them. Each spelling counts: the library compiles a definition once for each.
        self._targets = {reference: self._target(reference) for reference in self._references}

    def depth(self) -> int:
        """The heaviest path at most."""
        found = _Definitions()
        spellings: dict[int, int] = {id(self._root): 1}
        for target in self._targets.values():
            if isinstance(target, dict | list):
                spellings[id(target)] = spellings.get(id(target), 0) + 1
        deepest = 0
        definitions = [each for key in ("$defs", "definitions") if isinstance(each := self._root.get(key), dict | list)]
        # Apart, for the whole does not refer to its definitions by holding them.
        stack: list[tuple[object, int, int, int]] = [(self._root, 0, 0, 0)]
        stack += [(each, id(each), 0, 1) for each in definitions]
        apart = set(map(id, definitions))
        while stack:
            value, owner, level, whole = stack.pop()
            if not isinstance(value, dict | list):
                continue
            if id(value) in spellings:
                found.edges.append((owner, id(value)))
                owner, level = id(value), 0
            if isinstance(value, dict):
                level, whole = level + 1, whole + 1
                for key in _REFERENCES:
                    if isinstance(reference := value.get(key), str):
                        found.edges.append((owner, id(self._targets[reference])))
            found.weights[owner] = max(found.weights.get(owner, 0), level)
            deepest = max(deepest, whole)
            children = value.values() if isinstance(value, dict) else value
            stack += [
                (child, owner, level, whole) for child in children if not (value is self._root and id(child) in apart)
            ]
        if not self._is_plain:
            return deepest * (1 + len(self._references) * self._num_bases)
        for name, count in spellings.items():
            found.weights[name] = found.weights.get(name, 0) * count
        return max(found.depth(), deepest)

    def _find_references(self) -> Iterator[str]:
        """All of them, and the anchors and bases on the way."""
        stack: list[object] = [self._root]
        while stack:
            value = stack.pop()
            if isinstance(value, dict):
                yield from (each for key in _REFERENCES if isinstance(each := value.get(key), str))
                for anchor in (each for key in _ANCHORS if isinstance(each := value.get(key), str)):
                    self._is_plain &= anchor not in self._anchors
                    self._anchors[anchor] = value
                if value is not self._root and any(isinstance(value.get(key), str) for key in ("$id", "id")):
                    self._add_base(value)
                stack += value.values()
            elif isinstance(value, list):
                stack += value

    def _add_base(self, value: dict[str, object]) -> None:
        """References within it are relative to it, unless its name is an anchor or it is data."""
        name = value.get("$id", "")
        if isinstance(name, str) and name.startswith("#"):
            self._is_plain &= name[1:] not in self._anchors
            self._anchors[name[1:]] = value
        elif "$id" in value or "draft-04" in str(self._root.get("$schema")):
            self._num_bases += 1
            self._is_plain = False

    def _target(self, reference: str) -> object:
        """What a reference names."""
        base, _, fragment = reference.partition("#")
        name = unquote(fragment)
        if base and base != str(self._root.get("$id", "")).partition("#")[0]:
            self._is_plain = False
            return None
        if name and not name.startswith("/"):
            self._is_plain &= name in self._anchors
            return self._anchors.get(name)
        place: object = self._root
        for part in name.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(place, dict) and key in place:
                place = place[key]
            elif isinstance(place, list) and _INDEX.fullmatch(key) and int(key) < len(place):
                place = place[int(key)]
            else:
                self._is_plain = False
                return None
        return place
