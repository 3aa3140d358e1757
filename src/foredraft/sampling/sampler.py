"""From logits to probabilities to tokens, for rows with different settings at once."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

# So many tokens are worked on at a time: on a CPU what it has in hand stays in its cache; on a GPU the many tensors
# between logits and tokens take no more memory in a large batch than in a middling one.
_TOKENS_ON_CPU = 2**18
_TOKENS_ON_GPU = 2**23

# Weights are summed up as integers of this unit: exactly, thus in any order and among any number of zeros. A weight is
# at most 1, so that vocabularies below 2**19 cannot overflow.
_UNITS = 2.0**44


class RowSettings(NamedTuple):
    """How the tokens of a request are sampled; the defaults of the later filters turn them off."""

    temperature: float  # 0 = greedy
    top_k: int  # 0 = off
    top_p: float  # 1 = off
    seed: int  # modulo 2**64
    min_p: float = 0.0  # 0 = off
    typical_p: float = 1.0  # 1 = off


@dataclass(frozen=True)
class SamplingTensors:
    """The sampling settings of a batch, one entry a row, with what the host must know to choose the work.

    `temperature`, `top_p`, `min_p`, `typical_p` [B] float32; `top_k`, `seeds` [B] int64; values as in `RowSettings`.
    Build it with `from_params`: the host's fields come from host values, so that nothing waits for the device.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    min_p: Tensor
    typical_p: Tensor
    all_greedy: bool
    any_greedy: bool
    any_top_k: bool
    any_top_p: bool
    any_min_p: bool
    any_typical_p: bool
    num_candidates: int  # rows that are not greedy all have a top-k, and the largest is this; 0: not all have one

    @classmethod
    def from_params(
        cls, params: Sequence[RowSettings | tuple[float, int, float, int]], device: torch.device | str = "cpu"
    ) -> "SamplingTensors":
        """Build from the settings of each request.

        Filters of a greedy row are dropped: it takes the highest logit whatever they are.
        """
        rows = [RowSettings(*row) for row in params]
        rows = [row if row.temperature else RowSettings(row.temperature, 0, 1.0, row.seed) for row in rows]
        limits = [row.top_k for row in rows if row.temperature]

        def tensor(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        return cls(
            temperature=tensor([row.temperature for row in rows], torch.float32),
            top_k=tensor([row.top_k for row in rows], torch.int64),
            top_p=tensor([row.top_p for row in rows], torch.float32),
            seeds=tensor([(row.seed + 2**63) % 2**64 - 2**63 for row in rows], torch.int64),
            min_p=tensor([row.min_p for row in rows], torch.float32),
            typical_p=tensor([row.typical_p for row in rows], torch.float32),
            all_greedy=all(row.temperature == 0 for row in rows),
            any_greedy=any(row.temperature == 0 for row in rows),
            any_top_k=any(row.top_k > 0 for row in rows),
            any_top_p=any(row.top_p < 1 for row in rows),
            any_min_p=any(row.min_p > 0 for row in rows),
            any_typical_p=any(row.typical_p < 1 for row in rows),
            num_candidates=max(limits, default=0) if all(limits) else 0,
        )

    def rows(self, index: Tensor | slice) -> "SamplingTensors":
        """Return the settings of rows `index` ([R] int64, or a slice), where a request may have several."""
        return replace(
            self,
            temperature=self.temperature[index],
            top_k=self.top_k[index],
            top_p=self.top_p[index],
            seeds=self.seeds[index],
            min_p=self.min_p[index],
            typical_p=self.typical_p[index],
        )


def greedy(logits: Tensor) -> Tensor:
    """Return the id of each row's highest logit, the lowest id on a tie. logits [R, V]; returns [R] int64."""
    return logits.float().argmax(dim=-1)  # on a CPU half the bits take four times as long


def probabilities(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return the distribution each row is sampled from, which depends on no other row, down to the last bit.

    In the order of transformers: temperature, top-k, top-p, min-p (Nguyen et al. 2024), locally typical sampling
    (Meister et al. 2022), each upon what the ones before have left. Unlike there, ties never widen a filter: of equally
    likely tokens (for typical: of equally typical ones) top-k, top-p and typical keep those with the lowest ids, and no
    more than they need. min-p compares with a threshold: equally likely tokens stay or go together.
    A greedy row is one-hot.

    logits [R, V], any float type, V < 2**19; -inf masks a token, and a row with nothing else gives zeros unless it is
    greedy. `sampling` has R rows. Returns [R, V] float32; rows sum to 1.
    """
    if sampling.all_greedy:
        return _one_hot(logits)
    probs = torch.cat([_sampled_from(logits[block], sampling.rows(block)) for block in _row_blocks(logits)])
    if sampling.any_greedy:
        probs = torch.where((sampling.temperature == 0)[:, None], _one_hot(logits), probs)
    return probs


def _sampled_from(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """The same for rows none of which is greedy; those that are may come out as anything."""
    costs = _costs(logits, sampling)
    if not 0 < sampling.num_candidates < logits.shape[1]:
        return _filtered(costs, sampling)
    # In the order of their ids, which decides ties.
    ids = cheapest(costs, sampling.num_candidates).sort(dim=-1).values
    return torch.zeros_like(costs).scatter_(-1, ids, _filtered(costs.gather(-1, ids), sampling))


def sample(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token from each row by inverting its cumulative distribution.

    probs [R, V] float32, not negative; a row need not sum to 1, only its proportions count. uniforms [R] float64 in
    [0, 1). Returns [R] int64; a token of probability 0 is never drawn.
    """
    return torch.cat([_sampled(probs[block], uniforms[block]) for block in _row_blocks(probs)] or [uniforms.long()])


def _sampled(probs: Tensor, uniforms: Tensor) -> Tensor:
    vocab_size = probs.shape[-1]
    # Integers add up exactly in any order, so the cumulative sum rises at no token of weight 0, and depends neither on
    # the device nor on the other rows. Scaling by the row's maximum, which is exact too, makes the most of their bits
    # and keeps the sum below 2**62.
    scale = 2.0 ** (62 - vocab_size.bit_length())
    highest = probs.amax(dim=-1, keepdim=True).double()
    cumulative = (probs * (scale / highest)).long().cumsum(dim=-1)
    # Of a number below 1 the product is below the sum, also when rounded: some token is always found.
    reached = (uniforms * cumulative[:, -1].double()).long()
    ids = torch.searchsorted(cumulative, reached[:, None], right=True).squeeze(-1)
    return ids.clamp(max=vocab_size - 1)  # except in a row of nan or zeros, such as an unused one: no wild index there


def _row_blocks(rows: Tensor) -> list[slice]:
    """Which rows of [R, V] to work on at once: what is between two operations stays near, and takes little memory."""
    num_at_once = max((_TOKENS_ON_CPU if rows.device.type == "cpu" else _TOKENS_ON_GPU) // rows.shape[1], 1)
    return [slice(first, first + num_at_once) for first in range(0, len(rows), num_at_once)]


def _one_hot(logits: Tensor) -> Tensor:
    zeros = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    return zeros.scatter_(-1, greedy(logits)[:, None], 1.0)


def _costs(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return how far, at its temperature, each logit is below its row's highest: [R, V] float32, from 0 to inf."""
    scores = logits.float()
    highest = scores.amax(dim=-1, keepdim=True)
    highest = highest.masked_fill(highest == -torch.inf, 0.0)  # nothing but masked tokens: inf, not nan
    temperature = sampling.temperature.masked_fill(sampling.temperature == 0, 1.0)[:, None]
    # With the highest at 0, dividing by a tiny temperature can overflow only towards a probability of 0.
    return (highest - scores).div_(temperature).abs_()  # no -0.0: see `cheapest`


def cheapest(costs: Tensor, count: int) -> Tensor:
    """Return the ids [R, count] of the lowest costs [R, V] in ascending order, of equal ones the lowest ids."""
    # Bits of numbers without a sign are ordered as the numbers are; with the id behind them, no two are equal.
    keys = costs.view(torch.int32).long().mul_(2**32).add_(torch.arange(costs.shape[-1], device=costs.device))
    return keys.topk(count, dim=-1, largest=False).values.bitwise_and_(2**32 - 1)


def _filtered(costs: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return the probabilities [R, N] of tokens of `costs` [R, N], in the order of their ids, after all filters.

    Tokens that top-k removes may be missing.
    """
    weights = (-costs).exp_()
    if sampling.any_top_k:
        num_tokens = costs.shape[-1]
        targets = sampling.top_k.masked_fill(sampling.top_k == 0, num_tokens).clamp(max=num_tokens)
        weights.masked_fill_(~_head(costs, torch.ones_like(costs, dtype=torch.int64), targets), 0.0)
    if sampling.any_top_p:
        weights.masked_fill_(~_nucleus(costs, weights, sampling.top_p), 0.0)
    if sampling.any_min_p:
        weights.masked_fill_(weights < sampling.min_p[:, None], 0.0)  # the highest weight is 1
    if sampling.any_typical_p:
        weights.masked_fill_(~_nucleus(_atypicality(costs, weights), weights, sampling.typical_p), 0.0)
        # Without the likeliest token all may be small: now their sum is as precise as any.
        weights /= weights.amax(dim=-1, keepdim=True).clamp(min=torch.finfo(weights.dtype).tiny)
    total = _masses(weights).sum(dim=-1, keepdim=True).double() / _UNITS
    return weights.div_(total.clamp(min=1.0).float())  # it is below the highest weight, 1, only in a row of zeros


def _atypicality(costs: Tensor, weights: Tensor) -> Tensor:
    """Return how far the information of each token is from its mean, the entropy: [R, N], inf for a weight of 0.

    A cost is the information less a constant of the row, thus as far from the mean cost.
    """
    costs = costs.clamp(max=1e3)  # any more has a weight of 0
    mean = _masses(weights * costs).sum(dim=-1).double() / _masses(weights).sum(dim=-1).clamp(min=1)
    return (costs - mean.float()[:, None]).abs_().masked_fill_(weights == 0, torch.inf)


def _nucleus(costs: Tensor, weights: Tensor, shares: Tensor) -> Tensor:
    """Return which tokens [R, N] stay: the cheapest until they reach a share [R] of the row's weight, 1 for all."""
    masses = _masses(weights)
    targets = (shares.double() * masses.sum(dim=-1)).ceil().long().clamp(min=1)
    return _head(costs, masses, targets) | (shares >= 1)[:, None]


def _head(costs: Tensor, masses: Tensor, targets: Tensor) -> Tensor:
    """Return which tokens [R, N] stay: in the order of (cost, id), those before which the mass is below the target.

    costs [R, N] float32, without a sign; masses [R, N] and targets [R] int64, a target from 1 to the mass of its row.
    """
    targets = targets[:, None]
    bits = costs.view(torch.int32)  # ordered as the costs are
    # A radix select: digit by digit, find the highest cost that stays. It neither sorts nor waits for a device.
    highest = torch.zeros_like(bits[:, :1])
    for shift in (20, 10, 0):
        # Of the costs with the digits found so far, count the next digit; those below or above come first or last.
        highest <<= 10
        digits = (bits >> shift).sub_(highest - 1).clamp_(0, 2049).long()
        up_to = masses.new_zeros(len(masses), 2050).scatter_add_(-1, digits, masses).cumsum(dim=-1)
        digit = (up_to < targets).sum(dim=-1, keepdim=True)
        highest += digit.int() - 1
    below = up_to.gather(-1, digit - 1)
    is_tied = bits == highest
    tied = masses * is_tied
    return (bits < highest) | (is_tied & (tied.cumsum(dim=-1) - tied < targets - below))


def _masses(weights: Tensor) -> Tensor:
    return (weights * _UNITS).long()
