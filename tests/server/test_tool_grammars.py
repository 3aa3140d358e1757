"""A grammar for calls allows nothing but calls that the tools' schemas allow, with the grammar engine itself."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema  # type: ignore[import-untyped]
import pytest
from byte_models import EOS_ID, byte_tokenizer

from foredraft.errors import RequestError
from foredraft.sampling.grammar import GrammarCompiler
from foredraft.server.tools.events import CallArguments, CallStart, Text
from foredraft.server.tools.formats import TOOL_FORMATS
from foredraft.server.tools.tool_format import ToolFormat
from foredraft.structured_output import StructuredOutput

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1, "maxLength": 12},
        "days": {"type": "integer", "minimum": 0, "maximum": 99},
        "unit": {"enum": ["C", "F"]},
        "exact": {"type": "boolean"},
        "note": {"type": ["string", "null"], "maxLength": 5},
        "code": {"type": "string", "pattern": "^[a-z]{2}[0-9]$"},
    },
    "required": ["city", "unit"],
}
NESTED = {
    "type": "object",
    "properties": {
        "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "maxItems": 2},
        "limit": {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "string", "maxLength": 3}]},
    },
    "required": ["points"],
    "additionalProperties": False,
    "$defs": {
        "point": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": -9, "maximum": 9}},
            "required": ["x"],
            "additionalProperties": False,
        }
    },
}


def tool(name: str, parameters: dict[str, Any] | None, *, strict: bool = False) -> dict[str, Any]:
    """In OpenAI's form."""
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": strict}}


TOOLS = [tool("get_weather", WEATHER), tool("area", NESTED), tool("now", None)]
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {**WEATHER, "additionalProperties": False},
    "area": NESTED,
    "now": {"type": "object", "maxProperties": 0},
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(byte_tokenizer(), 256, frozenset({EOS_ID}))


def written(compiler: GrammarCompiler, spec: StructuredOutput, seed: int, begin: str = "") -> str:
    """Text of random tokens that are allowed, to an end; printable ones more often than others, and text is short."""
    draw = random.Random(seed)
    state = compiler.start(spec)
    output = bytearray(begin.encode())
    state.commit(list(output))
    plain = set(b"abcgnxyz 0123456789\",:.}])>='\n")
    while len(output) < 4_000:
        mask = state.mask_after([])
        assert mask is not None
        allowed = mask.nonzero().flatten().tolist()
        if EOS_ID in allowed and (len(allowed) == 1 or draw.random() < 0.6):
            return output.decode()
        allowed = [each for each in allowed if each != EOS_ID]
        if len(allowed) > 1 and draw.random() < 0.9:
            closing = [each for each in allowed if chr(each) in '"]}<']
            allowed = (closing if draw.random() < 0.4 else []) or [each for each in allowed if each in plain] or allowed
        token = draw.choice(allowed)
        output.append(token)
        state.commit([token])
    raise AssertionError(f"no end after {len(output)} bytes: {bytes(output[:200])!r}")


