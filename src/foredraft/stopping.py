"""When a request ends: rules that look at one token at a time."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum


class FinishReason(StrEnum):
    """Why a request ended."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


def first_stop(
    new_token_ids: Sequence[int], num_tokens: int, max_total_tokens: int, stop_token_ids: frozenset[int]
) -> tuple[int, FinishReason | None]:
    """How many of `new_token_ids` to keep, and why the request ends there (None: it goes on).

    num_tokens: tokens committed before them. What comes first in the sequence wins; a stop token is kept. One that may
    not stop yet (min_tokens) is never chosen.
    """
    if num_tokens + len(new_token_ids) < max_total_tokens and stop_token_ids.isdisjoint(new_token_ids):
        return len(new_token_ids), None  # nearly every step
    for index, token_id in enumerate(new_token_ids):
        total = num_tokens + index + 1
        if total > max_total_tokens:
            return index, FinishReason.LENGTH
        if token_id in stop_token_ids:
            return index + 1, FinishReason.STOP
        if total == max_total_tokens:
            return index + 1, FinishReason.LENGTH
    return len(new_token_ids), FinishReason.LENGTH if num_tokens + len(new_token_ids) >= max_total_tokens else None
