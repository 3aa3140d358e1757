"""How drafts fared at a server while a benchmark ran: the difference of its counters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from rich import box
from rich.table import Table

from foredraft.statistics import SpeculationStats

PREFIXES = ("foredraft:", "vllm:")
MAX_POSITION = 1024


@dataclass(frozen=True)
class ServerCounters:
    """Counters of speculation that a page /metrics shows, summed over their labels, and requests in the engine.

    accepted_by_position[i], drafted_by_position[i]: of draft tokens at depth i + 1; the latter is empty for a server
    that does not count them. num_open: requests that run or wait, None if the page does not say.
    """

    prefix: str
    num_drafts: float
    num_draft_tokens: float
    num_accepted_tokens: float
    accepted_by_position: tuple[float, ...]
    drafted_by_position: tuple[float, ...]
    num_open: float | None

    @classmethod
    def read(cls, page: str | None) -> ServerCounters | None:
        """Of a page in Prometheus' text format; None if there is no page, or none of the counters is on it."""
        if page is None:
            return None
        try:
            totals = _totals(page)
        except (ValueError, LookupError):  # not such a page at all
            return None
        for prefix in PREFIXES:
            name = f"{prefix}spec_decode_num_drafts_total"
            if name in totals:
                break
        else:
            return None

        def total(kind: str) -> float:
            return sum(totals.get(f"{prefix}spec_decode_num_{kind}_total", {}).values())

        def by_position(kind: str) -> tuple[float, ...]:
            counts = totals.get(f"{prefix}spec_decode_num_{kind}_per_pos_total", {})
            positions = {int(position): count for position, count in counts.items() if position.isdigit()}
            kept = [position for position in positions if position < MAX_POSITION]
            return tuple(positions.get(position, 0.0) for position in range(max(kept, default=-1) + 1))

        waiting = [totals.get(f"{prefix}num_requests_{state}") for state in ("running", "waiting")]
        num_open = sum(sum(each.values()) for each in waiting if each is not None) if any(waiting) else None
        return cls(
            prefix,
            total("drafts"),
            total("draft_tokens"),
            total("accepted_tokens"),
            by_position("accepted_tokens"),
            by_position("draft_tokens"),
            num_open,
        )


@dataclass(frozen=True)
class SpeculationFigures:
    """How drafts fared: verifications with drafts, draft tokens made and accepted, and those accepted by depth.

    drafted_by_depth is empty where it was not counted. source: who counted.
    """

    source: str
    num_drafts: int
    num_draft_tokens: int
    num_accepted_tokens: int
    accepted_by_depth: tuple[int, ...]
    drafted_by_depth: tuple[int, ...] = ()

    @classmethod
    def of_stats(cls, stats: SpeculationStats) -> SpeculationFigures:
        """Of our own engine's counts."""
        accepted, drafted = tuple(stats.accepted_by_depth), tuple(stats.drafted_by_depth)
        return cls("engine", stats.num_drafts, stats.num_drafted_tokens, stats.num_accepted_tokens, accepted, drafted)

    @property
    def acceptance_rate(self) -> float | None:
        """Share of the draft tokens that were accepted; None without any."""
        return self.num_accepted_tokens / self.num_draft_tokens if self.num_draft_tokens else None

    @property
    def mean_acceptance_length(self) -> float | None:
        """Tokens per verification with drafts, the recovered or bonus token included; None without any."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else None

    @property
    def accepted_rates(self) -> list[float]:
        """Share of the verifications with drafts in which the draft of depth 1, 2, ... was accepted."""
        return [accepted / self.num_drafts for accepted in self.accepted_by_depth] if self.num_drafts else []

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "source": self.source,
            "num_drafts": self.num_drafts,
            "num_draft_tokens": self.num_draft_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "acceptance_rate": self.acceptance_rate,
            "mean_acceptance_length": self.mean_acceptance_length,
            "accepted_by_depth": list(self.accepted_by_depth),
            "drafted_by_depth": list(self.drafted_by_depth),
            "accepted_rates": self.accepted_rates,
        }

    def table(self) -> Table:
        """Totals and shares by depth; Markdown as well."""
        table = Table("speculation", box=box.MARKDOWN)
        table.add_column("", justify="right")
        rate, length = self.acceptance_rate, self.mean_acceptance_length
        table.add_row("Drafts", str(self.num_drafts))
        table.add_row("Draft tokens", str(self.num_draft_tokens))
        table.add_row("Accepted tokens", str(self.num_accepted_tokens))
        table.add_row("Acceptance rate (%)", "-" if rate is None else f"{100 * rate:.2f}")
        table.add_row("Mean acceptance length", "-" if length is None else f"{length:.2f}")
        for depth, share in enumerate(self.accepted_rates, start=1):
            table.add_row(f"Accepted at depth {depth} (%)", f"{100 * share:.2f}")
        return table


def speculation_between(
    before: ServerCounters | None, after: ServerCounters | None
) -> tuple[SpeculationFigures | None, str]:
    """What happened between two pages; or None and why that cannot be said."""
    if after is None or (before is not None and before.prefix != after.prefix):
        return None, "the server's /metrics has no counters of speculation"
    if before is None:
        return None, "the server's /metrics had no counters of speculation before the run"
    named = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
    drafts, made, kept = (round(getattr(after, name) - getattr(before, name)) for name in named)
    accepted = _differences(before.accepted_by_position, after.accepted_by_position)
    drafted = _differences(before.drafted_by_position, after.drafted_by_position)
    if min([drafts, made, kept, *accepted, *drafted]) < 0:
        return None, "the server's counters went back: it was started again during the run"
    return SpeculationFigures(f"{after.prefix}* of /metrics", drafts, made, kept, accepted, drafted), ""


def _differences(before: Sequence[float], after: Sequence[float]) -> tuple[int, ...]:
    return tuple(round(new - old) for old, new in zip_longest(before, after, fillvalue=0.0))


def _totals(page: str) -> Mapping[str, dict[str, float]]:
    """Of each counter or gauge the values by the label `position` ("" without one), summed over other labels."""
    totals: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(page):
        if family.type not in ("counter", "gauge", "unknown") or not family.name.startswith(PREFIXES):
            continue
        if family.type == "counter":  # one with labels has no sample before it first counts
            totals.setdefault(f"{family.name}_total", {})
        for sample in family.samples:
            counts = totals.setdefault(sample.name, {})
            position = sample.labels.get("position", "")
            counts[position] = counts.get(position, 0.0) + float(sample.value)
    return totals
