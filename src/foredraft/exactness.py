"""The rule of exactness: which rows of each MTP module's cache equal those of one prefill of the whole sequence.

A sequence has n committed tokens t[0..n-1], and the target has run on rows 0..c-1. Module k (k = 1..K) at row i reads
h_{k-1}[i] and the embedding of t[i+k], and attends to its own rows 0..i. So its row i can be exact only if i < c and
t[i+k] is committed. `ExactRows` counts the leading rows that are exact, per module; all that must be recomputed after
a rejection, a chunk boundary, a preemption or a change of depth follows from these counts and from nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class DraftCycle:
    """The state in which the pending drafts were made: n, c, and how many modules ran."""

    num_tokens: int
    num_computed_tokens: int
    depth: int


@dataclass(frozen=True)
class ExactRows:
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

    def renewed(self, row: int) -> ExactRows:
        """Rows from `row` on are given up, in all modules: blocks that hold them may be shared and are not written."""
        rows = tuple(min(count, row) for count in self.num_exact_rows)
        return replace(self, num_exact_rows=rows, cycle=None)

    def restarted(self, row: int, depth: int) -> ExactRows:
        """All rows are given up; modules 1..depth begin anew at `row`, far enough back for their windows."""
        num_others = len(self.num_exact_rows) - depth
        return ExactRows((row,) * depth + (0,) * num_others, origin=row, kept_from=row)

    def keeping_from(self, row: int) -> ExactRows:
        """Rows that no window start from `row` on needs are freed."""
        return self if row <= self.kept_from else replace(self, kept_from=row)

    def window_start(self, depth: int) -> int:
        """The first row that a pass of modules 1..depth must compute (s): the smallest E_k among them."""
        return min(self.num_exact_rows[:depth])

    def after_rows(self, num_tokens: int, end: int, depth: int) -> ExactRows:
        """Modules 1..depth have covered the rows from `window_start` up to `end` with committed tokens only.

        Module k covers row i only if t[i+k] is committed: E_k = min(end, n-k), never less than it was.
        """
        return replace(self, num_exact_rows=self._raised(depth, end, num_tokens))

    def after_draft(self, num_tokens: int, num_computed_tokens: int, depth: int) -> ExactRows:
        """Modules 1..depth have run up to row c-1 and have drafted; a row that holds a draft is not exact yet."""
        rows = self._raised(depth, num_computed_tokens, num_tokens)
        return replace(self, num_exact_rows=rows, cycle=DraftCycle(num_tokens, num_computed_tokens, depth))

    def after_verify(self, num_accepted: int) -> ExactRows:
        """The first `num_accepted` pending drafts are committed: the rows that read only those are exact as they stand.

        For a cycle begun at (n', c') with a accepted drafts: E_k = min(c', n'+a-k) for the modules that it ran.
        """
        if self.cycle is None:
            return self
        cycle = self.cycle
        num_known = cycle.num_tokens + num_accepted
        return replace(self, num_exact_rows=self._raised(cycle.depth, cycle.num_computed_tokens, num_known), cycle=None)

    def _raised(self, depth: int, end: int, num_tokens: int) -> tuple[int, ...]:
        covered = (min(end, num_tokens - k) for k in range(1, depth + 1))
        raised = tuple(max(old, new) for old, new in zip(self.num_exact_rows, covered))
        return raised + self.num_exact_rows[depth:]