def calls_in(tool_format: ToolFormat, text: str, tools: list[dict[str, Any]]) -> list[tuple[str, Any]]:
    """The calls, whose arguments are valid; there is no text beside them."""
    calls: list[tuple[str, str]] = []
    parser = tool_format.parser(tools)
    for event in [*parser.add(text), *parser.finish()]:
        assert not isinstance(event, Text), text
        if isinstance(event, CallStart):
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            calls[-1] = (calls[-1][0], calls[-1][1] + event.text)
    decoded = [(name, json.loads(arguments)) for name, arguments in calls]
    for name, arguments in decoded:
        jsonschema.validate(arguments, SCHEMAS[name])
    return decoded


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_required(compiler: GrammarCompiler, name: str, parallel: bool) -> None:
    tool_format = TOOL_FORMATS[name]
    spec = tool_format.structured_output(TOOLS, "required", parallel)
    assert spec is not None
    compiler.check(spec)
    outputs = [calls_in(tool_format, written(compiler, spec, seed), TOOLS) for seed in range(20)]
    assert {called for calls in outputs for called, _ in calls} == {"get_weather", "area", "now"}
    numbers = {len(calls) for calls in outputs}
    assert numbers == {1} if not parallel else min(numbers) == 1 and max(numbers) > 1


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_named_function_is_called_once(compiler: GrammarCompiler, name: str) -> None:
    tool_format = TOOL_FORMATS[name]
    choice = {"type": "function", "function": {"name": "area"}}
    spec = tool_format.structured_output(TOOLS, choice, True)
    assert spec is not None
    for seed in range(4):
        assert [called for called, _ in calls_in(tool_format, written(compiler, spec, seed), TOOLS)] == ["area"]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_auto_is_free_up_to_the_marker_if_a_tool_is_strict(compiler: GrammarCompiler, name: str) -> None:
    tool_format = TOOL_FORMATS[name]
    assert tool_format.structured_output(TOOLS, "auto", True) is None
    tools = [tool("area", NESTED, strict=True)]
    spec = tool_format.structured_output(tools, "auto", True)
    assert tool_format.structured_output(tools, "none", True) is None
    if tool_format.marker is None:
        assert spec is None
        return
    assert spec is not None
    assert spec.after == tool_format.marker
    compiler.check(spec)
    assert compiler.start(spec).mask_after(list(b"Let me see.")) is None
    for seed in range(4):
        calls = calls_in(tool_format, written(compiler, spec, seed, tool_format.marker), tools)
        assert {called for called, _ in calls} == {"area"}


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_what_models_write_is_allowed(compiler: GrammarCompiler, name: str) -> None:
    """The layout of each format, as chat templates show it."""
    arguments = '{"city": "Bonn", "days": 3, "unit": "C"}'
    deepseek = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"  # noqa: RUF001
    separator = "<｜tool▁sep｜>"  # noqa: RUF001
    text = {
        "hermes": f'<tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</tool_call>',
        "longcat": f'<longcat_tool_call>\n{{"name": "get_weather", "arguments": {arguments}}}\n</longcat_tool_call>',
        "granite": f'<|tool_call|>[{{"name": "get_weather", "arguments": {arguments}}}]',
        "llama3_json": f'{{"name": "get_weather", "parameters": {arguments}}}',
        "mistral": f'[TOOL_CALLS][{{"name": "get_weather", "arguments": {arguments}}}]',
        "mistral_args": f"[TOOL_CALLS]get_weather[ARGS]{arguments}",
        "pythonic": '[get_weather(city="Bonn", days=3, unit="C")]',
        "qwen3_coder": "<tool_call>\n<function=get_weather>\n<parameter=city>\nBonn\n</parameter>\n<parameter=days>\n"
        "3\n</parameter>\n<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="get_weather">\n'
        '<parameter name="city">Bonn</parameter>\n<parameter name="days">3</parameter>\n'
        '<parameter name="unit">C</parameter>\n</invoke>\n</minimax:tool_call>',
        "glm45": "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Bonn</arg_value>\n"
        "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n"
        "<arg_key>unit</arg_key>\n<arg_value>C</arg_value>\n</tool_call>",
        "deepseek_v3": deepseek.format(f"function{separator}get_weather\n```json\n{arguments}\n```"),
        "deepseek_v31": deepseek.format(f"get_weather{separator}{arguments}"),
    }[name]
    spec = TOOL_FORMATS[name].structured_output(TOOLS, "required", True)
    assert spec is not None
    state = compiler.start(spec)
    for at, byte in enumerate(text.encode()):
        mask = state.mask_after([])
        assert mask is not None
        assert mask[byte], f"not allowed after {text.encode()[:at]!r}"
        state.commit([byte])
    mask = state.mask_after([])
    assert mask is not None
    assert mask[EOS_ID]
    called = calls_in(TOOL_FORMATS[name], text, TOOLS)
    assert called == [("get_weather", {"city": "Bonn", "days": 3, "unit": "C"})]


def test_text_that_a_tag_would_end_is_not_allowed(compiler: GrammarCompiler) -> None:
    """A value without quotes ends at the first tag that ends values."""
    spec = TOOL_FORMATS["glm45"].structured_output(
        [tool("f", {"properties": {"a": {"type": "string"}}})], "required", False
    )
    assert spec is not None
    state = compiler.start(spec)
    state.commit(list(b"<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value"))
    state.commit(list(b">"))
    mask = state.mask_after([])
    assert mask is not None
    assert mask.nonzero().flatten().tolist() == [ord("\n")]


