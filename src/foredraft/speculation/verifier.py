"""Which drafts are kept, and which token follows them: pure functions of tensors.

A request's drafts are the leading entries of its row that are not -1. Rows of requests do not influence each other,
and neither does the padding: a request gets the same tokens alone and in any batch.
"""

import torch
from torch import Tensor

from foredraft.sampling.philox import Stream, cycle_keys, uniform
from foredraft.sampling.sampler import sample


def verify_greedy(draft_token_ids: Tensor, target_token_ids: Tensor) -> Tensor:
    """Emit the target's tokens as far as the drafts foretold them, and one more.

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
    With draft_probs None the tokens are those that the target draws by itself: the same whatever was drafted.

    draft_token_ids [B, K] int64, padded with -1; draft_probs [B, K, V] float32, exactly the distributions the drafts
    were drawn from, or None if each was chosen without chance (a point mass); target_probs [B, K+1, V] float32. Rows
    sum to 1, a greedy one is one-hot; those beyond a request's drafts (for the target: beyond the row after them) may
    hold anything. seeds [B] int64; positions [B] int64, of draft 0 in its sequence: every number drawn is a function of
    the seed and the position that it decides.
    Returns ids [B, K+1], -1 after the last emitted token; none has target probability 0.
    """
    if draft_probs is None or draft_token_ids.shape[1] == 0:
        return verify_greedy(draft_token_ids, _draw(target_probs, seeds, positions))
    depths = torch.arange(draft_token_ids.shape[1], device=draft_token_ids.device)
    uniforms = uniform(seeds[:, None], positions[:, None] + depths, Stream.ACCEPT)
    target, draft = _probs_of(draft_token_ids, target_probs[:, :-1]), _probs_of(draft_token_ids, draft_probs)
    # u < target/draft without the division; strict, so that target probability 0 is rejected even at u = 0.
    is_accepted = (uniforms * draft < target) & _is_draft(draft_token_ids)
    num_accepted = is_accepted.cumprod(dim=1).sum(dim=1)
    weights = _next_weights(draft_token_ids, num_accepted, torch.ones_like(target), draft_probs, target_probs)
    return _emit(draft_token_ids, num_accepted, weights, seeds, positions)


