"""Chains of definitions that would overflow the native stack are refused; deep ones below the limit run."""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from byte_models import byte_tokenizer

from foredraft.errors import RequestError
from foredraft.sampling.grammar import GrammarCompiler
from foredraft.sampling.grammar_chains import MAX_CONVERSION, MAX_DEPTH, check_gbnf, check_lark, check_schema
from foredraft.structured_output import MAX_CHARACTERS, MAX_REGEX, StructuredOutput


def schema_chain(length: int, link: Callable[[dict[str, Any]], dict[str, Any]]) -> str:
    definitions = {f"d{i}": link({"$ref": f"#/$defs/d{i + 1}"}) for i in range(length)}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{length}": {"type": "integer"}}})


def objects(length: int) -> str:
    return schema_chain(length, lambda ref: {"type": "object", "properties": {"a": ref}, "required": ["a"]})


def arrays(length: int) -> str:
    return schema_chain(length, lambda ref: {"type": "array", "items": ref, "minItems": 1})


def tuples(length: int) -> str:
    return schema_chain(length, lambda ref: {"type": "array", "prefixItems": [ref], "minItems": 1})


def links(length: int) -> str:
    return schema_chain(length, lambda ref: ref)


def all_of(length: int) -> str:
    return schema_chain(length, lambda ref: {"allOf": [ref]})


def any_of(length: int) -> str:
    return schema_chain(length, lambda ref: {"anyOf": [ref, {"type": "null"}]})


def anchors(length: int) -> str:
    definitions = [{"$anchor": f"d{i}", "type": "array", "items": {"$ref": f"#d{i + 1}"}} for i in range(length)]
    end = {"$anchor": f"d{length}", "type": "integer"}
    return json.dumps({"$ref": "#d0", "$defs": {str(i): each for i, each in enumerate([*definitions, end])}})


def absolute(length: int) -> str:
    return links(length).replace('"#/', '"json-schema:///#/')


def spellings(length: int) -> str:
    """One definition, which the library compiles once for each spelling of its name."""
    names = ["".join("%61" if index >> bit & 1 else "a" for bit in range(14)) for index in range(length)]
    properties = {f"p{index}": {"$ref": f"#/$defs/{name}"} for index, name in enumerate(names)}
    return json.dumps({"$ref": "#/$defs/" + names[0], "$defs": {"a" * 14: {"properties": properties}}})


def rules(length: int) -> str:
    return "start: r0\n" + "\n".join(f'r{i}: r{i + 1} "a"' for i in range(length)) + f'\nr{length}: "b"'


def terminals(length: int) -> str:
    return "start: T0\n" + "\n".join(f'?T{i}: T{i + 1} "a"'[1:] for i in range(length)) + f'\nT{length}: "b"'


def groups(length: int) -> str:
    return "start: r0\n" + "\n".join(f'r{i}: ("c" (r{i + 1} | "a"))*' for i in range(length)) + f'\nr{length}: "b"'


def on_one_line(length: int) -> str:
    """An alias ends a rule."""
    return "start: r0\n" + " ".join(f'r{i}: r{i + 1} "a" -> x' for i in range(length)) + f'\nr{length}: "b"'


def camel_case(length: int) -> str:
    """`rT1` is two names, r and T1."""
    return (
        "start: rT0\nr: /x/\n" + "\n".join(f'T{i}: "/*" T{i + 1} /[x]\\//' for i in range(length)) + f"\nT{length}: /b/"
    )


def inner(length: int) -> str:
    return 'start: "a" %lark {\n' + rules(length) + "\n}\n"


def with_schema(length: int) -> str:
    return f"start: %json {objects(length)} end\nend: /\\n/"


def gbnf(length: int) -> str:
    return "root ::= r0\n" + "\n".join(f'r{i} ::= r{i + 1} "a"' for i in range(length)) + f'\nr{length} ::= "b"'


SCHEMAS = (objects, arrays, tuples, links, all_of, any_of, anchors, absolute, spellings)
GRAMMARS = (rules, terminals, groups, on_one_line, camel_case, inner, with_schema, gbnf)


def output(make: Callable[[int], str], length: int) -> StructuredOutput:
    text = make(length)
    return StructuredOutput(json_schema=text) if make in SCHEMAS else StructuredOutput(grammar=text)


def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), 300, frozenset({0}))


def longest(make: Callable[[int], str], most: Callable[[str], bool]) -> int:
    low, high = 1, 4 * MAX_DEPTH
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if most(make(middle)) else (low, middle)
    return low


def passes(make: Callable[[int], str], text: str) -> bool:
    check = check_schema if make in SCHEMAS else check_gbnf if make is gbnf else check_lark
    try:
        check(text, "field")
    except RequestError:
        return False
    return True


