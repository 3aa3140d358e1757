"""Counts and times of speculative decoding, per request and for a whole engine."""

from __future__ import annotations

import itertools
from dataclasses import asdict, dataclass, field
from typing import Any

from foredraft.plan import StepTimes


@dataclass
class SpeculationStats:
    """How drafts fared.

    num_cycles counts verifications, with and without drafts, and num_drafts those with at least one draft token.
    drafted_by_depth[d-1] and accepted_by_depth[d-1] count draft tokens made and accepted at depth d.
    num_rebuilt_rows: module rows computed late or again, after a rejection or a spell at a smaller depth.
    num_proposed_tokens: draft tokens made, with those that were never verified because the request ended first.
    """

    num_cycles: int = 0
    num_drafts: int = 0
    num_rebuilt_rows: int = 0
    num_proposed_tokens: int = 0
    drafted_by_depth: list[int] = field(default_factory=list)
    accepted_by_depth: list[int] = field(default_factory=list)

    def observe(self, num_draft_tokens: int, num_accepted: int) -> None:
        """Count one verification of `num_draft_tokens` drafts."""
        self.num_cycles += 1
        self.num_drafts += num_draft_tokens > 0
        if num_draft_tokens > len(self.drafted_by_depth):
            self._grow(num_draft_tokens)
        for depth in range(num_draft_tokens):
            self.drafted_by_depth[depth] += 1
        for depth in range(num_accepted):
            self.accepted_by_depth[depth] += 1

    def add(self, other: SpeculationStats) -> None:
        """Add the counts of `other`."""
        self.num_cycles += other.num_cycles
        self.num_drafts += other.num_drafts
        self.num_rebuilt_rows += other.num_rebuilt_rows
        self.num_proposed_tokens += other.num_proposed_tokens
        self._grow(len(other.drafted_by_depth))
        for depth, (drafted, accepted) in enumerate(zip(other.drafted_by_depth, other.accepted_by_depth)):
            self.drafted_by_depth[depth] += drafted
            self.accepted_by_depth[depth] += accepted

    def _grow(self, depth: int) -> None:
        missing = depth - len(self.drafted_by_depth)
        self.drafted_by_depth.extend([0] * missing)
        self.accepted_by_depth.extend([0] * missing)

    @property
    def cycles_by_depth(self) -> list[int]:
        """How many cycles had exactly d draft tokens, for d = 0, 1, ...: the depths that were chosen."""
        at_least = [self.num_cycles, *self.drafted_by_depth, 0]
        return [more - deeper for more, deeper in itertools.pairwise(at_least)]

    @property
    def num_drafted_tokens(self) -> int:
        return sum(self.drafted_by_depth)

    @property
    def num_accepted_tokens(self) -> int:
        return sum(self.accepted_by_depth)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per verification that had drafts, the bonus or recovered token included."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0

    @property
    def accepted_rates(self) -> list[float]:
        """Share of the cycles with drafts in which the draft of depth d was accepted."""
        return [accepted / self.num_drafts for accepted in self.accepted_by_depth]

    @property
    def conditional_rates(self) -> list[float]:
        """Share of the drafts of depth d accepted, among those whose predecessor was (depth 1: among all)."""
        reached = [self.num_drafts, *self.accepted_by_depth]
        return [accepted / max(1, before) for accepted, before in zip(self.accepted_by_depth, reached)]

    def to_dict(self) -> dict[str, Any]:
        """Counts, and the rates that follow from them, for JSON."""
        return asdict(self) | {
            "num_drafted_tokens": self.num_drafted_tokens,
            "num_accepted_tokens": self.num_accepted_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
            "accepted_rates": self.accepted_rates,
            "conditional_rates": self.conditional_rates,
        }


@dataclass
class EngineStats:
    """Totals of an engine since it was made or since `LLM.reset_stats`. Times in seconds.

    Of num_queried_tokens prompt tokens of requests that have started, num_cached_tokens had their rows in the cache.
    verification: the method that decides which drafts are kept. num_masks grammar masks took mask_seconds, which are
    part of verification and drafting.
    """

    verification: str = "rejection"
    speculation: SpeculationStats = field(default_factory=SpeculationStats)
    num_steps: int = 0
    num_requests: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_queried_tokens: int = 0
    num_cached_tokens: int = 0
    target_seconds: float = 0.0
    verification_seconds: float = 0.0
    drafting_seconds: float = 0.0
    host_seconds: float = 0.0
    num_masks: int = 0
    mask_seconds: float = 0.0

    def observe_step(self, times: StepTimes, total_seconds: float) -> None:
        """Count one step that took `total_seconds` in all; what is in none of the runner's parts is the host's."""
        self.num_steps += 1
        self.target_seconds += times.target
        self.verification_seconds += times.verification
        self.drafting_seconds += times.drafting
        self.num_masks += times.num_masks
        self.mask_seconds += times.masks
        # Where steps overlap, part of a step's time on the device was before the step that counts it.
        self.host_seconds += max(0.0, total_seconds - times.target - times.verification - times.drafting)
