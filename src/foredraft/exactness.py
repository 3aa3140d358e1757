"""The rule of exactness: which rows of each MTP module's cache equal those of one prefill of the whole sequence.

A sequence has n committed tokens t[0..n-1], and the target has run on rows 0..c-1. Module k (k = 1..K) at row i reads
h_{k-1}[i] and the embedding of t[i+k], and attends to its own rows 0..i. So its row i can be exact only if i < c and
t[i+k] is committed. `ExactRows` counts the leading rows that are exact, per module; all that must be recomputed after
a rejection, a chunk boundary, a preemption or a change of depth follows from these counts and from nothing else.
"""

from __future__ import annotations

from typing import NamedTuple


class DraftCycle(NamedTuple):
    """The state in which the pending drafts were made: n, c, and how many modules ran."""

    num_tokens: int
    num_computed_tokens: int
    depth: int


class ExactRows(NamedTuple):
    """`num_exact_rows[k-1]` is E_k: rows 0..E_k-1 of module k are exact. The counts never grow with k.

    `cycle` is the drafting whose outcome is not known yet: its rows beyond E_k become exact if drafts are accepted.
    With sliding windows not all rows before E_k are there. `origin`: the row at which the modules began, where that is
    not 0; none before it was computed, and windows that reach beyond it make the first rows after it inexact.
    `kept_from`: rows that a window start at this row needs are there, those for an earlier start may be freed.
    """

    num_exact_rows: tuple[int, ...]
    cycle: DraftCycle | None = None
    origin: int = 0
    kept_from: int = 0

    @classmethod
    def none(cls, num_modules: int) -> ExactRows:
        """Nothing is cached: a new request, or one that was preempted."""
        return cls((0,) * num_modules)

    @classmethod
    def after_hit(cls, num_modules: int, num_rows: int, depth: int) -> ExactRows:
        """Cached rows 0..num_rows-1 of modules 1..depth were found; with sliding windows, the last of them."""
        return cls((num_rows,) * depth + (0,) * (num_modules - depth))

    def after_copy(self, other: ExactRows, num_tokens: int) -> ExactRows:
        """A hit whose remaining rows are copied from a request that goes on otherwise after the same `num_tokens`.

        Of its rows those that read none but these tokens are exact here. A module that the hit has not found while
        others were found has holes.
        """
        has_hit = any(self.num_exact_rows)
        rows = []
        for index, (found, copied) in enumerate(zip(self.num_exact_rows, other.num_exact_rows)):
            rows.append(found if has_hit and not found else max(found, min(copied, num_tokens - index - 1)))
        return self._with(tuple(rows), None)

    def renewed(self, row: int) -> ExactRows:
        """Rows from `row` on are given up, in all modules: blocks that hold them may be shared and are not written."""
        rows = tuple(min(count, row) for count in self.num_exact_rows)
        return self._with(rows, None)

    def restarted(self, row: int, depth: int) -> ExactRows:
        """All rows are given up; modules 1..depth begin anew at `row`, far enough back for their windows."""
        num_others = len(self.num_exact_rows) - depth
        return ExactRows((row,) * depth + (0,) * num_others, origin=row, kept_from=row)

    def keeping_from(self, row: int) -> ExactRows:
        """Rows that no window start from `row` on needs are freed."""
        return self if row <= self.kept_from else self._replace(kept_from=row)

    def window_start(self, depth: int) -> int:
        """The first row that a pass of modules 1..depth must compute (s): the smallest E_k among them."""
        rows = self.num_exact_rows
        return rows[depth - 1] if depth <= len(rows) else rows[-1]  # the counts never grow with k

    def after_rows(self, num_tokens: int, end: int, depth: int) -> ExactRows:
        """Modules 1..depth have covered the rows from `window_start` up to `end` with committed tokens only.

        Module k covers row i only if t[i+k] is committed: E_k = min(end, n-k), never less than it was.
        """
        return self._with(self._raised(depth, end, num_tokens), self.cycle)

    def after_draft(self, num_tokens: int, num_computed_tokens: int, depth: int) -> ExactRows:
        """Modules 1..depth have run up to row c-1 and have drafted; a row that holds a draft is not exact yet."""
        c = num_computed_tokens
        if c == num_tokens - 1 and depth <= c:  # decoding: n-k, which no count exceeds
            rows = (*range(c, c - depth, -1), *self.num_exact_rows[depth:])
        else:
            rows = self._raised(depth, c, num_tokens)
        return self._with(rows, DraftCycle(num_tokens, num_computed_tokens, depth))

    def after_verify(self, num_accepted: int) -> ExactRows:
        """The first `num_accepted` pending drafts are committed: the rows that read only those are exact as they stand.

        For a cycle begun at (n', c') with a accepted drafts: E_k = min(c', n'+a-k) for the modules that it ran.
        """
        if self.cycle is None:
            return self
        cycle = self.cycle
        num_known = cycle.num_tokens + num_accepted
        return self._with(self._raised(cycle.depth, cycle.num_computed_tokens, num_known), None)

    def after_cycle(
        self, num_accepted: int, num_tokens: int, num_computed_tokens: int, depth: int
    ) -> tuple[int, ExactRows]:
        """`after_verify` and then `after_draft`, which every decode step does; and the window's start between them.

        Unless fewer modules draft than before, the second raises all counts at least as far as the first.
        """
        cycle = self.cycle
        if cycle is not None and cycle.depth > depth:
            verified = self.after_verify(num_accepted)
            return verified.window_start(depth), verified.after_draft(num_tokens, num_computed_tokens, depth)
        start = self.num_exact_rows[depth - 1]
        if cycle is not None and cycle.depth == depth:
            start = max(start, min(cycle.num_computed_tokens, cycle.num_tokens + num_accepted - depth))
        return start, self.after_draft(num_tokens, num_computed_tokens, depth)

    def _raised(self, depth: int, end: int, num_tokens: int) -> tuple[int, ...]:
        raised = list(self.num_exact_rows)
        for index in range(depth):
            covered = num_tokens - index - 1
            if covered > end:
                covered = end
            if covered > raised[index]:
                raised[index] = covered
        return tuple(raised)

    def _with(self, num_exact_rows: tuple[int, ...], cycle: DraftCycle | None) -> ExactRows:
        return ExactRows(num_exact_rows, cycle, self.origin, self.kept_from)
