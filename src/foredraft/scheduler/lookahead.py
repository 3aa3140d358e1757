"""Planning a decode step before the outcome of the one under way is known."""

from __future__ import annotations

from collections.abc import Mapping

from foredraft.cache.manager import CacheManager
from foredraft.plan import AheadPlan, AheadRequest, RequestPlan, RequestTerms, StepPlan
from foredraft.request import Request, RequestStatus
from foredraft.scheduler.shares import Shares


def _bounds(one: RequestPlan | AheadRequest) -> tuple[int, int]:
    """The most drafts that a request's decode step verifies, and the most that it makes."""
    if isinstance(one, AheadRequest):
        return one.num_drafts, one.depth
    return one.num_draft_tokens, one.window.depth if one.window is not None else 0


class Lookahead:
    """Plans on upper bounds, as if every draft of the step under way were accepted, and says later what has become of
    it."""

    def __init__(self, cache: CacheManager, shares: Shares, requests: Mapping[str, Request]) -> None:
        self._cache = cache
        self._shares = shares
        self._requests = requests

    def plan(self, under_way: StepPlan | AheadPlan, num_running: int) -> AheadPlan | None:
        """The step after `under_way`, if that is a decode of all running requests and so is the next.

        None where something has to be decided first: who gives way, which rows of deeper modules are missing, or what
        is copied between host and device.
        """
        members = [(request, one) for one in under_way.requests if (request := self._member(one.terms)) is not None]
        if not members or len(members) < num_running:
            return None
        ahead = []
        for request, one in members:
            num_drafts, depth = _bounds(one)
            if request.useful_depth > depth:
                return None
            end = min(request.num_tokens + num_drafts + 1 + depth, request.max_total_tokens)
            if not self._cache.reserve(request.request_id, *self._shares.ends(request, depth, end)):
                return None
            blocks = self._cache.block_tables(request.request_id)
            ahead.append(AheadRequest(request.terms, blocks, depth, request.useful_depth))
        return AheadPlan(tuple(ahead)) if not self._cache.has_copies else None

    def resolve(self, plan: AheadPlan) -> StepPlan:
        """What a step that was planned ahead is now that the one before it has been committed."""
        plans = []
        for one in plan.requests:
            if (request := self._member(one.terms)) is not None:
                room = max(0, request.max_total_tokens - request.num_tokens - 2)
                share = self._shares.decode(request, min(one.depth, room))  # whatever depth is asked for since
                plans.append(self._shares.plan(request, share))
        return StepPlan(tuple(plans))

    def has_member(self, plan: StepPlan | AheadPlan) -> bool:
        """Whether any request of a plan is still running."""
        return any(self._member(one.terms) is not None for one in plan.requests)

    def _member(self, terms: RequestTerms) -> Request | None:
        """The request of these terms, if it is still running."""
        request = self._requests.get(terms.request_id)
        is_same = request is not None and request.arrival == terms.arrival and request.status is RequestStatus.RUNNING
        return request if is_same else None