@pytest.mark.parametrize("make", [*SCHEMAS, *GRAMMARS])
def test_a_long_chain_is_refused_before_it_is_compiled(make: Callable[[int], str]) -> None:
    per_link = len(make(200)) // 200 + 16
    for length in (4_000, min(20_000, MAX_CHARACTERS // per_link)):
        spec = output(make, length if make is not spellings else min(length, 10_000))
        started = time.process_time()
        field = r"structured_output\.(json_schema|grammar)"
        with pytest.raises(RequestError, match=rf"{field} is nested too deeply .* at most 1000"):
            compiler().check(spec)
        assert time.process_time() - started < 10


def run_longest() -> None:
    """What the next test runs in a process of its own."""
    for make in (*SCHEMAS, *GRAMMARS):
        length = longest(make, functools.partial(passes, make))
        assert length >= MAX_DEPTH // 5, make
        state = compiler().start(output(make, length))
        for _ in range(20):
            mask = state.mask_after([])
            assert mask is not None
            state.commit([int(mask.int().argmax())])
        print(make.__name__, flush=True)


def test_the_longest_allowed_chains_compile_and_run_on_a_default_stack() -> None:
    program = (
        f"import sys, threading; sys.path[:] = {[*sys.path, str(Path(__file__).parent)]!r}\n"
        "from test_grammar_chains import run_longest\n"
        "thread = threading.Thread(target=run_longest); thread.start(); thread.join()"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert done.stdout.split() == [make.__name__ for make in (*SCHEMAS, *GRAMMARS)], done.stderr[-1000:]
    assert done.returncode == 0


TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "children": {"type": "array", "items": {"$ref": "#/$defs/node"}},
            },
        }
    },
}
META = {
    "$schema": "http://json-schema.org/draft-07/schema#",
    "$id": "http://json-schema.org/draft-07/schema#",
    "definitions": {"many": {"type": "array", "minItems": 1, "items": {"$ref": "#"}}},
    "type": ["object", "boolean"],
    "properties": {
        "$id": {"type": "string"},
        "items": {"anyOf": [{"$ref": "#"}, {"$ref": "#/definitions/many"}]},
        "properties": {"type": "object", "additionalProperties": {"$ref": "#"}},
        "allOf": {"$ref": "#/definitions/many"},
    },
}
API = {
    "$ref": "#/$defs/d0",
    "$defs": {
        f"d{i}": {
            "type": "object",
            "properties": {
                f"p{j}": {"anyOf": [{"$ref": f"#/$defs/d{(7 * i + j) % 150}"}, {"type": "null"}]} for j in range(9)
            },
        }
        for i in range(150)
    },
}


@pytest.mark.parametrize("schema", [TREE, META, API, {"properties": {"$ref": {"type": "string"}}}])
def test_recursive_schemas_of_the_usual_kind_compile(schema: dict[str, Any]) -> None:
    compiler().check(StructuredOutput(json_schema=schema))


def test_many_rules_side_by_side_are_not_deep() -> None:
    names = range(8_000)
    check_lark(
        "start: " + " | ".join(f"r{i}" for i in names) + "\n" + "\n".join(f'r{i}: "{i}"' for i in names), "field"
    )
    check_gbnf(
        "root ::= " + " | ".join(f"r{i}" for i in names) + "\n" + "\n".join(f'r{i} ::= "x"' for i in names), "field"
    )


def test_names_in_strings_regular_expressions_and_comments_refer_to_nothing() -> None:
    lines = [f'r{i}: "r{i + 1}" /r{i + 1}/ <r{i + 1}> // r{i + 1}' for i in range(2 * MAX_DEPTH)]
    check_lark("start: r0\n" + "\n".join(lines), "field")


def test_gbnf_that_the_converter_would_take_minutes_for_is_refused() -> None:
    wide = MAX_CONVERSION // 500
    text = gbnf(900) + "\n" + "\n".join(f's{i} ::= "a"' for i in range(wide))
    with pytest.raises(RequestError, match=r"field is too large: its .* rules"):
        check_gbnf(text, "field")


def test_json_that_is_not_valid_in_a_grammar_names_the_field() -> None:
    with pytest.raises(RequestError, match=r"structured_output\.grammar holds JSON that is not valid"):
        compiler().check(StructuredOutput(grammar="start: %json {"))


def test_rules_that_count_are_refused() -> None:
    """A mask of such a grammar may take minutes, and there is no bound to it."""
    with pytest.raises(RequestError, match=r"structured_output.grammar has rules with parameters \(::\)"):
        check_lark('start: foo::0x0\nfoo::_: foo::incr(_) "a" %if lt(_, 5000) | "b"', "structured_output.grammar")


@pytest.mark.parametrize("num_characters", [MAX_REGEX // 2, MAX_REGEX])
def test_regular_expressions_are_bounded_wherever_they_stand(num_characters: int) -> None:
    """The time to compile one grows with the square of its length: minutes at some 100,000 characters."""
    regex = "a?" * (num_characters // 2)
    schema = {
        "type": "object",
        "properties": {"a": {"type": "string", "pattern": regex}},
        "patternProperties": {regex: {}},
    }
    if num_characters < MAX_REGEX:
        check_schema(json.dumps(schema), "f")
        check_lark(f"start: /{regex[2:]}/", "f")
        StructuredOutput(regex=regex)
        return
    with pytest.raises(RequestError, match="f may have 16000 characters of regular expressions, not 32000"):
        check_schema(json.dumps(schema), "f")
    with pytest.raises(RequestError, match="f may have 16000 characters of regular expressions, not 16002"):
        check_lark(f"start: /{regex}/", "f")
    with pytest.raises(RequestError, match="f may have 16000 characters of regular expressions"):
        check_lark(f"start: %json {json.dumps(schema)}", "f")
    with pytest.raises(RequestError, match="regex may have 16000 characters at most, not 16001"):
        StructuredOutput(regex=f"{regex}a")
