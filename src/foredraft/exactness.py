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
    """

    num_exact_rows: tuple[int, ...]
    cycle: DraftCycle | None = None

    @classmethod
    def none(cls, num_modules: int) -> ExactRows:
        """Nothing is cached: a new request, or one that was preempted."""
        return cls((0,) * num_modules)

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
        return ExactRows(rows, DraftCycle(num_tokens, num_computed_tokens, depth))

    def after_verify(self, num_accepted: int) -> ExactRows:
        """The first `num_accepted` pending drafts are committed: the rows that read only those are exact as they stand.

        For a cycle begun at (n', c') with a accepted drafts: E_k = min(c', n'+a-k) for the modules that it ran.
        """
        if self.cycle is None:
            return self
        cycle = self.cycle
        num_known = cycle.num_tokens + num_accepted
        return ExactRows(self._raised(cycle.depth, cycle.num_computed_tokens, num_known))

    def _raised(self, depth: int, end: int, num_tokens: int) -> tuple[int, ...]:
        covered = (min(end, num_tokens - k) for k in range(1, depth + 1))
        raised = tuple(max(old, new) for old, new in zip(self.num_exact_rows, covered))
        return raised + self.num_exact_rows[depth:]
