"""How a request gets in: its body comes, it is read, it has a place in the queue, and it is waited for."""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from byte_models import byte_llama
from live_server import LiveServer, live_server
from server.held_steps import held_steps
from server.open_connection import OpenConnection
from server.talking_server import CHAT, COMPLETIONS

import foredraft.server.body_reader
from foredraft import LLM, SamplingParams
from foredraft.engine.async_engine import AsyncEngine, EngineState
from foredraft.engine.served import Job
from foredraft.errors import EngineBusyError, EngineUnavailableError

ASKED: dict[str, Any] = {"prompt": "abc", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
WITH_GRAMMAR = ASKED | {"structured_output": {"regex": "[a-z]{2,9}"}, "ignore_eos": False}
HALF = b'{"prompt": "ab'


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return byte_llama(tmp_path_factory.mktemp("bytes"), num_modules=1)


def load(checkpoint: Path, **settings: Any) -> LLM:
    settings = {"max_model_len": 200, "num_blocks": 60, "block_size": 4, **settings}
    return LLM(checkpoint, dtype="float32", device="cpu", **settings)


class HeldCompiler:
    """Grammars are compiled only when `go_on` is set. begun: some have been asked for."""

    def __init__(self, live: LiveServer, patch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        engine = live.llm.engine
        compile_grammar = engine.compile_grammar

        def waiting(params: SamplingParams) -> None:
            self.begun.set()
            assert self.go_on.wait(60)
            compile_grammar(params)

        patch.setattr(engine, "compile_grammar", waiting)


@contextmanager
def held_compiler(live: LiveServer) -> Iterator[HeldCompiler]:
    """Hold the grammars of a server, until the block ends."""
    with pytest.MonkeyPatch.context() as patch:
        held = HeldCompiler(live, patch)
        try:
            yield held
        finally:
            held.go_on.set()


# -- places in the queue -----------------------------------------------------------------------------------------------


def test_a_place_is_counted_once(checkpoint: Path) -> None:
    """While it is read, while the engine has not looked at it, and while it waits to start: so many choices it is."""
    llm = load(checkpoint, max_num_seqs=1)

    def jobs(num_prompts: int, n: int) -> list[Job]:
        return [Job([97, 98, 99], SamplingParams(max_tokens=2, n=n, ignore_eos=True))] * num_prompts

    async def main() -> None:
        engine = AsyncEngine(lambda: llm, max_waiting=6)
        engine.start()
        await engine.ready()
        with held_steps(llm.engine) as held:
            running = await engine.submit(jobs(1, 1))
            await asyncio.to_thread(held.wait_for_step)
            await asyncio.to_thread(held.let, 1)  # it has started; until the next step is let go, nobody is accepted
            while running.is_waiting:
                await asyncio.sleep(0.001)
            assert engine.num_waiting == 0
            with engine.reading(5):
                assert engine.num_waiting == 5
                with engine.reading(1):
                    with pytest.raises(EngineBusyError, match="6, of at most 6"), engine.reading(1):
                        pass
                    assert engine.num_waiting == 6
            assert engine.num_waiting == 0
            handed_in = []
            for num_prompts, n, total in ((1, 1, 1), (1, 3, 4), (2, 1, 6)):
                with engine.reading(num_prompts * n):
                    handed_in.append(engine.hand_in(jobs(num_prompts, n)))
                assert engine.num_waiting == total
            with pytest.raises(EngineBusyError, match="6, of at most 6"):
                await engine.submit(jobs(1, 1))
            held.free()
            for submission in (running, *handed_in):
                await submission.accepted()
                assert [chunk async for _, chunk in submission][-1].output is not None
        assert engine.num_waiting == 0
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_what_is_handed_in_at_last_finds_the_engine_ended(checkpoint: Path) -> None:
    """It was still read when the time to drain was over."""
    llm = load(checkpoint)

    async def main() -> None:
        engine = AsyncEngine(lambda: llm)
        engine.start()
        await engine.ready()
        with engine.reading(1):
            assert not await engine.drain(0.01)
            await engine.close()
            with pytest.raises(EngineUnavailableError, match="closed"):
                engine.hand_in([Job([97], SamplingParams())])
        assert engine.is_idle

    asyncio.run(asyncio.wait_for(main(), 60))


def test_choices_that_wait_fill_the_queue_exactly(checkpoint: Path) -> None:
    """Prompts times n, of requests of which the engine has seen none yet and of one that is read: as many as may."""
    with live_server(lambda: load(checkpoint, max_num_seqs=1), max_waiting=6) as live:
        engine = live.server.service.engine
        with held_steps(live.llm.engine) as held, held_compiler(live) as compiler:
            running = OpenConnection(live.url, COMPLETIONS, ASKED)
            held.wait_for_step()
            held.let(1)
            live.wait(lambda: engine.num_waiting == 0, "the first one had started")
            waiting, totals = [], []
            for body in (WITH_GRAMMAR | {"prompt": ["ab", "cd"]}, ASKED | {"n": 3}, ASKED):
                before = engine.num_waiting
                waiting.append(OpenConnection(live.url, COMPLETIONS, body))
                live.wait(lambda: engine.num_waiting > before, "it waited")  # noqa: B023
                totals.append(engine.num_waiting)
            assert totals == [2, 5, 6]
            refused = live.post(COMPLETIONS, ASKED)
            assert refused.status_code == 429
            assert "6, of at most 6" in refused.json()["error"]["message"]
            compiler.go_on.set()
            held.free()
            counts = [len(connection.json()["choices"]) for connection in (running, *waiting)]
        assert counts == [1, 2, 3, 1]
        live.wait_until_idle()
        assert engine.num_waiting == 0


# -- reading -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True], ids=["whole", "stream"])
def test_a_request_that_is_read_when_draining_begins_is_served(checkpoint: Path, is_stream: bool) -> None:
    with live_server(lambda: load(checkpoint), drain_seconds=60) as live, held_compiler(live) as compiler:
        engine = live.server.service.engine
        early = OpenConnection(live.url, COMPLETIONS, WITH_GRAMMAR | {"stream": is_stream})
        assert compiler.begun.wait(60)
        live.server.handle_exit(signal.SIGTERM, None)
        live.wait(lambda: engine.state is not EngineState.READY, "it drained")
        refused = live.post(COMPLETIONS, ASKED)
        assert refused.status_code == 503
        assert "draining" in refused.json()["error"]["message"]
        assert not live.server.should_exit
        assert engine.state is EngineState.DRAINING
        compiler.go_on.set()
        answer = early.read_all()
        assert answer.startswith(b"HTTP/1.1 200")
        assert b'"finish_reason":"length"' in answer
        live.wait(lambda: live.server.should_exit, "nothing was left to wait for")
        assert live.server.failure is None


def test_a_request_that_fails_while_it_is_read_holds_up_no_drain(checkpoint: Path) -> None:
    with live_server(lambda: load(checkpoint), drain_seconds=60) as live:
        with held_compiler(live) as compiler:
            early = OpenConnection(live.url, COMPLETIONS, WITH_GRAMMAR | {"prompt": "a" * 300})
            assert compiler.begun.wait(60)
            live.server.handle_exit(signal.SIGTERM, None)
            live.wait(lambda: live.server.service.engine.state is EngineState.DRAINING, "it drained")
            compiler.go_on.set()
            assert early.json()["error"]["param"] == "prompt"
        live.wait(lambda: live.server.should_exit, "nothing was left to wait for")


def test_a_client_that_goes_away_while_its_request_is_read_leaves_its_place(checkpoint: Path) -> None:
    with live_server(lambda: load(checkpoint), max_waiting=1) as live:
        engine = live.server.service.engine
        for is_stream in (False, True):
            with held_compiler(live) as compiler:
                gone = OpenConnection(live.url, COMPLETIONS, WITH_GRAMMAR | {"stream": is_stream})
                assert compiler.begun.wait(60)
                assert live.post(COMPLETIONS, ASKED).status_code == 429
                gone.go_away()
                live.wait(lambda: engine.num_waiting == 0, "its place was free")
                assert live.post(COMPLETIONS, ASKED).status_code == 200
        live.wait_until_idle()


def test_a_grammar_that_is_compiled_holds_up_nobody_else(checkpoint: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
    with live_server(lambda: load(checkpoint)) as live:
        with held_compiler(live) as compiler:
            slow = OpenConnection(live.url, COMPLETIONS, WITH_GRAMMAR)
            assert compiler.begun.wait(60)
            for path, body in ((COMPLETIONS, ASKED), (CHAT, chat), ("/tokenize", {"prompt": "ab"})):
                assert live.post(path, body).status_code == 200
            assert live.server.service.engine.num_waiting == 1
            compiler.go_on.set()
            assert slow.json()["choices"][0]["text"].isalpha()
        live.wait_until_idle()


# -- bodies ------------------------------------------------------------------------------------------------------------


def assert_refused(answer: bytes, status: int, kind: str, request_id: str) -> None:
    """A whole answer is an error in OpenAI's form."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = head.lower().split(b"\r\n")
    assert lines[0].startswith(b"http/1.1 %d" % status), answer
    assert f"x-request-id: {request_id}".encode() in lines
    assert b"content-type: application/json" in lines
    found = httpx.Response(status, content=body).json()
    assert set(found["error"]) == {"message", "type", "param", "code"}
    assert found["error"]["type"] == kind


def half_sent(live: LiveServer, request_id: str) -> OpenConnection:
    """A request of whose body the server waits for the rest."""
    head = f"Content-Length: 100\r\nX-Request-Id: {request_id}\r\nExpect: 100-continue\r\n"
    connection = OpenConnection(live.url, COMPLETIONS, b"", head=head)
    connection.read_until(b"100 Continue\r\n\r\n")  # so it has begun to read
    return connection


def test_bodies_that_have_not_come_when_the_server_ends(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with live_server(lambda: load(checkpoint), drain_seconds=60) as live:
        names = ("one", "two")
        connections = [half_sent(live, name) for name in names]
        started = time.monotonic()
        live.server.handle_exit(signal.SIGTERM, None)
        for name, connection in zip(names, connections):
            answer = connection.read_all().partition(b"100 Continue\r\n\r\n")[2]
            assert_refused(answer, 503, "service_unavailable_error", name)
            assert b"shuts down" in answer
        assert time.monotonic() - started < 4  # less than answers are waited for (ANSWER_SECONDS)
    assert "Traceback" not in capsys.readouterr().err


def test_a_body_that_does_not_come_in_time(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foredraft.server.body_reader, "BODY_SECONDS", 0.1)
    with live_server(lambda: load(checkpoint)) as live:
        head = "Content-Length: 100\r\nX-Request-Id: slow\r\n"
        started = time.monotonic()
        for sent in (b"", HALF):
            answer = OpenConnection(live.url, COMPLETIONS, sent, head=head).read_all()
            assert_refused(answer, 408, "invalid_request_error", "slow")
        assert 0.2 <= time.monotonic() - started < 10
        assert live.post(COMPLETIONS, ASKED).status_code == 200
        # A request whose body came in time is not broken off because its answer takes longer.
        with held_compiler(live) as compiler:
            slow = OpenConnection(live.url, COMPLETIONS, WITH_GRAMMAR)
            assert compiler.begun.wait(60)
            time.sleep(0.3)
            compiler.go_on.set()
            assert slow.json()["choices"][0]["finish_reason"] == "length"
        live.wait_until_idle()


# -- who goes first ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_priority_that_would_have_no_effect_is_refused(checkpoint: Path, path: str) -> None:
    body = {"max_tokens": 1} | (
        {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    )
    with live_server(lambda: load(checkpoint)) as live:
        for priority in (-1, 5):
            for is_stream in (False, True):
                answer = live.post(path, body | {"priority": priority, "stream": is_stream})
                assert answer.status_code == 400
                error = answer.json()["error"]
                assert error["param"] == "priority"
                assert "--scheduling-policy priority" in error["message"]
        assert live.post(path, body | {"priority": 0}).status_code == 200


def test_a_priority_is_honoured(checkpoint: Path) -> None:
    """Of those that wait the lowest number runs first, whoever came first."""
    with live_server(lambda: load(checkpoint, max_num_seqs=1, scheduling_policy="priority")) as live:
        with held_steps(live.llm.engine) as held:
            connections = [OpenConnection(live.url, COMPLETIONS, ASKED | {"priority": -9})]
            held.wait_for_step()
            for priority in (5, 0, 9, -5):
                connections.append(OpenConnection(live.url, COMPLETIONS, ASKED | {"priority": priority}))
                live.wait(lambda: live.server.service.engine.num_open == len(connections), "it was handed in")
            held.free()
            assert all(connection.json()["choices"][0]["finish_reason"] == "length" for connection in connections)
        live.wait_until_idle()
        served = dict.fromkeys(request.params.priority for plan in held.plans for request in plan.requests)
        assert list(served) == [-9, -5, 0, 5, 9]
