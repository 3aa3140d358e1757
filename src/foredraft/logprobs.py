"""How likely a token was."""

from __future__ import annotations

from typing import Literal, NamedTuple

LogprobsMode = Literal["raw", "processed"]


class TokenLogprob(NamedTuple):
    """The target's log-probability of one token at its place.

    rank: 1 for the likeliest token there, 2 for the next. top: the likeliest tokens there with their log-probabilities,
    best first, as many as were asked for.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()
