"""Attention over paged rows, registered with transformers under `ATTENTION_NAME`.

A forward pass sees the rows of many requests laid end to end as one sequence of T rows. Each layer writes its new
keys and values to the slots that the pass names, then every group of requests attends to its own slots. What a pass
needs is one `PagedAttention` object, handed through transformers' keyword arguments: there is no global state.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from foredraft.cache.groups import CacheGroup
from foredraft.cache.storage import CacheStorage, LayerKV
from foredraft.errors import ModelLoadError
from foredraft.kernels.lanes import Lanes
from foredraft.kernels.ops import Kernels, kernels_of

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
    for all; slots [B * L], or a slice where they lie one after another; masks: additive, [B, 1, fold * Q, L] by fold,
    the number of query heads that share a key head; None where every key is visible to every query.
    """

    num_requests: int
    rows: Tensor
    real: Tensor | None
    slots: Tensor | slice
    masks: dict[int, Tensor | None]


@dataclass(frozen=True)
class GroupRows:
    """What a pass does in the layers of one cache group: `slots` [T] take each row's key and value, and `attention`
    covers all T rows: as rectangles, or as lanes for the kernels that read block tables, which need the `window`."""

    slots: Tensor
    attention: tuple[AttentionGroup, ...] | Lanes
    window: int | None = None


class Rotation(NamedTuple):
    """How the rows of a pass become queries and keys: their positions, the rotary tables [P, size], the heads that lie
    in a row of query, key and value, and the norms of each head [head_dim], if there are any."""

    positions: Tensor
    cos: Tensor
    sin: Tensor
    num_heads: int
    num_kv_heads: int
    head_dim: int
    q_norm: Tensor | None = None
    k_norm: Tensor | None = None
    eps: float = 0.0

    def apply(self, kernels: Kernels, qkv: Tensor, keys: Tensor, values: Tensor, slots: Tensor) -> Tensor:
        """Turn qkv [T, heads * dim], store keys and values at `slots` [T]; the queries [T, num_heads, head_dim]."""
        positions, cos, sin, num_heads, num_kv_heads, head_dim, q_norm, k_norm, eps = self
        return kernels.rotate_and_store(
            qkv, positions, cos, sin, keys, values, slots, num_heads, num_kv_heads, head_dim, q_norm, k_norm, eps
        )


