"""Which earlier rows a row of sparse attention looks at, in plain torch on any device."""

from __future__ import annotations

import torch
from torch import Tensor

from foredraft.kernels.lanes import Lanes

_MAX_SCORES = 1 << 26
"""Scores of single heads that are held at once."""


def choose_rows(
    query: Tensor, weights: Tensor, key_cache: Tensor, lanes: Lanes, block_size: int, scale: float, count: int
) -> Tensor:
    """For each row the `count` rows of its own sequence with the highest scores, of those up to itself.

    query [T, heads, dim], key_cache [num_slots, dim]. The score of row j at row i is the sum over heads of weights [T,
    heads] times relu(scale * query . key), in float32. Of equal scores the earlier rows win, whatever else is in the
    batch. A row that has no more than `count` rows is given all of them.

    Returns [T, N] bool by row of the sequence, where N is a bound of all rows that the block tables name. What it says
    of rows behind a row's own, or before its lane's origin, means nothing. Waits for the lengths on a GPU.
    """
    num_rows, num_heads, _ = query.shape
    chosen = torch.zeros(num_rows, lanes.block_tables.shape[1] * block_size, dtype=torch.bool, device=query.device)
    columns = torch.stack((lanes.flat_rows, lanes.num_rows, lanes.first_rows, lanes.origins), dim=1)
    for table, (flat_row, num_queries, first_row, origin) in zip(lanes.block_tables, columns.tolist()):
        if not num_queries:  # the lane takes no part
            continue
        end = first_row + num_queries
        keys = key_cache.index_select(0, _slots(table, origin, end, block_size)).float()
        step = max(1, _MAX_SCORES // (num_heads * max(1, end - origin)))
        for first in range(0, num_queries, step):
            rows = slice(flat_row + first, flat_row + min(first + step, num_queries))
            scores = _scores(query[rows], weights[rows], keys, scale)
            own = torch.arange(first_row + first - origin, end - origin, device=query.device)[: len(scores)]
            behind = torch.arange(end - origin, device=query.device) > own.unsqueeze(1)
            chosen[rows, origin:end] = _highest(scores.masked_fill_(behind, float("-inf")), count)
    return chosen


def _slots(table: Tensor, first: int, end: int, block_size: int) -> Tensor:
    """Where rows first..end-1 of a sequence lie."""
    rows = torch.arange(first, end, device=table.device)
    return table[rows // block_size].to(torch.int64) * block_size + rows % block_size


def _scores(query: Tensor, weights: Tensor, keys: Tensor, scale: float) -> Tensor:
    """[Q, N] float32, of query [Q, heads, dim], weights [Q, heads] and keys [N, dim]."""
    by_head = (query.float() @ keys.t()).mul_(scale).relu_()
    return (weights.float().unsqueeze(1) @ by_head).squeeze(1)


def _highest(scores: Tensor, count: int) -> Tensor:
    """The `count` highest of each row, bool [Q, N]; of equal ones the first."""
    if count >= scores.shape[1]:
        return torch.ones_like(scores, dtype=torch.bool)
    least = scores.topk(count, dim=1).values[:, -1:]
    above, level = scores > least, scores == least
    room = count - above.sum(dim=1, keepdim=True)
    return above | (level & (level.cumsum(dim=1) <= room))
