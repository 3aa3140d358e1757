"""A served model that says what a test tells it to, and that a test can hold up in the middle of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from byte_models import EOS_ID, byte_llama, byte_tokenizer
from fake_model import FakeModel, one_after_another, right
from live_server import LiveServer, live_server
from torch import Tensor

VOCAB_SIZE = 256
NUM_DRAFTS = 3
WAIT_SECONDS = 60.0
CHAT_TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}<tool_call>{% endif %}"
    "{% for message in messages %}{{ message['role'] }} {{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}{{ call['function'] | tojson }}{% endfor %}\n{% endfor %}:"
)
"""Of a model that knows tools, in the format of Hermes."""


class Teller:
    """A live server, and what its model is going to say. All drafts are right.

    Tell it before each request that says something else, while it is idle.
    """

    def __init__(self, live: LiveServer, fake: FakeModel) -> None:
        self.live = live
        self.furthest = 0
        self._fake = fake
        self._gate = threading.Event()
        self._is_held = threading.Event()

    def tell(
        self, text: str, messages: Sequence[Any], tools: Sequence[Any] = (), *, held_after: int | None = None
    ) -> None:
        """Answer this conversation with `text`, and end. held_after: stop after that many tokens until `let_go`.

        `furthest` is then the number of tokens of prompt and answer that the target has run on, at most.
        """
        body = {"messages": list(messages)} | ({"tools": list(tools)} if tools else {})
        reply = self.live.post("/tokenize", body)
        assert reply.status_code == 200, reply.text
        num_prompt_tokens = int(reply.json()["count"])
        table = one_after_another([*text.encode(), EOS_ID], VOCAB_SIZE, start=num_prompt_tokens)
        self.live.wait_until_idle()
        self._gate.clear()
        self._is_held.clear()
        self.furthest = 0

        def held(token_id: int, position: int) -> Tensor:
            self.furthest = max(self.furthest, position + 1)
            if held_after is not None and position + 1 >= num_prompt_tokens + held_after:
                self._is_held.set()
                assert self._gate.wait(WAIT_SECONDS), "the model was never let go"
            return table(token_id, position)

        self._fake.target.table = held
        self._fake.drafter.script = right(table, NUM_DRAFTS)

    def wait_until_held(self) -> None:
        """Return when it has come so far that it is held up."""
        assert self._is_held.wait(WAIT_SECONDS), "the model never came so far"

    @contextmanager
    def full(self, messages: Sequence[Any]) -> Iterator[None]:
        """One request runs, held up, and one waits for it: with max_num_seqs=1 and max_waiting=1 there is no room.

        They and all that come after `let_go` get the answer "Hello". Returns when these two have theirs.
        """
        self.tell("Hello", messages, held_after=2)
        engine = self.live.server.service.engine
        body = {"messages": list(messages), "temperature": 0}
        with ThreadPoolExecutor(2) as pool:
            first = pool.submit(self.live.post, "/v1/chat/completions", body)
            try:
                self.live.wait(lambda: engine.num_open == 1 and engine.num_waiting == 0, "one runs")
                second = pool.submit(self.live.post, "/v1/chat/completions", body)
                self.live.wait(lambda: engine.num_waiting == 1, "another waits")
                yield
            finally:
                self.let_go()
        assert first.result().status_code == second.result().status_code == 200
        self.live.wait_until_idle()

    def let_go(self) -> None:
        """Go on."""
        self._gate.set()


@contextmanager
def teller(path: Path, *, max_num_seqs: int = 8, **settings: Any) -> Iterator[Teller]:
    """Serve such a model. settings: the server's."""
    if not (path / "config.json").exists():
        byte_llama(path, num_modules=NUM_DRAFTS)
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    nothing = one_after_another([EOS_ID], VOCAB_SIZE)
    fake = FakeModel(
        path,
        nothing,
        right(nothing),
        vocab_size=VOCAB_SIZE,
        eos_token_ids=[EOS_ID],
        tokenizer=tokenizer,
        num_blocks=2048,
        max_num_seqs=max_num_seqs,
        num_speculative_tokens=NUM_DRAFTS,
    )
    with live_server(lambda: fake.llm, **settings) as live:
        found = Teller(live, fake)
        try:
            yield found
        finally:
            found.let_go()
