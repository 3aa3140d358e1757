"""What one request of a benchmark came to: when its tokens arrived, or why it failed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from foredraft.statistics import SpeculationStats

CountSource = Literal["usage", "token_ids", "chunks"]
"""Where the number of generated tokens comes from. A chunk may hold several tokens, so "chunks" is a lower bound."""

MAX_MESSAGE = 300


class Arrival(NamedTuple):
    """A chunk of output: when it came (seconds of the clock), and how many tokens it held (None: it did not say)."""

    time: float
    num_tokens: int | None


@dataclass(frozen=True)
class Failure:
    """Why a request failed: a kind to count by, and what was said, at most MAX_MESSAGE characters."""

    kind: str
    message: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "message", self.message[:MAX_MESSAGE])


@dataclass(frozen=True)
class RequestFigures:
    """One request. Times are seconds of one clock.

    started: it was sent; ended: its last output came, or it failed. arrivals: the chunks of output in order.
    num_prompt_tokens, num_cached_tokens: None where nobody said. token_ids: the generated ones, where the server gives
    them. speculation: how its drafts fared, where the engine is our own.
    """

    started: float
    ended: float
    arrivals: tuple[Arrival, ...] = ()
    num_tokens: int = 0
    num_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    counted_by: CountSource = "usage"
    token_ids: tuple[int, ...] | None = None
    failure: Failure | None = None
    speculation: SpeculationStats | None = None

    @property
    def ttft(self) -> float | None:
        """Seconds to the first output; None if there was none."""
        return self.arrivals[0].time - self.started if self.arrivals else None

    @property
    def tpot(self) -> float | None:
        """Seconds per output token after the first; None with fewer than two tokens."""
        if self.ttft is None or self.num_tokens < 2:
            return None
        return (self.e2el - self.ttft) / (self.num_tokens - 1)

    @property
    def itl(self) -> list[float]:
        """Seconds between a chunk and the next. A chunk may hold several tokens."""
        return [after.time - before.time for before, after in zip(self.arrivals, self.arrivals[1:])]

    @property
    def e2el(self) -> float:
        """Seconds from sending the request to its last output."""
        return self.ended - self.started

    @property
    def timed_tokens(self) -> list[tuple[float, float]]:
        """When how many tokens came; where the chunks do not say, the tokens are spread over them evenly."""
        if any(arrival.num_tokens is None for arrival in self.arrivals):
            share = self.num_tokens / len(self.arrivals)
            return [(arrival.time, share) for arrival in self.arrivals]
        return [(arrival.time, float(arrival.num_tokens or 0)) for arrival in self.arrivals]


def duration_of(figures: Sequence[RequestFigures]) -> float:
    """Seconds from the first request's start to the last one's end; 0 without requests."""
    if not figures:
        return 0.0
    return max(each.ended for each in figures) - min(each.started for each in figures)
