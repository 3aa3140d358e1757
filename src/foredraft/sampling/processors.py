"""The rules that act on logits, over all rows of a batch at once: each row by its own history, its drafts included.

The order is that of transformers (`GenerationMixin._get_logits_processor`): bias, repetition penalty, presence and
frequency penalty (which transformers has not), bad words, minimum length, allowed tokens and grammar, the caller's own
processors. Temperature and the filters follow in `sampler.probabilities`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from foredraft.errors import RequestError, described
from foredraft.sampling.sampling_state import SamplingState

Ids = NDArray[np.int64]


class RowError(NamedTuple):
    """Why no token can be chosen after the first `num_drafts` drafts. Of no account if one of them is rejected."""

    num_drafts: int
    message: str


class RuledRows(NamedTuple):
    """Consecutive rows of one request: row `first_row` + j - `start` comes after the first j drafts, j >= `start`."""

    state: SamplingState
    first_row: int
    draft_token_ids: tuple[int, ...]
    start: int = 0

    @property
    def num_drafts(self) -> range:
        """How many drafts come before each of the rows."""
        return range(self.start, len(self.draft_token_ids) + 1)

    @property
    def rows(self) -> Ids:
        return np.arange(self.first_row, self.first_row + len(self.num_drafts))


def apply_rules(
    logits: Tensor, ruled: Sequence[RuledRows], *, is_draft: bool = False
) -> tuple[Tensor, dict[str, RowError]]:
    """Apply the rules of each request to its rows.

    logits [R, V]; V may be less than the vocabulary for drafts, which callers' own processors are not asked about.
    Returns logits [R, V] float32, where -inf is banned, and the first row of a request where its rules failed: from
    there on its rows may hold anything.
    """
    logits = logits.float() if logits.dtype != torch.float32 else logits.clone()
    errors: dict[str, RowError] = {}
    masks = [_masks(rows, errors) for rows in ruled]
    _add_biases(logits, ruled)
    _subtract_penalties(logits, ruled)
    _ban(logits, [_banned(rows, own) for rows, own in zip(ruled, masks)])
    _apply_masks(logits, ruled, masks)
    if not is_draft:
        for rows in ruled:
            if rows.state.params.logits_processors:
                _process(logits, rows, errors)
        _note_dead_rows(logits, ruled, errors)
    return logits, errors


def _masks(rows: RuledRows, errors: dict[str, RowError]) -> list[Tensor | None]:
    masks: list[Tensor | None] = []
    for num_drafts in rows.num_drafts:
        try:
            masks.append(rows.state.mask_after(rows.draft_token_ids[:num_drafts]))
        except RequestError as error:
            errors[rows.state.terms.request_id] = RowError(num_drafts, str(error))
            break
    return masks + [None] * (len(rows.num_drafts) - len(masks))


def _flat(rows: Ids, ids: Ids, vocab_size: int) -> tuple[Ids, NDArray[np.bool_]]:
    """Where each of `ids` lies in each of `rows` of flattened logits; and which of `ids` there are at all."""
    is_there = ids < vocab_size
    return np.add.outer(rows * vocab_size, ids[is_there]).ravel(), is_there


def _update(logits: Tensor, index: Sequence[Ids], change: Callable[[Tensor], Tensor]) -> None:
    """Replace the entries at flat places by what `change` makes of them. A place may be named twice for a constant."""
    if index:
        places = torch.from_numpy(np.concatenate(index)).to(logits.device)
        flat = logits.view(-1)
        flat[places] = change(flat[places])


def _add_biases(logits: Tensor, ruled: Sequence[RuledRows]) -> None:
    index, values = [], []
    for rows in ruled:
        if len(rows.state.bias_ids):
            places, is_there = _flat(rows.rows, rows.state.bias_ids, logits.shape[1])
            index.append(places)
            values.append(np.tile(rows.state.bias_values[is_there], len(rows.num_drafts)))
    _update(logits, index, lambda scores: scores + _joined(values, logits.device))


def _subtract_penalties(logits: Tensor, ruled: Sequence[RuledRows]) -> None:
    """Penalties of Keskar et al. 2019 (repetition: a factor) and of OpenAI's API (presence, frequency: subtracted)."""
    index, factors, amounts = [], [], []
    for rows in ruled:
        counts, params = rows.state.counts, rows.state.params
        if counts is None:
            continue
        ids, num_written, is_seen = counts.rows(rows.draft_token_ids, rows.start)
        places, is_there = _flat(rows.rows, ids, logits.shape[1])
        num_written, is_seen = num_written[:, is_there], is_seen[:, is_there]
        index.append(places)
        factors.append(np.where(is_seen, np.float32(params.repetition_penalty), np.float32(1.0)).ravel())
        amount = params.frequency_penalty * num_written + params.presence_penalty * (num_written > 0)
        amounts.append(amount.astype(np.float32).ravel())

    def penalise(scores: Tensor) -> Tensor:
        factor = _joined(factors, logits.device)
        scores = torch.where(scores > 0, scores / factor, scores * factor)
        return scores - _joined(amounts, logits.device)

    _update(logits, index, penalise)


