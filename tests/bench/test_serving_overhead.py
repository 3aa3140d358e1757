"""Overhead: turns, ratios, equal tokens; and the server that is started for it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from scripted_peer import DONE, Answer, Peer, chunk, serving

from foredraft.bench.serving import server_process
from foredraft.bench.serving.figures import Failure, RequestFigures
from foredraft.bench.serving.overhead import ServerSide, measure_overhead
from foredraft.bench.serving.server_process import ServerProcess
from foredraft.errors import ForedraftError


class ScriptedSide:
    """Two prompts of four tokens; takes as long as it is told to, and writes down its turns."""

    def __init__(
        self, name: str, seconds: list[float], log: list[str], token_ids: tuple[int, ...] = (1, 2, 3, 4)
    ) -> None:
        self.name = name
        self.token_ids: tuple[int, ...] | None = token_ids
        self.failure: Failure | None = None
        self._seconds = iter([99.0, *seconds])  # the first is the warm-up
        self._log = log

    def run(self, salt: str) -> list[RequestFigures]:
        self._log.append(f"{self.name} {salt}")
        seconds = next(self._seconds)
        return [
            RequestFigures(start, seconds, num_tokens=4, token_ids=self.token_ids, failure=self.failure)
            for start in (0.0, 0.5)
        ]


def test_sides_take_turns_and_the_first_alternates() -> None:
    log: list[str] = []
    offline, server = (ScriptedSide(name, [1.0] * 3, log) for name in ("offline", "server"))
    measure_overhead(offline, server, range(3), 4)
    assert log == [
        "offline warm-up",
        "server warm-up",
        "offline round 0",
        "server round 0",
        "server round 1",
        "offline round 1",
        "offline round 2",
        "server round 2",
    ]


def test_the_ratio_is_that_of_medians_and_the_warm_up_does_not_count() -> None:
    log: list[str] = []
    offline, server = ScriptedSide("offline", [2.0, 1.0, 8.0], log), ScriptedSide("server", [4.0, 2.5, 1.0], log)
    result = measure_overhead(offline, server, range(3), 4)
    assert result.offline.tokens_per_second == [4.0, 8.0, 1.0]
    assert result.server.median_tokens_per_second == 3.2
    assert result.ratio == 0.8
    assert result.is_identical
    record = result.to_dict()
    assert (record["ratio"], record["num_identical"], record["num_prompts"]) == (0.8, 2, 2)
    assert [side["median_tokens_per_second"] for side in record["sides"]] == [4.0, 3.2]
    assert result.table().row_count == 2


def test_other_tokens_are_noticed_between_sides_and_between_rounds() -> None:
    log: list[str] = []
    other = ScriptedSide("server", [1.0] * 3, log, (1, 2, 3, 5))
    result = measure_overhead(ScriptedSide("offline", [1.0] * 3, log), other, range(3), 4)
    assert (result.is_identical, result.num_identical) == (False, 0)

    class Wavering(ScriptedSide):
        def run(self, salt: str) -> list[RequestFigures]:
            self.token_ids = (9, 9, 9, 9) if salt == "round 1" else (1, 2, 3, 4)
            return super().run(salt)

    wavering = Wavering("server", [1.0] * 3, log)
    result = measure_overhead(ScriptedSide("offline", [1.0] * 3, log), wavering, range(3), 4)
    assert (result.is_identical, result.num_identical) == (False, 2)


@pytest.mark.parametrize("kind", ["failed", "short", "unnamed"])
def test_a_round_that_is_not_the_whole_work_is_an_error(kind: str) -> None:
    log: list[str] = []
    server = ScriptedSide("server", [1.0], log)
    messages = {
        "failed": "server, prompt 0: HTTP 500: oops",
        "short": "server, prompt 0: 3 tokens instead of 4",
        "unnamed": "return_token_ids had no effect",
    }
    if kind == "failed":
        server.failure = Failure("HTTP 500", "oops")
    else:
        server.token_ids = (1, 2, 3) if kind == "short" else None
    with pytest.raises(ForedraftError, match=messages[kind]):
        measure_overhead(ScriptedSide("offline", [1.0], log), server, range(1), 4)


def test_the_servers_side_asks_for_the_same_work_and_for_token_ids() -> None:
    peer = Peer(lambda body: Answer((chunk("a", token_ids=[body["prompt"][0], 7]), DONE)))
    with serving(peer):
        figures = ServerSide(peer.base_url, [[1, 2], [3]], 2, 8, api_key="k").run("salt 1")
    assert [each.token_ids for each in figures] == [(1, 7), (3, 7)]
    assert peer.authorizations == ["Bearer k"] * 2
    body = sorted(peer.bodies, key=lambda body: str(body["prompt"]))[0]
    assert body["prompt"] == [1, 2]
    expected = {"max_tokens": 2, "temperature": 0.0, "ignore_eos": True, "cache_salt": "salt 1"}
    assert expected | {"return_token_ids": True, "model": "scripted"} == {
        name: value for name, value in body.items() if name not in ("prompt", "stream", "stream_options")
    }


SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(503 if self.path != "/health" or Handler.asked < 3 else 200)
        self.send_header("Content-Length", "0")
        self.end_headers()
    def log_message(self, *arguments):
        pass
print("Loading", sys.argv[1:], file=sys.stderr, flush=True)
server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
print(f"INFO: Serving on http://127.0.0.1:{server.server_port}", file=sys.stderr, flush=True)
print("much more\\n" * 100_000, file=sys.stderr, flush=True)  # more than a pipe holds
server.serve_forever()
"""


def script(path: Path, text: str) -> list[str]:
    file = path / "server.py"
    file.write_text(text)
    return [sys.executable, str(file)]


def test_a_server_is_started_waited_for_and_ended(tmp_path: Path) -> None:
    process = ServerProcess(["--num-blocks", "9"], command=script(tmp_path, SERVER))
    with process as server:
        assert server.base_url.startswith("http://127.0.0.1:")
        assert process._process.poll() is None
    assert process._process.poll() is not None
    assert process._process.stderr is not None
    assert process._process.stderr.closed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import sys; sys.exit('foredraft: error: no such model')",
            "ended before it listened; it said:\nforedraft: error",
        ),
        ("import sys; print('Serving on http://127.0.0.1:1', file=sys.stderr)", "ended before it was ready"),
    ],
)
def test_a_server_that_ends_too_soon_is_an_error_with_its_last_words(tmp_path: Path, text: str, message: str) -> None:
    process = ServerProcess([], command=script(tmp_path, text))
    with pytest.raises(ForedraftError) as error, process:
        pass
    assert message in str(error.value)
    assert process._process.poll() is not None


@pytest.mark.parametrize("text", ["import time; time.sleep(60)", SERVER.replace("< 3", "< 1e9")])
def test_a_server_that_is_not_ready_in_time_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setattr(server_process, "START_SECONDS", 0.5)
    process = ServerProcess([], command=script(tmp_path, text))
    with pytest.raises(ForedraftError, match=r"within 0 s|within 1 s"), process:
        pass
    assert process._process.poll() is not None
