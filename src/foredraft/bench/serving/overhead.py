"""What HTTP costs: the same work in process and through a server, in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Protocol

from rich import box
from rich.table import Table

from foredraft import LLM, SamplingParams
from foredraft.bench.offline import run_closed_loop
from foredraft.bench.serving.client import ServingClient
from foredraft.bench.serving.datasets import WorkItem
from foredraft.bench.serving.figures import RequestFigures, duration_of
from foredraft.bench.serving.load import Load
from foredraft.bench.serving.request_body import RequestOptions
from foredraft.bench.serving.run import run_serving
from foredraft.errors import ForedraftError


class Side(Protocol):
    """One way to do the work."""

    @property
    def name(self) -> str:
        """What the report calls it."""

    def run(self, salt: str) -> list[RequestFigures]:
        """Continue all prompts greedily, each to its full length, whatever EOS says.

        Requests share cached rows only with those of the same salt.
        """


class OfflineSide:
    """In process: a closed loop of `concurrency` requests."""

    name = "offline"

    def __init__(self, llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int, concurrency: int) -> None:
        self._llm, self._prompts = llm, prompts
        self._max_tokens, self._concurrency = max_tokens, concurrency

    def run(self, salt: str) -> list[RequestFigures]:
        """See `Side`."""
        params = SamplingParams(max_tokens=self._max_tokens, ignore_eos=True, cache_salt=salt)
        return run_closed_loop(self._llm, self._prompts, params, self._concurrency)


class ServerSide:
    """Over HTTP: streams of /v1/completions that name the token ids, `concurrency` open at once."""

    name = "server"

    def __init__(
        self,
        base_url: str,
        prompts: Sequence[Sequence[int]],
        max_tokens: int,
        concurrency: int,
        *,
        model: str | None = None,
        api_key: str | None = None,
    ) -> None:
        self._base_url, self._model, self._api_key = base_url, model, api_key
        self._items = [WorkItem(tuple(prompt), max_tokens) for prompt in prompts]
        self._load = Load(max_concurrency=concurrency)

    def run(self, salt: str) -> list[RequestFigures]:
        """See `Side`."""
        return asyncio.run(self._run(salt))

    async def _run(self, salt: str) -> list[RequestFigures]:
        extra = {"cache_salt": salt, "return_token_ids": True}
        options = RequestOptions(ignore_eos=True, extra_body=extra)
        async with ServingClient(self._base_url, api_key=self._api_key) as client:
            return (await run_serving(client, self._items, options, self._load, model=self._model)).figures


@dataclass
class SideResult:
    """Tokens a second of each round, and the tokens of the last one."""

    name: str
    tokens_per_second: list[float] = field(default_factory=list)
    token_ids: list[tuple[int, ...]] = field(default_factory=list)
    is_repeatable: bool = True

    @property
    def median_tokens_per_second(self) -> float:
        return median(self.tokens_per_second)

    def add(self, figures: Sequence[RequestFigures], num_tokens: int) -> None:
        """Count a round. Raises ForedraftError for a request that failed, or is not `num_tokens` tokens."""
        for index, each in enumerate(figures):
            if each.failure is not None:
                raise ForedraftError(f"{self.name}, prompt {index}: {each.failure.kind}: {each.failure.message}")
            if each.token_ids is None:
                raise ForedraftError(f"{self.name}, prompt {index}: return_token_ids had no effect")
            if len(each.token_ids) != num_tokens:
                raise ForedraftError(
                    f"{self.name}, prompt {index}: {len(each.token_ids)} tokens instead of {num_tokens}"
                )
        token_ids = [each.token_ids or () for each in figures]
        self.is_repeatable &= not self.token_ids or token_ids == self.token_ids
        self.token_ids = token_ids
        self.tokens_per_second.append(num_tokens * len(figures) / duration_of(figures))


@dataclass(frozen=True)
class OverheadResult:
    """Both sides, offline first."""

    offline: SideResult
    server: SideResult

    @property
    def ratio(self) -> float:
        """Of the medians of tokens a second: server to offline."""
        return self.server.median_tokens_per_second / self.offline.median_tokens_per_second

    @property
    def num_identical(self) -> int:
        """For how many prompts both gave the same tokens."""
        return sum(ours == theirs for ours, theirs in zip(self.offline.token_ids, self.server.token_ids))

    @property
    def is_identical(self) -> bool:
        """Both gave the same tokens for every prompt, in every round."""
        sides = (self.offline, self.server)
        return self.num_identical == len(self.offline.token_ids) and all(side.is_repeatable for side in sides)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "ratio": self.ratio,
            "is_identical": self.is_identical,
            "num_identical": self.num_identical,
            "num_prompts": len(self.offline.token_ids),
            "sides": [
                {
                    "name": side.name,
                    "median_tokens_per_second": side.median_tokens_per_second,
                    "tokens_per_second": side.tokens_per_second,
                }
                for side in (self.offline, self.server)
            ],
        }

    def table(self) -> Table:
        """A line for each side; Markdown as well."""
        table = Table("", box=box.MARKDOWN)
        for heading in ("tokens/s, median", "least", "most", "x offline", "identical"):
            table.add_column(heading, justify="right")
        number = len(self.offline.token_ids)
        for side, ratio, same in ((self.offline, 1.0, number), (self.server, self.ratio, self.num_identical)):
            speeds = side.tokens_per_second
            cells = (side.median_tokens_per_second, min(speeds), max(speeds))
            table.add_row(side.name, *(f"{cell:.1f}" for cell in cells), f"{ratio:.3f}", f"{same} of {number}")
        return table


def measure_overhead(offline: Side, server: Side, rounds: Iterable[int], num_tokens: int) -> OverheadResult:
    """Let both do the same work in turn, once for each of `rounds`; who is first alternates. Each warms up once.

    num_tokens: of each prompt's continuation. While one works the other is idle. In each round both find nothing of an
    earlier one in their cache.
    """
    result = OverheadResult(SideResult(offline.name), SideResult(server.name))
    turns = [(offline, result.offline), (server, result.server)]
    for side, counted in turns:
        SideResult(counted.name).add(side.run("warm-up"), num_tokens)
    for index in rounds:
        for side, counted in turns if index % 2 == 0 else turns[::-1]:
            counted.add(side.run(f"round {index}"), num_tokens)
    return result