def _banned(rows: RuledRows, masks: Sequence[Tensor | None]) -> list[tuple[int, Ids]]:
    """For each row, the tokens that bad words and the minimum length forbid."""
    state = rows.state
    banned = []
    for row, num_drafts, mask in zip(rows.rows.tolist(), rows.num_drafts, masks):
        ids = np.array(state.banned_after(rows.draft_token_ids[:num_drafts]), np.int64)
        if state.params.min_tokens and state.holds_open(num_drafts, mask):
            ids = np.concatenate([ids, state.stop_token_ids])
        if len(ids):
            banned.append((row, ids))
    return banned


def _ban(logits: Tensor, banned: Sequence[list[tuple[int, Ids]]]) -> None:
    vocab_size = logits.shape[1]
    index = [_flat(np.array([row]), ids, vocab_size)[0] for each in banned for row, ids in each]
    _update(logits, index, lambda scores: torch.full_like(scores, -torch.inf))


def _apply_masks(logits: Tensor, ruled: Sequence[RuledRows], masks: Sequence[list[Tensor | None]]) -> None:
    vocab_size = logits.shape[1]
    chosen = [
        (row, mask[:vocab_size])
        for rows, each in zip(ruled, masks)
        for row, mask in zip(rows.rows.tolist(), each)
        if mask is not None
    ]
    if logits.device.type == "cpu":
        for row, mask in chosen:
            logits[row].masked_fill_(~mask, -torch.inf)
    elif chosen:
        index = torch.tensor([row for row, _ in chosen], device=logits.device)
        allowed = torch.stack([mask for _, mask in chosen]).to(logits.device)
        logits[index] = logits[index].masked_fill(~allowed, -torch.inf)


def _process(logits: Tensor, rows: RuledRows, errors: dict[str, RowError]) -> None:
    for row, num_drafts in zip(rows.rows.tolist(), rows.num_drafts):
        try:
            logits[row] = rows.state.process(rows.draft_token_ids[:num_drafts], logits[row].clone())
        except Exception as error:  # a caller's own code may raise anything; only this request ends
            found = RowError(num_drafts, f"logits_processors: {described(error)}")
            request_id = rows.state.terms.request_id
            errors[request_id] = min(errors.get(request_id, found), found, key=_place)
            return


def _note_dead_rows(logits: Tensor, ruled: Sequence[RuledRows], errors: dict[str, RowError]) -> None:
    """A row where nothing is left, or which a processor filled with nan or inf, has no token to choose."""
    has_token = logits.amax(dim=-1).isfinite().tolist()
    for rows in ruled:
        alive = has_token[rows.first_row : rows.first_row + len(rows.num_drafts)]
        if not all(alive):
            num_drafts, state = rows.num_drafts[alive.index(False)], rows.state
            message = f"the request's options leave no token at position {state.num_tokens + num_drafts}"
            found = RowError(num_drafts, message)
            errors[state.terms.request_id] = min(errors.get(state.terms.request_id, found), found, key=_place)


def _place(error: RowError) -> int:
    return error.num_drafts


def _joined(parts: Sequence[NDArray[np.float32]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(device)
