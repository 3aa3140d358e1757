"""Servers of tiny models for the clients, and the official client."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from byte_models import byte_llama
from live_server import LiveServer, live_server
from openai import OpenAI
from server.clients.teller import Teller, teller

from foredraft import LLM


@pytest.fixture(scope="session")
def byte_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint that byte_server serves."""
    return byte_llama(tmp_path_factory.mktemp("byte") / "model")


@pytest.fixture(scope="module")
def byte_llm(byte_path: Path) -> LLM:
    """The same model without a server. Shared: leave it with no open request."""
    return LLM(byte_path, dtype="float32", num_speculative_tokens=3)


@pytest.fixture(scope="module")
def byte_server(byte_path: Path) -> Iterator[LiveServer]:
    """A server of a random model that can write any text, with three drafts a step."""
    with live_server(lambda: LLM(byte_path, dtype="float32", num_speculative_tokens=3, block_size=4)) as live:
        yield live
        live.wait_until_idle()


@pytest.fixture(scope="module")
def client(byte_server: LiveServer) -> Iterator[OpenAI]:
    """The official client of byte_server. It does not try again."""
    with OpenAI(base_url=f"{byte_server.url}/v1", api_key="none", max_retries=0) as found:
        yield found


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teller]:
    """A server whose model says what it is told."""
    with teller(tmp_path_factory.mktemp("told")) as found:
        yield found
        found.let_go()
        found.live.wait_until_idle()


@pytest.fixture(scope="module")
def told_client(told: Teller) -> Iterator[OpenAI]:
    """The official client of `told`. It does not try again."""
    with OpenAI(base_url=f"{told.live.url}/v1", api_key="none", max_retries=0) as found:
        yield found
