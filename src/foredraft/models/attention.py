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

from foredraft.cache.storage import KVShape, LayerKV
from foredraft.errors import ModelLoadError

ATTENTION_NAME = "foredraft_paged"


MaskKind = tuple[int | None, int]
"""Sliding window and fold of a layer: layers that agree in both share a mask."""


@dataclass(frozen=True)
class RowSpan:
    """The rows of one request in a pass: `num_rows` rows of the flat batch that end at row `end` of its sequence.

    `slots` lists where rows 0..end-1 of the sequence lie in the paged storage, int64 [end] on the CPU.
    """

    num_rows: int
    end: int
    slots: Tensor


@dataclass(frozen=True)
class AttentionGroup:
    """Requests of like size, padded to one rectangle of B requests, Q query rows, L key rows.

    rows [B * Q] flat rows of the batch (padding repeats a real row); real [n] which of those are no padding, or None
    for all; slots [B * L]; masks: additive, [B, 1, fold * Q, L] by sliding window (None: no window) and fold, the
    number of query heads that share a key head; None where every key is visible to every query.
    """

    num_requests: int
    rows: Tensor
    real: Tensor | None
    slots: Tensor
    masks: dict[MaskKind, Tensor | None]


@dataclass(frozen=True)
class PagedAttention:
    """All that the layers of one forward pass need to know.

    slots [T] where each row's key and value go; kv one entry a layer, by `layer_idx`; groups cover all T rows.
    """

    slots: Tensor
    kv: Sequence[LayerKV]
    groups: tuple[AttentionGroup, ...]

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Store `key` and `value` [1, kv_heads, T, dim], attend with `query` [1, heads, T, dim]; [1, T, heads, dim]."""
        kv = self.kv[layer_idx]
        num_rows = query.shape[2]
        kv.key.index_copy_(0, self.slots, key[0].transpose(0, 1).reshape(num_rows, -1))
        kv.value.index_copy_(0, self.slots, value[0].transpose(0, 1).reshape(num_rows, -1))
        rows = query[0].transpose(0, 1)
        if len(self.groups) == 1 and self.groups[0].real is None:
            return _attend_group(self.groups[0], kv, rows, scale, window).unsqueeze(0)
        output = rows.new_empty(num_rows, rows.shape[1], value.shape[-1])
        for group in self.groups:
            attended = _attend_group(group, kv, rows.index_select(0, group.rows), scale, window)
            if group.real is None:
                output.index_copy_(0, group.rows, attended)
            else:
                output.index_copy_(0, group.rows.index_select(0, group.real), attended.index_select(0, group.real))
        return output.unsqueeze(0)


def _attend_group(group: AttentionGroup, kv: LayerKV, query: Tensor, scale: float, window: int | None) -> Tensor:
    """query [B * Q, heads, dim] -> [B * Q, heads, value_dim].

    The heads that share a key head are folded into its query rows, so keys are never repeated in memory.
    """
    batch, kv_heads = group.num_requests, kv.num_kv_heads
    num_queries, heads, dim = query.shape[0] // batch, query.shape[1], query.shape[2]
    fold = heads // kv_heads
    keys = kv.key.index_select(0, group.slots).view(batch, -1, kv_heads, dim).transpose(1, 2)
    values = kv.value.index_select(0, group.slots).view(batch, keys.shape[2], kv_heads, -1).transpose(1, 2)
    mask = group.masks[window, fold]
    if num_queries == 1:  # plain decoding: folded as it lies
        folded = query.view(batch, kv_heads, fold, dim)
        attended = F.scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
        return attended.reshape(batch, heads, -1)  # on a GPU its strides may be those of another layout
    folded = query.view(batch, num_queries, kv_heads, fold, dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(batch, kv_heads, fold * num_queries, dim)
    attended = F.scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
    attended = attended.view(batch, kv_heads, fold, num_queries, -1).permute(0, 3, 1, 2, 4)
    return attended.reshape(batch * num_queries, heads, -1)


def mask_kinds(shapes: Sequence[KVShape]) -> frozenset[MaskKind]:
    """The masks that layers of these shapes need."""
    return frozenset((shape.window, shape.fold) for shape in shapes)


def build_groups(
    spans: Sequence[RowSpan], kinds: frozenset[MaskKind], dtype: torch.dtype, device: torch.device
) -> tuple[AttentionGroup, ...]:
    """Group the requests of a pass: those whose row counts and lengths round up to the same powers of two.

    Padding thus at most doubles either side, and a batch of decodes costs one attention call a layer.
    """
    buckets: dict[tuple[int, int], list[tuple[int, RowSpan]]] = {}
    first_row = 0
    for span in spans:
        bucket = (span.num_rows - 1).bit_length(), (span.end - 1).bit_length()
        buckets.setdefault(bucket, []).append((first_row, span))
        first_row += span.num_rows
    return tuple(_build_group(members, kinds, dtype, device) for members in buckets.values())


def _build_group(
    members: list[tuple[int, RowSpan]], kinds: frozenset[MaskKind], dtype: torch.dtype, device: torch.device
) -> AttentionGroup:
    num_queries = max(span.num_rows for _, span in members)
    num_keys = max(span.end for _, span in members)
    slots = torch.empty(len(members), num_keys, dtype=torch.int64)
    for index, (_, span) in enumerate(members):
        slots[index, : span.end] = span.slots
        slots[index, span.end :] = span.slots[0]  # masked; a row of its own, so that no request reads another's
    # Query j of a request is its last row for all padding j: a padded query then never has an empty mask row.
    first = torch.tensor([first_row for first_row, _ in members]).unsqueeze(1)
    count = torch.tensor([span.num_rows for _, span in members]).unsqueeze(1)
    end = torch.tensor([span.end for _, span in members]).unsqueeze(1)
    offsets = torch.arange(num_queries).unsqueeze(0)
    clamped = torch.minimum(offsets, count - 1)
    is_padded = bool((count < num_queries).any())
    real = (offsets < count).flatten().nonzero().squeeze(1).to(device) if is_padded else None
    query_rows = (end - count + clamped).unsqueeze(2)
    masks = {kind: _mask(query_rows, num_keys, kind, dtype, device) for kind in kinds}
    return AttentionGroup(len(members), (first + clamped).flatten().to(device), real, slots.flatten().to(device), masks)


def _mask(query_rows: Tensor, num_keys: int, kind: MaskKind, dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Additive mask [B, 1, fold * Q, L] for queries at sequence rows `query_rows` [B, Q, 1]; None if all is visible."""
    window, fold = kind
    keys = torch.arange(num_keys)
    visible = keys <= query_rows
    if window is not None:
        visible &= keys > query_rows - window
    if bool(visible.all()):
        return None
    mask = torch.zeros(visible.shape, dtype=dtype).masked_fill_(~visible, float("-inf"))
    return mask.unsqueeze(1).repeat(1, 1, fold, 1).to(device)


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
