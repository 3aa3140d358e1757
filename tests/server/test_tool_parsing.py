"""Calls of tools are read alike however the text is cut into pieces, and nothing of it is lost."""

# ruff: noqa: RUF001 (DeepSeek's tokens have bars of full width in their names)

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foredraft.server.tools.events import CallArguments, CallStart, Event, Text
from foredraft.server.tools.formats import TOOL_FORMATS, detect_format

Read = list[str | tuple[str, str]]  # what one output holds, in order: text, or a call's name and arguments

FIRST: dict[str, Any] = {"city": 'Zürich "{[" </tool_call> [TOOL_CALLS]', "deep": {"a": [1, {"b": "}"}]}}
SECOND: dict[str, Any] = {}


def _json_call(name: str, arguments: object, key: str = "arguments") -> str:
    return json.dumps({"name": name, key: arguments}, ensure_ascii=False)


_DEEPSEEK = "<｜tool▁call▁begin｜>{}<｜tool▁call▁end｜>"

# For each format, how two calls are written, with what may be between them.
WRITTEN = {
    "hermes": (
        f"<tool_call>\n{_json_call('f', FIRST)}\n</tool_call>",
        '<tool_call>{ "arguments" : {} ,\t"name":"g"}</tool_call>',
    ),
    "longcat": (
        f"<longcat_tool_call>\n{_json_call('f', FIRST)}\n</longcat_tool_call>",
        '<longcat_tool_call>{"name":"g"}</longcat_tool_call>',
    ),
    "granite": (
        f"<|tool_call|>[{_json_call('f', FIRST)}]",
        f"<|tool_call|> [ {_json_call('g', None)} ]",
    ),
    "llama3_json": (
        f"<|python_tag|>{_json_call('f', FIRST, 'parameters')}",
        '\n{"type": "function", "name": "g", "parameters": {}}',
    ),
    "mistral": (
        f"[TOOL_CALLS][{_json_call('f', FIRST)}]",
        f'[TOOL_CALLS] [{_json_call("g", {})[:-1]}, "id": "abcdefghi"}}]',
    ),
    "mistral_args": (
        f"[TOOL_CALLS]f[ARGS]{json.dumps(FIRST, ensure_ascii=False)}",
        "[TOOL_CALLS]g[CALL_ID]abcdefghi[ARGS] {}",
    ),
    "pythonic": (
        "[f(city='Z\\u00fcrich \"{[\" </tool_call> [TOOL_CALLS]', deep={'a': [1, {'b': '}'}]})]",
        "\n<|python_start|>[ g( ) ]<|python_end|>",
    ),
    "qwen3_coder": (
        '<tool_call>\n<function=f>\n<parameter=city>\nZürich "{[" </tool_call> [TOOL_CALLS]\n</parameter>\n'
        '<parameter=deep>\n{"a": [1, {"b": "}"}]}\n</parameter>\n</function>\n</tool_call>',
        "<tool_call><function=g></function></tool_call>",
    ),
    "minimax_m2": (
        '<minimax:tool_call>\n<invoke name="f">\n<parameter name="city">Zürich "{[" </tool_call> [TOOL_CALLS]'
        "</parameter>"
        '<parameter name="deep">{"a": [1, {"b": "}"}]}</parameter>\n</invoke>\n</minimax:tool_call>',
        '<minimax:tool_call><invoke name="g"></invoke></minimax:tool_call>',
    ),
    "glm45": (
        '<tool_call>f\n<arg_key>city</arg_key>\n<arg_value>Zürich "{[" </tool_call> [TOOL_CALLS]</arg_value>\n'
        '<arg_key>deep</arg_key><arg_value>{"a": [1, {"b": "}"}]}</arg_value>\n</tool_call>',
        "<tool_call>g</tool_call>",
    ),
    "deepseek_v3": (
        "<｜tool▁calls▁begin｜>"
        + _DEEPSEEK.format(f"function<｜tool▁sep｜>f\n```json\n{json.dumps(FIRST, ensure_ascii=False)}\n```")
        + "<｜tool▁calls▁end｜>",
        _DEEPSEEK.format("function<｜tool▁sep｜>g\n```json\n{}\n```"),
    ),
    "deepseek_v31": (
        "<｜tool▁calls▁begin｜>"
        + _DEEPSEEK.format(f"f<｜tool▁sep｜>{json.dumps(FIRST, ensure_ascii=False)}")
        + "\n<｜tool▁calls▁end｜>",
        "<｜tool▁calls▁begin｜>" + _DEEPSEEK.format("g<｜tool▁sep｜>{}") + "<｜tool▁calls▁end｜>",
    ),
}