def block_verify(
    draft_token_ids: Tensor, draft_probs: Tensor | None, target_probs: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    """Emit tokens distributed as the target's own, of which no fewer are drafts, on average, than with
    `rejection_sample` (Sun et al. 2024, algorithm 2).

    The drafts are judged together: a likely draft makes up for an unlikely one before it. Arguments and result are
    those of `rejection_sample`, with one more condition. As drafts that are not accepted have a say in how many are,
    the numbers that drew them must not be used again in the next cycle: those of all drafts must be keyed by
    `cycle_keys`, as the numbers that accept them are here.
    """
    if draft_probs is None or draft_token_ids.shape[1] == 0:
        # Drafts chosen without chance can be emitted only as often as the target would emit them itself, which is how
        # often the plain rule accepts them: no rule that keeps the target's distribution accepts more.
        return rejection_sample(draft_token_ids, draft_probs, target_probs, seeds, positions)
    depths = torch.arange(draft_token_ids.shape[1], device=draft_token_ids.device)
    uniforms = uniform(seeds[:, None], cycle_keys(positions[:, None], depths), Stream.ACCEPT)
    shares = _prefix_shares(draft_token_ids, draft_probs, target_probs)
    # Strict, so that a probability of 0 is rejected even at u = 0. The longest accepted prefix counts, and with it the
    # drafts before its end, whatever was drawn for them.
    is_accepted = uniforms < _prefix_acceptance(draft_token_ids, shares, draft_probs, target_probs)
    num_accepted = (is_accepted * (depths + 1)).amax(dim=1)
    weights = _next_weights(draft_token_ids, num_accepted, shares, draft_probs, target_probs)
    return _emit(draft_token_ids, num_accepted, weights, seeds, positions)


def typical_accept(
    draft_token_ids: Tensor, target_probs: Tensor, seeds: Tensor, positions: Tensor, epsilon: float, delta: float
) -> Tensor:
    """Emit drafts that the target finds likely enough (typical acceptance; Cai et al. 2024, "Medusa"). Lossy: the
    tokens are NOT distributed as the target's own.

    A draft is accepted while its target probability is above min(epsilon, delta * exp(-entropy of the target's row)):
    where the target is undecided, less is asked of it. The token after the accepted drafts is drawn from the target's
    row. One-hot rows are verified greedily.

    epsilon in [0, 1), delta >= 0; the other arguments and the result are those of `rejection_sample`.
    """
    rows = target_probs[:, :-1]
    entropy = _sum(torch.special.entr(rows.double()))
    target = _probs_of(draft_token_ids, rows)
    is_accepted = (target > (delta * (-entropy).exp()).clamp(max=epsilon)) & _is_draft(draft_token_ids)
    num_accepted = is_accepted.cumprod(dim=1).sum(dim=1)
    weights = target_probs[torch.arange(len(target_probs), device=target_probs.device), num_accepted]
    return _emit(draft_token_ids, num_accepted, weights, seeds, positions)


def _is_draft(draft_token_ids: Tensor) -> Tensor:
    """Return which entries [B, K] are drafts: those before the first -1."""
    return (draft_token_ids >= 0).cumprod(dim=1).bool()


def _probs_of(token_ids: Tensor, probs: Tensor) -> Tensor:
    """Return the probability [B, K] float64 of each token in its row. token_ids [B, K], probs [B, K, V]."""
    return probs.gather(2, token_ids.clamp(min=0)[:, :, None]).squeeze(2).double()


def _draw(target_probs: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Draw the target's own token [B, K+1] of each row, as it would without drafts."""
    columns = torch.arange(target_probs.shape[1], device=target_probs.device)
    uniforms = uniform(seeds[:, None], positions[:, None] + columns, Stream.RECOVER)
    return sample(target_probs.flatten(0, 1), uniforms.flatten()).view_as(uniforms)


def _prefix_shares(draft_token_ids: Tensor, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """Return p [B, K+1] float64: how probable it is that the first i drafts are accepted, these being what they are.

    p_0 = 1, and p_i = min(p_{i-1} * target/draft, 1): what was lost by one draft, the next ones can win back.
    """
    target, draft = _probs_of(draft_token_ids, target_probs[:, :-1]), _probs_of(draft_token_ids, draft_probs)
    shares = [torch.ones_like(target[:, 0])]
    for depth in range(draft_token_ids.shape[1]):
        joint = shares[-1] * target[:, depth]
        shares.append(torch.where(joint > 0, (joint / draft[:, depth]).clamp(max=1), 0.0))
    return torch.stack(shares, dim=1)


def _prefix_acceptance(draft_token_ids: Tensor, shares: Tensor, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """Return h [B, K] float64: the probability that the first i drafts are accepted where no longer prefix is.

    On average over draft i+1, the longer prefixes are accepted with probability p_i - S_i, where S_i is the sum of
    max(p_i * target - draft, 0); so h_i = S_i / (1 - (p_i - S_i)) makes it p_i in all. At the last draft h = p.
    """
    num_drafts, share = _is_draft(draft_token_ids).sum(dim=1, keepdim=True), shares[:, 1:]
    counts = torch.arange(1, share.shape[1] + 1, device=share.device)
    missing = torch.zeros_like(share)
    for i in range(1, share.shape[1]):  # one by one, to hold a single row of float64 for each request
        missing[:, i - 1] = _sum(_residual(shares[:, i], draft_probs[:, i], target_probs[:, i]))
    # A full share is accepted for certain; where there is no S either, the quotient would be 0/0.
    is_share = (counts == num_drafts) | (share == 1)
    return torch.where(is_share, share, missing / (missing + 1 - share)).masked_fill(counts > num_drafts, 0.0)


def _next_weights(
    draft_token_ids: Tensor, num_accepted: Tensor, shares: Tensor, draft_probs: Tensor, target_probs: Tensor
) -> Tensor:
    """Return the weights [B, V] float64 of the token after the accepted drafts, recovered or bonus.

    shares [B, K or more] float64: how much of the target's probability is left after i accepted drafts.
    """
    requests = torch.arange(len(num_accepted), device=num_accepted.device)
    own = target_probs[requests, num_accepted]
    depth = num_accepted.clamp(max=draft_token_ids.shape[1] - 1)
    residual = _residual(shares[requests, depth], draft_probs[requests, depth], own)
    # Where rounding has left no residual, target and draft agree, and the target's own distribution is right.
    is_recovered = (num_accepted < _is_draft(draft_token_ids).sum(dim=1)) & (residual > 0).any(dim=1)
    return torch.where(is_recovered[:, None], residual, own.double())


def _residual(share: Tensor, draft_probs: Tensor, target_probs: Tensor) -> Tensor:
    """Return max(share * target - draft, 0) [B, V] float64. share [B], probabilities [B, V]."""
    return (share[:, None] * target_probs.double() - draft_probs.double()).clamp(min=0)


def _emit(draft_token_ids: Tensor, num_accepted: Tensor, weights: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
    """Return the accepted drafts, one token drawn by `weights` [B, V], then -1: ids [B, K+1]."""
    last_ids = sample(weights, uniform(seeds, positions + num_accepted, Stream.RECOVER))
    columns = torch.arange(draft_token_ids.shape[1] + 1, device=draft_token_ids.device)
    ids = torch.nn.functional.pad(draft_token_ids, (0, 1)).masked_fill(columns >= num_accepted[:, None], -1)
    return ids.scatter(1, num_accepted[:, None], last_ids[:, None])


def _sum(values: Tensor) -> Tensor:
    """Sum the last dimension, float64 not negative, total below 32. As integers: these add up the same in any order."""
    return (values * 2.0**58).long().sum(dim=-1).double() * 2.0**-58
