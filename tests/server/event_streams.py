"""Answers as server-sent events, read whole: what each choice said in them, and how it ended."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx


@dataclass(frozen=True)
class SaidChoice:
    """What a choice said. pieces: the texts of its chunks; reasons: finish_reason of each, null included."""

    text: str
    pieces: tuple[str, ...]
    token_ids: tuple[int, ...]
    reasons: tuple[str | None, ...]


@dataclass(frozen=True)
class Events:
    """The JSON of each event of a stream that ended with the mark of its end."""

    chunks: list[dict[str, Any]]

    @property
    def usage(self) -> dict[str, Any] | None:
        """The usage of the last chunk, if it has one."""
        found: dict[str, Any] | None = self.chunks[-1].get("usage")
        return found

    def choice(self, index: int = 0) -> SaidChoice:
        """All that was said of a choice."""
        own = [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]
        assert all("finish_reason" in choice for choice in own), "null must be there"
        pieces = tuple(_text(choice) for choice in own)
        token_ids = tuple(token_id for choice in own for token_id in choice.get("token_ids") or ())
        return SaidChoice("".join(pieces), pieces, token_ids, tuple(choice["finish_reason"] for choice in own))


def _text(choice: dict[str, Any]) -> str:
    return str((choice["delta"].get("content") or "") if "delta" in choice else choice["text"])


def read_events(response: httpx.Response) -> Events:
    """The events of a whole answer. Fails unless it is a stream with [DONE] as its last event, and only there."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *events, last = split_events(response.text)
    assert last == "[DONE]"
    assert "[DONE]" not in events
    return Events([json.loads(event) for event in events])


def split_events(text: str) -> list[str]:
    """The data of each event of a stream, which ends with a whole one."""
    *events, rest = text.split("\n\n")
    assert rest == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]
