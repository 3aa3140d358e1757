"""When requests are sent: arrivals at a rate, and a bound on how many are open."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np

from foredraft.bench.serving.figures import RequestFigures
from foredraft.errors import ConfigError


@dataclass(frozen=True)
class Load:
    """How requests arrive. Raises ConfigError.

    request_rate: arrivals a second; infinity sends all at once. Gaps between them are drawn from a gamma distribution
    with the mean 1 / rate and the shape `burstiness`: 1 is a Poisson process, less comes in bursts, more is steadier.
    max_concurrency: how many may be open; an arrival beyond it waits here, and its times begin when it is sent.
    """

    request_rate: float = math.inf
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(f"request_rate must be more than 0, or inf, not {self.request_rate}")
        if not (self.burstiness > 0 and math.isfinite(self.burstiness)):
            raise ConfigError(f"burstiness must be a number above 0, not {self.burstiness}")
        if self.burstiness != 1.0 and math.isinf(self.request_rate):
            raise ConfigError("burstiness has no effect without request_rate")
        if self.max_concurrency is not None and self.max_concurrency < 1:
            raise ConfigError(f"max_concurrency must be at least 1, not {self.max_concurrency}")

    def arrivals(self, count: int) -> list[float]:
        """When each request arrives, in seconds after the first; the same for the same seed."""
        if math.isinf(self.request_rate):
            return [0.0] * count
        random = np.random.default_rng(self.seed)
        gaps = random.gamma(self.burstiness, 1 / (self.request_rate * self.burstiness), max(0, count - 1))
        return [0.0, *np.cumsum(gaps).tolist()][:count]

    async def drive(
        self,
        count: int,
        send: Callable[[int], Awaitable[RequestFigures]],
        *,
        clock: Callable[[], float],
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
        on_end: Callable[[], None] = lambda: None,
    ) -> list[RequestFigures]:
        """Send requests 0 to count - 1, each at its time, and wait for all; what each came to, in that order.

        No more tasks exist than requests are open. on_end is called after each. clock: seconds, as `send` uses.
        """
        figures: dict[int, RequestFigures] = {}
        places = asyncio.Semaphore(self.max_concurrency) if self.max_concurrency is not None else None

        async def run(index: int) -> None:
            try:
                figures[index] = await send(index)
            finally:
                if places is not None:
                    places.release()
            on_end()

        started = clock()
        async with asyncio.TaskGroup() as tasks:
            for index, arrival in enumerate(self.arrivals(count)):
                if (delay := started + arrival - clock()) > 0:
                    await sleep(delay)
                if places is not None:
                    await places.acquire()
                tasks.create_task(run(index))
        return [figures[index] for index in range(count)]
