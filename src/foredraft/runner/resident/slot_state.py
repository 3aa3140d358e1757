"""What the device keeps of each running request: a row of numbers, its block tables, what its drafts were drawn
from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.kernels.decode_state import EXACT, RING_SIZE
from foredraft.plan import RequestPlan

TEMPERATURE, TOP_P, MIN_P, TYPICAL_P = range(4)
"""Columns of the floats."""


@dataclass(frozen=True)
class SlotLayout:
    """num_slots: most requests that run at once, and one for padding. max_depth: most drafts of a request (K).

    probs_width: of the distributions that drafts are drawn from; 0: none is kept.
    """

    num_slots: int
    num_modules: int
    max_depth: int
    num_groups: int
    max_blocks: int
    probs_width: int

    @property
    def ring(self) -> int:
        """The first column of the ring of tokens; E_1..E_M come before it."""
        return EXACT + self.num_modules

    @property
    def num_columns(self) -> int:
        return self.ring + RING_SIZE


class SlotState:
    """ints [S, columns] int64: n, pending drafts and how many modules made them, limits, seed, top-k, E_1..E_M
    (`num_exact_rows`), the last tokens.

    floats [S, 4] float32: temperature, top-p, min-p, typical-p. tables [G, S, blocks] int32: block tables by cache
    group. draft_probs [S, K, N] float32: what the pending drafts were drawn from, made when a request first needs it.
    """

    def __init__(self, layout: SlotLayout, device: torch.device) -> None:
        self.layout = layout
        self.device = device
        self.ints = torch.zeros(layout.num_slots, layout.num_columns, dtype=torch.int64, device=device)
        self.floats = torch.zeros(layout.num_slots, 4, dtype=torch.float32, device=device)
        shape = layout.num_groups, layout.num_slots, layout.max_blocks
        self.tables = torch.zeros(shape, dtype=torch.int32, device=device)
        self._draft_probs: Tensor | None = None

    @property
    def has_draft_probs(self) -> bool:
        return self._draft_probs is not None

    @property
    def draft_probs(self) -> Tensor:
        if self._draft_probs is None:
            shape = self.layout.num_slots, max(1, self.layout.max_depth), self.layout.probs_width
            self._draft_probs = torch.zeros(shape, dtype=torch.float32, device=self.device)
        return self._draft_probs

    def upload(self, slots: Sequence[int], plans: Sequence[RequestPlan]) -> None:
        """Set the rows of these slots to what the host knows of their requests."""
        ints = torch.zeros(len(slots), self.layout.num_columns, dtype=torch.int64)
        rows = ints.numpy()
        for row, plan in zip(rows, plans):
            row[: self.layout.ring] = self._numbers(plan)
            first, tokens = _known_tokens(plan)
            for position, token_id in enumerate(tokens, first):
                row[self.layout.ring + position % RING_SIZE] = token_id
        floats = torch.tensor([_floats(plan) for plan in plans], dtype=torch.float32)
        index = torch.tensor(slots)
        if self.device.type == "cuda":
            index, ints, floats = (t.pin_memory().to(self.device, non_blocking=True) for t in (index, ints, floats))
        self.ints.index_copy_(0, index, ints)
        self.floats.index_copy_(0, index, floats)

    def _numbers(self, plan: RequestPlan) -> list[int]:
        exact = plan.window.exact if plan.window is not None else None
        num_exact_rows = exact.num_exact_rows if exact is not None else (0,) * self.layout.num_modules
        return [
            plan.num_tokens,
            plan.num_draft_tokens,
            exact.cycle.depth if exact is not None and exact.cycle is not None and plan.num_draft_tokens else 0,
            plan.terms.max_total_tokens,
            exact.origin if exact is not None else 0,
            (plan.seed + 2**63) % 2**64 - 2**63,
            plan.params.top_k if plan.params.temperature else 0,
            *num_exact_rows,
        ]


def _known_tokens(plan: RequestPlan) -> tuple[int, Sequence[int]]:
    """The position of the first token that the device needs, and the tokens from there on, pending drafts included."""
    first, tokens = plan.num_tokens - 1, plan.token_ids
    if plan.window is not None and plan.window.token_ids:
        first, tokens = plan.window.start + 1, (*plan.window.token_ids, *plan.token_ids[1:])
    surplus = max(0, len(tokens) - RING_SIZE)
    return first + surplus, tokens[surplus:]


def _floats(plan: RequestPlan) -> tuple[float, float, float, float]:
    params = plan.params
    if not params.temperature:
        return 0.0, 1.0, 0.0, 1.0
    return params.temperature, params.top_p, params.min_p, params.typical_p
