"""Which rows a row of sparse attention looks at, against a loop over rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from foredraft.kernels.lanes import Lanes
from foredraft.kernels.torch import indexer

BLOCK_SIZE, SCALE = 4, 0.3


@dataclass(frozen=True)
class IndexCase:
    """Arguments of `choose_rows`; slots [L, N] of the rows of each lane."""

    query: Tensor
    weights: Tensor
    key_cache: Tensor
    lanes: Lanes
    slots: Tensor

    @classmethod
    def random(cls, num_rows: Sequence[int], first_rows: Sequence[int], origins: Sequence[int]) -> IndexCase:
        """A lane for each entry. Block 0 and the flat rows 0 and T - 1 are nobody's."""
        rng = torch.Generator().manual_seed(0)
        num_lanes, width = len(num_rows), 1 + max(a + b for a, b in zip(num_rows, first_rows)) // BLOCK_SIZE
        tables = 1 + torch.randperm(num_lanes * width, generator=rng).view(num_lanes, width)
        flat_rows = [1 + sum(num_rows[:lane]) for lane in range(num_lanes)]

        def integers(values: Sequence[int]) -> Tensor:
            return torch.tensor(values, dtype=torch.int32)

        lanes = Lanes(
            block_tables=tables.to(torch.int32),
            first_rows=integers(first_rows),
            num_rows=integers(num_rows),
            flat_rows=integers(flat_rows),
            origins=integers(origins),
            max_num_rows=max(num_rows),
        )
        total, heads, dim = sum(num_rows) + 2, 5, 8
        return cls(
            query=torch.randn(total, heads, dim, generator=rng),
            weights=torch.randn(total, heads, generator=rng),
            key_cache=torch.randn((1 + num_lanes * width) * BLOCK_SIZE, dim, generator=rng),
            lanes=lanes,
            slots=(tables.unsqueeze(2) * BLOCK_SIZE + torch.arange(BLOCK_SIZE)).flatten(1),
        )

    def chosen(self, count: int) -> Tensor:
        return indexer.choose_rows(self.query, self.weights, self.key_cache, self.lanes, BLOCK_SIZE, SCALE, count)

    def visible(self) -> list[tuple[int, int, range]]:
        """Each flat row, its lane, and the rows of its sequence that it may see."""
        lanes = self.lanes
        columns = torch.stack((lanes.flat_rows, lanes.num_rows, lanes.first_rows, lanes.origins), dim=1).tolist()
        return [
            (flat_row + index, lane, range(origin, first_row + index + 1))
            for lane, (flat_row, num_rows, first_row, origin) in enumerate(columns)
            for index in range(num_rows)
        ]

    def assert_right(self, chosen: Tensor, count: int) -> None:
        assert chosen.shape == (len(self.query), self.slots.shape[1])
        for row, lane, rows in self.visible():
            scores = [self.score(row, self.key_cache[self.slots[lane, key]]) for key in rows]
            best = sorted(range(len(rows)), key=lambda index: (-scores[index], index))[:count]
            ours = chosen[row, rows.start : rows.stop].nonzero()[:, 0].tolist()
            assert ours == sorted(best)

    def score(self, row: int, key: Tensor) -> float:
        """By float64, rounded, so that equal sums are equal."""
        heads = (self.query[row].double() @ key.double() * SCALE).clamp(min=0)
        return round(float(self.weights[row].double() @ heads), 5)


CASE = IndexCase.random([1, 7, 0, 3, 12], [9, 0, 5, 14, 2], [0, 0, 0, 6, 1])


@pytest.mark.parametrize("count", [1, 4, 100])
def test_the_highest_of_the_own_sequence_are_chosen(count: int) -> None:
    CASE.assert_right(CASE.chosen(count), count)


def test_rows_may_be_scored_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = CASE.chosen(4)
    monkeypatch.setattr(indexer, "_MAX_SCORES", 160)
    assert torch.equal(CASE.chosen(4), whole)


def test_of_equal_scores_the_earlier_rows_are_chosen() -> None:
    """With weights below 0 the highest score is that of keys to which all heads say 0: many have it."""
    case = replace(CASE, query=CASE.query[:, :2], weights=-CASE.weights[:, :2].abs())
    num_equal = [
        sum(case.score(row, case.key_cache[case.slots[lane, key]]) == 0 for key in rows)
        for row, lane, rows in case.visible()
    ]
    assert max(num_equal) > 3
    for count in (1, 2, 3):
        case.assert_right(case.chosen(count), count)


def test_what_nobody_sees_is_not_read() -> None:
    seen = torch.zeros(len(CASE.key_cache), dtype=torch.bool)
    own = torch.zeros(len(CASE.query), dtype=torch.bool)
    for row, lane, rows in CASE.visible():
        seen[CASE.slots[lane, rows.start : rows.stop]] = True
        own[row] = True
    key_cache, query = CASE.key_cache.clone(), CASE.query.clone()
    key_cache[~seen], query[~own] = torch.nan, torch.nan
    assert key_cache.isnan().any()
    poisoned = replace(CASE, key_cache=key_cache, query=query)
    assert torch.equal(poisoned.chosen(4)[own], CASE.chosen(4)[own])


def test_bfloat16_is_scored_in_float32() -> None:
    case = replace(CASE, query=CASE.query.bfloat16(), key_cache=CASE.key_cache.bfloat16())
    case.assert_right(case.chosen(4), 4)


def test_lanes_that_take_no_part_are_passed_over() -> None:
    """Padding of a batch: no rows, and numbers that name none."""
    case = IndexCase.random((2, 1), (5, 7), (0, 0))
    lanes = case.lanes
    padded = replace(
        lanes,
        block_tables=torch.cat([lanes.block_tables, torch.zeros_like(lanes.block_tables[:1])]),
        first_rows=torch.cat([lanes.first_rows, torch.tensor([-1], dtype=torch.int32)]),
        num_rows=torch.cat([lanes.num_rows, torch.zeros(1, dtype=torch.int32)]),
        flat_rows=torch.cat([lanes.flat_rows, torch.zeros(1, dtype=torch.int32)]),
        origins=torch.cat([lanes.origins, torch.zeros(1, dtype=torch.int32)]),
    )
    assert torch.equal(replace(case, lanes=padded).chosen(3), case.chosen(3))
