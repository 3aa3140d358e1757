"""Drafts accepted by depth and by what the cycle before accepted, and what one depth foretells of a smaller one.

A cycle drafts K tokens after the newest one, keeps the first a of them, and adds a token of the target's own; the next
cycle starts after that. So which positions are starts depends on K: a deep cycle that runs over easy text leaves the
hard tokens behind it as starts, and the drafts of depth 1 fare worse the deeper the cycles are, though nothing about
them has changed. In greedy decoding how many drafts from a position are right is a property of that position.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich import box
from rich.table import Table

START = -1
"""In place of the number accepted before: a request's first cycle, which nothing comes before."""
NUM_REPLAYS = 10
SEED = 0


@dataclass
class CycleCounts:
    """Cycles with `depth` drafts, by how many the cycle before accepted (START: none before) and how many they did.

    traces: of each output, the numbers accepted, in order.
    num_left_out: cycles at the end of an output that are not counted, because the limit of tokens left room for fewer
    drafts, or because the end cut them short (then it is known only that the drafts up to there were right).
    """

    depth: int
    counts: dict[tuple[int, int], int] = field(default_factory=dict)
    traces: list[list[int]] = field(default_factory=list)
    num_left_out: int = 0

    def observe(self, previous: int, accepted: int) -> None:
        """Count one cycle."""
        self.counts[previous, accepted] = self.counts.get((previous, accepted), 0) + 1

    def observe_output(self, token_depths: Sequence[int], max_tokens: int) -> None:
        """Count the cycles of one output, drafted at this depth all along.

        token_depths: as in `Choice`. The first token comes from the prefill. A cycle is a run of accepted drafts, at
        depths 1, 2, ..., and the target's own token after them. max_tokens: the most that the output could have had; a
        cycle that has g tokens before it makes no more than max_tokens - g - 1 drafts.
        """
        previous, accepted, begin = START, 0, 1
        trace: list[int] = []
        for index in range(1, len(token_depths)):
            if token_depths[index]:
                accepted += 1
                continue
            if max_tokens - begin - 1 < self.depth:
                self.num_left_out += max_tokens - begin > 1
            else:
                self.observe(previous, accepted)
                trace.append(accepted)
            previous, accepted, begin = accepted, 0, index + 1
        self.num_left_out += accepted > 0
        self.traces.append(trace)

    @property
    def num_cycles(self) -> int:
        return sum(self.counts.values())

    @property
    def first_rate(self) -> float:
        """Share of the cycles in which the first draft was accepted."""
        return self.rates()[0] if self.depth else 0.0

    @property
    def mean_length(self) -> float:
        """Tokens a cycle, the target's own included."""
        return 1.0 + sum(self.rates())

    @property
    def previous(self) -> list[int]:
        """What the cycles before accepted, START first."""
        return sorted({previous for previous, _ in self.counts})

    def num_after(self, previous: int | None = None) -> int:
        """Cycles after one that accepted so many; None: all."""
        return sum(count for (before, _), count in self.counts.items() if previous in (None, before))

    def rates(self, previous: int | None = None) -> list[float]:
        """The share of cycles, of those after `previous` (None: of all), that accepted the draft of each depth."""
        total = max(1, self.num_after(previous))
        rows = [(accepted, count) for (before, accepted), count in self.counts.items() if previous in (None, before)]
        return [sum(n for accepted, n in rows if accepted >= depth) / total for depth in range(1, self.depth + 1)]

    def restart_mix(self) -> dict[int, float]:
        """The share of cycles after each number accepted before."""
        return {previous: self.num_after(previous) / max(1, self.num_cycles) for previous in self.previous}

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "depth": self.depth,
            "num_cycles": self.num_cycles,
            "num_left_out": self.num_left_out,
            "mean_length": self.mean_length,
            "rates": self.rates(),
            "after": [
                {"previous_accepted": name_of(p), "share_of_cycles": share, "rates": self.rates(p)}
                for p, share in self.restart_mix().items()
            ],
        }

    def table(self) -> Table:
        """A table that is Markdown as well: a row for each number accepted before."""
        table = Table("accepted before", box=box.MARKDOWN)
        for heading in (
            "cycles",
            "share of cycles",
            *(f"depth {d}" for d in range(1, self.depth + 1)),
            "tokens a cycle",
        ):
            table.add_column(heading, justify="right")
        rows: list[tuple[str, int | None, float]] = [(name_of(p), p, share) for p, share in self.restart_mix().items()]
        for name, previous, share in (*rows, ("all", None, 1.0)):
            rates = self.rates(previous)
            table.add_row(
                name,
                str(self.num_after(previous)),
                f"{share:.3f}",
                *(f"{rate:.3f}" for rate in rates),
                f"{1 + sum(rates):.2f}",
            )
        return table


