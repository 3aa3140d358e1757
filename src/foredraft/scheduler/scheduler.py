"""Continuous batching under a token budget: the only place that changes a request."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from foredraft.cache.manager import CacheManager
from foredraft.exactness import ExactRows
from foredraft.plan import RequestPlan, RequestResult, StepPlan, StepResult, WindowPlan
from foredraft.request import Request, RequestStatus
from foredraft.stopping import FinishReason, first_stop


@dataclass(frozen=True)
class SchedulerLimits:
    """Bounds of a step. A full batch of decodes at the largest depth always fits max_num_batched_tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    num_modules: int


@dataclass(frozen=True)
class Committed:
    """What a step added to one request: tokens (with the depth each was accepted at, 0 for the target's own)."""

    request: Request
    token_ids: tuple[int, ...]
    token_depths: tuple[int, ...]


@dataclass(frozen=True)
class _Share:
    """Rows of one request in a step: target rows, module rows computed again, whether the newest token is reached."""

    num_target_rows: int
    num_lagging_rows: int
    is_sampling: bool
    end: int


class Scheduler:
    """Plans steps and commits their results.

    Requests run in order of arrival. A decode takes all of its rows (newest token and pending drafts) or waits: drafts
    are never cut to fit a batch, so that a request returns the same tokens in any company. When blocks run out, the
    request that arrived last gives up its own and starts over from its tokens, pending drafts included.
    """

    def __init__(self, cache: CacheManager, limits: SchedulerLimits) -> None:
        self._cache = cache
        self._limits = limits
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self.num_preemptions = 0

    @property
    def num_modules(self) -> int:
        return self._limits.num_modules

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def unfinished_ids(self) -> list[str]:
        return list(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._waiting.append(request)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def set_depth(self, request_id: str, depth: int) -> None:
        """Draft `depth` tokens a step from the next step on; 0 stops drafting. The caller has checked the bound."""
        self._requests[request_id].depth = depth

    def abort(self, request_id: str) -> Request | None:
        """End a request now; None if it is not there (any more)."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT)
        return request

    # -- planning ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Choose the rows of the next step: steady decodes first, then chunks and rebuilds, then new requests."""
        planned: dict[str, RequestPlan] = {}
        budget = self._limits.max_num_batched_tokens
        preempted = self.num_preemptions
        steady = [r for r in self._running if r.is_decoding and not self._num_lagging_rows(r)]
        for request in [*steady, *(r for r in self._running if r not in steady)]:
            if request.status is RequestStatus.RUNNING:
                budget -= self._plan_request(request, budget, planned)
        if self.num_preemptions == preempted:
            self._admit(budget, planned)
        return StepPlan(tuple(planned.values()))

    def _admit(self, budget: int, planned: dict[str, RequestPlan]) -> None:
        """Start waiting requests, in order, as long as the whole of what they hold so far fits the cache.

        Room for the first chunk alone would let requests in that must push each other out again.
        """
        while self._waiting and budget > 0 and len(self._running) < self._limits.max_num_seqs:
            request = self._waiting[0]
            if not self._reserve(request, request.num_tokens + len(request.draft_token_ids)):
                break
            share = self._share(request, budget)
            self._waiting.popleft()
            request.status = RequestStatus.RUNNING
            self._running.append(request)
            self._running.sort(key=lambda running: running.arrival)
            planned[request.request_id] = self._request_plan(request, share)
            budget -= share.num_target_rows + share.num_lagging_rows

    def _plan_request(self, request: Request, budget: int, planned: dict[str, RequestPlan]) -> int:
        """Add a running request to the step if rows and blocks allow; returns the rows that it takes."""
        share = self._share(request, budget)
        num_rows = share.num_target_rows + share.num_lagging_rows
        if num_rows == 0:
            return 0
        while not self._reserve(request, max(request.num_computed_tokens, share.end)):
            victim = self._last_arrival_after(request, planned)
            if victim is None:
                return 0
            self.preempt(victim)
        planned[request.request_id] = self._request_plan(request, share)
        return num_rows

    def _num_lagging_rows(self, request: Request) -> int:
        """Module rows to compute again beyond the few of a steady decode: a spell at a smaller depth left them."""
        depth = self._module_depth(request)
        if depth == 0:
            return 0
        return max(0, request.num_computed_tokens - request.exact.window_start(depth) - depth)

    def _module_depth(self, request: Request) -> int:
        return min(request.useful_depth, self._limits.num_modules)

    def _share(self, request: Request, budget: int) -> _Share:
        """What a request may take of `budget` rows. Rows of its modules that lag behind come first."""
        computed, lagging = request.num_computed_tokens, self._num_lagging_rows(request)
        smallest = request.num_pending_rows if request.is_decoding else 1
        if lagging and lagging + smallest > budget:
            start = request.exact.window_start(self._module_depth(request))
            num_rows = min(computed - start, budget)
            return _Share(0, num_rows, False, start + num_rows)
        num_rows = min(request.num_pending_rows, budget - lagging)
        if num_rows < request.num_pending_rows:
            num_rows = min(num_rows, request.num_tokens - 1 - computed)
        return _Share(num_rows, lagging, num_rows == request.num_pending_rows, computed + num_rows)

    def _reserve(self, request: Request, num_rows: int) -> bool:
        """Take blocks for rows 0..num_rows-1 of the target and, if the request drafts, of the modules.

        A single module that drafts several tokens also writes a row for each further one.
        """
        num_module_rows = 0
        depth = request.useful_depth
        if depth > 0:
            num_further = depth - 1 if depth > self._limits.num_modules else 0
            num_module_rows = min(num_rows + num_further, request.max_total_tokens)
        return self._cache.reserve(request.request_id, num_rows, num_module_rows)

    def _last_arrival_after(self, request: Request, planned: dict[str, RequestPlan]) -> Request | None:
        """Who gives way to `request`: the latest arrival after it that is not in the step yet."""
        later = (r for r in reversed(self._running) if r.arrival > request.arrival)
        return next((r for r in later if r.request_id not in planned), None)

    def preempt(self, request: Request) -> None:
        """Take a request's blocks away. Its tokens and pending drafts stay; all rows are computed again later."""
        self._cache.release(request.request_id)
        self._running.remove(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = 0
        request.exact = ExactRows.none(self._limits.num_modules)
        self._waiting = deque(sorted((request, *self._waiting), key=lambda waiting: waiting.arrival))
        self.num_preemptions += 1

    def _request_plan(self, request: Request, share: _Share) -> RequestPlan:
        tables = self._cache.tables(request.request_id)
        first = request.num_computed_tokens
        pending = [*request.token_ids[first:], *request.draft_token_ids]
        return RequestPlan(
            request_id=request.request_id,
            token_ids=tuple(pending[: share.num_target_rows]),
            first_row=first,
            num_draft_tokens=len(request.draft_token_ids) if share.is_sampling else 0,
            num_tokens=request.num_tokens,
            max_total_tokens=request.max_total_tokens,
            is_sampling=share.is_sampling,
            target_blocks=tuple(tables.target),
            module_blocks=tuple(tables.module),
            window=self._window_plan(request, share),
            params=request.params,
            seed=request.seed,
            stop_token_ids=request.stop_token_ids,
        )

    def _window_plan(self, request: Request, share: _Share) -> WindowPlan | None:
        depth = self._module_depth(request)
        if depth == 0:
            return None
        start = request.exact.window_start(depth)
        known = request.num_tokens if share.is_sampling else share.end + depth
        return WindowPlan(
            start=start,
            end=share.end,
            token_ids=tuple(request.token_ids[start + 1 : known]),
            exact=request.exact,
            depth=request.useful_depth if share.is_sampling else depth,
        )

    # -- committing --------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult) -> list[Committed]:
        """Apply a step's result token by token; results of requests that have ended meanwhile are dropped."""
        committed = []
        for request_plan, outcome in zip(plan.requests, result.requests):
            request = self._requests.get(request_plan.request_id)
            if request is None:
                continue
            if request_plan.is_sampling:
                committed.append(self._commit_tokens(request, request_plan, outcome))
            else:
                self._commit_rows(request, request_plan)
        return committed

    def _commit_rows(self, request: Request, plan: RequestPlan) -> None:
        request.num_computed_tokens += len(plan.token_ids)
        if plan.window is not None:
            request.stats.num_rebuilt_rows += min(plan.first_row, plan.window.end) - plan.window.start
            request.exact = request.exact.after_rows(request.num_tokens, plan.window.end, plan.window.depth)

    def _commit_tokens(self, request: Request, plan: RequestPlan, outcome: RequestResult) -> Committed:
        num_accepted = outcome.num_accepted
        kept, reason = first_stop(
            outcome.token_ids, request.num_tokens, request.max_total_tokens, request.stop_token_ids
        )
        depths = (*range(1, num_accepted + 1), 0)
        committed = Committed(request, outcome.token_ids[:kept], depths[:kept])
        request.stats.observe(plan.num_draft_tokens, min(num_accepted, kept))
        request.token_ids += committed.token_ids
        request.token_depths += committed.token_depths
        request.num_computed_tokens = request.num_tokens - 1
        request.exact = request.exact.after_verify(num_accepted)
        request.draft_token_ids = outcome.draft_token_ids
        if outcome.draft_token_ids and plan.window is not None:
            depth = min(len(outcome.draft_token_ids), self._limits.num_modules)
            request.stats.num_rebuilt_rows += plan.first_row - request.exact.window_start(depth)
            request.exact = request.exact.after_draft(request.num_tokens, request.num_computed_tokens, depth)
        if reason is not None:
            self._finish(request, reason)
        return committed

    def _finish(self, request: Request, reason: FinishReason) -> None:
        self._cache.release(request.request_id)
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.draft_token_ids = ()

    def requests(self) -> Iterable[Request]:
        """All requests that have not ended."""
        return self._requests.values()
