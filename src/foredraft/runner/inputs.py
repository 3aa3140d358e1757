"""From a plan's numbers to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.cache.storage import CacheStorage
from foredraft.models.attention import PagedAttention, RowSpan, build_groups, mask_kinds
from foredraft.plan import RequestPlan


@dataclass(frozen=True)
class TargetInputs:
    """token_ids, positions [T]: the rows of all requests laid end to end. first_rows: where each request's begin."""

    token_ids: Tensor
    positions: Tensor
    paged: PagedAttention
    first_rows: tuple[int, ...]


def target_inputs(plans: Sequence[RequestPlan], storage: CacheStorage, device: torch.device) -> TargetInputs:
    """Lay the target rows of `plans` (each has at least one) end to end."""
    token_ids: list[int] = []
    positions, slots, spans, first_rows = [], [], [], []
    for plan in plans:
        first_rows.append(len(token_ids))
        token_ids += plan.token_ids
        end = plan.first_row + len(plan.token_ids)
        row_slots = storage.slots(plan.target_blocks, end)
        positions.append(torch.arange(plan.first_row, end))
        slots.append(row_slots[plan.first_row :])
        spans.append(RowSpan(len(plan.token_ids), end, row_slots))
    groups = build_groups(spans, mask_kinds(storage.layout.target), storage.layout.dtype, device)
    return TargetInputs(
        token_ids=torch.tensor(token_ids).to(device),
        positions=torch.cat(positions).to(device),
        paged=PagedAttention(torch.cat(slots).to(device), storage.target, groups),
        first_rows=tuple(first_rows),
    )


def sampled_rows(plans: Sequence[RequestPlan], first_rows: Sequence[int], device: torch.device) -> Tensor:
    """Flat rows whose logits are needed: for each request that samples, its newest token and its drafts, in order."""
    rows: list[int] = []
    for plan, first in zip(plans, first_rows):
        if plan.is_sampling:
            end = first + len(plan.token_ids)
            rows += range(end - plan.num_draft_tokens - 1, end)
    return torch.tensor(rows, dtype=torch.int64).to(device)
