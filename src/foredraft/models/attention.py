"""Attention over paged rows, registered with transformers under `ATTENTION_NAME`.

A forward pass sees the rows of many requests laid end to end as one sequence of T rows. Each layer writes its new
keys and values to the slots that the pass names, then every group of requests attends to its own slots. What a pass
needs is one `PagedAttention` object, handed through transformers' keyword arguments: there is no global state.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from foredraft.cache.groups import CacheGroup
from foredraft.cache.storage import LayerKV
from foredraft.errors import ModelLoadError

ATTENTION_NAME = "foredraft_paged"


@dataclass(frozen=True)
class RowSpan:
    """The rows of one request in a pass: `num_rows` rows of the flat batch that end at row `end` of its sequence.

    slots: where rows 0..end-1 of the sequence lie in the paged storage, int64 [end] on the CPU; those before `origin`
    and those behind every row's window are not looked at.
    """

    num_rows: int
    end: int
    slots: Tensor
    origin: int = 0

    def first_key(self, window: int | None) -> int:
        """The first row that a row of this span attends to."""
        return self.origin if window is None else max(self.origin, self.end - self.num_rows - window + 1)


@dataclass(frozen=True)
class AttentionGroup:
    """Requests of like size, padded to one rectangle of B requests, Q query rows, L key rows.

    rows [B * Q] flat rows of the batch (padding repeats a real row); real [n] which of those are no padding, or None
    for all; slots [B * L]; masks: additive, [B, 1, fold * Q, L] by fold, the number of query heads that share a key
    head; None where every key is visible to every query.
    """

    num_requests: int
    rows: Tensor
    real: Tensor | None
    slots: Tensor
    masks: dict[int, Tensor | None]


@dataclass(frozen=True)
class GroupRows:
    """What a pass does in the layers of one cache group: `slots` [T] take each row's key and value, and `attention`
    covers all T rows."""

    slots: Tensor
    attention: tuple[AttentionGroup, ...]


@dataclass(frozen=True)
class PagedAttention:
    """All that the layers of one forward pass need to know; `kv` and `rows` have an entry a layer, by `layer_idx`."""

    kv: Sequence[LayerKV]
    rows: Sequence[GroupRows]

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Store `key` and `value` [1, kv_heads, T, dim], attend with `query` [1, heads, T, dim]; [1, T, heads, dim].

        `window` is the one that the cache group of the layer was made for.
        """
        kv, group_rows = self.kv[layer_idx], self.rows[layer_idx]
        num_rows = query.shape[2]
        kv.key.index_copy_(0, group_rows.slots, key[0].transpose(0, 1).reshape(num_rows, -1))
        kv.value.index_copy_(0, group_rows.slots, value[0].transpose(0, 1).reshape(num_rows, -1))
        rows, groups = query[0].transpose(0, 1), group_rows.attention
        if len(groups) == 1 and groups[0].real is None:
            return _attend_group(groups[0], kv, rows, scale).unsqueeze(0)
        output = rows.new_empty(num_rows, rows.shape[1], value.shape[-1])
        for group in groups:
            attended = _attend_group(group, kv, rows.index_select(0, group.rows), scale)
            if group.real is None:
                output.index_copy_(0, group.rows, attended)
            else:
                output.index_copy_(0, group.rows.index_select(0, group.real), attended.index_select(0, group.real))
        return output.unsqueeze(0)


