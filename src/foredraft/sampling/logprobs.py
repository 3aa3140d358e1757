"""Log-probabilities of tokens: what the target gives them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from foredraft.logprobs import TokenLogprob
from foredraft.sampling.sampler import cheapest


def token_logprobs(logprobs: Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """Look tokens up, each in its row, with the `num_top` likeliest beside it.

    logprobs [R, V] float32; token_ids: R of them. Of equally likely tokens those with the lowest ids
    come first.
    """
    chosen_ids = torch.tensor(token_ids, device=logprobs.device).unsqueeze(1)
    chosen = logprobs.gather(1, chosen_ids)
    ranks = (logprobs > chosen).sum(dim=1) + 1
    best_ids = cheapest(logprobs.neg().clamp_(min=0.0), min(num_top, logprobs.shape[1]))
    best = logprobs.gather(1, best_ids)
    found = zip(token_ids, chosen.squeeze(1).tolist(), ranks.tolist(), best_ids.tolist(), best.tolist())
    return [
        TokenLogprob(token_id, logprob, rank, _listed(ids, values)) for token_id, logprob, rank, ids, values in found
    ]


def _listed(ids: list[int], values: list[float]) -> tuple[tuple[int, float], ...]:
    return tuple(pair for pair in zip(ids, values) if pair[1] > -math.inf)  # what cannot follow is no alternative
