"""From logits to probabilities to tokens, for rows with different settings at once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

# On a CPU, this many of the highest scores are ranked before the whole vocabulary is: a tenth of the work, and a
# nucleus is seldom larger.
_FEW_CANDIDATES = 1024


@dataclass(frozen=True)
class SamplingTensors:
    """The sampling settings of a batch, one entry a row, with what the host must know to choose the work.

    `temperature` [B] float32, 0 = greedy; `top_k` [B] int64, 0 = off; `top_p` [B] float32, 1 = off; `seeds` [B] int64.
    Build it with `from_params`: the host's fields come from host values, so that nothing waits for the device.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    seeds: Tensor
    all_greedy: bool
    any_top_k: bool
    any_top_p: bool
    num_candidates: int  # no filter of the batch keeps more tokens than this; 0: no such bound

    @classmethod
    def from_params(
        cls, params: Sequence[tuple[float, int, float, int]], device: torch.device | str = "cpu"
    ) -> "SamplingTensors":
        """Build from (temperature, top_k, top_p, seed) of each request. Seeds are taken modulo 2**64.

        Filters of a greedy row are dropped: they never remove the highest score.
        """
        rows = [(t, k, p, seed) if t else (t, 0, 1.0, seed) for t, k, p, seed in params]
        limits = [k for _, k, p, _ in rows if k or p < 1]

        def tensor(values: Sequence[float], dtype: torch.dtype) -> Tensor:
            return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)

        return cls(
            temperature=tensor([row[0] for row in rows], torch.float32),
            top_k=tensor([row[1] for row in rows], torch.int64),
            top_p=tensor([row[2] for row in rows], torch.float32),
            seeds=tensor([(row[3] + 2**63) % 2**64 - 2**63 for row in rows], torch.int64),
            all_greedy=all(row[0] == 0 for row in rows),
            any_top_k=any(row[1] > 0 for row in rows),
            any_top_p=any(row[2] < 1 for row in rows),
            num_candidates=max(limits, default=0) if all(limits) else 0,
        )

    @property
    def is_greedy(self) -> bool:
        """Whether every row is greedy."""
        return self.all_greedy

    def rows(self, index: Tensor) -> "SamplingTensors":
        """Return the settings of rows `index` [R] int64, where a request may have several."""
        return SamplingTensors(
            self.temperature[index],
            self.top_k[index],
            self.top_p[index],
            self.seeds[index],
            self.all_greedy,
            self.any_top_k,
            self.any_top_p,
            self.num_candidates,
        )


def greedy(logits: Tensor) -> Tensor:
    """Return the id of each row's highest logit, the lowest id on a tie. logits [R, V]; returns [R] int64."""
    return logits.argmax(dim=-1)


def probabilities(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return the distribution each row is sampled from: temperature, then top-k, then top-p, as transformers does.

    Unlike there, ties never widen a filter: top-k keeps exactly k tokens, and of equal ones those with the lowest ids.
    A greedy row is one-hot.

    logits [R, V], any float type; -inf masks a token, and each row has a finite one. `sampling` has R rows.
    Returns [R, V] float32; rows sum to 1.
    """
    one_hot = torch.zeros(logits.shape, dtype=torch.float32, device=logits.device)
    one_hot.scatter_(-1, greedy(logits)[:, None], 1.0)
    if sampling.all_greedy:
        return one_hot
    is_greedy = (sampling.temperature == 0)[:, None]
    scores = logits.float()
    # With the maximum at 0, dividing by a tiny temperature can overflow only towards a probability of 0.
    scores = (scores - scores.amax(dim=-1, keepdim=True)) / sampling.temperature[:, None].masked_fill(is_greedy, 1.0)
    if sampling.any_top_k or sampling.any_top_p:
        scores = scores.masked_fill(~_is_kept(scores, sampling), -torch.inf)
    return torch.where(is_greedy, one_hot, scores.softmax(dim=-1))


def sample(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Draw a token from each row by inverting its cumulative distribution.

    probs [R, V] float32, not negative; a row need not sum to 1, only its proportions count. uniforms [R] float64 in
    [0, 1). Returns [R] int64; a token of probability 0 is never drawn.
    """
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


def _is_kept(scores: Tensor, sampling: SamplingTensors) -> Tensor:
    """Return which tokens [R, V] pass top-k and top-p. scores [R, V] float32, each row's maximum 0."""
    vocab_size = scores.shape[-1]
    limits = torch.where(sampling.top_k > 0, sampling.top_k.clamp(max=vocab_size), vocab_size)
    is_unfiltered = (limits == vocab_size) & (sampling.top_p >= 1)

    bound = min(sampling.num_candidates or vocab_size, vocab_size)
    if bound > _FEW_CANDIDATES and scores.device.type == "cpu":
        ranked, num_kept = _rank(scores, sampling, limits, _FEW_CANDIDATES)
        # Few are enough for a row that keeps fewer, if its limit is among them or there is none: the mass within a
        # larger limit is not known. Only on a CPU may the host look at the outcome: elsewhere it would wait.
        is_known = (limits <= _FEW_CANDIDATES) | (limits == vocab_size)
        if not bool(((num_kept < _FEW_CANDIDATES) & is_known | is_unfiltered).all()):
            ranked, num_kept = _rank(scores, sampling, limits, bound)
    else:
        ranked, num_kept = _rank(scores, sampling, limits, bound)

    lowest = ranked.gather(-1, (num_kept - 1).clamp(max=ranked.shape[-1] - 1)[:, None])
    is_above, is_tied = scores > lowest, scores == lowest
    num_tied = num_kept[:, None] - is_above.sum(dim=-1, keepdim=True)
    return is_above | (is_tied & (is_tied.cumsum(dim=-1) <= num_tied)) | is_unfiltered[:, None]


def _rank(scores: Tensor, sampling: SamplingTensors, limits: Tensor, num_candidates: int) -> tuple[Tensor, Tensor]:
    """Return the highest scores [R, C] in descending order, and how many of them each row keeps [R]."""
    if num_candidates < scores.shape[-1]:
        ranked = scores.topk(num_candidates, dim=-1).values
    else:
        ranked = scores.sort(dim=-1, descending=True).values
    # top-p applies to what top-k has left: the mass beyond a row's limit is 0.
    ranks = torch.arange(num_candidates, device=scores.device)
    mass = ranked.double().exp().masked_fill(ranks >= limits[:, None], 0.0)
    # Without a limit it is the mass of all, summed in one way whatever the other rows need.
    total = torch.where(limits == scores.shape[-1], scores.double().exp().sum(dim=-1), mass.sum(dim=-1))
    # A token stays while those before it have not reached top_p; the first one always does.
    in_nucleus = mass.cumsum(dim=-1) - mass < sampling.top_p.double()[:, None] * total[:, None]
    num_in_nucleus = in_nucleus.sum(dim=-1).clamp(min=1)
    return ranked, torch.where(sampling.top_p < 1, torch.minimum(num_in_nucleus, limits), limits)