# Several calls at one marker.
TOGETHER = {
    "hermes": f"<tool_call>[{_json_call('f', FIRST)}, {_json_call('g', {})}]</tool_call>",
    "granite": f"<|tool_call|>[{_json_call('f', FIRST)},{_json_call('g', {})}]",
    "llama3_json": f"{_json_call('f', FIRST, 'parameters')}; {_json_call('g', {}, 'parameters')}",
    "mistral": f"[TOOL_CALLS][{_json_call('f', FIRST)} ,\n{_json_call('g', {})}]",
    "pythonic": f"[f(city={FIRST['city']!r}, deep={FIRST['deep']!r}), g()]",
    "minimax_m2": WRITTEN["minimax_m2"][0].replace(
        "</minimax:tool_call>", '<invoke name="g">\n</invoke></minimax:tool_call>'
    ),
    "deepseek_v3": WRITTEN["deepseek_v3"][0].replace(
        "<｜tool▁calls▁end｜>", f"\n{WRITTEN['deepseek_v3'][1]}<｜tool▁calls▁end｜>"
    ),
    "deepseek_v31": WRITTEN["deepseek_v31"][0].replace(
        "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>g<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    ),
}


def events_of(name: str, pieces: Iterable[str], tools: list[dict[str, Any]] | None = None) -> list[list[Event]]:
    """The events after each piece, and at the end."""
    parser = TOOL_FORMATS[name].parser(tools or [])
    return [*(parser.add(piece) for piece in pieces), parser.finish()]


def read(name: str, pieces: Iterable[str], tools: list[dict[str, Any]] | None = None) -> Read:
    """What the pieces hold, with neighbours joined; checks that the calls are opened once each, and in order."""
    result: Read = []
    ids: set[str] = set()
    for event in (event for events in events_of(name, pieces, tools) for event in events):
        if isinstance(event, CallStart):
            assert event.index == len(ids)
            assert event.call_id not in ids
            ids.add(event.call_id)
            result.append((event.name, ""))
        elif isinstance(event, CallArguments):
            assert event.index == len(ids) - 1
            last = result[-1]
            assert isinstance(last, tuple), "arguments after text"
            result[-1] = (last[0], last[1] + event.text)
        elif result and isinstance(last := result[-1], str):
            result[-1] = last + event.text
        else:
            assert event.text
            result.append(event.text)
    return result


def decoded(result: Read) -> list[Any]:
    """With the arguments read as JSON."""
    return [part if isinstance(part, str) else (part[0], json.loads(part[1])) for part in result]


def splits(text: str, num_cuts: int) -> Iterable[list[str]]:
    """Every way to cut a text, pieces of nothing included."""
    for cuts in combinations(range(len(text) + 1), num_cuts):
        yield [text[start:end] for start, end in zip((0, *cuts), (*cuts, len(text)))]


TWO_CALLS = [("f", FIRST), ("g", SECOND)]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_two_calls_with_text_around_in_every_two_pieces_and_in_characters(name: str) -> None:
    first, second = WRITTEN[name]
    text = f"I will look: \n{first}\n and then {second} done <tool"
    if name in ("llama3_json", "pythonic"):
        text = f"I will look:\n{first}\n and then{second} done <tool"
    whole = read(name, [text])
    before, between, after = (part for part in whole if isinstance(part, str))
    assert (before.strip(), between.strip(), after) == ("I will look:", "and then", " done <tool")
    assert [part for part in decoded(whole) if not isinstance(part, str)] == TWO_CALLS
    assert read(name, text) == whole
    for pieces in splits(text, 1):
        assert read(name, pieces) == whole


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("is_together", [False, True])
def test_calls_alone_give_no_text(name: str, is_together: bool) -> None:
    if is_together and name not in TOGETHER:
        pytest.skip("each call has a marker of its own")
    text = TOGETHER[name] if is_together else "\n".join(WRITTEN[name])
    whole = read(name, ["\n", text, " \n"])
    assert decoded(whole) == TWO_CALLS
    assert read(name, f"\n{text} \n") == whole
    for pieces in splits(f"\n{text} \n", 1):
        assert read(name, pieces) == whole


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
def test_every_three_pieces(name: str, step: int) -> None:
    shorter = [call.replace("city", "c").replace(" </tool_call> [TOOL_CALLS]", "") for call in WRITTEN[name]]
    text = "a\n" + "x".join(shorter)
    whole = read(name, [text])
    assert len(whole) >= 2
    for number, pieces in enumerate(splits(text, 2)):
        if number % step == 0:
            assert read(name, pieces) == whole


# Pieces that calls and markers are made of, put together at random.
_SCRAPS = sorted(
    {scrap for calls in WRITTEN.values() for call in calls for scrap in (call, call[:-1], call[: len(call) // 2])}
    | {"<tool_call>", "</tool_call>", "<function=f>", "<parameter=a>", "</parameter>", "</function>", "[TOOL_CALLS]"}
    | {
        "<|python_tag|>",
        "[f(a=",
        "[f(",
        "[f(a=1",
        ")]",
        ", g(",
        '{"name": "f", ',
        '"arguments": {',
        '"parameters": "',
        "}}",
    }
    | {
        "[ARGS]",
        "f",
        "{",
        "}",
        "[",
        "]",
        "<",
        "\\",
        '"',
        "'",
        "\n",
        " ",
        ";",
        ",",
        "ü",
        "1",
        "null",
        "text",
        "[1]",
        "{}",
    }
    | {"<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "f<｜tool▁sep｜>", "<｜tool▁calls▁end｜>", "<arg_key>", "```"}
)


@pytest.mark.parametrize("name", TOOL_FORMATS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_any_text_in_any_pieces(name: str, data: st.DataObject) -> None:
    text = "".join(data.draw(st.lists(st.sampled_from(_SCRAPS), max_size=8)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    pieces = [text[start:end] for start, end in zip((0, *cuts), (*cuts, len(text)))]
    whole = read(name, [text])
    assert read(name, pieces) == whole
    assert read(name, text) == whole
    if all(isinstance(part, str) for part in whole):
        assert "".join(map(str, whole)) == text


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_text_flows(name: str) -> None:
    """Text that cannot begin a marker is given out with the piece that it comes in; what could, once it cannot."""
    given_out = ""
    text = "If a < b, then [x] and {y}: <tool, <|py, [TOOL, <｜tool and so on."
    for count, events in enumerate(events_of(name, text)[:-1], 1):
        given_out += "".join(event.text for event in events if isinstance(event, Text))
        held = text[len(given_out) : count]
        assert given_out + held == text[:count]
        assert len(held) <= len("<｜tool▁calls▁begin｜>")
        assert not held or held[0] in "<[", f"{held!r} is held back"
    assert given_out == text


@pytest.mark.parametrize("name", ["hermes", "mistral", "mistral_args", "llama3_json", "deepseek_v3", "deepseek_v31"])
def test_arguments_flow(name: str) -> None:
    """Once the arguments have begun, each piece of them is given out with the piece that it comes in."""
    text = WRITTEN[name][0]
    begin = text.index('{"city"')
    end = begin + len(json.dumps(FIRST, ensure_ascii=False))
    events = events_of(name, text)
    for at in range(begin + 1, end):
        assert events[at] == [CallArguments(0, text[at])]


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_beginnings_of_calls_are_text_if_the_output_ends(name: str) -> None:
    """A call without an end: what was not announced is text, what was stays as it came."""
    text = WRITTEN[name][0]
    for length in range(len(text)):
        result = read(name, [text[:length]])
        calls = [part for part in result if isinstance(part, tuple)]
        if not calls:
            assert "".join(map(str, result)) == text[:length]
        else:
            assert [name for name, _ in calls] == ["f"]
            whole = next(part for part in read(name, [text]) if isinstance(part, tuple))
            assert whole[1].startswith(calls[0][1])


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>I mean this tag.</tool_call>"),
        ("hermes", "\n <tool_call>"),
        ("hermes", '<tool_call>{"name": 5, "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "\\ud800", "arguments": {}}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),
        ("hermes", '<tool_call>{"name": "f", "arguments": "no JSON"}</tool_call>'),
        ("hermes", "<tool_call>{}</tool_call>"),
        ("hermes", "<tool_call>[]</tool_call>"),
        ("llama3_json", '{"name": "Ada", "age": 36}'),
        ("llama3_json", '{"name": "Ada"}'),
        ("llama3_json", 'As JSON: {"name": "f", "parameters": {}}'),
        ("llama3_json", "<|python_tag|>print(1)"),
        ("mistral", "[TOOL_CALLS] are what I write"),
        ("mistral", "[TOOL_CALLS]f()"),
        ("pythonic", "[f(1)]"),
        ("pythonic", "[f(a=g())]"),
        ("pythonic", "[f(a=1, a=2)]"),
        ("pythonic", "[f(a={1, 2})]"),
        ("pythonic", "[f(a=[1)]"),
        ("pythonic", "[f(a=1e999)]"),
        ("pythonic", "[link](https://example.org)"),
        ("pythonic", "Call it as [f(a=1)]"),
        ("qwen3_coder", "<tool_call>\n<function=f\n</tool_call>"),
        ("qwen3_coder", "<tool_call>\nf\n</tool_call>"),
        ("glm45", "<tool_call>f(a=1)</tool_call>"),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
        ("deepseek_v31", "<｜tool▁call▁begin｜>f<｜tool▁sep｜>plain<｜tool▁call▁end｜>"),
    ],
)
def test_what_only_looks_like_a_call_is_text(name: str, text: str) -> None:
    assert read(name, [text]) == [text]
    assert read(name, text) == [text]


def test_a_call_with_wrong_brackets_keeps_what_was_given_out() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": [1}}</tool_call> more'
    assert read("hermes", [text]) == read("hermes", text) == [("f", '{"a": [1'), "}}</tool_call> more"]


def test_arguments_as_a_string_or_null() -> None:
    text = (
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call><tool_call>{"name": "g", "arguments": null}'
    )
    assert read("hermes", text) == [("f", '{"a": 1}'), ("g", "{}")]


def test_a_call_after_a_broken_one_is_read() -> None:
    assert read("hermes", '<tool_call><tool_call>{"name": "f"}</tool_call>') == ["<tool_call>", ("f", "{}")]


def test_pythonic_values() -> None:
    text = (
        "[f.g(a=None, b=True, c=false, d=-1.5e3, e=(1, 2), f={'x': [None, -2,], 3: \"y\"}, g='it\\'s\\n\\x41\\u00e9',"
        ' h="a" \'b\', i=+.5, j=null, k=\'\\ud800\', l="""say \\d""", m=1.)]'
    )
    ((name, arguments),) = decoded(read("pythonic", text))
    assert name == "f.g"
    assert arguments == {
        "a": None,
        "b": True,
        "c": False,
        "d": -1500.0,
        "e": [1, 2],
        "f": {"x": [None, -2], "3": "y"},
        "g": "it's\nAé",
        "h": "ab",
        "i": 0.5,
        "j": None,
        "k": "\ud800",
        "l": "say \\d",
        "m": 1.0,
    }


@given(
    st.dictionaries(
        st.from_regex(r"[a-z]\w{0,5}", fullmatch=True),
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
            max_leaves=8,
        ),
        max_size=4,
    )
)
@settings(max_examples=100, deadline=None)
def test_pythonic_reads_whatever_python_writes(arguments: dict[str, Any]) -> None:
    text = f"[f({', '.join(f'{key}={value!r}' for key, value in arguments.items())})]"
    assert decoded(read("pythonic", [text])) == [("f", arguments)]


@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "minimax_m2"])
def test_values_without_quotes_have_the_types_of_the_schema(name: str) -> None:
    values = {
        "text": ("string", "5", "5"),
        "whole": ("integer", "5", 5),
        "number": ("number", "5", 5),
        "flag": ("boolean", "True", True),
        "things": ("array", "['a', None]", ["a", None]),
        "either": (["string", "null"], "null", None),
        "other": (["string", "integer"], "true", "true"),
        "wrong": ("integer", "many", "many"),
        "unknown": (None, '{"a": 1}', {"a": 1}),
        "plain": (None, "a b", "a b"),
    }
    properties = {key: {"type": kind} if kind else {} for key, (kind, _, _) in values.items()}
    parameters = {"type": "object", "properties": {**properties, "other": {"$ref": "#/$defs/o"}}}
    parameters["$defs"] = {"o": properties["other"]}
    tools = [{"type": "function", "function": {"name": "f", "parameters": parameters}}]
    key, value, before, after = {
        "qwen3_coder": ("<parameter={}>\n", "{}\n</parameter>\n", "<tool_call><function=f>", "</function></tool_call>"),
        "glm45": ("<arg_key>{}</arg_key>", "<arg_value>{}</arg_value>", "<tool_call>f\n", "</tool_call>"),
        "minimax_m2": (
            *('<parameter name="{}">', "{}</parameter>"),
            *('<minimax:tool_call><invoke name="f">', "</invoke></minimax:tool_call>"),
        ),
    }[name]
    text = before + "".join(key.format(each) + value.format(raw) for each, (_, raw, _) in values.items()) + after
    result = decoded(read(name, text, tools))
    assert result == [("f", {each: expected for each, (_, _, expected) in values.items()})]


def test_a_value_keeps_its_own_line_breaks() -> None:
    text = "<function=f><parameter=a>\n\n x\n\n</parameter></function>"
    assert decoded(read("qwen3_coder", text)) == [("f", {"a": "\n x\n"})]


@pytest.mark.parametrize("name", ["mistral", "mistral_args"])
def test_mistral_ids_are_short(name: str) -> None:
    (start,) = (e for events in events_of(name, WRITTEN[name][0]) for e in events if isinstance(e, CallStart))
    assert len(start.call_id) == 9
    assert start.call_id.isalnum()


@pytest.mark.parametrize("name", TOOL_FORMATS)
@pytest.mark.parametrize("kind", ["text", "spaces", "arguments", "markers", "start"])
def test_time_is_linear(name: str, kind: str) -> None:
    """Eight times the text takes nothing like 64 times the time."""
    call = WRITTEN[name][0]
    texts: dict[str, Callable[[int], str]] = {
        "text": lambda size: "word <[{ " * (size // 9),
        "spaces": lambda size: " " * size,
        "arguments": lambda size: call.replace("Z", "Z" * size, 1),
        "markers": lambda size: call[:11] * (size // 11),
        "start": lambda size: call[: len(call) // 3] + "[" * size,
    }
    seconds = []
    for size in (3_000, 24_000):
        parser, started = TOOL_FORMATS[name].parser(), time.process_time()
        for character in texts[kind](size):
            parser.add(character)
        parser.finish()
        seconds.append(time.process_time() - started)
    assert seconds[1] < 28 * seconds[0] + 0.05


@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_many_calls_in_one_piece(name: str) -> None:
    """Each is read once, and none is opened twice."""
    result = read(name, ["\n".join(WRITTEN[name] * 100)])
    assert decoded(result) == TWO_CALLS * 100


@pytest.mark.slow
@pytest.mark.parametrize("name", TOOL_FORMATS)
def test_a_megabyte_in_characters_takes_seconds(name: str) -> None:
    parser, started = TOOL_FORMATS[name].parser(), time.process_time()
    for character in WRITTEN[name][0].replace("Z", "Z" * 1_000_000, 1):
        parser.add(character)
    parser.finish()
    assert time.process_time() - started < 20


@pytest.mark.parametrize(
    ("template", "name"),
    [
        (None, None),
        ("{% for message in messages %}{{ message.content }}{% endfor %}", None),
        ("return a json object within <tool_call></tool_call> XML tags", "hermes"),
        ("<tool_call>\n<function=example>\n<parameter=x>", "qwen3_coder"),
        ("<tool_call>{name}<arg_key>{k}</arg_key><arg_value>", "glm45"),
        ("{{ '[TOOL_CALLS]' }}", "mistral"),
        ("{{ '[TOOL_CALLS]' + name + '[ARGS]' }}", "mistral_args"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + '<｜tool▁sep｜>' + '```json'", "deepseek_v3"),
        ("'<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>'", "deepseek_v31"),
        ('{"name": function name, "parameters": dictionary of argument name and its value}', "llama3_json"),
        ("<|python_tag|>", "llama3_json"),
        ("[func_name1(params_name1=params_value1), func_name2(params)]", "pythonic"),
        ("<|tool_call|>", "granite"),
        ("<longcat_tool_call>", "longcat"),
        ("{%- set toolcall_begin_token = '<minimax:tool_call>' %}", "minimax_m2"),
    ],
)
def test_a_template_tells_its_format(template: str | None, name: str | None) -> None:
    assert detect_format(template) == name
