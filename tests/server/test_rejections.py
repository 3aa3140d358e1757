"""Requests that are not served: each is answered in OpenAI's form with an id, and counted once, or not at all."""

from __future__ import annotations

import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_models import byte_llama
from live_server import LiveServer, live_server
from server.event_streams import split_events
from server.held_steps import held_steps
from server.open_connection import OpenConnection
from server.talking_server import CHAT, COMPLETIONS

import foredraft.server.body_reader
from foredraft import LLM
from foredraft.engine.async_engine import EngineState
from foredraft.errors import ModelLoadError

KEY = "key"
BEARER = {"authorization": f"Bearer {KEY}"}
JSON = {"content-type": "application/json"}
ASKED: dict[str, Any] = {"prompt": "abc", "max_tokens": 2, "temperature": 0, "ignore_eos": True}
SAID: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
NO_TOKEN = {"allowed_token_ids": [97], "bad_words": ["a"]}
NONE = {"queue_full": 0, "invalid": 0, "unavailable": 0}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_llama(tmp_path_factory.mktemp("bytes"), num_modules=1)


def load(checkpoint: Path, **settings: Any) -> LLM:
    settings = {"max_model_len": 200, "num_blocks": 60, "block_size": 4, **settings}
    return LLM(checkpoint, dtype="float32", device="cpu", **settings)


@pytest.fixture(scope="module")
def live(checkpoint: Path) -> Iterator[LiveServer]:
    """Serves one request at a time, and lets one choice wait."""
    with live_server(
        lambda: load(checkpoint, max_num_seqs=1), api_key=KEY, max_body_mib=1, max_waiting=1, drain_seconds=60
    ) as live:
        yield live


class Rejections:
    """What /metrics has counted since."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._before = self._read()

    def _read(self) -> dict[str, int]:
        lines = re.findall(
            r'^foredraft:requests_rejected_total\{model_name="model",reason="(\w+)"\} (\S+)$',
            httpx.get(f"{self._url}/metrics").text,
            flags=re.MULTILINE,
        )
        return {reason: int(float(total)) for reason, total in lines}

    def counted(self) -> dict[str, int]:
        """By reason, those with none included."""
        return {reason: total - self._before[reason] for reason, total in self._read().items()}


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error of an answer, in OpenAI's form."""
    assert response.status_code == status, response.text
    assert response.headers["x-request-id"]
    error: dict[str, Any] = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


# -- counted -----------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[int, dict[str, Any]]] = {
    "no key": (401, {"json": ASKED}),
    "too large": (413, {"content": b" " * ((1 << 20) + 1), "headers": BEARER | JSON}),
    "not sent as JSON": (415, {"content": b'{"prompt": "a"}', "headers": BEARER | {"content-type": "text/plain"}}),
    "not JSON": (400, {"content": b"{", "headers": BEARER | JSON}),
    "another model": (404, {"headers": BEARER}),
    "a bad field": (400, {"json": {"temperature": -1}, "headers": BEARER}),
}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize", "/detokenize"])
@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused_before_it_is_read_is_counted_once(live: LiveServer, why: str, path: str) -> None:
    status, request = REFUSED[why]
    if why == "another model":
        fields = {COMPLETIONS: ASKED, CHAT: SAID, "/tokenize": {"prompt": "a"}, "/detokenize": {"tokens": [97]}}
        request = request | {"json": fields[path] | {"model": "other"}}
    rejections = Rejections(live.url)
    error_of(httpx.post(live.url + path, **request, timeout=60), status)
    assert rejections.counted() == NONE | {"invalid": 1}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (COMPLETIONS, ASKED | {"prompt": "a" * 300}),  # which does not fit
        (COMPLETIONS, ASKED | {"prompt": ["ab", [999]]}),  # no such token
        (COMPLETIONS, ASKED | {"structured_output": {"regex": "("}}),
        (COMPLETIONS, ASKED | {"priority": 1}),
        (CHAT, SAID | {"messages": [{"role": "user", "content": "a" * 300}]}),
        (CHAT, SAID | {"num_speculative_tokens": 9}),
    ],
)
def test_what_is_refused_after_it_was_read_is_counted_once(
    live: LiveServer, path: str, fields: dict[str, Any], is_stream: bool
) -> None:
    rejections = Rejections(live.url)
    error_of(live.post(path, fields | {"stream": is_stream}, headers=BEARER), 400)
    assert rejections.counted() == NONE | {"invalid": 1}


