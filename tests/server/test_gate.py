"""What every request passes before it is read: keys, sizes, ids, paths, methods, and pages from here and elsewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_models import byte_llama
from live_server import LiveServer, live_server
from server.open_connection import OpenConnection
from server.talking_server import CHAT, COMPLETIONS

from foredraft import LLM

KEYS = ("first-key", "second:key==")
OPEN = ("/health", "/metrics", "/version", "/", "/docs", "/openapi.json", "/playground/app.js")
PROTECTED = (
    ("GET", "/v1/models"),
    ("GET", "/v1/models/model"),
    ("POST", COMPLETIONS),
    ("POST", CHAT),
    ("POST", "/tokenize"),
    ("POST", "/detokenize"),
)
JSON = {"content-type": "application/json"}
ASKED = {"prompt": "abc", "max_tokens": 1}


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    path = byte_llama(tmp_path_factory.mktemp("bytes"), num_modules=1)
    return LLM(path, dtype="float32", device="cpu", block_size=4, num_blocks=64, max_model_len=128)


@contextmanager
def serving(llm: LLM, **settings: Any) -> Iterator[tuple[LiveServer, httpx.Client]]:
    with live_server(lambda: llm, **settings) as live, httpx.Client(base_url=live.url, timeout=60.0) as client:
        yield live, client


@pytest.fixture(scope="module")
def locked(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LiveServer, httpx.Client]]:
    """A server with a key of its own, and others in a file; for small bodies only."""
    keys = tmp_path_factory.mktemp("keys") / "keys"
    keys.write_text(f"{KEYS[1]}\n\n  third \n", encoding="ascii")
    with serving(llm, api_key=KEYS[0], api_key_file=keys, max_body_mib=1, cors_origin="https://page.example") as both:
        yield both


@pytest.fixture
def client(locked: tuple[LiveServer, httpx.Client]) -> httpx.Client:
    return locked[1]


@pytest.fixture
def live(locked: tuple[LiveServer, httpx.Client]) -> LiveServer:
    return locked[0]


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer, in OpenAI's form."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    return error


# -- keys --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [*KEYS, "third", " third"])
def test_each_of_the_keys_opens(client: httpx.Client, key: str) -> None:
    for scheme in ("Bearer", "bearer", "BEARER"):
        headers = {"authorization": f"{scheme} {key}"}
        assert client.post(COMPLETIONS, json=ASKED, headers=headers).status_code == 200
    assert client.get("/v1/models", headers=bearer(key)).json()["data"][0]["id"] == "model"


@pytest.mark.parametrize(("method", "path"), PROTECTED)
def test_without_a_known_key_nothing_opens(client: httpx.Client, method: str, path: str) -> None:
    wrong = ["", "Bearer", "Bearer wrong", f"Bearer {KEYS[0]}x", f"Bearer {KEYS[0][:-1]}"]
    wrong += [f"Basic {KEYS[0]}", KEYS[0], f"Bearer {KEYS[0]} {KEYS[1]}", "Bearer \xe9\xff", "Bearer " + "x" * 5000]
    for header in (None, *wrong):
        headers = {} if header is None else {b"authorization": header.encode("latin-1")}
        response = client.request(method, path, headers=headers, json=ASKED if method == "POST" else None)
        error = error_of(response, 401)
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer"
        assert KEYS[0] not in response.text


def test_a_key_elsewhere_is_none(client: httpx.Client) -> None:
    error_of(client.get("/v1/models", params={"api_key": KEYS[0]}), 401)
    error_of(client.get("/v1/models", headers={"x-api-key": KEYS[0]}), 401)
    error_of(client.get("/v1/no-such-path"), 401)  # what exists there is nobody's business
    error_of(client.get("//v1/models"), 404)


@pytest.mark.parametrize("path", OPEN)
def test_open_paths_need_no_key(client: httpx.Client, path: str) -> None:
    assert client.get(path).status_code == 200


# -- bodies ------------------------------------------------------------------------------------------------------------


def test_a_body_that_says_it_is_too_large(client: httpx.Client, live: LiveServer) -> None:
    """Refused before it is read, by its Content-Length: none of it is sent."""
    for length in ("1048577", "9" * 15, "9" * 30):
        connection = OpenConnection(
            live.url, COMPLETIONS, b"", head=f"Authorization: Bearer {KEYS[0]}\r\nContent-Length: {length}\r\n"
        )
        answer = connection.read_all()
        assert answer.startswith(b"HTTP/1.1 4"), answer
        if length != "9" * 30:  # which no HTTP parser takes for a number
            assert answer.startswith(b"HTTP/1.1 413")
            assert b'"code":"request_too_large"' in answer
    assert client.get("/health").status_code == 200


def test_a_body_in_chunks_that_becomes_too_large(client: httpx.Client) -> None:
    def chunks() -> Iterator[bytes]:
        yield b'{"prompt": "'
        for _ in range(17):
            yield b"a" * 65_536
        yield b'"}'

    response = client.post(COMPLETIONS, content=chunks(), headers=bearer(KEYS[0]) | JSON)
    assert error_of(response, 413)["code"] == "request_too_large"


def test_a_client_that_sends_too_much_reads_why(client: httpx.Client) -> None:
    """What it still sends while the answer comes does not break the connection under it."""
    body = b'{"prompt": "' + b"a" * (3 << 20) + b'"}'
    for _ in range(5):
        response = client.post(COMPLETIONS, content=body, headers=bearer(KEYS[0]) | JSON)
        assert error_of(response, 413)["code"] == "request_too_large"


def test_bodies_that_are_just_small_enough(client: httpx.Client) -> None:
    """Whole or in chunks, a body of the largest size is read; what it says is another matter."""
    body = b'{"prompt": "' + b"a" * ((1 << 20) - 14) + b'"}'
    assert len(body) == 1 << 20
    for content in (body, iter([body[:1000], body[1000:]])):
        error = error_of(client.post(COMPLETIONS, content=content, headers=bearer(KEYS[0]) | JSON), 400)
        assert error["param"] == "prompt"
    error_of(client.post(COMPLETIONS, content=body + b" ", headers=bearer(KEYS[0]) | JSON), 413)
    small = iter([b'{"prompt": "abc", ', b'"max_tokens": 1}'])
    assert client.post(COMPLETIONS, content=small, headers=bearer(KEYS[0]) | JSON).status_code == 200


# -- ids ---------------------------------------------------------------------------------------------------------------


def test_every_answer_has_an_id(client: httpx.Client) -> None:
    paths = ["/health", "/v1/models", "/no-such-path", "/metrics"]
    found = [client.get(path).headers["x-request-id"] for path in paths]
    assert len(set(found)) == len(found)
    assert all(len(each) == 32 for each in found)


@pytest.mark.parametrize("path", ["/health", "/v1/models", "/no-such-path"])
def test_a_client_may_choose_the_id(client: httpx.Client, path: str) -> None:
    """Of an answer, whether good or not, unless it is none that can be written into a log."""
    for given in ("mine-1", "x" * 128):
        assert client.get(path, headers={"x-request-id": given}).headers["x-request-id"] == given
    for bad in (b"x" * 129, b"\xe9", b"a\tb", b""):
        found = client.get(path, headers={b"x-request-id": bad}).headers["x-request-id"]
        assert len(found) == 32
    headers = {"x-request-id": "mine-2", **bearer(KEYS[0])}
    with client.stream("POST", COMPLETIONS, json={**ASKED, "stream": True}, headers=headers) as response:
        response.read()
    assert response.headers["x-request-id"] == "mine-2"


# -- paths and methods -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/v1",
        "/v1/",
        "/v1/completions/",
        "/v1/engines",
        "/%00",
        "/..%2f..%2fetc/passwd",
        "/health/x",
        "/\xe9",
    ],
)
def test_paths_that_do_not_exist(client: httpx.Client, path: str) -> None:
    for method in ("GET", "POST"):
        response = client.request(method, path, headers=bearer(KEYS[0]))
        error = error_of(response, 404)
        assert error["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("GET", COMPLETIONS, "POST"),
        ("PUT", CHAT, "POST"),
        ("DELETE", "/v1/models", "GET"),
        ("POST", "/v1/models", "GET"),
        ("DELETE", "/v1/models/model", "GET"),
        ("GET", "/tokenize", "POST"),
        ("PATCH", "/detokenize", "POST"),
        ("POST", "/health", "GET"),
        ("POST", "/metrics", "GET"),
        ("POST", "/", "GET"),
        ("TRACE", "/version", "GET"),
        ("BREW", "/version", "GET"),
    ],
)
def test_methods_that_do_not_fit(client: httpx.Client, method: str, path: str, allowed: str) -> None:
    response = client.request(method, path, headers=bearer(KEYS[0]))
    assert error_of(response, 405)["type"] == "invalid_request_error"
    assert allowed in response.headers["allow"].replace(" ", "").split(",")


WITH_HEAD = ("/health", "/", "/favicon.ico", "/playground/app.js", "/docs-files/swagger-ui.css")


@pytest.mark.parametrize("path", [*WITH_HEAD, "/version", "/v1/models", "/no-such-path", COMPLETIONS])
def test_head_has_no_body(client: httpx.Client, path: str) -> None:
    """Otherwise it is answered as GET is, where it is answered at all: those who watch a server may ask with it."""
    response = client.head(path, headers=bearer(KEYS[0]))
    assert response.content == b""
    got = client.get(path, headers=bearer(KEYS[0]))
    assert response.status_code == (got.status_code if path in WITH_HEAD or got.status_code == 404 else 405)
    if path in WITH_HEAD:
        assert got.status_code == 200
        assert got.content
        for name in ("content-type", "content-length"):
            assert response.headers[name] == got.headers[name]
    assert response.headers["x-request-id"]
    assert client.get("/health").json() == {"status": "ready"}  # the connection is still in step


# -- pages from here ---------------------------------------------------------------------------------------------------


def test_the_page_of_the_api_needs_no_other_server(client: httpx.Client) -> None:
    page = client.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert "//" not in re.sub(r"window\.location\.origin|<!--.*?-->|^\s*//.*$", "", page.text, flags=re.MULTILINE)
    named = re.findall(r"""\b(?:src|href)=["']([^"']+)["']""", page.text)
    assert {name.rpartition(".")[2] for name in named} == {"css", "js", "png"}
    (document,) = re.findall(r"""\burl: ["']([^"']+)["']""", page.text)
    for name in [*named, document]:
        found = client.get(name)
        assert found.status_code == 200, name
        assert len(found.content) > 500
        if name.endswith(".css"):
            assert not re.search(r"""@import|url\((?!["']?data:)""", found.text)
    assert client.get(document).json()["paths"]


def test_a_browser_finds_an_icon(client: httpx.Client) -> None:
    icon = client.get("/favicon.ico")
    assert (icon.status_code, icon.headers["content-type"]) == (200, "image/svg+xml")
    assert "<svg" in icon.text


# -- pages from elsewhere ----------------------------------------------------------------------------------------------


def test_a_page_from_the_named_origin_may_ask(client: httpx.Client) -> None:
    asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
    asked["access-control-request-headers"] = "authorization,content-type"
    response = client.options(COMPLETIONS, headers=asked)
    assert response.status_code == 200
    assert response.headers["access-control-allow-origin"] == "https://page.example"
    assert "POST" in response.headers["access-control-allow-methods"]
    allowed = response.headers["access-control-allow-headers"].lower()
    assert "authorization" in allowed
    for key, status in ((KEYS[0], 200), ("wrong", 401)):
        headers = {"origin": "https://page.example", **bearer(key)}
        answer = client.post(COMPLETIONS, json=ASKED, headers=headers)
        assert answer.status_code == status
        assert answer.headers["access-control-allow-origin"] == "https://page.example"
        assert "x-request-id" in answer.headers["access-control-expose-headers"].lower()


def test_a_page_from_another_origin_may_not(client: httpx.Client) -> None:
    asked = {"origin": "https://other.example", "access-control-request-method": "POST"}
    response = client.options(COMPLETIONS, headers=asked)
    assert response.status_code == 400
    assert response.headers.get("access-control-allow-origin") in (None, "https://page.example")


def test_without_a_key_or_an_origin(llm_path: Path) -> None:
    """A server without settings: nobody needs a key, and OPTIONS is a method like any other."""
    with serving(LLM(llm_path, dtype="float32", device="cpu", num_blocks=16, max_model_len=128)) as (_, client):
        for headers in ({}, bearer("whatever"), {"authorization": "Basic x"}):
            assert client.post(COMPLETIONS, json=ASKED, headers=headers).status_code == 200
        asked = {"origin": "https://page.example", "access-control-request-method": "POST"}
        response = client.options(COMPLETIONS, headers=asked)
        error_of(response, 405)
        assert "access-control-allow-origin" not in response.headers


@pytest.fixture(scope="module")
def llm_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_llama(tmp_path_factory.mktemp("bytes"), num_modules=1)
