"""Handovers over local sockets: whole or not at all, and never a wait without an end."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from handing import to_bytes
from scripted import finish
from tiny_models import tiny_llama

from foredraft.config import EngineConfig
from foredraft.engine.build import build_engine
from foredraft.engine.engine import Engine
from foredraft.engine.handover import Handover
from foredraft.engine.handover_socket import Address, HandoverListener, send_handover
from foredraft.errors import HandoverError
from foredraft.models.loader import LoadedModel, load_checkpoint
from foredraft.sampling_params import SamplingParams

SAMPLED = SamplingParams(max_tokens=16, ignore_eos=True, temperature=1.0, seed=5)
SOON = 0.2


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tiny_llama(tmp_path_factory.mktemp("model") / "model", num_modules=2)
    return load_checkpoint(path, dtype=torch.float32, device=torch.device("cpu"))


def engine_of(model: LoadedModel) -> Engine:
    return build_engine(model, EngineConfig(num_blocks=32, block_size=4, max_model_len=64))


@pytest.fixture(scope="module")
def handover(model: LoadedModel) -> Handover:
    engine = engine_of(model)
    engine.add_request("one", list(range(30)), SAMPLED)
    for _ in range(3):
        engine.step()
    return engine.export_request("one")


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor() as pool:
        yield pool


@pytest.mark.parametrize("kind", ["path", "tcp", "name"])
def test_what_is_sent_arrives(
    model: LoadedModel, handover: Handover, tmp_path: Path, threads: ThreadPoolExecutor, kind: str
) -> None:
    addresses: dict[str, Address] = {"path": tmp_path / "socket", "tcp": ("127.0.0.1", 0), "name": ("localhost", 0)}
    unmoved = engine_of(model)
    expected = unmoved.add_request("one", list(range(30)), SAMPLED)
    finish(unmoved)
    with HandoverListener(addresses[kind]) as listener:
        for _ in range(2):
            sending = threads.submit(send_handover, handover, listener.address)
            received = listener.receive(10)
            sending.result()
            assert received is not None
            assert to_bytes(received) == to_bytes(handover)
            engine = engine_of(model)
            moved = engine.import_request(received)
            finish(engine)
            assert moved.token_ids == expected.token_ids
    assert list(tmp_path.iterdir()) == []


def test_only_this_user_may_connect_to_a_path(tmp_path: Path) -> None:
    with HandoverListener(tmp_path / "socket"):
        assert (tmp_path / "socket").stat().st_mode & 0o777 == 0o600


def test_nobody_comes(tmp_path: Path) -> None:
    with HandoverListener(tmp_path / "socket") as listener:
        assert listener.receive(0) is None
        assert listener.receive(0.01) is None


def test_a_sender_that_stops_halfway_does_not_hold_the_listener(handover: Handover, tmp_path: Path) -> None:
    """Nor does one that sends a little from time to time."""
    data = to_bytes(handover)
    with HandoverListener(tmp_path / "socket", timeout=SOON) as listener:
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(tmp_path / "socket"))
            other.sendall(data[: len(data) // 2])
            with pytest.raises(HandoverError, match="has not come within"):
                listener.receive(10)
        with socket.socket(socket.AF_UNIX) as other:
            other.connect(str(tmp_path / "socket"))
            ended = threading.Event()

            def trickle() -> None:
                for byte in data:
                    if ended.wait(SOON / 20):
                        return
                    other.sendall(bytes([byte]))

            thread = threading.Thread(target=trickle)
            thread.start()
            with pytest.raises(HandoverError, match="has not come within"):
                listener.receive(10)
            ended.set()
            thread.join()


def test_after_a_broken_one_the_next_is_taken(handover: Handover, tmp_path: Path, threads: ThreadPoolExecutor) -> None:
    data = to_bytes(handover)
    with HandoverListener(tmp_path / "socket") as listener:
        for content, message in ((data[:-9], "closed the connection"), (b"GET / HTTP/1.1\r\n\r\n", "no handover")):
            with socket.socket(socket.AF_UNIX) as other:
                other.connect(str(tmp_path / "socket"))
                other.sendall(content)
                other.shutdown(socket.SHUT_WR)
                with pytest.raises(HandoverError, match=message):
                    listener.receive(10)
                with suppress(ConnectionResetError):
                    assert other.recv(1) == b""
        sending = threads.submit(send_handover, handover, listener.address)
        assert listener.receive(10) is not None
        sending.result()


def test_a_listener_that_does_not_answer_does_not_hold_the_sender(handover: Handover, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "socket"))
        silent.listen()
        started = time.monotonic()
        with pytest.raises(HandoverError, match="has not taken the handover within"):
            send_handover(handover, tmp_path / "socket", timeout=SOON)
        assert time.monotonic() - started >= SOON


def test_a_listener_that_goes_away_or_speaks_otherwise(
    handover: Handover, tmp_path: Path, threads: ThreadPoolExecutor
) -> None:
    with socket.socket(socket.AF_UNIX) as other:
        other.bind(str(tmp_path / "socket"))
        other.listen()
        for answer, message in ((b"", "cannot take the handover|has closed"), (b"?", "answers as no listener does")):
            sending = threads.submit(send_handover, handover, tmp_path / "socket", 10)
            connected, _ = other.accept()
            with connected:
                size = len(to_bytes(handover)) if answer else 9
                while size > 0:
                    size -= len(connected.recv(size))
                connected.sendall(answer)
            with pytest.raises(HandoverError, match=message):
                sending.result()


def test_addresses_that_cannot_be_had(handover: Handover, tmp_path: Path) -> None:
    for address in (("0.0.0.0", 0), ("example.com", 80), ("10.0.0.1", 80), ("", 0)):
        with pytest.raises(HandoverError, match="not on the loopback interface"):
            HandoverListener(address)
        with pytest.raises(HandoverError, match="not on the loopback interface"):
            send_handover(handover, address)
    (tmp_path / "taken").touch()
    with pytest.raises(HandoverError, match="cannot be listened at"):
        HandoverListener(tmp_path / "taken")
    assert (tmp_path / "taken").exists()
    with pytest.raises(HandoverError, match="cannot take the handover"):
        send_handover(handover, tmp_path / "none", timeout=SOON)
