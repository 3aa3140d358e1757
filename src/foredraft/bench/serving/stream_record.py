"""What the events of one stream add up to, from their data alone."""

from __future__ import annotations

import json
from typing import Any

from foredraft.bench.serving.figures import Arrival, CountSource, Failure
from foredraft.errors import described, shown

_TEXT_FIELDS = ("content", "reasoning_content", "reasoning", "tool_calls", "refusal")


class StreamRecord:
    """Takes the events of one stream; `failure` is set by the one that says that the request failed.

    A chunk counts as output if it has text, a tool call or token ids. Where no chunk has any (tokens without a text),
    the one that ends the choice counts, so that a request with tokens always has a time to its first.
    """

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.failure: Failure | None = None
        self.is_done = False
        self.last_output: float | None = None
        self.usage: dict[str, Any] = {}
        self._token_ids: list[int] | None = None
        self._prompt_token_ids: int | None = None

    def add(self, data: bytes, time: float) -> None:
        """One event, and when its last byte came."""
        if data.strip() == b"[DONE]":
            self.is_done = True
            return
        try:
            event = json.loads(data)
            if not isinstance(event, dict):
                raise ValueError("not a JSON object")
            if event.get("error") is not None:
                self.failure = Failure("error in the stream", shown(_message(event["error"])))
                return
            self._take(event, time)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            self.failure = Failure("malformed event", f"{described(error)}, in {shown(data)}")

    def _take(self, event: dict[str, Any], time: float) -> None:
        if isinstance(usage := event.get("usage"), dict):
            self.usage = usage
        if isinstance(prompt := event.get("prompt_token_ids"), list):
            self._prompt_token_ids = len(prompt)
        for choice in event.get("choices") or ():
            ids = choice.get("token_ids")
            if ids is not None:
                self._token_ids = self._token_ids or []
                self._token_ids += ids
            if isinstance(prompt := choice.get("prompt_token_ids"), list):
                self._prompt_token_ids = len(prompt)
            delta = choice.get("delta") or {}
            has_output = bool(ids or choice.get("text") or any(delta.get(name) for name in _TEXT_FIELDS))
            reason = choice.get("finish_reason")
            if has_output or (reason and not self.arrivals):
                self.arrivals.append(Arrival(time, None if ids is None else len(ids)))
            if has_output or reason:
                self.last_output = time
            if reason in ("error", "abort"):
                self.failure = Failure("ended by the server", f"finish_reason {reason!r}")

    @property
    def token_ids(self) -> tuple[int, ...] | None:
        """The generated tokens, where the chunks named them."""
        return None if self._token_ids is None else tuple(self._token_ids)

    def count(self) -> tuple[int, CountSource]:
        """How many tokens were generated, and how that is known: the best source that there is."""
        if (number := _count(self.usage, "completion_tokens")) is not None:
            return number, "usage"
        if self._token_ids is not None:
            return len(self._token_ids), "token_ids"
        return len(self.arrivals), "chunks"

    def num_prompt_tokens(self, num_sent: int | None) -> int | None:
        """Tokens of the prompt, as the server says or (num_sent) as they were sent; None if nobody knows."""
        number = _count(self.usage, "prompt_tokens")
        if number is None:
            number = self._prompt_token_ids
        return num_sent if number is None else number

    @property
    def num_cached_tokens(self) -> int | None:
        details = self.usage.get("prompt_tokens_details")
        return _count(details, "cached_tokens") if isinstance(details, dict) else None


def _count(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _message(error: Any) -> Any:
    return error.get("message", error) if isinstance(error, dict) else error