def test_a_body_that_does_not_come_is_counted_once(live: LiveServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foredraft.server.body_reader, "BODY_SECONDS", 0.1)
    rejections = Rejections(live.url)
    head = f"Authorization: Bearer {KEY}\r\nContent-Length: 100\r\n"
    answer = OpenConnection(live.url, COMPLETIONS, b'{"prompt"', head=head).read_all()
    assert answer.startswith(b"HTTP/1.1 408")
    assert rejections.counted() == NONE | {"invalid": 1}


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_full_queue_is_counted_once(live: LiveServer, is_stream: bool) -> None:
    live.wait_until_idle()
    rejections = Rejections(live.url)
    head = f"Authorization: Bearer {KEY}\r\n"
    with held_steps(live.llm.engine) as held:
        running = OpenConnection(live.url, COMPLETIONS, ASKED, head=head)
        held.wait_for_step()
        held.let(1)
        live.wait(lambda: live.server.service.engine.num_waiting == 0, "the first one had started")
        waiting = OpenConnection(live.url, COMPLETIONS, ASKED, head=head)
        live.wait(lambda: live.server.service.engine.num_waiting == 1, "the other one waited")
        for path, fields in ((COMPLETIONS, ASKED), (CHAT, SAID)):
            error = error_of(live.post(path, fields | {"stream": is_stream}, headers=BEARER), 429)
            assert error["code"] == "queue_full"
        held.free()
        assert running.json()["choices"]
        assert waiting.json()["choices"]
    assert rejections.counted() == NONE | {"queue_full": 2}


def test_a_server_that_is_not_ready_counts_whom_it_sends_away(checkpoint: Path) -> None:
    """While it loads, and while it drains."""
    may_load = threading.Event()

    def waiting() -> LLM:
        if not may_load.wait(60):
            raise ModelLoadError("nobody let it load")
        return load(checkpoint)

    def refused(live: LiveServer) -> dict[str, int]:
        rejections = Rejections(live.url)
        for path, fields in ((COMPLETIONS, ASKED), (CHAT, SAID)):
            for is_stream in (False, True):
                error_of(live.post(path, fields | {"stream": is_stream}), 503)
        return rejections.counted()

    with live_server(waiting, is_loading=True, drain_seconds=60) as live:
        try:
            assert refused(live) == NONE | {"unavailable": 4}
            error_of(live.post("/tokenize", {"prompt": "a"}), 503)
        finally:
            may_load.set()
        live.wait(lambda: live.server.service.is_ready, "it was ready")
        with held_steps(live.llm.engine) as held:
            running = OpenConnection(live.url, COMPLETIONS, ASKED)
            held.wait_for_step()
            live.server.handle_exit(signal.SIGTERM, None)
            live.wait(lambda: live.server.service.engine.state is EngineState.DRAINING, "it drained")
            assert refused(live) == NONE | {"unavailable": 4}
            held.free()
            assert running.json()["choices"]


# -- not counted -------------------------------------------------------------------------------------------------------


def test_what_asks_for_nothing_that_is_here_is_not_counted(live: LiveServer) -> None:
    rejections = Rejections(live.url)
    error_of(httpx.get(f"{live.url}/nothing"), 404)
    error_of(live.post("/nothing", ASKED), 404)
    error_of(httpx.get(f"{live.url}{COMPLETIONS}", headers=BEARER), 405)
    assert httpx.get(f"{live.url}/health").status_code == 200
    assert rejections.counted() == NONE


def test_what_is_served_is_not_counted(live: LiveServer) -> None:
    rejections = Rejections(live.url)
    for path, fields in ((COMPLETIONS, ASKED), (CHAT, SAID)):
        for is_stream in (False, True):
            assert live.post(path, fields | {"stream": is_stream}, headers=BEARER).status_code == 200
    assert rejections.counted() == NONE


def test_what_fails_in_the_engine_is_not_counted(live: LiveServer) -> None:
    """It was taken, so it is among the requests that ended, with an error."""
    rejections = Rejections(live.url)
    for path, fields in ((COMPLETIONS, ASKED), (CHAT, SAID)):
        assert error_of(live.post(path, fields | NO_TOKEN, headers=BEARER), 400)["code"] == "generation_failed"
        streamed = live.post(path, fields | NO_TOKEN | {"stream": True}, headers=BEARER)
        assert streamed.status_code == 200
        assert "generation_failed" in split_events(streamed.text)[-1]
    assert rejections.counted() == NONE


# -- what nobody has foreseen ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "path", "fields"),
    [
        ("GET", "/v1/models", None),
        ("POST", "/tokenize", {"prompt": "a"}),
        ("POST", COMPLETIONS, ASKED),
        ("POST", COMPLETIONS, ASKED | {"stream": True}),
        ("POST", CHAT, SAID),
    ],
)
def test_an_unforeseen_fault_has_an_id_and_openai_s_form(
    live: LiveServer,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    path: str,
    fields: dict[str, Any] | None,
) -> None:
    def broken(*args: Any) -> Any:
        raise ZeroDivisionError("a fault of ours")

    for name in ("model_card", "check_model", "check_priority"):
        monkeypatch.setattr(live.server.service, name, broken)
    rejections = Rejections(live.url)
    headers = BEARER | {"x-request-id": "mine"}
    answer = httpx.request(method, live.url + path, json=fields, headers=headers, timeout=60)
    error = error_of(answer, 500)
    assert answer.headers["x-request-id"] == "mine"
    assert (error["type"], error["param"], error["code"]) == ("internal_server_error", None, None)
    assert "a fault of ours" not in answer.text  # that is for the log
    assert rejections.counted() == NONE
    monkeypatch.undo()
    assert live.post(COMPLETIONS, ASKED, headers=BEARER).status_code == 200
