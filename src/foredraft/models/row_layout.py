"""The rows of a pass, laid out for attention: as rectangles for torch's, as lanes for kernels with block tables."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from foredraft.cache.groups import CacheGroup
from foredraft.cache.storage import CacheStorage
from foredraft.kernels.lanes import Lanes


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
    """What a pass does in the layers of one cache group: `slots` [T] take what each row stores, and `attention` covers
    all T rows: as rectangles, or as lanes for the kernels that read block tables, which need the `window`.

    make_lanes: lays out the same rows as lanes, where `attention` is rectangles.
    """

    slots: Tensor
    attention: tuple[AttentionGroup, ...] | Lanes
    window: int | None = None
    make_lanes: Callable[[], Lanes] | None = None

    @cached_property
    def lanes(self) -> Lanes:
        """The rows as lanes."""
        if isinstance(self.attention, Lanes):
            return self.attention
        assert self.make_lanes is not None
        return self.make_lanes()


def _as_slice(slots: Tensor) -> slice | None:
    """The slice that `slots` [L] are, if they lie one after another: it needs no copy of the rows."""
    first, count = int(slots[0]), len(slots)
    is_run = int(slots[-1]) - first == count - 1 and torch.equal(slots, torch.arange(first, first + count))
    return slice(first, first + count) if is_run else None


class EarlierRows(NamedTuple):
    """The rows before each row of a pass, oldest first: their slots [T, n], and which there are [T, n]."""

    slots: Tensor
    exists: Tensor


def earlier_rows(lanes: Lanes, num_rows: int, count: int, block_size: int) -> EarlierRows:
    """The `count` rows before each of the T = `num_rows` rows of a pass in its own sequence, without waiting for the
    device. Of rows in no lane it is any."""
    tables = lanes.block_tables
    rows = torch.arange(num_rows, device=tables.device)
    # Lanes that take part lie one after another; the others are looked for behind all rows.
    starts = torch.where(lanes.num_rows > 0, lanes.flat_rows, num_rows).to(torch.int64)
    order = starts.argsort(stable=True)
    lane = order[torch.searchsorted(starts[order], rows, right=True).sub_(1).clamp_(min=0)]
    first = lanes.first_rows[lane] + (rows - lanes.flat_rows[lane])
    earlier = first.unsqueeze(1) + torch.arange(-count, 0, device=tables.device)
    exists = earlier >= lanes.origins[lane].unsqueeze(1)
    earlier = earlier.clamp_(0, tables.shape[1] * block_size - 1)
    blocks = tables[lane.unsqueeze(1), earlier // block_size].to(torch.int64)
    return EarlierRows(blocks * block_size + earlier % block_size, exists)


def group_rows(
    storage: CacheStorage, group: int, slots: Tensor, spans: Sequence[RowSpan], device: torch.device
) -> GroupRows:
    """What a pass over `spans`, whose new rows go to `slots` [T], does in cache group number `group`."""
    own = storage.layout.groups[group]
    make_lanes = partial(_lanes, spans, storage.block_size, device)
    if device.type == "cuda":
        return GroupRows(slots.to(device), make_lanes(), own.window)
    attention = _rectangles(own, spans, storage.layout.dtype, device) if own.layers else ()
    return GroupRows(slots.to(device), attention, own.window, make_lanes)


def _rectangles(
    group: CacheGroup, spans: Sequence[RowSpan], dtype: torch.dtype, device: torch.device
) -> tuple[AttentionGroup, ...]:
    """For torch's attention. Requests are taken together whose row counts and lengths round up to the same powers of
    two. Padding thus at most doubles either side, and a batch of decodes costs one attention call a layer.
    """
    window = group.window
    folds = frozenset(shape.fold for shape in group.shapes)
    buckets: dict[tuple[int, int], list[tuple[int, RowSpan]]] = {}
    first_row = 0
    for span in spans:
        bucket = (span.num_rows - 1).bit_length(), (span.end - span.first_key(window) - 1).bit_length()
        buckets.setdefault(bucket, []).append((first_row, span))
        first_row += span.num_rows
    return tuple(_attention_group(members, window, folds, dtype, device) for members in buckets.values())


def _lanes(spans: Sequence[RowSpan], block_size: int, device: torch.device) -> Lanes:
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
    return Lanes(on_device[:numbers_at].view(-1, width), first, counts, flat, begins, max(num_rows))


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
