"""When requests are sent: arrivals by their seed, and how many are open, against a clock that the test moves."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest

from foredraft.bench.serving.figures import RequestFigures
from foredraft.bench.serving.load import Load
from foredraft.errors import ConfigError


def test_all_at_once_without_a_rate() -> None:
    assert Load().arrivals(3) == [0.0, 0.0, 0.0]


def test_arrivals_are_those_of_their_seed_and_rate() -> None:
    arrivals = Load(4.0, seed=1).arrivals(20_000)
    assert arrivals[0] == 0.0
    assert arrivals == sorted(arrivals) == Load(4.0, seed=1).arrivals(20_000)
    assert arrivals != Load(4.0, seed=2).arrivals(20_000)
    assert arrivals[:100] == Load(4.0, seed=1).arrivals(100)
    assert (Load(4.0).arrivals(0), Load(4.0).arrivals(1)) == ([], [0.0])


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gaps_have_the_mean_of_the_rate_and_the_spread_of_burstiness(burstiness: float) -> None:
    gaps = np.diff(Load(4.0, burstiness, seed=5).arrivals(40_000))
    spread = 1 / math.sqrt(burstiness)  # a gamma distribution's standard deviation, in means
    assert gaps.mean() == pytest.approx(0.25, rel=5 * spread / math.sqrt(40_000))
    assert gaps.std() / gaps.mean() == pytest.approx(spread, rel=0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"request_rate": 0.0}, "request_rate must be more than 0"),
        ({"request_rate": math.nan}, "request_rate must be more than 0"),
        ({"request_rate": 1.0, "burstiness": 0.0}, "burstiness must be a number above 0"),
        ({"burstiness": 2.0}, "burstiness has no effect without request_rate"),
        ({"max_concurrency": 0}, "max_concurrency must be at least 1"),
    ],
)
def test_wrong_settings_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Load(**settings)


class World:
    """A clock that moves when everybody sleeps, to the time of the one who wakes first."""

    def __init__(self) -> None:
        self.now = 50.0
        self._sleepers: list[tuple[float, asyncio.Event]] = []

    def clock(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        woken = asyncio.Event()
        self._sleepers.append((self.now + seconds, woken))
        await woken.wait()

    async def run(self, task: asyncio.Task[list[RequestFigures]]) -> list[RequestFigures]:
        while not task.done():
            for _ in range(20):
                await asyncio.sleep(0)
            if self._sleepers:
                self._sleepers.sort(key=lambda sleeper: sleeper[0])
                self.now, woken = self._sleepers.pop(0)
                woken.set()
        return await task


def drive(load: Load, seconds: list[float]) -> tuple[list[RequestFigures], int]:
    """Requests that take so long each; and how many ends were reported."""
    ends: list[None] = []

    async def run() -> list[RequestFigures]:
        world = World()

        async def send(index: int) -> RequestFigures:
            started = world.now
            await world.sleep(seconds[index])
            return RequestFigures(started, world.now, num_tokens=index)

        driven = load.drive(len(seconds), send, clock=world.clock, sleep=world.sleep, on_end=lambda: ends.append(None))
        return await world.run(asyncio.create_task(driven))

    return asyncio.run(run()), len(ends)


def test_requests_are_sent_when_they_arrive_whether_others_have_ended_or_not() -> None:
    load = Load(2.0, seed=7)
    figures, num_ends = drive(load, [100.0, 0.01, 3.0, 0.2])
    assert [each.started - 50.0 for each in figures] == pytest.approx(load.arrivals(4))
    assert [each.num_tokens for each in figures] == [0, 1, 2, 3]
    assert num_ends == 4


def test_no_more_are_open_than_may_be_and_the_next_begins_when_one_ends() -> None:
    figures, _ = drive(Load(max_concurrency=2), [4.0, 1.0, 2.0, 5.0])
    assert [(each.started - 50, each.ended - 50) for each in figures] == [(0, 4), (0, 1), (1, 3), (3, 8)]


def test_with_both_a_request_waits_for_its_arrival_and_for_a_place() -> None:
    load = Load(1.0, max_concurrency=1, seed=3)
    arrivals = load.arrivals(3)
    figures, _ = drive(load, [arrivals[2] + 1.0, 0.5, 0.5])
    started = [each.started - 50 for each in figures]
    assert started == pytest.approx([0.0, arrivals[2] + 1.0, arrivals[2] + 1.5])
