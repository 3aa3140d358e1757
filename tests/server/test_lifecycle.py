"""How a server begins and ends: loading, draining, signals, faults of the engine, a queue that is full."""

from __future__ import annotations

import json
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_models import byte_tokenizer
from live_server import live_server
from server.event_streams import split_events
from server.held_steps import held_steps
from server.open_connection import OpenConnection
from server.server_process import ServerProcess
from server.talking_server import CHAT, COMPLETIONS
from tiny_models import tiny_llama

import foredraft.server.serve
from foredraft import LLM
from foredraft.cli.app import main
from foredraft.engine.async_engine import EngineState
from foredraft.errors import ForedraftError, ModelLoadError
from foredraft.server.serve import ModelServer, serve
from foredraft.server.settings import ServerSettings

ENDLESS = 6_000  # tokens, which take much longer than anything that is waited for
ASKED: dict[str, Any] = {"prompt": "abc", "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a context so long that an answer can take many seconds."""
    path = tiny_llama(
        tmp_path_factory.mktemp("long"),
        num_modules=1,
        num_layers=1,
        hidden_size=16,
        vocab_size=256,
        max_position_embeddings=ENDLESS + 100,
    )
    byte_tokenizer().save_pretrained(path)
    return path


def load(checkpoint: Path, **settings: Any) -> LLM:
    settings = {"max_model_len": 200, "num_blocks": 60, "block_size": 4, "num_speculative_tokens": 0, **settings}
    return LLM(checkpoint, dtype="float32", device="cpu", **settings)


def stream(url: str, max_tokens: int) -> OpenConnection:
    """A stream that has begun."""
    connection = OpenConnection(url, COMPLETIONS, {**ASKED, "max_tokens": max_tokens, "stream": True})
    connection.read_until(b"data: ")
    return connection


def ending(connection: OpenConnection) -> tuple[Any, str]:
    """The last choice or error of a stream, and what comes at its very end."""
    *events, last = split_events(connection.body().decode())
    return (json.loads(last), "") if last.startswith("{") else (json.loads(events[-1]), last)


# -- processes ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def processes(checkpoint: Path) -> Iterator[dict[str, ServerProcess]]:
    """All at once: most of their time they start."""
    options = ["--port", "0", "--num-speculative-tokens", "0"]
    made = {
        "patient": ServerProcess(checkpoint, *options, "--drain-seconds", "60", "--access-log"),
        "hasty": ServerProcess(checkpoint, *options, "--drain-seconds", "0.2"),
        "idle": ServerProcess(checkpoint, *options),
        "busy": ServerProcess(checkpoint, *options, "--drain-seconds", "3600"),
    }
    try:
        yield made
    finally:
        for process in made.values():
            process.close()


def ready(process: ServerProcess) -> str:
    """Where a process serves, once it takes requests."""
    url, deadline = process.url, time.monotonic() + 60
    assert url.startswith("http://127.0.0.1:")
    while httpx.get(f"{url}/health").status_code != 200:
        assert time.monotonic() < deadline, process.lines
        time.sleep(0.05)
    return url


def requests_in(lines: list[str]) -> list[str]:
    """What the lines of an access log say of each request."""
    pattern = r'INFO: +127\.0\.0\.1:\d+ - ("[A-Z]+ [^"]+ HTTP/1\.1" \d{3}\b.*)'
    return [found.group(1) for line in lines if (found := re.fullmatch(pattern, line))]


def test_sigterm_lets_requests_end_and_takes_no_more(processes: dict[str, ServerProcess]) -> None:
    """Its log has a line for each request, as was asked for."""
    process = processes["patient"]
    url = ready(process)
    with stream(url, 1500) as going_on:
        process.signal(signal.SIGTERM)
        process.wait_for("SIGTERM: requests in flight have 60 s, or until a second signal")
        for path, body in ((COMPLETIONS, ASKED), (COMPLETIONS, ASKED | {"stream": True})):
            refused = httpx.post(f"{url}{path}", json=body, timeout=30)
            assert refused.status_code == 503
            assert int(refused.headers["retry-after"]) > 0
            assert refused.json()["error"]["type"] == "service_unavailable_error"
        health = httpx.get(f"{url}/health")
        assert (health.status_code, health.json()) == (503, {"status": "draining"})
        last, mark = ending(going_on)
    assert (last["choices"][0]["finish_reason"], mark) == ("length", "[DONE]")
    assert process.exit_code() == 0
    asked, unavailable = f'"POST {COMPLETIONS} HTTP/1.1"', "503 Service Unavailable"
    expected = [f"{asked} 200 OK", *[f"{asked} {unavailable}"] * 2, f'"GET /health HTTP/1.1" {unavailable}']
    logged = requests_in(process.lines)
    assert logged[-4:] == expected
    assert all(line.startswith('"GET /health ') for line in logged[:-4])


def test_a_request_that_outlasts_the_drain_gets_an_error(processes: dict[str, ServerProcess]) -> None:
    """And so does one whose body has not come; none of it is a fault that the log must explain."""
    process = processes["hasty"]
    url = ready(process)
    head = "Content-Length: 100\r\nX-Request-Id: half\r\nExpect: 100-continue\r\n"
    with OpenConnection(url, COMPLETIONS, b"", head=head) as half, stream(url, ENDLESS) as going_on:
        half.read_until(b"100 Continue\r\n\r\n")
        process.signal(signal.SIGTERM)
        last, mark = ending(going_on)
        refused = half.read_all().partition(b"100 Continue\r\n\r\n")[2]
    assert refused.startswith(b"HTTP/1.1 503")
    assert b"x-request-id: half\r\n" in refused
    assert json.loads(refused.partition(b"\r\n\r\n")[2])["error"]["code"] == "engine_unavailable"
    assert last["error"]["type"] == "service_unavailable_error"
    assert "shuts down" in last["error"]["message"]
    assert mark == ""
    assert process.exit_code() == 0
    assert any("not all requests have ended in time" in line for line in process.lines)
    assert all(line.startswith(("foredraft: ", "cache: ", "  ")) for line in process.lines), process.lines


def test_two_signals_in_a_row_while_nothing_runs(processes: dict[str, ServerProcess]) -> None:
    """The second one comes while the process ends: it changes nothing about its exit code."""
    process = processes["idle"]
    ready(process)
    process.signal(signal.SIGTERM)
    time.sleep(0.3)
    process.signal(signal.SIGTERM)
    assert process.exit_code() == 0
    assert not any("Traceback" in line for line in process.lines)


def test_two_signals_in_a_row_while_a_request_runs(processes: dict[str, ServerProcess]) -> None:
    process = processes["busy"]
    with stream(ready(process), ENDLESS) as going_on:
        process.signal(signal.SIGINT)
        process.wait_for("SIGINT: requests in flight have 3600 s, or until a second signal")
        process.signal(signal.SIGINT)
        assert process.exit_code() == 0
        assert b"[DONE]" not in going_on.read_all()
    assert not any("Traceback" in line for line in process.lines)


def test_a_model_that_cannot_be_loaded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One line says why, and the exit code is 1; it has listened before."""
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(SystemExit) as caught:
        main(["serve", str(tmp_path), "--port", "0", "--device", "cpu"])
    assert caught.value.code == 1
    listens, error = capsys.readouterr().err.splitlines()
    assert listens.startswith("foredraft: Serving on http://127.0.0.1:")
    assert error.startswith("foredraft: error: ")
    assert len(error) < 500


# -- signals and faults, in a thread of this process -------------------------------------------------------------------


def test_a_second_signal_ends_at_once(checkpoint: Path) -> None:
    """The first one would let the stream go on for an hour."""
    settings = {"max_model_len": ENDLESS + 50, "num_blocks": ENDLESS // 4 + 20}
    with (
        live_server(lambda: load(checkpoint, **settings), drain_seconds=3600) as live,
        stream(live.url, ENDLESS) as one,
    ):
        live.server.handle_exit(signal.SIGTERM, None)
        live.wait(lambda: live.server.service.engine.state is EngineState.DRAINING, "it drained")
        assert not live.server.should_exit
        live.server.handle_exit(signal.SIGINT, None)
        assert live.server.should_exit
        assert b"[DONE]" not in one.body()
    assert live.server.failure is None


def test_while_it_loads_nothing_but_its_state_is_there(checkpoint: Path) -> None:
    may_load = threading.Event()

    def waiting() -> LLM:
        assert may_load.wait(60)
        return load(checkpoint)

    with live_server(waiting, is_loading=True) as live:
        try:
            health = httpx.get(f"{live.url}/health")
            assert (health.status_code, health.json()) == (503, {"status": "loading"})
            bodies: dict[str, Any] = {
                COMPLETIONS: ASKED,
                CHAT: {"messages": [{"role": "user", "content": "a"}]},
                "/tokenize": {"prompt": "a"},
                "/detokenize": {"tokens": [1]},
            }
            answers = [live.post(path, body) for path, body in bodies.items()]
            answers += [live.post(COMPLETIONS, ASKED | {"stream": True}), httpx.get(f"{live.url}/v1/models")]
            for answer in answers:
                assert answer.status_code == 503, answer.text
                assert "loading" in answer.json()["error"]["message"]
                assert int(answer.headers["retry-after"]) > 0
            assert httpx.get(f"{live.url}/metrics").status_code == 200
            assert httpx.get(f"{live.url}/version").status_code == 200
        finally:
            may_load.set()
        live.wait(lambda: live.server.service.is_ready, "it was ready")
        assert live.post(COMPLETIONS, ASKED).status_code == 200
        assert httpx.get(f"{live.url}/health").json() == {"status": "ready"}


def test_a_signal_while_it_loads_ends_it(checkpoint: Path) -> None:
    may_load = threading.Event()

    def waiting() -> LLM:
        may_load.wait(60)
        raise ModelLoadError("nobody waits for it any more")

    with live_server(waiting, is_loading=True) as live:
        live.server.handle_exit(signal.SIGTERM, None)
        assert live.server.should_exit
    may_load.set()


def test_a_fatal_fault_answers_everybody(checkpoint: Path) -> None:
    """Streams and whole answers, running and waiting: each gets an error, and then the server has gone."""
    with live_server(lambda: load(checkpoint, max_num_seqs=2)) as live:
        engine = live.llm.engine
        with held_steps(engine) as held:
            execute = engine.runner.execute
            bodies = [ASKED | {"max_tokens": 100, "stream": index % 2 == 1} for index in range(4)]
            connections = [OpenConnection(live.url, COMPLETIONS, body) for body in bodies]
            held.wait_for_step()
            live.wait(lambda: live.server.service.engine.num_open == 4, "all were handed in")
            held.let(2)

            def broken(plan: Any) -> Any:
                raise RuntimeError("the device is lost")

            engine.runner.execute = broken  # type: ignore[method-assign]
            held.free()
            for body, connection in zip(bodies, connections):
                if body["stream"]:
                    connection.read_until(b"\r\n\r\n")
                answer = connection.body().decode()
                last = split_events(answer)[-1] if answer.startswith("data:") else answer
                assert "the device is lost" in json.loads(last)["error"]["message"]
            assert engine.runner.execute is broken
            engine.runner.execute = execute  # type: ignore[method-assign]
        live.wait(lambda: live.server.failure is not None, "the failure was noted")
        assert isinstance(live.server.failure, RuntimeError)
        assert live.server.service.engine.state is EngineState.FAILED
        assert live.server.should_exit


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ModelServer]:
    """The servers that `serve` makes, so that a test can look into them."""
    made: list[ModelServer] = []

    class KnownServer(ModelServer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(foredraft.server.serve, "ModelServer", KnownServer)
    return made


class Serving:
    """`serve` in a thread. error: what it has raised."""

    def __init__(self, made: list[ModelServer], load_model: Any, settings: ServerSettings) -> None:
        self.error: BaseException | None = None
        self._made = made
        self._thread = threading.Thread(target=self._run, args=(load_model, settings), daemon=True)
        self._thread.start()

    def _run(self, load_model: Any, settings: ServerSettings) -> None:
        try:
            serve(load_model, settings, "model")
        except BaseException as error:
            self.error = error

    def server(self) -> ModelServer:
        """Once it takes requests."""
        deadline = time.monotonic() + 60
        while not self._made or not self._made[0].service.is_ready:
            assert time.monotonic() < deadline
            assert self._thread.is_alive(), self.error
            time.sleep(0.005)
        return self._made[0]

    def join(self) -> BaseException | None:
        self._thread.join(60)
        assert not self._thread.is_alive()
        return self.error


def test_serve_raises_what_made_the_engine_fail(
    checkpoint: Path, served: list[ModelServer], capsys: pytest.CaptureFixture[str]
) -> None:
    serving = Serving(served, lambda: load(checkpoint), ServerSettings(port=0))
    server = serving.server()
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "Serving on" in line]
    url = line.rpartition(" ")[2]

    def broken(plan: Any) -> Any:
        raise RuntimeError("the device is lost")

    server.service.engine.llm.engine.runner.execute = broken  # type: ignore[method-assign]
    answer = httpx.post(f"{url}{COMPLETIONS}", json=ASKED, timeout=60)
    assert answer.status_code == 503
    assert "the device is lost" in answer.json()["error"]["message"]
    error = serving.join()
    assert isinstance(error, ForedraftError)
    assert "the device is lost" in str(error)
    assert "Traceback" in capsys.readouterr().err
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_small_pieces_of_answers_are_sent_at_once(checkpoint: Path, served: list[ModelServer]) -> None:
    """Without TCP_NODELAY the second piece of an answer waits for the client's delayed acknowledgement, some 40 ms."""
    serving = Serving(served, lambda: load(checkpoint), ServerSettings(port=0))
    server = serving.server()
    (address,) = {each.getsockname() for listener in server.servers for each in listener.sockets}
    try:
        with httpx.Client(base_url=f"http://{address[0]}:{address[1]}") as client:
            assert client.get("/health").status_code == 200
            (connection,) = server.server_state.connections
            transport: Any = connection.transport
            assert transport.get_extra_info("socket").getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    finally:
        server.should_exit = True
        error = serving.join()
    assert error is None


def test_serve_raises_what_made_loading_fail(served: list[ModelServer]) -> None:
    def fail() -> LLM:
        raise ModelLoadError("no weights")

    error = Serving(served, fail, ServerSettings(port=0)).join()
    assert isinstance(error, ModelLoadError)
    assert str(error) == "no weights"


def test_a_port_in_use(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(SystemExit) as caught:
            main(["serve", str(checkpoint), "--port", str(port)])
    assert caught.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"foredraft: error: cannot listen on host 127.0.0.1, port {port}: ")
    assert "in use" in line
