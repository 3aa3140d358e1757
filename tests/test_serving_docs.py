"""What docs/serving.md and docs/api.md say is so: their examples are run, their tables compared with the code."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import Field, fields
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_models import byte_llama
from live_server import LiveServer, live_server
from typer.main import get_command

from foredraft import LLM
from foredraft.cli.app import app
from foredraft.config import EngineConfig
from foredraft.server.protocol.body import Body
from foredraft.server.protocol.chat import ChatCompletionRequest
from foredraft.server.protocol.completions import CompletionRequest
from foredraft.server.protocol.errors import ApiError
from foredraft.server.protocol.responses import Speculation
from foredraft.server.settings import ServerSettings
from foredraft.server.tools.formats import TOOL_FORMATS

ROOT = Path(__file__).parents[1]
SERVING, API = ((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("serving.md", "api.md"))
UNIT = (ROOT / "deploy/systemd/foredraft.service").read_text(encoding="utf-8")
CONTAINERFILE = (ROOT / "deploy/container/Containerfile").read_text(encoding="utf-8")
TASKS = ROOT / "benchmarks/lm_eval"
URL = "http://127.0.0.1:8000"
MODEL_NAME = "smollm2-135m-instruct"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_llama(tmp_path_factory.mktemp("docs") / "model")


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[LiveServer]:
    with live_server(lambda: LLM(checkpoint, device="cpu", num_blocks=256), model_name=MODEL_NAME) as live:
        yield live


def blocks(page: str, language: str) -> list[str]:
    """The fenced blocks in `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page, flags=re.MULTILINE | re.DOTALL)


def commands(program: str) -> list[list[str]]:
    """The words of each command of `program` on both pages, which may go over several lines."""
    lines = [line for page in (SERVING, API) for block in blocks(page, "console") for line in block.split("\n$ ")]
    words = [shlex.split(line.removeprefix("$ "), comments=True) for line in lines]
    return [line[1:] for line in words if line[0] == program]


def rows(page: str, before: str) -> list[list[str]]:
    """The cells of the first table after a text, its head left out."""
    lines = page[page.index(before) + len(before) :].splitlines()
    first = next(index for index, line in enumerate(lines) if line.startswith("|"))
    table = []
    for line in lines[first:]:
        if not line.startswith("|"):
            break
        table.append([cell.strip() for cell in line.strip("|").split("|")])
    return table[2:]


def names(cell: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)


# -- tables ----------------------------------------------------------------------------------------------------------


def option_table(kind: type[Any]) -> str:
    """The table of a settings dataclass, as the page must have it."""
    return "\n".join(["| option | default | meaning |", "|---|---|---|", *map(option_row, fields(kind))])


def option_row(field: Field[Any]) -> str:
    (parameter,) = (each for each in serve_parameters() if each.name == field.name)
    flags = [*parameter.opts, *parameter.secondary_opts]
    default = flags[0 if field.default else 1] if isinstance(field.default, bool) else field.default
    cells = ", ".join(f"`{flag}`" for flag in flags), "" if default is None else f"`{default}`", field.metadata["help"]
    return f"| {' | '.join(cells)} |"


def serve_parameters() -> list[Any]:
    """The options of `foredraft serve`, as its command line has them."""
    command: Any = get_command(app)
    return list(command.commands["serve"].params)


def serve_options() -> set[str]:
    """All flags of `foredraft serve`."""
    return {flag for parameter in serve_parameters() for flag in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize("kind", [ServerSettings, EngineConfig])
def test_the_options_are_those_of_the_settings(kind: type[Any]) -> None:
    """To renew a table, put in what this prints."""
    table = option_table(kind)
    begin, end = f"<!-- options of {kind.__name__} -->\n\n", "\n\n<!-- end of options -->"
    found = SERVING.split(begin)[1].split(end)[0]
    assert found == table, f"docs/serving.md must have this table:\n\n{table}\n"


@pytest.mark.parametrize(("kind", "word"), [(CompletionRequest, "completions"), (ChatCompletionRequest, "chat")])
def test_every_field_is_named_and_no_other(kind: type[Body], word: str) -> None:
    named = [name for cell, where, _ in rows(API, "<!-- fields -->") if where in (word, "both") for name in names(cell)]
    assert sorted(named) == sorted(kind.model_fields)


def test_the_fields_that_are_ours_are_those_the_client_does_not_know() -> None:
    from openai.types.chat.completion_create_params import CompletionCreateParamsNonStreaming as ChatParams
    from openai.types.completion_create_params import CompletionCreateParamsNonStreaming as CompletionParams

    official: set[str] = {"stream"}
    for kind in (ChatParams, CompletionParams):
        official |= kind.__required_keys__ | kind.__optional_keys__
    table = rows(API, "<!-- fields -->")
    ours = {name for cell, _, meaning in table if meaning.startswith("ours") for name in names(cell)}
    assert ours == {name for cell, _, _ in table for name in names(cell)} - official


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("suffix", "end"),
        ("service_tier", "flex"),
        ("store", True),
        ("prompt_cache_retention", "24h"),
        ("prompt_cache_options", {}),
        ("best_of", 2),
    ],
)
def test_what_is_refused_in_a_completion(server: LiveServer, field: str, value: Any) -> None:
    answer = server.post("/v1/completions", {"prompt": "a", "max_tokens": 1, field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == field


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("modalities", ["audio"]),
        ("verbosity", "low"),
        ("function_call", "auto"),
        ("audio", {}),
        ("prediction", {}),
        ("reasoning_effort", "low"),
        ("web_search_options", {}),
        ("moderation", {}),
        ("functions", []),
    ],
)
def test_what_is_refused_in_a_chat(server: LiveServer, field: str, value: Any) -> None:
    messages = [{"role": "user", "content": "a"}]
    answer = server.post("/v1/chat/completions", {"messages": messages, "max_tokens": 1, field: value})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"].split(".")[0] == field


def test_statistics_of_speculation_are_all_named() -> None:
    named = [name for cell, _ in rows(API, "<!-- speculation -->") for name in names(cell)]
    assert sorted(named) == sorted(Speculation.model_fields)


def test_tool_formats_are_all_named() -> None:
    named = [name for cell, _ in rows(API, "<!-- formats -->") for name in names(cell)]
    assert sorted(named) == sorted(TOOL_FORMATS)


def test_errors_have_the_types_that_are_stated(server: LiveServer) -> None:
    stated = {int(status): names(kind) for status, kind, _ in rows(API, "<!-- errors -->")}
    assert stated == {status: [ApiError(status, "").type] for status in stated}
    document = httpx.get(f"{server.url}/openapi.json").json()
    statuses = {status for path in document["paths"].values() for one in path.values() for status in one["responses"]}
    # FastAPI puts 422 beside any parameter in a path, though this server answers 400. 405 and 500 go without saying.
    assert {int(status) for status in statuses} - {200, 422} | {405, 500} == set(stated)


def test_the_codes_of_errors_are_all_named() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "src/foredraft/server").rglob("*.py"))
    listed = API[API.index("`code` is a word") :].split(".")[0]
    assert sorted(names(listed)[1:]) == sorted(set(re.findall(r'code="(\w+)"', sources)))


def test_the_example_of_an_error(server: LiveServer) -> None:
    (block,) = blocks(API, "json")
    assert server.post("/v1/completions", {"prompt": "a", "temperature": -1}).json() == json.loads(block)


def test_keys_protect_what_is_said(checkpoint: Path) -> None:
    stated: dict[str, bool] = {}
    for cell, _, needs in rows(API, "## Endpoints"):
        stated |= dict.fromkeys(names(cell), {"yes": True, "no": False}[needs])
    with live_server(lambda: LLM(checkpoint, device="cpu", num_blocks=64), model_name="m", api_key="secret") as live:
        for endpoint, needs_key in stated.items():
            method, path = endpoint.split()
            url = live.url + path.format(name="m")
            answer = httpx.request(method, url, json={} if method == "POST" else None)
            assert (answer.status_code == 401) == needs_key, endpoint
            assert answer.headers["x-request-id"]
            assert httpx.request(method, url, headers={"Authorization": "Bearer secret"}).status_code != 401
        document = httpx.get(f"{live.url}/openapi.json").json()
    described = {endpoint.split()[1].split("{")[0] for endpoint in stated}
    assert {path.split("{")[0] for path in document["paths"]} | {"/", "/docs", "/openapi.json"} == described


# -- examples --------------------------------------------------------------------------------------------------------


PYTHON = blocks(SERVING, "python")


@pytest.mark.parametrize("code", PYTHON, ids=[code.split()[1] for code in PYTHON])
def test_the_python_runs(server: LiveServer, code: str, capsys: pytest.CaptureFixture[str]) -> None:
    needed = code.split()[1]
    if find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed")
    found: dict[str, Any] = {"__name__": "docs"}
    exec(compile(code.replace(URL, server.url), "docs/serving.md", "exec"), found)
    assert capsys.readouterr().out.strip()
    if needed == "openai":
        (call,) = found["answer"].choices[0].message.tool_calls
        assert call.function.name == "look_up"
        assert json.loads(call.function.arguments).keys() == {"city", "is_capital"}
        found["client"].close()


CURLS = commands("curl")


@pytest.mark.parametrize("words", CURLS, ids=lambda words: next(w for w in words if w.startswith(URL))[len(URL) :])
def test_curl_is_answered(server: LiveServer, words: list[str]) -> None:
    (url,) = (word for word in words if word.startswith(URL))
    assert words[words.index("-H") + 1] == "Content-Type: application/json"
    body = json.loads(words[words.index("-d") + 1])
    answer = server.post(url.removeprefix(URL), body)
    assert answer.status_code == 200, answer.text
    assert ("data: [DONE]" in answer.text) == body.get("stream", False)
    if body.get("return_speculation"):
        (choice,) = answer.json()["choices"]
        assert len(choice["token_ids"]) == len(choice["speculation"]["token_depths"])
    if "structured_output" in body:
        assert answer.json()["choices"][0]["message"]["content"] in body["structured_output"]["choice"]


def test_the_options_in_the_text_exist() -> None:
    prose = [re.sub(r"^```.*?^```$", "", page, flags=re.MULTILINE | re.DOTALL) for page in (SERVING, API)]
    flags = {word for page in prose for code in names(page) for word in code.split() if re.match("--?[a-z]", word)}
    flags |= {word for words in commands("foredraft") for word in words if word.startswith("-")}
    assert flags - {"--help"} <= serve_options()
    assert {"--drain-seconds", "--api-key-file", "--max-waiting", "--host", "-k"} <= flags


# -- what runs it ----------------------------------------------------------------------------------------------------


def unit_value(name: str) -> str:
    (value,) = re.findall(rf"^{name}=(.*)$", UNIT, flags=re.MULTILINE)
    return str(value)


def test_the_unit_leaves_time_to_drain() -> None:
    words = unit_value("ExecStart").split()
    assert words[1] == "serve"
    assert {word for word in words if word.startswith("--")} <= serve_options()
    assert int(unit_value("TimeoutStopSec")) >= float(words[words.index("--drain-seconds") + 1]) + 10
    assert unit_value("Restart") == "on-failure"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_the_unit_is_valid(tmp_path: Path) -> None:
    unit = tmp_path / "foredraft.service"
    unit.write_text(UNIT.replace("/opt/foredraft/bin/foredraft", "/bin/true"), encoding="utf-8")
    found = subprocess.run(
        ["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, timeout=60, check=False
    )
    assert found.returncode == 0, found.stderr
    assert not found.stderr.strip()


def test_the_container_starts_the_server() -> None:
    (entry,) = re.findall(r"^ENTRYPOINT (\[.*\])$", CONTAINERFILE, flags=re.MULTILINE)
    words = json.loads(entry)
    assert words[:2] == ["foredraft", "serve"]
    assert {word for word in words if word.startswith("--")} <= serve_options()
    copied = re.findall(r"^COPY (.*) \S+$", CONTAINERFILE, flags=re.MULTILINE)
    assert all((ROOT / name).exists() for line in copied for name in line.split())
    pins = [set(re.findall(r"torch==[\d.]+", text)) for text in (CONTAINERFILE, (ROOT / "Makefile").read_text())]
    assert pins[0] == pins[1] != set()


def test_the_tasks_fit_their_data() -> None:
    lines = [json.loads(line) for line in (TASKS / "capitals.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len(lines) == 24
    assert f"{len(lines)} capitals" in SERVING
    assert all(line["capital"] in line["choices"] and len(set(line["choices"])) == 4 for line in lines)
    written = (TASKS / "capitals.yaml").read_text(encoding="utf-8")
    (pattern,) = re.findall(r'regex_pattern: "(.*)"', written)
    for line in lines:
        found = re.search(pattern, f"The capital of {line['country']} is {line['capital']}.")
        assert found is not None
        assert found[1] == line["capital"]
    for task in ("capitals", "capitals_choice"):
        text = (TASKS / f"{task}.yaml").read_text(encoding="utf-8")
        assert f"task: {task}\n" in text
        assert all((ROOT / path).exists() for path in re.findall(r"test: (\S+/\S+)", text))
        used = {name for code in re.findall(r"{{(.*?)}}", text) for name in re.findall(r"[a-z]+", code)} - {"index"}
        assert used <= lines[0].keys()
        assert any(f"--tasks {task}" in " ".join(words) for words in commands("lm_eval"))
