"""Attention over paged rows, in plain torch: the reference, and what runs on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from foredraft.kernels.lanes import Lanes

_MAX_SCORES = 1 << 26
"""Numbers added to scores that are held at once, in float32."""


@dataclass(frozen=True)
class _Span:
    """The query rows of one lane: `num_rows` flat rows from `flat_row` on, which see rows first_key..end-1 of their
    sequence; the last of them is row end-1 itself."""

    lane: int
    flat_row: int
    num_rows: int
    first_key: int
    end: int

    @property
    def num_keys(self) -> int:
        return self.end - self.first_key


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    lanes: Lanes,
    block_size: int,
    scale: float,
    window: int | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    chosen: Tensor | None = None,
) -> Tensor:
    """See `foredraft.kernels.ops.Kernels`. Waits for the lengths on a GPU. Computed in the query's dtype, with other
    terms in float32. No query row lies before its lane's origin. Rows outside all lanes are not written.

    Lanes are taken together whose row counts and lengths round up to the same powers of two: padding at most doubles
    either side, and a batch of decodes costs one call of torch's attention.
    """
    num_kv_heads = key_cache.shape[1] // query.shape[2]
    output = query.new_empty(*query.shape[:2], value_cache.shape[1] // num_kv_heads)
    groups: dict[tuple[int, int], list[_Span]] = {}
    for span in _spans(lanes, window):
        sizes = (span.num_rows - 1).bit_length(), (span.num_keys - 1).bit_length()
        groups.setdefault(sizes, []).append(span)
    is_plain = bias is None and sinks is None and chosen is None
    for spans in groups.values():
        whole = _Rectangle.of(spans, lanes.block_tables, block_size)
        for part in [whole] if is_plain else whole.parts(query.shape[1]):
            attended = part.attend(query, key_cache, value_cache, num_kv_heads, scale, window, bias, sinks, chosen)
            output.index_copy_(0, part.flat_rows.flatten(), attended)
    return output


def _spans(lanes: Lanes, window: int | None) -> list[_Span]:
    """Of the lanes that take part."""
    columns = torch.stack((lanes.flat_rows, lanes.num_rows, lanes.first_rows, lanes.origins), dim=1)
    spans = []
    for lane, (flat_row, num_rows, first_row, origin) in enumerate(columns.tolist()):
        if num_rows:
            first_key = origin if window is None else max(origin, first_row - window + 1)
            spans.append(_Span(lane, flat_row, num_rows, first_key, first_row + num_rows))
    return spans


@dataclass(frozen=True)
class _Rectangle:
    """Lanes of like size, padded to B lanes of Q query rows and N keys.

    flat_rows, rows [B, Q]: query rows in the flat batch and in their sequences; key_rows, slots [B, N]: keys in their
    sequences and in the cache. Padding repeats the last row of the same lane: so all that is read is real, and what is
    computed twice is written twice. key_rows of padding lie behind all query rows.
    """

    flat_rows: Tensor
    rows: Tensor
    key_rows: Tensor
    slots: Tensor
    is_padded: bool

    @classmethod
    def of(cls, spans: Sequence[_Span], block_tables: Tensor, block_size: int) -> _Rectangle:
        device = block_tables.device
        num_queries = max(span.num_rows for span in spans)
        num_keys = max(span.num_keys for span in spans)
        numbers = [(span.lane, span.flat_row, span.num_rows, span.first_key, span.end) for span in spans]
        lane, flat_row, num_rows, first_key, end = torch.tensor(numbers, device=device).unsqueeze(2).unbind(1)
        offsets = torch.minimum(torch.arange(num_queries, device=device), num_rows - 1)
        key_rows = first_key + torch.arange(num_keys, device=device)
        read_rows = torch.minimum(key_rows, end - 1)
        blocks = block_tables[lane, read_rows // block_size].to(torch.int64)
        return cls(
            flat_rows=flat_row + offsets,
            rows=end - num_rows + offsets,
            key_rows=key_rows,
            slots=blocks * block_size + read_rows % block_size,
            is_padded=any(span.num_keys < num_keys for span in spans),
        )

    def parts(self, num_heads: int) -> Iterator[_Rectangle]:
        """The same in runs of query rows, so few that what is added to their scores stays small."""
        (batch, num_queries), num_keys = self.rows.shape, self.slots.shape[1]
        step = max(1, _MAX_SCORES // (batch * num_heads * num_keys))
        for first in range(0, num_queries, step):
            rows = slice(first, first + step)
            yield replace(self, flat_rows=self.flat_rows[:, rows], rows=self.rows[:, rows])

    def attend(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        num_kv_heads: int,
        scale: float,
        window: int | None,
        bias: Tensor | None,
        sinks: Tensor | None,
        chosen: Tensor | None,
    ) -> Tensor:
        """[B * Q, heads, value_dim]. The heads that share a key head are folded into its query rows."""
        (batch, num_queries), num_keys = self.rows.shape, self.slots.shape[1]
        queries = query.index_select(0, self.flat_rows.flatten())
        queries = queries.view(batch, num_queries, num_kv_heads, -1, query.shape[2]).transpose(1, 2).flatten(2, 3)
        slots = self.slots.flatten()
        keys, values = (rows.index_select(0, slots).to(query.dtype) for rows in (key_cache, value_cache))
        keys = keys.view(batch, num_keys, num_kv_heads, -1).transpose(1, 2)
        values = values.view(batch, num_keys, num_kv_heads, -1).transpose(1, 2)
        fold = query.shape[1] // num_kv_heads
        if bias is None and sinks is None and chosen is None:
            mask = self._mask(fold, query.dtype, window)
        else:
            queries, keys, values = queries.float(), keys.float(), values.float()
            mask = self._scores(query.shape[1], fold, bias, chosen, window)
            if sinks is not None:  # a key of zeros, whose score is the sink alone, and whose value is nothing
                keys, values = (F.pad(rows, (0, 0, 0, 1)) for rows in (keys, values))
                column = sinks.float().view(1, num_kv_heads, 1, fold).expand(batch, -1, num_queries, -1)
                mask = torch.cat((mask, column.flatten(2).unsqueeze(3)), dim=3)
        attended = F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale)
        attended = attended.reshape(batch, num_kv_heads, num_queries, fold, -1).transpose(1, 2)
        return attended.reshape(batch * num_queries, num_kv_heads * fold, -1).to(query.dtype)

    def _distance(self) -> Tensor:
        """[B, Q, N], from each query row back to each key."""
        return self.rows.unsqueeze(2) - self.key_rows.unsqueeze(1)

    def _mask(self, fold: int, dtype: torch.dtype, window: int | None) -> Tensor | None:
        """Additive [B, 1, Q * fold, N], or None if all is visible."""
        if self.rows.shape[1] == 1 and not self.is_padded:
            return None  # keys begin with the first that is visible to the only row
        mask = torch.zeros(*self.rows.shape, 1, self.slots.shape[1], dtype=dtype, device=self.rows.device)
        mask.masked_fill_(_hidden(self._distance(), window).unsqueeze(2), float("-inf"))
        return mask.expand(-1, -1, fold, -1).flatten(1, 2).unsqueeze(1)

    def _scores(self, heads: int, fold: int, bias: Tensor | None, chosen: Tensor | None, window: int | None) -> Tensor:
        """What is added to scores, float32 [B, kv_heads, Q * fold, N]: the bias, and -inf at hidden keys."""
        distance = self._distance().unsqueeze(2)
        if bias is None:
            added = torch.zeros(*self.rows.shape, heads, self.slots.shape[1], device=self.rows.device)
        else:
            extent = bias.shape[2]
            rows = bias.index_select(0, self.flat_rows.flatten()).view(*self.flat_rows.shape, heads, extent).float()
            near = distance.clamp(0, extent - 1).expand(-1, -1, heads, -1)
            added = rows.gather(3, near).masked_fill_(distance >= extent, 0.0)
        added.masked_fill_(_hidden(distance, window), float("-inf"))
        if chosen is not None:
            rows = chosen.index_select(0, self.flat_rows.flatten()).view(*self.flat_rows.shape, -1)
            keys = self.key_rows.clamp(max=rows.shape[2] - 1).unsqueeze(1).expand(-1, rows.shape[1], -1)
            added.masked_fill_(~rows.gather(2, keys).unsqueeze(2), float("-inf"))
        return added.view(*self.rows.shape[:2], -1, fold, added.shape[3]).transpose(1, 2).flatten(2, 3)


def _hidden(distance: Tensor, window: int | None) -> Tensor:
    return distance < 0 if window is None else (distance < 0) | (distance >= window)