def name_of(previous: int) -> str:
    """What tables call it."""
    return "start" if previous == START else str(previous)


@dataclass(frozen=True)
class Forecast:
    """What a depth gives, as foretold from a greater one, and as measured (None: not measured).

    same_starts: the greater depth's own cycles, cut to this one. foretold: from `foretell`.
    """

    depth: int
    source_depth: int
    same_starts: CycleCounts
    foretold: CycleCounts
    measured: CycleCounts | None = None

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Errors are what was expected less what was measured."""
        figures: dict[str, Any] = {"depth": self.depth, "source_depth": self.source_depth}
        for kind in ("same_starts", "foretold", "measured"):
            counts: CycleCounts | None = getattr(self, kind)
            if counts is None:
                continue
            figures[kind] = {"mean_length": counts.mean_length, "first_rate": counts.first_rate}
            if self.measured is not None and kind != "measured":
                figures[kind]["mean_length_error"] = counts.mean_length - self.measured.mean_length
                figures[kind]["first_rate_error"] = counts.first_rate - self.measured.first_rate
        return figures


def forecast(source: CycleCounts, depth: int, measured: CycleCounts | None) -> Forecast:
    """Foretell `depth` from the cycles of a greater one."""
    same_starts = CycleCounts(depth)
    for (previous, accepted), count in source.counts.items():
        key = min(previous, depth), min(accepted, depth)
        same_starts.counts[key] = same_starts.counts.get(key, 0) + count
    return Forecast(depth, source.depth, same_starts, foretell(source, depth), measured)


def foretell(source: CycleCounts, depth: int) -> CycleCounts:
    """Replay the outputs of depth K at a smaller depth, whose cycles start at other places.

    It is assumed that a draft is right from any start if one at depth K was right from its own, and wrong if that was
    wrong. Of the token after K accepted drafts it is not known whether a draft would have been right: it is taken to be
    as often as the first draft after such a cycle is, by chance, and the replay is repeated NUM_REPLAYS times.

    So it is a little low where a nearer draft gets right what a further one did not. At temperatures above 0, where
    drafts are accepted by chance, it is no more than an estimate.
    """
    result, draw = CycleCounts(depth), random.Random(SEED)
    bonus_rate = source.rates(source.depth if source.depth in source.previous else None)[0]
    for trace in (trace for _ in range(NUM_REPLAYS) for trace in source.traces):
        is_right: list[bool] = []
        for accepted in trace:
            is_right += [True] * accepted
            is_right.append(accepted == source.depth and draw.random() < bonus_rate)
        previous, start = START, 0
        while start + depth < len(is_right):
            accepted = 0
            while accepted < depth and is_right[start + accepted]:
                accepted += 1
            result.observe(previous, accepted)
            previous, start = accepted, start + accepted + 1
    return result


def forecast_table(forecasts: Sequence[Forecast]) -> Table:
    """A table that is Markdown as well: what each depth was foretold to give, and what it gave."""
    table = Table("K", box=box.MARKDOWN)
    columns = ("figure", "measured", "same starts", "error", "foretold", "error")
    for heading in columns:
        table.add_column(heading, justify="right")
    for one in forecasts:
        for name in ("mean_length", "first_rate"):
            measured = None if one.measured is None else float(getattr(one.measured, name))
            cells = ["" if measured is None else f"{measured:.3f}"]
            for counts in (one.same_starts, one.foretold):
                value = float(getattr(counts, name))
                cells += [f"{value:.3f}", "" if measured is None else f"{value - measured:+.3f}"]
            label = "tokens a cycle" if name == "mean_length" else "rate at depth 1"
            table.add_row(str(one.depth), label, *cells)
    return table