@dataclass(frozen=True)
class PagedAttention:
    """All that the layers of one forward pass need to know; `kv` and `rows` have an entry a layer, by `layer_idx`.

    block_size: rows of a block, where `rows` are lanes. kernels: those of the device if left out. dtype: what queries,
    keys and values are converted to before they meet, if it is not their own.
    """

    kv: Sequence[LayerKV]
    rows: Sequence[GroupRows]
    block_size: int = 0
    kernels: Kernels | None = None
    dtype: torch.dtype | None = None

    def attend(
        self, layer_idx: int, query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Store `key` and `value` [1, kv_heads, T, dim], attend with `query` [1, heads, T, dim]; [1, T, heads, dim].

        `window` is the one that the cache group of the layer was made for.
        """
        kv, slots = self.kv[layer_idx], self.rows[layer_idx].slots
        num_rows = query.shape[2]
        kv.key.index_copy_(0, slots, key[0].transpose(0, 1).reshape(num_rows, -1))
        kv.value.index_copy_(0, slots, value[0].transpose(0, 1).reshape(num_rows, -1))
        return self._attend(layer_idx, query[0].transpose(0, 1), scale).unsqueeze(0)

    def attend_rotated(self, layer_idx: int, qkv: Tensor, rotation: Rotation, scale: float) -> Tensor:
        """The same for rows as a projection leaves them, qkv [T, heads * dim]: turn, store and attend; [T, heads *
        dim]."""
        kv = self.kv[layer_idx]
        kernels, slots = self.kernels or kernels_of(qkv.device), self.rows[layer_idx].slots
        query = rotation.apply(kernels, qkv, kv.key, kv.value, slots)
        return self._attend(layer_idx, query, scale).flatten(1)

    def _attend(self, layer_idx: int, query: Tensor, scale: float) -> Tensor:
        """query [T, heads, dim] -> [T, heads, value_dim]; keys and values are stored."""
        if self.dtype is not None and query.dtype != self.dtype:
            return self._attend(layer_idx, query.to(self.dtype), scale).to(query.dtype)
        kv, rows = self.kv[layer_idx], self.rows[layer_idx]
        groups = rows.attention
        if isinstance(groups, Lanes):
            kernels = self.kernels or kernels_of(query.device)
            return kernels.paged_attention(
                query.contiguous(), kv.key, kv.value, groups, self.block_size, scale, rows.window
            )
        if len(groups) == 1 and groups[0].real is None:
            return _attend_group(groups[0], kv, query, scale)
        output = query.new_empty(*query.shape[:2], kv.value.shape[1] // kv.num_kv_heads)
        for group in groups:
            attended = _attend_group(group, kv, query.index_select(0, group.rows), scale)
            if group.real is None:
                output.index_copy_(0, group.rows, attended)
            else:
                output.index_copy_(0, group.rows.index_select(0, group.real), attended.index_select(0, group.real))
        return output


def _attend_group(group: AttentionGroup, kv: LayerKV, query: Tensor, scale: float) -> Tensor:
    """query [B * Q, heads, dim] -> [B * Q, heads, value_dim], in the query's dtype.

    The heads that share a key head are folded into its query rows, so keys are never repeated in memory.
    """
    batch, kv_heads = group.num_requests, kv.num_kv_heads
    num_queries, heads, dim = query.shape[0] // batch, query.shape[1], query.shape[2]
    fold = heads // kv_heads
    keys, values = (_rows_at(rows, group.slots).to(query.dtype) for rows in (kv.key, kv.value))
    keys = keys.view(batch, -1, kv_heads, dim).transpose(1, 2)
    values = values.view(batch, keys.shape[2], kv_heads, -1).transpose(1, 2)
    mask = group.masks[fold]
    mask = None if mask is None else mask.to(query.dtype)
    if num_queries == 1:  # plain decoding: folded as it lies
        folded = query.view(batch, kv_heads, fold, dim)
        attended = F.scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
        return attended.reshape(batch, heads, -1)  # on a GPU its strides may be those of another layout
    folded = query.view(batch, num_queries, kv_heads, fold, dim).permute(0, 2, 3, 1, 4)
    folded = folded.reshape(batch, kv_heads, fold * num_queries, dim)
    attended = F.scaled_dot_product_attention(folded, keys, values, mask, scale=scale)
    attended = attended.view(batch, kv_heads, fold, num_queries, -1).permute(0, 3, 1, 2, 4)
    return attended.reshape(batch * num_queries, heads, -1)


def _rows_at(rows: Tensor, slots: Tensor | slice) -> Tensor:
    return rows[slots] if isinstance(slots, slice) else rows.index_select(0, slots)


def _as_slice(slots: Tensor) -> slice | None:
    """The slice that `slots` [L] are, if they lie one after another: it needs no copy of the rows."""
    first, count = int(slots[0]), len(slots)
    is_run = int(slots[-1]) - first == count - 1 and torch.equal(slots, torch.arange(first, first + count))
    return slice(first, first + count) if is_run else None


def group_rows(
    storage: CacheStorage, group: int, slots: Tensor, spans: Sequence[RowSpan], device: torch.device
) -> GroupRows:
    """What a pass over `spans`, whose new rows go to `slots` [T], does in cache group number `group`."""
    if device.type == "cuda":
        return _lane_rows(storage.layout.groups[group], slots, spans, storage.block_size, device)
    return _rectangles(storage.layout.groups[group], slots, spans, storage.layout.dtype, device)


def _rectangles(
    group: CacheGroup, slots: Tensor, spans: Sequence[RowSpan], dtype: torch.dtype, device: torch.device
) -> GroupRows:
    """For torch's attention. Requests are taken together whose row counts and lengths round up to the same powers of
    two. Padding thus at most doubles either side, and a batch of decodes costs one attention call a layer.
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


def _lane_rows(
    group: CacheGroup, slots: Tensor, spans: Sequence[RowSpan], block_size: int, device: torch.device
) -> GroupRows:
    """For kernels that read block tables: a lane for each span. All of it is one copy to the device."""
    tables = [span.slots[::block_size] // block_size for span in spans]
    width = max(len(table) for table in tables)
    packed = torch.zeros(len(spans) * (width + 4), dtype=torch.int32)
    for row, table in zip(packed[: len(spans) * width].view(-1, width), tables):
        row[: len(table)] = table
    numbers = [(span.end - span.num_rows, span.num_rows, span.origin) for span in spans]
    first_rows, num_rows, origins = (list(column) for column in zip(*numbers))
    flat_rows = [0, *itertools.accumulate(num_rows)][:-1]
    packed[len(spans) * width :] = torch.tensor([*first_rows, *num_rows, *flat_rows, *origins], dtype=torch.int32)
    on_device = packed.to(device)
    numbers_at = len(spans) * width
    first, counts, flat, begins = on_device[numbers_at:].view(4, -1).unbind()
    lanes = Lanes(on_device[:numbers_at].view(-1, width), first, counts, flat, begins, max(num_rows))
    return GroupRows(slots.to(device), lanes, group.shapes[0].window)


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
    flat = slots.flatten()
    where = (_as_slice(flat) if len(members) == 1 else None) or flat.to(device)
    return AttentionGroup(len(members), (first + clamped).flatten().to(device), real, where, masks)


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
