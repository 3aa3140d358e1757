"""Server-sent events, cut anywhere."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from foredraft.bench.serving.sse import MAX_EVENT_BYTES, EventParser

STREAM = (
    'data: {"a": 1}\n\n: a comment\r\ndata:two\r\ndata: lines\r\n\r\nevent: x\rid: 1\r\rdata: é€\r\rdata\n\n'.encode()
)
EVENTS = [b'{"a": 1}', b"two\nlines", "é€".encode(), b""]


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_are_the_same_wherever_the_stream_is_cut(cuts: list[int]) -> None:
    bounds = [0, *sorted(cuts), len(STREAM)]
    parser = EventParser()
    parts = [STREAM[start:end] for start, end in pairwise(bounds)]
    assert [data for part in parts for data in parser.feed(part)] == EVENTS


def test_an_event_that_has_not_ended_is_none() -> None:
    parser = EventParser()
    assert parser.feed(b"data: [DONE]\n") == []
    assert parser.feed(b"\n") == [b"[DONE]"]


@pytest.mark.parametrize("line", [b"x" * 1000, b"data: " + b"x" * 1000 + b"\n"])
def test_an_event_without_an_end_is_refused_before_it_fills_the_memory(line: bytes) -> None:
    parser = EventParser()
    for _ in range(MAX_EVENT_BYTES // len(line) - 10):
        assert parser.feed(line) == []
    with pytest.raises(ValueError, match="more than"):
        parser.feed(30 * line)


def test_many_events_may_be_more_than_one_may_be() -> None:
    parser = EventParser()
    line = b"data: " + b"x" * 10_000 + b"\n\n"
    number = MAX_EVENT_BYTES // len(line) + 10
    assert sum(len(parser.feed(line)) for _ in range(number)) == number
