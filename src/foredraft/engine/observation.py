"""What an engine that serves tells whoever watches it: its state after each step, and the times of each request."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from foredraft.statistics import EngineStats
from foredraft.stopping import FinishReason


@dataclass(frozen=True)
class EngineSnapshot:
    """The engine after a step.

    cache_usage: share of the cache blocks that requests hold, from 0 to 1, of the group that is fullest.
    stats: totals since the start, up to and including this step, those of requests that still run too. A copy.
    """

    num_running: int
    num_waiting: int
    cache_usage: float
    stats: EngineStats

    @property
    def depths(self) -> Mapping[int, int]:
        """How many cycles had so many draft tokens since the start; 0 is plain decoding."""
        return dict(enumerate(self.stats.speculation.cycles_by_depth))


@dataclass(frozen=True)
class ChoiceTimes:
    """When things happened to one choice of a request that has ended: seconds of `time.perf_counter`.

    arrival: it was handed in; started: a step first ran it; first_token, last_token: a step committed them; ended: with
    or without a token. None for what never happened. num_prompt_tokens is 0 for all choices but the first.
    """

    arrival: float
    started: float | None
    first_token: float | None
    last_token: float | None
    ended: float
    num_prompt_tokens: int
    num_generated_tokens: int
    finish_reason: FinishReason


class Observer(Protocol):
    """Is told by the thread of the engine, so each method must be quick, and must not fail."""

    def observe_step(self, snapshot: EngineSnapshot) -> None:
        """A step has ended, or the engine has become idle."""

    def observe_gap(self, seconds: float, num_tokens: int) -> None:
        """A choice that had tokens got `num_tokens` more in one step, `seconds` after those before them."""

    def observe_end(self, times: ChoiceTimes) -> None:
        """A choice has ended."""
