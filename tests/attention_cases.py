"""Random inputs of paged attention, what must come out of them, and NaN wherever nothing may be read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from foredraft.kernels.lanes import Lanes

ERRORS = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""By dtype: how far a number may be from the exact one, of which it is that share, or that much if it is below 1."""


@dataclass(frozen=True)
class AttentionCase:
    """The arguments of `paged_attention`, by their names."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    lanes: Lanes
    block_size: int
    scale: float
    window: int | None
    bias: Tensor | None
    sinks: Tensor | None = None
    chosen: Tensor | None = None

    @classmethod
    def random(
        cls,
        num_rows: Sequence[int],
        first_rows: Sequence[int],
        *,
        origins: Sequence[int] | None = None,
        num_kv_heads: int = 2,
        fold: int = 3,
        head_dim: int = 16,
        value_dim: int | None = None,
        block_size: int = 4,
        window: int | None = None,
        extent: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        seed: int = 0,
    ) -> AttentionCase:
        """A lane for each entry of num_rows. Block 0 and three flat rows (first, last, between lanes) are nobody's.

        extent: of the bias, None for no bias.
        """
        rng = torch.Generator().manual_seed(seed)
        value_dim = head_dim if value_dim is None else value_dim
        num_lanes, heads = len(num_rows), num_kv_heads * fold
        lengths = [first + count for first, count in zip(first_rows, num_rows)]
        counts = [-(-length // block_size) for length in lengths]
        blocks = 1 + torch.randperm(sum(counts), generator=rng, dtype=torch.int32)
        tables = torch.zeros(num_lanes, max(counts, default=0) + 1, dtype=torch.int32)
        for table, own in zip(tables, torch.split(blocks, counts)):
            table[: len(own)] = own
        flat_rows, total = [], 1
        for lane, count in enumerate(num_rows):
            flat_rows.append(total)
            total += count + (lane == 0)
        total += 1

        def numbers(*shape: int) -> Tensor:
            return torch.randn(shape, generator=rng).to(dtype).to(device)

        def integers(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32, device=device)

        lanes = Lanes(
            block_tables=tables.to(device),
            first_rows=integers(first_rows),
            num_rows=integers(num_rows),
            flat_rows=integers(flat_rows),
            origins=integers([0] * num_lanes if origins is None else origins),
            max_num_rows=max(num_rows, default=0),
        )
        num_slots = (1 + sum(counts)) * block_size
        return cls(
            query=numbers(total, heads, head_dim),
            key_cache=numbers(num_slots, num_kv_heads * head_dim),
            value_cache=numbers(num_slots, num_kv_heads * value_dim),
            lanes=lanes,
            block_size=block_size,
            scale=head_dim**-0.5,
            window=window,
            bias=None if extent is None else numbers(total, heads, extent),
        )

    def with_sinks(self) -> AttentionCase:
        """With a sink for each head, large enough to matter."""
        heads = self.query.shape[1]
        return replace(self, sinks=torch.linspace(-1, 3, heads).to(self.query))

    def with_chosen(self, share: float = 0.3) -> AttentionCase:
        """With a random choice of the keys that each row sees; its own is always one of them."""
        lanes, rng = self.lanes, torch.Generator().manual_seed(1)
        width = lanes.block_tables.shape[1] * self.block_size
        chosen = torch.rand(len(self.query), width, generator=rng) < share
        for flat, count, first, _ in self.spans():
            chosen[range(flat, flat + count), range(first, first + count)] = True
        return replace(self, chosen=chosen.to(self.query.device))

    @property
    def num_kv_heads(self) -> int:
        return self.key_cache.shape[1] // self.query.shape[2]

    def spans(self) -> list[tuple[int, int, int, int]]:
        """Of each lane: its first flat row, its number of rows, its first row, its origin."""
        lanes = self.lanes
        columns = torch.stack((lanes.flat_rows, lanes.num_rows, lanes.first_rows, lanes.origins), dim=1)
        return [(flat, count, first, origin) for flat, count, first, origin in columns.tolist()]

    def flat_rows(self) -> Tensor:
        """The flat rows that belong to a lane."""
        rows = [row for flat, count, _, _ in self.spans() for row in range(flat, flat + count)]
        return torch.tensor(rows, dtype=torch.int64, device=self.query.device)

    def slots(self, lane: int, first: int, end: int) -> Tensor:
        """Where rows first..end-1 of a lane's sequence lie."""
        rows = torch.arange(first, end, device=self.query.device)
        return self.lanes.block_tables[lane, rows // self.block_size].long() * self.block_size + rows % self.block_size

    def expected(self) -> Tensor:
        """[rows of lanes, heads, value_dim] float64, in the order of `flat_rows`: lane by lane, as it is defined."""
        return torch.cat([self._expected_lane(lane, *span) for lane, span in enumerate(self.spans()) if span[1]])

    def _expected_lane(self, lane: int, flat: int, count: int, first: int, origin: int) -> Tensor:
        """[rows, heads, value_dim]"""
        kv_heads, (_, heads, head_dim) = self.num_kv_heads, self.query.shape
        slots = self.slots(lane, 0, first + count)
        queries = self.query[flat : flat + count].double().view(count, kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        keys = self.key_cache[slots].double().view(len(slots), kv_heads, -1).transpose(0, 1).unsqueeze(1)
        values = self.value_cache[slots].double().view(len(slots), kv_heads, -1).transpose(0, 1).unsqueeze(1)
        scores = queries @ keys.transpose(2, 3) * self.scale
        rows = torch.arange(first, first + count, device=slots.device)
        distance = rows.unsqueeze(1) - torch.arange(len(slots), device=slots.device)
        visible = (distance >= 0) & (distance < (self.window or len(slots) + 1))
        visible[:, :origin] = False
        if self.bias is not None:
            extent = self.bias.shape[2]
            bias = self.bias[flat : flat + count].double()
            added = bias.gather(2, distance.clamp(0, extent - 1).unsqueeze(1).expand(-1, heads, -1))
            added = added.masked_fill((distance >= extent).unsqueeze(1), 0.0)
            scores = scores + added.view(count, kv_heads, -1, len(slots)).permute(1, 2, 0, 3)
        if self.chosen is not None:
            visible &= self.chosen[flat : flat + count, : len(slots)]
        scores = scores.masked_fill(~visible, float("-inf"))
        if self.sinks is not None:
            sinks = self.sinks.double().view(kv_heads, -1, 1, 1).expand(-1, -1, count, -1)
            scores = torch.cat([scores, sinks], dim=3)
            values = torch.cat([values, torch.zeros_like(values[:, :, :1])], dim=2)
        attended = scores.softmax(3) @ values
        return attended.flatten(0, 1).transpose(0, 1)

    def poisoned(self) -> AttentionCase:
        """NaN in every flat row of no lane, and in every cache row that no query sees."""
        is_seen = torch.zeros(len(self.key_cache), dtype=torch.bool, device=self.query.device)
        for lane, (_, count, first, origin) in enumerate(self.spans()):
            if count:
                begin = origin if self.window is None else max(origin, first - self.window + 1)
                is_seen[self.slots(lane, begin, first + count)] = True
        is_row = torch.zeros(len(self.query), dtype=torch.bool, device=self.query.device)
        is_row[self.flat_rows()] = True
        nan = float("nan")
        return replace(
            self,
            query=self.query.masked_fill(~is_row[:, None, None], nan),
            key_cache=self.key_cache.masked_fill(~is_seen[:, None], nan),
            value_cache=self.value_cache.masked_fill(~is_seen[:, None], nan),
            bias=None if self.bias is None else self.bias.masked_fill(~is_row[:, None, None], nan),
        )

    def assert_right(self, output: Tensor) -> None:
        """`output` [T, heads, value_dim] is what is expected, as near as the dtype allows."""
        assert output.dtype == self.query.dtype
        assert output.shape[:2] == self.query.shape[:2]
        error = ERRORS[output.dtype]
        torch.testing.assert_close(output[self.flat_rows()].double(), self.expected(), rtol=error, atol=error)
