"""What one request does in a step: how many rows of which kind, where they end, and how that is put into a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from foredraft.cache.manager import CacheManager
from foredraft.config import SchedulingPolicy
from foredraft.plan import RequestPlan, WindowPlan
from foredraft.request import Request


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of a step. A full batch of decodes at the largest depth always fits max_num_batched_tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_modules: int
    policy: SchedulingPolicy = "fcfs"


class Share(NamedTuple):
    """What one request does in a step: how many rows the target runs on, and how many module rows are computed late;
    whether the newest token is reached; where its rows end; how many tokens are drafted after it, if it is."""

    num_target_rows: int
    num_lagging_rows: int
    is_sampling: bool
    end: int
    depth: int


class Shares:
    """Works out shares of a step, and plans of them."""

    def __init__(self, cache: CacheManager, limits: SchedulerLimits) -> None:
        self._cache = cache
        self._limits = limits

    def num_passes(self, depth: int) -> int:
        """How many modules run for so many drafts; a single one drafts them all."""
        return min(depth, self._limits.num_modules)

    def of(self, request: Request, depth: int, lagging: int, budget: int) -> Share:
        """What a request may take of `budget` rows. Rows of its modules that lag behind come first."""
        computed, pending = request.num_computed_tokens, request.num_pending_rows
        if pending <= budget and not lagging:
            return Share(pending, 0, True, computed + pending, depth)
        if lagging and lagging + (pending if request.is_decoding else 1) > budget:
            start = request.exact.window_start(self.num_passes(depth))
            num_rows = min(computed - start, budget)
            return Share(0, num_rows, False, start + num_rows, depth)
        num_rows = min(pending, budget - lagging)
        if num_rows < pending:
            num_rows = max(0, min(num_rows, request.num_tokens - 1 - computed))
        return Share(num_rows, lagging, num_rows == pending, computed + num_rows, depth)

    def decode(self, request: Request, depth: int) -> Share:
        """All pending rows of a request in steady decoding."""
        num_rows = request.num_pending_rows
        return Share(num_rows, 0, True, request.num_computed_tokens + num_rows, depth)

    def ends(self, request: Request, depth: int, end: int) -> tuple[int, int]:
        """Where room for rows is needed up to: `end` in the target and, if the request drafts, in the modules.

        A single module that drafts several tokens also writes a row for each further one.
        """
        if depth == 0:
            return end, 0
        if depth <= self._limits.num_modules:
            return end, end
        return end, min(end + depth - 1, request.max_total_tokens)

    def plan(self, request: Request, share: Share) -> RequestPlan:
        first, drafts = request.num_computed_tokens, request.draft_token_ids
        pending = (*request.token_ids[first:], *drafts)
        return RequestPlan(
            terms=request.terms,
            token_ids=pending[: share.num_target_rows],
            first_row=first,
            num_draft_tokens=len(drafts) if share.is_sampling else 0,
            num_tokens=request.num_tokens,
            is_sampling=share.is_sampling,
            blocks=self._cache.block_tables(request.request_id),
            window=self._window_plan(request, share),
            num_state_rows=request.num_state_rows,
        )

    def _window_plan(self, request: Request, share: Share) -> WindowPlan | None:
        num_passes = self.num_passes(share.depth)
        if num_passes == 0:
            return None
        start = request.exact.window_start(num_passes)
        known = request.num_tokens if share.is_sampling else share.end + num_passes
        depth = share.depth if share.is_sampling else num_passes
        return WindowPlan(start, share.end, tuple(request.token_ids[start + 1 : known]), request.exact, depth)