@pytest.mark.parametrize("value", ["9", "ab", "", "a1"])
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2"])
def test_a_value_may_be_text_or_a_number(compiler: GrammarCompiler, name: str, value: str) -> None:
    """Both ways are open to the end, where a schema allows both."""
    limit = {"anyOf": [{"type": "integer", "minimum": 1, "maximum": 9}, {"type": "string", "maxLength": 3}]}
    parameters = {"properties": {"a": limit}, "required": ["a"]}
    tools = [tool("f", parameters)]
    spec = TOOL_FORMATS[name].structured_output(tools, "required", False)
    assert spec is not None
    text = {
        "qwen3_coder": "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>",
        "glm45": "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>",
        "minimax_m2": '<minimax:tool_call>\n<invoke name="f">\n<parameter name="a">{}</parameter>\n</invoke>\n'
        "</minimax:tool_call>",
    }[name].format(value)
    state = compiler.start(spec)
    for byte in text.encode():
        mask = state.mask_after([])
        assert mask is not None
        assert mask[byte], f"{chr(byte)} is not allowed"
        state.commit([byte])
    assert state.mask_after([]) is not None
    parser = TOOL_FORMATS[name].parser(tools)
    arguments = "".join(event.text for event in parser.add(text) if isinstance(event, CallArguments))
    assert json.loads(arguments) == {"a": 9 if value == "9" else value}


def test_markers_are_special_tokens_where_the_tokenizer_has_them() -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]", "[ARGS]"]})
    ids = {str(token.content): number for number, token in tokenizer.added_tokens_decoder.items()}
    assert ids.keys() == {"[TOOL_CALLS]", "[ARGS]"}
    compiler = GrammarCompiler(tokenizer, len(tokenizer), frozenset({EOS_ID}))
    spec = TOOL_FORMATS["mistral_args"].structured_output([tool("f", None)], "required", False, ids)
    assert spec is not None
    state = compiler.start(spec)
    path = [ids["[TOOL_CALLS]"], ord("f"), ids["[ARGS]"], ord("{"), ord("}"), EOS_ID]
    for token in path:
        mask = state.mask_after([])
        assert mask is not None
        assert mask.nonzero().flatten().tolist() == [token]
        state.commit([token])


@pytest.mark.parametrize(
    ("tools", "choice", "message"),
    [
        (TOOLS, {"type": "function", "function": {"name": "other"}}, "must name one of the tools, not 'other'"),
        (TOOLS, {"type": "function"}, "tool_choice must be"),
        (TOOLS, "any", "tool_choice must be"),
        (TOOLS, 5, "tool_choice must be"),
        ([], "required", "only with tools"),
        ([{"type": "function"}], "auto", r"tools\[0\].function must be an object"),
        ([tool("", None)], "auto", r"tools\[0\].function.name must be text"),
        ([tool("f", None), tool("f", None)], "auto", r"tools\[1\].function.name .* twice"),
        ([{"function": {"name": "f", "parameters": [1]}}], "auto", r"tools\[0\].function.parameters must be"),
        ([tool("f", {"properties": {"a": {"const": float("nan")}}})], "required", "cannot be written as JSON"),
    ],
)
def test_what_cannot_be_is_refused(tools: list[dict[str, Any]], choice: Any, message: str) -> None:
    for tool_format in TOOL_FORMATS.values():
        with pytest.raises(RequestError, match=message):
            tool_format.structured_output(tools, choice, True)


@pytest.mark.parametrize("name", ["pythonic", "qwen3_coder", "glm45", "minimax_m2"])
def test_schemas_that_are_no_list_of_parameters_are_refused(name: str) -> None:
    """They would be followed in part only."""
    tools = [tool("f", {"anyOf": [{"required": ["a"]}, {"required": ["b"]}], "properties": {"a": {}, "b": {}}})]
    with pytest.raises(RequestError, match="parameters of the function 'f' have anyOf"):
        TOOL_FORMATS[name].structured_output(tools, "required", True)
