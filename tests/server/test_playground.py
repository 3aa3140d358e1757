"""The playground's routes: what is served, as what, and under which rules."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib.resources import files

import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient

from foredraft.server.playground import page_files, playground_router

NAMES = sorted(entry.name for entry in files("foredraft.server").joinpath("playground").iterdir())
CONTENT_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}


@pytest.fixture(scope="module")
def client() -> Iterator[TestClient]:
    app = FastAPI()
    app.include_router(playground_router())
    with TestClient(app) as client:
        yield client


def policy(header: str) -> dict[str, str]:
    """A content security policy by directive."""
    directives = (directive.strip().partition(" ") for directive in header.split(";"))
    return {name: value for name, _, value in directives}


def test_the_page_is_at_the_root(client: TestClient) -> None:
    response = client.get("/")
    assert response.status_code == 200
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    assert response.text.startswith("<!doctype html>")


@pytest.mark.parametrize("name", NAMES)
def test_each_file_is_served_as_what_it_is(client: TestClient, name: str) -> None:
    response = client.get(f"/playground/{name}")
    assert response.status_code == 200
    assert response.headers["content-type"].partition(";")[0] == CONTENT_TYPES[name.rpartition(".")[2]]
    assert response.content == files("foredraft.server").joinpath("playground", name).read_bytes()


@pytest.mark.parametrize("address", ["/", *(f"/playground/{name}" for name in NAMES)])
def test_each_answer_forbids_what_comes_from_elsewhere(client: TestClient, address: str) -> None:
    headers = client.get(address).headers
    directives = policy(headers["content-security-policy"])
    assert directives["default-src"] == "'self'"
    assert directives["frame-ancestors"] == "'none'"
    assert directives["require-trusted-types-for"] == "'script'"
    # Nothing widens what default-src allows.
    assert not {value for value in directives.values() if "unsafe" in value or "http" in value or "*" in value}
    assert headers["x-content-type-options"] == "nosniff"
    assert headers["cache-control"] == "no-cache"


def test_a_browser_that_has_the_file_is_told_so(client: TestClient) -> None:
    tag = client.get("/playground/app.js").headers["etag"]
    for sent in (tag, f'"other", W/{tag}', "*"):
        response = client.get("/playground/app.js", headers={"If-None-Match": sent})
        assert (response.status_code, response.content, response.headers["etag"]) == (304, b"", tag)
    assert client.get("/playground/app.js", headers={"If-None-Match": '"other"'}).status_code == 200


def test_head_has_no_body(client: TestClient) -> None:
    whole = client.get("/")
    head = client.head("/")
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-length"] == str(len(whole.content))


@pytest.mark.parametrize(
    "name", ["", "none.js", "app.py", "%2e%2e%2fplayground.py", "..%5cplayground.py", "index.html/x"]
)
def test_nothing_else_is_served(client: TestClient, name: str) -> None:
    assert client.get(f"/playground/{name}").status_code == 404


def test_the_routes_are_no_part_of_the_api(client: TestClient) -> None:
    assert client.get("/openapi.json").json()["paths"] == {}


def test_the_page_names_only_files_that_are_there() -> None:
    known = page_files()
    page = known["index.html"].content.decode()
    named = re.findall(r'(?:src|href)="([^"#]+)"', page)
    assert len(named) >= 4
    assert {name.removeprefix("playground/") for name in named} <= {*known, "docs", "metrics"}
    assert re.search(r'<link rel="icon" href="playground/icon.svg" type="image/svg\+xml"', page)
    for name, file in known.items():
        for imported in re.findall(r'from "\./([^"]+)"', file.content.decode()) if name.endswith(".js") else ():
            assert imported in known, f"{name} imports {imported}"


def test_nothing_is_inline_and_no_string_becomes_markup() -> None:
    known = {name: file.content.decode() for name, file in page_files().items()}
    assert not re.search(r"<style|<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=|javascript:", known["index.html"])
    for name, text in known.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\(|new Function", text), (
            name
        )
        assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text), name


def test_each_control_has_a_label() -> None:
    page = page_files()["index.html"].content.decode()
    controls = re.findall(r"<(?:input|select|textarea)\b[^>]*\bid=\"([^\"]+)\"", page)
    assert len(controls) == len(re.findall(r"<(?:input|select|textarea)\b", page)) > 15
    assert set(controls) == set(re.findall(r'<label[^>]* for="([^"]+)"', page))
