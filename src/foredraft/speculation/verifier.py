"""Which drafts are kept, and which token follows them: pure functions of tensors.

A request's drafts are the leading entries of its row that are not -1. Rows of requests do not influence each other,
and neither does the padding: a request gets the same tokens alone and in any batch.
"""

import torch
from torch import Tensor

from foredraft.sampling.philox import Stream, uniform
from foredraft.sampling.sampler import sample


def verify_greedy(draft_token_ids: Tensor, target_token_ids: Tensor) -> Tensor:
    """Emit the target's highest-scored tokens as far as the drafts foretold them, and one more.

    draft_token_ids [B, K] int64, padded with -1; target_token_ids [B, K+1] int64, the target's choice at each row.
    Returns ids [B, K+1], -1 after the last emitted token.
    """
    # The padding is never equal to a token, so it ends the run of matches like any wrong draft.
    num_matches = (draft_token_ids == target_token_ids[:, :-1]).cumprod(dim=1).sum(dim=1)
    columns = torch.arange(target_token_ids.shape[1], device=target_token_ids.device)
    return target_token_ids.masked_fill(columns > num_matches[:, None], -1)


def rejection_sample(
    draft_token_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """Emit tokens distributed as the target's own (Leviathan et al. 2023, algorithm 1).

    A draft is accepted with probability min(1, target/draft). The first rejected one is replaced by a recovered token
    from the normalised max(target - draft, 0); when all are accepted, a bonus token from the target's next row follows.

    draft_token_ids [B, K] int64, padded with -1; draft_probs [B, K, V] float32, exactly the distributions the drafts
    were drawn from, or None if each was chosen without chance (a point mass); target_probs [B, K+1, V] float32. Rows
    sum to 1, a greedy one is one-hot; those beyond a request's drafts (for the target: beyond the row after them) may
    hold anything. seeds [B] int64; positions [B] int64, of draft 0 in its sequence: every number drawn is a function of
    the seed and the position that it decides.
    Returns ids [B, K+1], -1 after the last emitted token; none has target probability 0.
    """
    num_requests, max_drafts = draft_token_ids.shape
    columns = torch.arange(max_drafts + 1, device=draft_token_ids.device)
    is_draft = (draft_token_ids >= 0).cumprod(dim=1).bool()

    uniforms = uniform(seeds[:, None], positions[:, None] + columns[:-1], Stream.ACCEPT)
    target = _probs_of(draft_token_ids, target_probs[:, :-1])
    draft = torch.ones_like(target) if draft_probs is None else _probs_of(draft_token_ids, draft_probs)
    # u < target/draft without the division; strict, so that target probability 0 is rejected even at u = 0.
    is_accepted = (uniforms * draft < target) & is_draft
    num_drafts_accepted = is_accepted.cumprod(dim=1).sum(dim=1)
    is_rejected = num_drafts_accepted < is_draft.sum(dim=1)

    requests = torch.arange(num_requests, device=draft_token_ids.device)
    weights = target_probs[requests, num_drafts_accepted]
    if max_drafts > 0:
        depth = num_drafts_accepted.clamp(max=max_drafts - 1)
        if draft_probs is None:
            rejected_ids = draft_token_ids[requests, depth].clamp(min=0)
            residual = weights.scatter(1, rejected_ids[:, None], 0.0)
        else:
            residual = (weights - draft_probs[requests, depth]).clamp(min=0)
        # Where rounding has left no residual, target and draft agree, and the target's own distribution is right.
        has_residual = is_rejected & (residual > 0).any(dim=1)
        weights = torch.where(has_residual[:, None], residual, weights)
    last_ids = sample(weights, uniform(seeds, positions + num_drafts_accepted, Stream.RECOVER))

    ids = torch.nn.functional.pad(draft_token_ids, (0, 1)).masked_fill(columns >= num_drafts_accepted[:, None], -1)
    return ids.scatter(1, num_drafts_accepted[:, None], last_ids[:, None])


def num_accepted(ids: Tensor) -> Tensor:
    """Return how many drafts each request had accepted [B], from the emitted ids [B, K+1]: all but its last token."""
    return (ids >= 0).sum(dim=1) - 1


def _probs_of(token_ids: Tensor, probs: Tensor) -> Tensor:
    """Return the probability [B, K] float64 of each token in its row. token_ids [B, K], probs [B, K, V]."""
    return probs.gather(2, token_ids.clamp(min=0)[:, :, None]).squeeze(2).double()
