"""One request among others: a queue that is full, and a fault that is nobody else's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_models import byte_llama
from live_server import live_server
from server.held_steps import held_steps
from server.open_connection import OpenConnection
from server.talking_server import CHAT, COMPLETIONS

from foredraft import LLM

ASKED: dict[str, Any] = {"prompt": "abc", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_llama(tmp_path_factory.mktemp("bytes"), num_modules=1)


def load(checkpoint: Path, **settings: Any) -> LLM:
    settings = {"max_model_len": 200, "num_blocks": 60, "block_size": 4, **settings}
    return LLM(checkpoint, dtype="float32", device="cpu", **settings)


def metric(url: str, name: str) -> float:
    """The value of a line of /metrics that begins with `name`."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    (line,) = [line for line in lines if line.startswith(f"foredraft:{name}")]
    return float(line.rpartition(" ")[2])


def test_a_full_queue_says_when_to_come_back(checkpoint: Path) -> None:
    with live_server(lambda: load(checkpoint, max_num_seqs=1), max_waiting=3) as live:
        with held_steps(live.llm.engine) as held:
            running = OpenConnection(live.url, COMPLETIONS, ASKED)
            held.wait_for_step()
            held.let(1)  # the first one has started, and counts no more
            waiting = [OpenConnection(live.url, COMPLETIONS, ASKED | {"n": n}) for n in (1, 2)]
            live.wait(lambda: live.server.service.engine.num_waiting == 3, "three choices waited")
            for path in (COMPLETIONS, CHAT):
                body = ASKED if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
                for is_stream in (False, True):
                    refused = live.post(path, body | {"stream": is_stream})
                    assert refused.status_code == 429, refused.text
                    assert int(refused.headers["retry-after"]) > 0
                    error = refused.json()["error"]
                    assert (error["type"], error["code"]) == ("rate_limit_error", "queue_full")
            assert metric(live.url, 'requests_rejected_total{model_name="model",reason="queue_full"}') == 4
            held.free()
            for connection in (running, *waiting):
                assert all(choice["finish_reason"] == "length" for choice in connection.json()["choices"])
        live.wait_until_idle()
        assert live.post(COMPLETIONS, ASKED).status_code == 200


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_fault_while_a_request_is_added_is_its_own(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, is_stream: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    with live_server(lambda: load(checkpoint)) as live:
        engine = live.llm.engine
        add_request = engine.add_request

        def sometimes(request_id: str, token_ids: Any, params: Any, **options: Any) -> Any:
            if params.seed == 13:
                raise ZeroDivisionError("a fault of ours")
            return add_request(request_id, token_ids, params, **options)

        monkeypatch.setattr(engine, "add_request", sometimes)
        with held_steps(engine) as held:
            neighbour = OpenConnection(live.url, COMPLETIONS, ASKED | {"max_tokens": 20})
            held.wait_for_step()
            wrong = OpenConnection(live.url, COMPLETIONS, ASKED | {"seed": 13, "stream": is_stream})
            live.wait(lambda: live.server.service.engine.num_open == 2, "the engine had it")
            held.free()
            answer = wrong.read_all()
            assert answer.startswith(b"HTTP/1.1 500")
            assert b'"type":"internal_server_error"' in answer
            assert b"fault of ours" not in answer
            assert re.search(rb"\r\nx-request-id: \w{32}\r\n", answer)
            assert neighbour.json()["usage"]["completion_tokens"] == 20
        assert "a fault of ours" in capsys.readouterr().err  # the log says why
        live.wait_until_idle()
        assert live.post(COMPLETIONS, ASKED).status_code == 200
        assert live.server.failure is None
