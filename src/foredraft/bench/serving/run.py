"""One benchmark of a server from warm-up to figures."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from foredraft.bench.serving.client import ServingClient
from foredraft.bench.serving.datasets import WorkItem, warm_up_items
from foredraft.bench.serving.figures import RequestFigures
from foredraft.bench.serving.load import Load
from foredraft.bench.serving.metrics import ServerCounters, SpeculationFigures, speculation_between
from foredraft.bench.serving.request_body import RequestOptions
from foredraft.errors import ForedraftError

SETTLE_TRIES = 20
SETTLE_SECONDS = 0.1


@dataclass(frozen=True)
class ServingRun:
    """What each request came to, the seconds that all took, and how drafts fared; `no_speculation` says why not."""

    model: str
    marks: tuple[str, ...]
    figures: list[RequestFigures]
    duration: float
    speculation: SpeculationFigures | None
    no_speculation: str


async def run_serving(
    client: ServingClient,
    items: Sequence[WorkItem],
    options: RequestOptions,
    load: Load,
    *,
    model: str | None = None,
    num_warm_up: int = 0,
    on_end: Callable[[], None] = lambda: None,
) -> ServingRun:
    """Send the requests; the first model of the server if none is named.

    The warm-up sends other requests of the same kind one after another, before anything is counted. Raises ConfigError
    for items that the endpoint cannot take, ForedraftError if the server names no model or a warm-up request fails.
    """
    options.check(items)
    served = await client.served_model(model)
    name = served.name

    async def send(item: WorkItem, index: int) -> RequestFigures:
        num_sent = len(item.prompt) if isinstance(item.prompt, tuple) else None
        return await client.send(options.endpoint, options.body(item, index, name), num_sent)

    for index, item in enumerate(warm_up_items(items, num_warm_up)):
        if (failure := (await send(item, index)).failure) is not None:
            raise ForedraftError(f"warm-up request {index + 1} failed: {failure.kind}: {failure.message}")
    before = await _settled(client)
    started = client.clock()
    figures = await load.drive(len(items), lambda index: send(items[index], index), clock=client.clock, on_end=on_end)
    duration = max((each.ended for each in figures), default=started) - started
    speculation, reason = speculation_between(before, await _settled(client))
    return ServingRun(name, served.marks, figures, duration, speculation, reason)


async def _settled(client: ServingClient) -> ServerCounters | None:
    """The counters once no request is open: an answer may reach its client before the step is counted."""
    counters = ServerCounters.read(await client.metrics())
    for _ in range(SETTLE_TRIES):
        if counters is None or not counters.num_open:
            break
        await asyncio.sleep(SETTLE_SECONDS)
        counters = ServerCounters.read(await client.metrics())
    return counters
