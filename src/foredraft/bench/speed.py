"""Tokens per second of plain decoding, of each depth, and of transformers, measured side by side."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rich import box
from rich.table import Table

from foredraft.bench.variants import Generation, Variant
from foredraft.errors import ForedraftError
from foredraft.statistics import SpeculationStats


@dataclass
class VariantResult:
    """Figures of one variant: an entry for each batch; how the drafts of all of them fared (None: not our engine)."""

    name: str
    tokens_per_second: list[float] = field(default_factory=list)
    token_ids: list[tuple[int, ...]] = field(default_factory=list)
    speculation: SpeculationStats | None = None

    @property
    def median_tokens_per_second(self) -> float:
        return median(self.tokens_per_second)

    @property
    def mean_acceptance_length(self) -> float | None:
        return self.speculation.mean_acceptance_length if self.speculation and self.speculation.num_drafts else None

    def add(self, generation: Generation, num_tokens: int) -> None:
        """Count one batch. Raises ForedraftError if it is not `num_tokens` tokens for each prompt."""
        lengths = {len(tokens) for tokens in generation.token_ids}
        if lengths != {num_tokens}:
            raise ForedraftError(
                f"{self.name} made {min(lengths)} tokens for a prompt instead of {num_tokens}: "
                f"do prompt and tokens fit max_model_len?"
            )
        self.token_ids += generation.token_ids
        self.tokens_per_second.append(num_tokens * len(generation.token_ids) / generation.seconds)
        if generation.speculation is not None:
            self.speculation = self.speculation or SpeculationStats()
            self.speculation.add(generation.speculation)


@dataclass(frozen=True)
class SpeedResult:
    """Figures of all variants; the first is our plain decoding."""

    variants: list[VariantResult]

    @property
    def plain(self) -> VariantResult:
        return self.variants[0]

    @property
    def is_identical(self) -> bool:
        """Every variant gave the same tokens for every prompt."""
        return all(self.num_identical(variant) == self.num_prompts for variant in self.variants)

    @property
    def num_prompts(self) -> int:
        return len(self.plain.token_ids)

    def num_identical(self, variant: VariantResult) -> int:
        """For how many prompts `variant` gave the tokens of our plain decoding."""
        return sum(tokens == plain for tokens, plain in zip(variant.token_ids, self.plain.token_ids))

    @property
    def fastest_peer(self) -> VariantResult | None:
        peers = [variant for variant in self.variants if variant.speculation is None]
        return max(peers, key=lambda peer: peer.median_tokens_per_second, default=None)

    def ratios(self, variant: VariantResult) -> tuple[float, float | None]:
        """How many times as fast as our plain decoding, and as the fastest peer (None without peers)."""
        speed, peer = variant.median_tokens_per_second, self.fastest_peer
        return speed / self.plain.median_tokens_per_second, speed / peer.median_tokens_per_second if peer else None

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "is_identical": self.is_identical,
            "num_prompts": self.num_prompts,
            "variants": [self._variant_dict(variant) for variant in self.variants],
        }

    def _variant_dict(self, variant: VariantResult) -> dict[str, Any]:
        to_plain, to_peer = self.ratios(variant)
        return {
            "name": variant.name,
            "median_tokens_per_second": variant.median_tokens_per_second,
            "ratio_to_plain": to_plain,
            "ratio_to_fastest_peer": to_peer,
            "mean_acceptance_length": variant.mean_acceptance_length,
            "num_identical": self.num_identical(variant),
            "tokens_per_second": variant.tokens_per_second,
        }

    def table(self) -> Table:
        """A table that is Markdown as well."""
        headings = ("tokens/s", "x plain", "x transformers", "mean acceptance length", "identical")
        table = Table("variant", box=box.MARKDOWN)
        for heading in headings:
            table.add_column(heading, justify="right")
        for variant in self.variants:
            to_plain, to_peer = self.ratios(variant)
            length = variant.mean_acceptance_length
            table.add_row(
                variant.name,
                f"{variant.median_tokens_per_second:.1f}",
                f"{to_plain:.2f}",
                "" if to_peer is None else f"{to_peer:.2f}",
                "" if length is None else f"{length:.2f}",
                f"{self.num_identical(variant)} of {self.num_prompts}",
            )
        return table


def measure_speed(variants: Sequence[Variant], batches: Iterable[list[list[int]]], num_tokens: int) -> SpeedResult:
    """Run every variant on every batch of prompts, greedily, `num_tokens` tokens each.

    variants: our plain decoding first. They take turns on each batch, in an order that rotates, so that a machine that
    slows down meanwhile slows all alike. Each warms up on the whole first batch, so that graphs of the shapes that it
    meets there are not captured in its time.
    """
    results = [VariantResult(variant.name) for variant in variants]
    for index, batch in enumerate(batches):
        if index == 0:
            for variant in variants:
                variant.generate(batch, num_tokens)
        turns = list(zip(variants, results))
        first = index % len(turns)
        for variant, result in (*turns[first:], *turns[:first]):
            result.add(variant.generate(batch, num_tokens), num_tokens)
    return SpeedResult(results)
