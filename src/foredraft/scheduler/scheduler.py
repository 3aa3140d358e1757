"""Continuous batching under a token budget: the only place that changes a request."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from foredraft.cache.block_tables import RowDemand
from foredraft.cache.manager import CacheManager
from foredraft.cache.prefix_match import PrefixMatch
from foredraft.exactness import ExactRows
from foredraft.logprobs import TokenLogprob
from foredraft.plan import AheadPlan, RequestPlan, RequestResult, StepPlan, StepResult
from foredraft.request import Request, RequestStatus
from foredraft.scheduler.lookahead import Lookahead
from foredraft.scheduler.queue import WaitingQueue
from foredraft.scheduler.shares import SchedulerLimits as SchedulerLimits
from foredraft.scheduler.shares import Share, Shares
from foredraft.scheduler.upkeep import CacheUpkeep
from foredraft.statistics import SpeculationStats
from foredraft.stopping import FinishReason

_NO_ENDS: Mapping[str, int] = {}


class Committed(NamedTuple):
    """What a step added to one request: tokens (with the depth each was accepted at, 0 for the target's own), and
    their log-probabilities if they were asked for."""

    request: Request
    token_ids: tuple[int, ...]
    token_depths: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()


class Scheduler:
    """Plans steps and commits their results.

    Requests run in the order of the queue. A decode takes all of its rows (newest token and pending drafts) or waits:
    drafts are never cut to fit a batch, so that a request returns the same tokens in any company. When blocks run out,
    the last request in that order gives up its own and starts over from its tokens, pending drafts included, and from
    what is still cached of them.
    """

    def __init__(self, cache: CacheManager, limits: SchedulerLimits) -> None:
        self._cache = cache
        self._limits = limits
        self._upkeep = CacheUpkeep(cache, limits.num_modules)
        self._waiting = WaitingQueue(limits.policy)
        self._running: list[Request] = []
        self._requests: dict[str, Request] = {}
        self._shares = Shares(cache, limits)
        self._lookahead = Lookahead(cache, self._shares, self._requests)
        self._is_settled = False  # whoever waits has been looked at, and nothing can have changed since
        self.num_preemptions = 0
        self.num_queried_tokens = 0
        self.num_cached_tokens = 0
        self.speculation = SpeculationStats()

    @property
    def num_modules(self) -> int:
        return self._limits.num_modules

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting or self._running)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def unfinished_ids(self) -> list[str]:
        return list(self._requests)

    def add(self, request: Request) -> None:
        self._requests[request.request_id] = request
        self._waiting.add(request)
        self._is_settled = False

    def adopt(self, request: Request, match: PrefixMatch, num_module_rows: int, fill: Callable[[], None]) -> bool:
        """Go on with a request that another engine has begun; False, and nothing is changed, if there is no room.

        match: where its rows are to lie (`PrefixMatch.of_rows`); its modules have rows up to num_module_rows. fill:
        puts them there.
        """
        if len(self._running) >= self._limits.max_num_seqs or not self._waiting.lets_pass:
            return False
        whole = request.num_tokens + len(request.draft_token_ids)
        target_total, module_total = self._shares.ends(request, request.useful_depth, whole)
        demand = RowDemand(
            request.num_computed_tokens, num_module_rows, target_total, max(module_total, num_module_rows)
        )
        if not self._cache.admit(request.request_id, request.params.cache_salt, match, demand):
            return False
        self._waiting.note_passed()
        request.status = RequestStatus.RUNNING
        self._requests[request.request_id] = request
        self._running.append(request)
        self._running.sort(key=self._waiting.order)
        self._is_settled = False
        fill()
        self._upkeep.publish(request, is_ending=False)
        return True

    def request(self, request_id: str) -> Request | None:
        """The request of this id that has not ended."""
        return self._requests.get(request_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._requests

    def set_depth(self, request_id: str, depth: int) -> None:
        """Draft `depth` tokens a step from the next step on that is not under way yet; 0 stops drafting.

        The caller has checked the bound.
        """
        request = self._requests[request_id]
        request.depth = depth
        request.max_depth = max(request.max_depth, depth)

    def abort(self, request_id: str) -> Request | None:
        """End a request now; None if it is not there (any more)."""
        request = self._requests.get(request_id)
        if request is not None:
            self._finish(request, FinishReason.ABORT)
        return request

    def abandon(self) -> list[Request]:
        """End all requests and forget all that is cached, after a failure in the middle of a change.

        May be called again where it was itself broken off.
        """
        requests = list(self._requests.values())
        for request in requests:
            request.status = RequestStatus.FINISHED
            request.finish_reason = FinishReason.ABORT
            request.draft_token_ids = ()
        self._requests.clear()
        self._running.clear()
        self._waiting = WaitingQueue(self._limits.policy)
        self._cache.clear()
        return requests

    # -- planning ----------------------------------------------------------------------------------------------------

    def plan(self) -> StepPlan:
        """Choose the rows of the next step: steady decodes first, then chunks and rebuilds, then new requests."""
        planned: dict[str, RequestPlan] = {}
        budget = self._limits.max_num_batched_tokens
        preempted = self.num_preemptions
        others: list[tuple[Request, int, int]] = []
        for request in tuple(self._running):
            if request.status is not RequestStatus.RUNNING:  # it has just given way to one before it
                continue
            depth = request.useful_depth
            num_lagging = self._upkeep.renew(request, self._shares.num_passes(depth))
            if num_lagging or not request.is_decoding:
                others.append((request, depth, num_lagging))
                continue
            budget -= self._plan_request(request, self._shares.of(request, depth, 0, budget), planned)
        for request, depth, num_lagging in others:
            if request.status is RequestStatus.RUNNING:
                share = self._shares.of(request, depth, num_lagging, budget)
                budget -= self._plan_request(request, share, planned)
        if self.num_preemptions == preempted:
            self._admit(budget, planned)
        can_change = self._cache.layout.has_windows or any(request.is_held_back for request in self._waiting)
        self._is_settled = self.num_preemptions == preempted and not can_change
        return StepPlan(tuple(planned.values()), self._cache.take_copies())

    def plan_ahead(self, under_way: StepPlan | AheadPlan) -> AheadPlan | None:
        """The step after one that is under way, where nothing has to be decided before that has ended; see
        `Lookahead`."""
        if self._waiting and len(self._running) < self._limits.max_num_seqs and not self._is_settled:
            return None  # somebody may be able to start
        return self._lookahead.plan(under_way, len(self._running))

    def has_member(self, plan: StepPlan | AheadPlan) -> bool:
        """Whether any request of a step under way is still running."""
        return self._lookahead.has_member(plan)

    def resolve(self, plan: AheadPlan) -> StepPlan:
        """What a step that was planned ahead is, now that the one before it has been committed."""
        return self._lookahead.resolve(plan)

    def _admit(self, budget: int, planned: dict[str, RequestPlan]) -> None:
        """Start waiting requests, in order, as long as the whole of what they hold so far fits the cache.

        Room for the first chunk alone would let requests in that must push each other out again.
        """
        while budget > 0 and len(self._running) < self._limits.max_num_seqs:
            request = self._waiting.first(can_share=self._cache.is_shared)
            share = self._start(request, budget) if request is not None else None
            if request is None or share is None:
                break
            self._waiting.start(request)
            request.status = RequestStatus.RUNNING
            self._running.append(request)
            self._running.sort(key=self._waiting.order)
            planned[request.request_id] = self._shares.plan(request, share)
            budget -= share.num_target_rows + share.num_lagging_rows

    def _start(self, request: Request, budget: int) -> Share | None:
        """Give a waiting request its blocks, cached ones first, and its share of the step. None: it has to wait."""
        depth, params = request.useful_depth, request.params
        num_passes = self._shares.num_passes(depth)
        match = self._cache.match(self._upkeep.findable(request), params.cache_salt, num_passes)
        request.num_computed_tokens = request.num_state_rows = match.num_rows
        request.exact = ExactRows.after_hit(self._limits.num_modules, match.num_module_rows, match.module_depth)
        donor = self._upkeep.donor(request)
        if donor is not None:
            match = replace(match, donor=donor.request_id, num_copied_rows=request.num_tokens)
            request.num_computed_tokens = request.num_tokens
            if num_passes:
                request.exact = request.exact.after_copy(donor.exact, request.num_tokens)
        if self._cache.layout.has_module_windows:
            request.exact = request.exact.keeping_from(match.num_module_rows)
        if (row := self._upkeep.restart_row(request, num_passes)) is not None:
            request.exact, match = request.exact.restarted(row, num_passes), match.without_modules(row)
        share = self._shares.of(request, depth, self._upkeep.num_lagging_rows(request, num_passes), budget)
        whole = request.num_tokens + len(request.draft_token_ids)
        end, total = (
            self._shares.ends(request, depth, share.end),
            self._shares.ends(request, depth, max(whole, share.end)),
        )
        if not self._cache.admit(request.request_id, params.cache_salt, match, RowDemand(*end, *total)):
            request.num_computed_tokens = request.num_state_rows = 0
            request.exact = ExactRows.none(self._limits.num_modules)
            return None
        if request.num_cached_tokens is None:
            request.num_cached_tokens = request.num_computed_tokens
            self.num_queried_tokens += request.num_tokens
            self.num_cached_tokens += request.num_cached_tokens
        return share

    def _plan_request(self, request: Request, share: Share, planned: dict[str, RequestPlan]) -> int:
        """Add a running request to the step if rows and blocks allow; returns the rows that it takes."""
        num_rows = share.num_target_rows + share.num_lagging_rows
        if num_rows == 0 and not share.is_sampling:
            return 0
        ends = self._shares.ends(request, share.depth, max(request.num_computed_tokens, share.end))
        while not self._cache.reserve(request.request_id, *ends):
            victim = self._last_after(request, planned)
            if victim is None:
                return 0
            self.preempt(victim)
        planned[request.request_id] = self._shares.plan(request, share)
        return num_rows

    def _last_after(self, request: Request, planned: dict[str, RequestPlan]) -> Request | None:
        """Who gives way to `request`: the last in order after it that is not in the step yet."""
        order = self._waiting.order
        later = (r for r in reversed(self._running) if order(r) > order(request))
        return next((r for r in later if r.request_id not in planned), None)

    def preempt(self, request: Request) -> None:
        """Take a request's blocks away, while no step is under way. Its tokens and pending drafts stay; rows that are
        not cached are computed again later."""
        self._upkeep.publish(request, is_ending=True)
        self._cache.release(request.request_id)
        self._running.remove(request)
        request.status = RequestStatus.WAITING
        request.num_computed_tokens = request.num_state_rows = 0
        request.exact = ExactRows.none(self._limits.num_modules)
        request.first_rows = {}
        self._waiting.add(request)
        self._is_settled = False
        self.num_preemptions += 1

    # -- committing --------------------------------------------------------------------------------------------------

    def commit(self, plan: StepPlan, result: StepResult, ends: Mapping[str, int] = _NO_ENDS) -> list[Committed]:
        """Apply a step's result token by token; results of requests that have ended meanwhile are dropped.

        ends: how many of its new tokens a request keeps because a stop string is complete there.
        """
        committed = []
        for request_plan, outcome in zip(plan.requests, result.requests):
            terms = request_plan.terms
            request = self._requests.get(terms.request_id)
            if request is None or request.arrival != terms.arrival:
                continue
            if outcome.is_broken:
                request.error = outcome.error
                self._finish(request, FinishReason.ERROR)
                committed.append(Committed(request, (), ()))
            elif request_plan.is_sampling:
                committed.append(self._commit_tokens(request, request_plan, outcome, ends.get(request.request_id)))
            else:
                self._commit_rows(request, request_plan)
            if request.status is RequestStatus.RUNNING:
                self._upkeep.publish(request, is_ending=False)
                if self._cache.layout.has_windows:
                    self._upkeep.retain(request, self._shares.num_passes(request.useful_depth))
        return committed

    def _commit_rows(self, request: Request, plan: RequestPlan) -> None:
        request.num_computed_tokens += len(plan.token_ids)
        request.num_state_rows = plan.next_state_rows
        if plan.window is not None:
            self._count_rebuilt(request, min(plan.first_row, plan.window.end) - plan.window.start)
            request.exact = request.exact.after_rows(request.num_tokens, plan.window.end, plan.window.depth)

    def _commit_tokens(
        self, request: Request, plan: RequestPlan, outcome: RequestResult, text_end: int | None
    ) -> Committed:
        num_accepted, before = outcome.num_accepted, plan.num_tokens
        kept, reason = request.terms.first_stop(outcome.token_ids, before)
        if text_end is not None:
            kept, reason = text_end, FinishReason.STOP
        elif outcome.error is not None and reason is None:
            request.error, reason = outcome.error, FinishReason.ERROR
        num_tokens = before + kept
        depths = (*range(1, num_accepted + 1), 0)
        committed = Committed(request, outcome.token_ids[:kept], depths[:kept], outcome.logprobs[:kept])
        for stats in (request.stats, self.speculation):
            if kept:
                stats.observe(plan.num_draft_tokens, min(num_accepted, kept))
            stats.num_proposed_tokens += len(outcome.draft_token_ids)
        request.token_ids += committed.token_ids
        request.token_depths += committed.token_depths
        request.logprobs += committed.logprobs
        if outcome.prompt_logprobs:
            request.prompt_logprobs = outcome.prompt_logprobs
        # Rows of accepted drafts are computed, the one of the target's own token is not.
        request.num_computed_tokens = min(num_tokens, before + num_accepted)
        request.num_state_rows = plan.next_state_rows
        request.draft_token_ids = outcome.draft_token_ids
        if outcome.draft_token_ids and plan.window is not None:
            depth = min(len(outcome.draft_token_ids), self._limits.num_modules)
            start, request.exact = request.exact.after_cycle(
                num_accepted, num_tokens, request.num_computed_tokens, depth
            )
            self._count_rebuilt(request, plan.first_row - start)
        else:
            request.exact = request.exact.after_verify(min(num_accepted, kept))
        if reason is not None:
            self._finish(request, reason)
        return committed

    def _count_rebuilt(self, request: Request, num_rows: int) -> None:
        request.stats.num_rebuilt_rows += num_rows
        self.speculation.num_rebuilt_rows += num_rows

    def _finish(self, request: Request, reason: FinishReason) -> None:
        if request.status is RequestStatus.RUNNING:
            self._upkeep.publish(request, is_ending=True)
        self._cache.release(request.request_id)
        del self._requests[request.request_id]
        if request.status is RequestStatus.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)
        request.status = RequestStatus.FINISHED
        request.finish_reason = reason
        request.draft_token_ids = ()
        self._is_settled = False

    def requests(self) -> Iterable[Request]:
        """All requests that have not ended."""
        return self._requests.values()
