"""How often tokens were seen, before each row."""

from __future__ import annotations

import random

import numpy as np
import pytest

from foredraft.sampling.token_counts import CountRows, TokenCounts

VOCAB_SIZE = 8


def as_dicts(rows: CountRows) -> list[tuple[dict[int, int], set[int]]]:
    """By row: how often each written token was written, and the seen ones."""
    return [
        (
            {int(token_id): int(count) for token_id, count in zip(rows.ids, counts) if count},
            {int(token_id) for token_id, seen in zip(rows.ids, is_seen) if seen},
        )
        for counts, is_seen in zip(rows.num_written, rows.is_seen)
    ]


def naive(prompt: list[int], output: list[int], drafts: list[int], first: int) -> list[tuple[dict[int, int], set[int]]]:
    rows = []
    for j in range(first, len(drafts) + 1):
        written = output + drafts[:j]
        rows.append(({token_id: written.count(token_id) for token_id in set(written)}, set(prompt + written)))
    return rows


@pytest.mark.parametrize("seed", range(50))
def test_against_counting_anew(seed: int) -> None:
    """Drafts, rejected ones among them, are in the rows after them and in nothing that comes later."""
    chance = random.Random(seed)

    def some(high: int) -> list[int]:
        return [chance.randrange(VOCAB_SIZE) for _ in range(chance.randint(0, high))]

    prompt, output = some(5), list[int]()
    counts = TokenCounts(prompt)
    for _ in range(6):
        drafts = some(6)
        first = chance.randint(0, len(drafts))
        for start in (0, first, len(drafts)):
            rows = counts.rows(drafts, start)
            assert as_dicts(rows) == naive(prompt, output, drafts, start)
            assert len(set(rows.ids.tolist())) == len(rows.ids)
        kept = drafts[:first] + some(2)
        counts.add(kept)
        output += kept


def test_kinds() -> None:
    rows = TokenCounts([3, 3, 1]).rows([7, 3, 7])
    assert rows.ids.dtype == np.int64
    assert rows.num_written.dtype == np.float32
    assert rows.is_seen.dtype == np.bool_
    assert rows.ids.tolist() == [3, 1, 7]
    assert rows.num_written.tolist() == [[0, 0, 0], [0, 0, 1], [1, 0, 1], [1, 0, 2]]
    assert rows.is_seen.tolist() == [[True, True, False], *[[True, True, True]] * 3]


def test_what_is_returned_is_the_callers() -> None:
    counts = TokenCounts([1, 2])
    counts.add([2])
    counts.rows([2]).num_written[:] = 9
    assert as_dicts(counts.rows([])) == [({2: 1}, {1, 2})]
