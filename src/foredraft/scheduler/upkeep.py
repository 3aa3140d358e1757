"""What a request's rows need beside being computed: to be found by others, kept, given back or begun anew."""

from __future__ import annotations

from collections.abc import Sequence

from foredraft.cache.manager import CacheManager
from foredraft.request import Request, RequestStatus


class CacheUpkeep:
    """Keeps the cache in line with what is known of a request's rows, `Request.exact` above all."""

    def __init__(self, cache: CacheManager, num_modules: int) -> None:
        self._cache = cache
        self._layout = cache.layout
        self._num_modules = num_modules

    def findable(self, request: Request) -> Sequence[int]:
        """The tokens whose rows a request may take from the cache.

        Log-probabilities of its prompt come from h0 of every row, so that where windows bound h0 each must be computed.
        """
        needs_all_rows = request.terms.num_prompt_logprobs is not None and request.prompt_logprobs is None
        is_bounded = self._layout.groups[self._layout.hidden_group].retention is not None
        return () if needs_all_rows and is_bounded else request.token_ids

    def donor(self, request: Request) -> Request | None:
        """Who has all rows of a new choice's prompt in blocks of its own: the first choice, while it runs."""
        leader = request.leader
        if leader is None or leader.status is not RequestStatus.RUNNING or self._layout.has_windows:
            return None
        is_new = request.num_tokens == len(request.prompt_token_ids)
        return leader if self._cache.is_shared and is_new and leader.num_computed_tokens >= request.num_tokens else None

    def num_lagging_rows(self, request: Request, depth: int) -> int:
        """Module rows to compute beyond the few of a steady decode: a hit or a spell at a smaller depth left them.

        depth: how many modules are to run, here and below.
        """
        return max(0, request.num_computed_tokens - request.exact.window_start(depth) - depth) if depth else 0

    def restart_row(self, request: Request, depth: int) -> int | None:
        """Where the modules begin anew, if what they need is not there or is further back than it need be.

        With sliding windows only, a bounded number of rows before c is enough for rows that are exact from c on.
        """
        if not (depth and self._layout.has_module_windows):
            return None
        start, needed = request.exact.window_start(depth), self._layout.rebuild_rows[depth]
        row = 0 if needed is None else max(0, request.num_computed_tokens - needed)
        return row if start < row or start < request.exact.kept_from else None

    def renew(self, request: Request, depth: int) -> int:
        """Before modules compute rows that are shared or no longer there, replace those blocks by fresh ones.

        That happens after a rise in depth only: rows of deeper modules are missing where the others have theirs.
        Returns the lagging rows.
        """
        if depth == 0:
            return 0
        if (row := self.restart_row(request, depth)) is not None:
            self._cache.renew_modules(request.request_id, row, keep_before=False)
            request.exact = request.exact.restarted(row, depth)
        elif (start := request.exact.window_start(depth)) < self._cache.num_shared_module_rows(request.request_id):
            row = self._cache.renew_modules(request.request_id, start, keep_before=True)
            request.exact = request.exact.renewed(row)
        return self.num_lagging_rows(request, depth)

    def publish(self, request: Request, *, is_ending: bool) -> None:
        """Let others find the request's full blocks.

        A module block waits until all modules that the request may use are exact to its end. Once the request gives its
        blocks back, any depth will do.
        """
        depth = min(1 if is_ending else request.max_depth, self._num_modules)
        self._cache.publish(
            request.request_id,
            request.token_ids,
            request.num_computed_tokens,
            request.exact,
            depth,
            request.num_state_rows,
        )

    def retain(self, request: Request, depth: int) -> None:
        """Give back the blocks behind sliding windows that no later step of this request needs."""
        layout = self._layout
        if depth and layout.has_module_windows:
            max_depth = min(request.max_depth, self._num_modules)
            needed = layout.rebuild_rows[max_depth]
            deepest = request.exact.window_start(max_depth)
            # The deepest modules' rows serve a later rise in depth, unless they would have to begin anew anyway.
            is_near = needed is not None and deepest >= request.num_computed_tokens - needed
            request.exact = request.exact.keeping_from(deepest if is_near else request.exact.window_start(depth))
        self._cache.retain(request.request_id, request.num_computed_tokens, request.exact.kept_from)
