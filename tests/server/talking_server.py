"""A server whose model says what the test wants: bytes are its tokens, and drafts are right as far as a test says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
from byte_models import EOS_ID, byte_llama
from fake_model import FakeModel, one_after_another, right
from live_server import WAIT_SECONDS, LiveServer, live_server
from server.event_streams import Events, read_events
from transformers import AutoTokenizer

VOCAB_SIZE = 256
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


class TalkingServer:
    """A live server over a fake model. Everything is asked at temperature 0 unless a test says otherwise."""

    def __init__(self, fake: FakeModel, live: LiveServer, client: httpx.Client) -> None:
        self.fake = fake
        self.live = live
        self.client = client

    def says(self, text: str | bytes, start: int, num_right: int = 8) -> None:
        """From position `start` on the model says `text`, and its last byte for ever; so many drafts are right."""
        self.live.wait_until_idle()
        said = text.encode() if isinstance(text, str) else text
        table = one_after_another(said, VOCAB_SIZE, start)
        self.fake.target.table, self.fake.drafter.script = table, right(table, num_right)
        self.fake.drafter.drafted.clear()

    def post(self, path: str, body: dict[str, Any]) -> httpx.Response:
        """Whatever it answers."""
        return self._send(path, {"temperature": 0, **body} if path.startswith("/v1/") else body)

    def _send(self, path: str, body: Any) -> httpx.Response:
        content = (
            body if isinstance(body, bytes) else json.dumps(body).encode()
        )  # with \u escapes: any text can be sent
        return self.client.post(path, content=content, headers={"content-type": "application/json"})

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """The JSON of an answer that is right."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def stream(self, path: str, *, with_usage: bool = True, **body: Any) -> Events:
        """The same as a stream."""
        options = {"stream_options": {"include_usage": True}} if with_usage else {}
        return read_events(self.post(path, {"stream": True, **options, **body}))

    def refuses(self, path: str, body: Any, param: str | None, status: int = 400) -> str:
        """A body, as JSON or as raw bytes, is refused in OpenAI's form, with the field's name. Returns the message."""
        response = self._send(path, body)
        assert response.status_code == status, (body, response.text)
        error = response.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["param"] == param, (body, error)
        message = str(error["message"])
        assert 0 < len(message) <= 1_000
        return message

    def serves(self) -> None:
        """A plain request is served, and leaves nothing."""
        self.says("fine", 3)
        assert (
            self.ask(COMPLETIONS, prompt="abc", max_tokens=4, num_speculative_tokens=3)["choices"][0]["text"] == "fine"
        )
        self.live.wait_until_idle()


@contextmanager
def talking_server(path: Path, *, max_model_len: int = 200, **settings: Any) -> Iterator[TalkingServer]:
    """Serve a fake model with 8 modules and blocks of 4 rows, which two of the longest sequences fill. The byte 0 ends
    its output; its conversations are their contents and a colon."""
    byte_llama(path, num_modules=8)
    fake = FakeModel(
        path,
        one_after_another(b"?", VOCAB_SIZE),
        eos_token_ids=[EOS_ID],
        tokenizer=AutoTokenizer.from_pretrained(path),
        max_model_len=max_model_len,
        **{"num_blocks": max_model_len // 2 + 1, **settings},
    )
    with (
        live_server(lambda: fake.llm) as live,
        httpx.Client(base_url=live.url, timeout=WAIT_SECONDS) as client,
    ):
        yield TalkingServer(fake, live, client)
