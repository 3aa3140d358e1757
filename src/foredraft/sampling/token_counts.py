"""Which tokens a request has seen and how often it has written each: what the penalties look at."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class CountRows(NamedTuple):
    """The seen tokens of some rows: ids [U] int64; num_written [rows, U] float32, how often each is in the output
    before the row; is_seen [rows, U]: whether it is in the prompt or the output before the row."""

    ids: NDArray[np.int64]
    num_written: NDArray[np.float32]
    is_seen: NDArray[np.bool_]


class TokenCounts:
    """Counts over the committed tokens. Drafts are added to a copy for the rows after them, never to these."""

    def __init__(self, prompt_token_ids: Iterable[int]) -> None:
        self._slots = {token_id: slot for slot, token_id in enumerate(dict.fromkeys(prompt_token_ids))}
        self._ids = np.fromiter(self._slots, np.int64, len(self._slots))
        self._num_written = np.zeros(len(self._slots), np.float32)

    def add(self, token_ids: Sequence[int]) -> None:
        """These tokens are committed."""
        new = [token_id for token_id in dict.fromkeys(token_ids) if token_id not in self._slots]
        if new:
            self._slots |= {token_id: len(self._slots) + offset for offset, token_id in enumerate(new)}
            self._ids = np.concatenate([self._ids, np.array(new, np.int64)])
            self._num_written = np.concatenate([self._num_written, np.zeros(len(new), np.float32)])
        for token_id in token_ids:
            self._num_written[self._slots[token_id]] += 1

    def rows(self, draft_token_ids: Sequence[int], first: int = 0) -> CountRows:
        """For rows first..D, where row j comes after the committed tokens and the first j of D drafts."""
        num_rows, num_committed = len(draft_token_ids) + 1 - first, len(self._ids)
        new = [token_id for token_id in dict.fromkeys(draft_token_ids) if token_id not in self._slots]
        slots = {token_id: num_committed + offset for offset, token_id in enumerate(new)}
        num_written = np.zeros((num_rows, num_committed + len(new)), np.float32)
        num_written[:, :num_committed] = self._num_written
        for index, token_id in enumerate(draft_token_ids):
            slot = self._slots.get(token_id, slots.get(token_id, 0))
            num_written[max(0, index + 1 - first) :, slot] += 1
        is_seen = num_written > 0
        is_seen[:, :num_committed] = True
        return CountRows(np.concatenate([self._ids, np.array(new, np.int64)]), num_written, is_seen)