def _attend_group(group: AttentionGroup, kv: LayerKV, query: Tensor, scale: float) -> Tensor:
    """query [B * Q, heads, dim] -> [B * Q, heads, value_dim].

    The heads that share a key head are folded into its query rows, so keys are never repeated in memory.
    """
    batch, kv_heads = group.num_requests, kv.num_kv_heads
    num_queries, heads, dim = query.shape[0] // batch, query.shape[1], query.shape[2]
    fold = heads // kv_heads
    keys = kv.key.index_select(0, group.slots).view(batch, -1, kv_heads, dim).transpose(1, 2)
    values = kv.value.index_select(0, group.slots).view(batch, keys.shape[2], kv_heads, -1).transpose(1, 2)
    mask = group.masks[fold]
    if num_queries == 1:  # plain decoding: folded as it lies
        folded = query.view(batch, kv_heads, fold, dim)
        attended = F.scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
        return attended.reshape(batch, heads, -1)  # on a GPU its strides may be those of another layout
    folded = query.view(batch, num_queries, kv_heads, fold, dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(batch, kv_heads, fold * num_queries, dim)
    attended = F.scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
    attended = attended.view(batch, kv_heads, fold, num_queries, -1).permute(0, 3, 1, 2, 4)
    return attended.reshape(batch * num_queries, heads, -1)


def group_rows(
    group: CacheGroup, slots: Tensor, spans: Sequence[RowSpan], dtype: torch.dtype, device: torch.device
) -> GroupRows:
    """What a pass over `spans`, whose new rows go to `slots` [T], does in one cache group.

    Requests are taken together whose row counts and lengths round up to the same powers of two. Padding thus at most
    doubles either side, and a batch of decodes costs one attention call a layer.
    """
    window = group.shapes[0].window
    folds = frozenset(shape.fold for shape in group.shapes)
    buckets: dict[tuple[int, int], list[tuple[int, RowSpan]]] = {}
    first_row = 0
    for span in spans:
        bucket = (span.num_rows - 1).bit_length(), (span.end - span.first_key(window) - 1).bit_length()
        buckets.setdefault(bucket, []).append((first_row, span))
        first_row += span.num_rows
    attention = tuple(_attention_group(members, window, folds, dtype, device) for members in buckets.values())
    return GroupRows(slots.to(device), attention)


def _attention_group(
    members: list[tuple[int, RowSpan]],
    window: int | None,
    folds: frozenset[int],
    dtype: torch.dtype,
    device: torch.device,
) -> AttentionGroup:
    num_queries = max(span.num_rows for _, span in members)
    first_keys = [span.first_key(window) for _, span in members]
    num_keys = max(span.end - first_key for (_, span), first_key in zip(members, first_keys))
    slots = torch.empty(len(members), num_keys, dtype=torch.int64)
    for index, ((_, span), first_key) in enumerate(zip(members, first_keys)):
        count = span.end - first_key
        slots[index, :count] = span.slots[first_key : span.end]
        slots[index, count:] = span.slots[first_key]  # masked; a row of its own, so that no request reads another's
    # Query j of a request is its last row for all padding j: a padded query then never has an empty mask row.
    first = torch.tensor([first_row for first_row, _ in members]).unsqueeze(1)
    count_rows = torch.tensor([span.num_rows for _, span in members]).unsqueeze(1)
    end = torch.tensor([span.end - first_key for (_, span), first_key in zip(members, first_keys)]).unsqueeze(1)
    offsets = torch.arange(num_queries).unsqueeze(0)
    clamped = torch.minimum(offsets, count_rows - 1)
    is_padded = bool((count_rows < num_queries).any())
    real = (offsets < count_rows).flatten().nonzero().squeeze(1).to(device) if is_padded else None
    query_rows = (end - count_rows + clamped).unsqueeze(2)
    masks = _masks(query_rows, num_keys, window, folds, dtype, device)
    return AttentionGroup(len(members), (first + clamped).flatten().to(device), real, slots.flatten().to(device), masks)


def _masks(
    query_rows: Tensor,
    num_keys: int,
    window: int | None,
    folds: frozenset[int],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[int, Tensor | None]:
    """By fold: additive mask [B, 1, fold * Q, L] for queries at `query_rows` [B, Q, 1], None if all is visible.

    Rows are counted from the first key of each request.
    """
    keys = torch.arange(num_keys)
    visible = keys <= query_rows
    if window is not None:
        visible &= keys > query_rows - window
    if bool(visible.all()):
        return dict.fromkeys(folds)
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf")).unsqueeze(1).to(device)
    return {fold: mask.repeat(1, 1, fold, 1) for fold in folds}


def _paged_attention_forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    paged: PagedAttention | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function that transformers' attention modules call; query, key, value are [1, heads, T, dim]."""
    if paged is None:
        raise ModelLoadError(f"{type(module).__name__} does not hand on the keyword `paged`: not an ordinary attention")
    if attention_mask is not None:
        raise ModelLoadError(
            f"{type(module).__name__} builds an attention mask of its own, which Foredraft does not run"
        )
    unknown = [name for name in ("softcap", "s_aux", "position_bias") if kwargs.get(name) is not None]
    if unknown:
        raise ModelLoadError(f"{type(module).__name__} uses {', '.join(unknown)}, which Foredraft does not run yet")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return paged.attend(int(module.layer_idx), query, key, value, scale, sliding_window), None  # type: ignore[arg-type]


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """`PagedAttention` masks by itself, so transformers need not build a mask."""


AttentionInterface.register(ATTENTION_NAME, _paged_attention_forward)
AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
