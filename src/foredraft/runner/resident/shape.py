"""The shapes that resident steps are made for; a captured graph serves one of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import NamedTuple

from foredraft.plan import RequestPlan
from foredraft.sampling_params import SamplingParams


class SamplingKind(NamedTuple):
    """What sampling a batch needs: none (greedy), or draws with the filters that any of its requests has."""

    is_sampled: bool = False
    any_top_k: bool = False
    any_top_p: bool = False
    any_min_p: bool = False
    any_typical_p: bool = False

    @classmethod
    def of(cls, params: Sequence[SamplingParams]) -> SamplingKind:
        sampled = [one for one in params if one.temperature]
        if not sampled:
            return GREEDY
        return cls(
            True,
            any(one.top_k > 0 for one in sampled),
            any(one.top_p < 1 for one in sampled),
            any(one.min_p > 0 for one in sampled),
            any(one.typical_p < 1 for one in sampled),
        )


GREEDY = SamplingKind()


class TargetShape(NamedTuple):
    """num_lanes requests of num_rows rows each: the newest token and pending drafts."""

    num_lanes: int
    num_rows: int
    kind: SamplingKind


class DraftShape(NamedTuple):
    """num_lanes windows of at most num_rows rows, and `depth` drafts for each."""

    num_lanes: int
    num_rows: int
    depth: int
    kind: SamplingKind


WINDOW_SIZES = (16, 32, 64)
"""Rows of a window beyond those of steady decoding, where a depth has risen."""
MAX_WINDOW = WINDOW_SIZES[-1]


def lane_sizes(max_num_seqs: int) -> tuple[int, ...]:
    """The numbers of lanes that steps are padded to."""
    sizes = [size for size in (1, 2, 4, 8, *range(16, max_num_seqs, 8)) if size < max_num_seqs]
    return (*sizes, max_num_seqs)


def depth_sizes(max_depth: int) -> tuple[int, ...]:
    """The depths that steps are made for: small ones as they are, since near the end of a sequence others occur."""
    sizes = [size for size in (0, 1, 2, 3, 4, 6, 8, *range(12, max_depth, 4)) if size < max_depth]
    return (*sizes, max_depth)


def padded(count: int, sizes: Sequence[int]) -> int:
    """The smallest of the ascending `sizes` that is not below `count`."""
    return sizes[bisect_left(sizes, count)]


def window_need(plan: RequestPlan) -> int:
    """The most rows that the window of a decode can have, whatever is accepted; 0: it drafts nothing."""
    window = plan.window
    if window is None:
        return 0
    num_modules = len(window.exact.num_exact_rows)
    depth, drafts = min(window.depth, num_modules), plan.num_draft_tokens
    cycle = window.exact.cycle
    if cycle is not None and cycle.depth >= depth and drafts:
        return max(depth, drafts + 1)
    return plan.num_tokens + drafts - window.exact.window_start(depth)
