"""From a plan's numbers to the tensors of one forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foredraft.cache.storage import CacheStorage
from foredraft.models.attention import PagedAttention
from foredraft.models.media_store import MediaStore, text_ids
from foredraft.models.recurrence import RecurrentRows
from foredraft.models.row_layout import GroupRows, RowSpan, group_rows
from foredraft.plan import RequestPlan


@dataclass(frozen=True)
class TargetInputs:
    """token_ids, positions [T]: the rows of all requests laid end to end. hidden_slots [T]: where their h0 go."""

    token_ids: Tensor
    positions: Tensor
    paged: PagedAttention
    hidden_slots: Tensor


def target_inputs(
    plans: Sequence[RequestPlan], storage: CacheStorage, device: torch.device, store: MediaStore | None = None
) -> TargetInputs:
    """Lay the target rows of `plans` (each has at least one) end to end. store: with what the step reads of media."""
    layout = storage.layout
    token_ids = [token_id for plan in plans for token_id in plan.token_ids]
    media = store.rows(token_ids) if store is not None else None
    positions = [torch.arange(plan.first_row, plan.first_row + len(plan.token_ids)) for plan in plans]
    rows = {
        group: _group_rows(plans, storage, group, device)
        for group in layout.target_groups
        if layout.groups[group].holds_layers
    }
    recurrent = RecurrentRows(plans, storage, device) if storage.states else None
    if layout.hidden_group in rows:  # h0 lies beside layers of the target
        hidden_slots = rows[layout.hidden_group].slots
    else:
        hidden_slots = _written(plans, [_slots(plan, storage, layout.hidden_group) for plan in plans]).to(device)
    return TargetInputs(
        token_ids=torch.tensor(text_ids(token_ids) if media else token_ids).to(device),
        positions=torch.cat(positions).to(device),
        paged=PagedAttention.of_target(storage, rows, recurrent=recurrent, media=media),
        hidden_slots=hidden_slots,
    )


def _slots(plan: RequestPlan, storage: CacheStorage, group: int) -> Tensor:
    return storage.slots(plan.blocks[group], plan.first_row + len(plan.token_ids))


def _group_rows(plans: Sequence[RequestPlan], storage: CacheStorage, group: int, device: torch.device) -> GroupRows:
    slots = [_slots(plan, storage, group) for plan in plans]
    spans = [RowSpan(len(plan.token_ids), len(rows), rows) for plan, rows in zip(plans, slots)]
    return group_rows(storage, group, _written(plans, slots), spans, device)


def _written(plans: Sequence[RequestPlan], slots: Sequence[Tensor]) -> Tensor:
    """Of the slots of each request's rows from 0 on, those of the rows that the pass computes."""
    return torch.cat([rows[plan.first_row :] for plan, rows in zip(plans, slots)])


def sampled_slots(plans: Sequence[RequestPlan], storage: CacheStorage, device: torch.device) -> Tensor:
    """Where h0 lies of the rows whose logits are needed: for each request its newest token and its drafts, in order.

    The newest row of a prompt that is wholly cached was computed by another request.
    """
    slots = []
    for plan in plans:
        first, end = plan.num_tokens - 1, plan.num_tokens + plan.num_draft_tokens
        slots.append(storage.slots(plan.blocks[storage.layout.hidden_group], end)[first:])
    return torch.cat(slots).to(device)
