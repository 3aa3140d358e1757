"""Toy models small enough to try everything: what verification does, by enumeration and by many requests at once.

A toy model is a table [V, V] float64: row t is the distribution of the token after token t. START precedes a sequence.
"""

from collections.abc import Callable, Iterator
from itertools import product

import numpy as np
import torch
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from foredraft.sampling.philox import Stream, cycle_keys, uniform
from foredraft.sampling.sampler import sample

START = 0
ALIKE, BIASED = 1e-4, 1e-6  # p-values: above the first the distributions agree, below the second they do not

Verify = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], Tensor]
Keys = Callable[[Tensor, int], Tensor]
Judge = Callable[[Tensor, Tensor, tuple[int, ...]], tuple[list[float], list[float]]]


def random_table(vocab_size: int, seed: int, masked: float = 0.0, certain: float = 0.0) -> Tensor:
    """Random rows. masked: how many of the entries are 0; certain: how many of the rows are one-hot."""
    rng = torch.Generator().manual_seed(seed)
    logits = torch.randn(vocab_size, vocab_size, generator=rng, dtype=torch.float64) * 1.5
    is_masked = torch.rand(logits.shape, generator=rng) < masked
    is_masked.scatter_(1, logits.argmax(dim=1, keepdim=True), False)  # at least one token is possible
    probs = logits.masked_fill(is_masked, -torch.inf).softmax(dim=1)
    return torch.where(torch.rand(vocab_size, 1, generator=rng) < certain, most_likely(probs), probs)


def most_likely(table: Tensor) -> Tensor:
    """The table whose rows are certain of the most likely token."""
    return one_hot(table.argmax(dim=-1), table.shape[-1]).double()


def one_hot(ids: Tensor, vocab_size: int) -> Tensor:
    return torch.nn.functional.one_hot(ids, vocab_size).float()


def num_accepted(ids: Tensor) -> Tensor:
    """How many drafts each request had accepted [B], from the emitted ids [B, K+1]: all but its last token."""
    return (ids >= 0).sum(dim=1) - 1


DISJOINT = torch.eye(4, dtype=torch.float64).roll(1, 1) + torch.eye(4, dtype=torch.float64)
TABLES = {  # target, draft
    "two_tokens": (random_table(2, 1), random_table(2, 2)),
    "three_tokens": (random_table(3, 3), random_table(3, 4)),
    "five_tokens": (random_table(5, 5), random_table(5, 6)),
    "masked": (random_table(4, 7, masked=0.4), random_table(4, 8, masked=0.4)),
    "masked_in_the_target": (random_table(4, 9, masked=0.5), random_table(4, 10)),
    "certain_drafts": (random_table(3, 11), random_table(3, 12, certain=0.7)),
    "certain_rows": (random_table(4, 13, certain=0.5), random_table(4, 14, certain=0.3)),
    "greedy_target": (random_table(4, 15, certain=1.0), random_table(4, 16)),
    "disjoint": (DISJOINT / 2, DISJOINT.roll(2, 1) / 2),
    "equal": (random_table(4, 17, masked=0.3), random_table(4, 17, masked=0.3)),
    "coins": (torch.tensor([[1, 2]] * 2).double() / 3, torch.tensor([[2, 1]] * 2).double() / 3),
}


# --- by enumeration ---------------------------------------------------------------------------------------------------


def token_by_token(target: Tensor, draft: Tensor, drafts: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """Leviathan et al. 2023, as written there: the probability of exactly 0..K accepted drafts, and what is left of
    the target's probability then."""
    contexts, stops, reached = (START, *drafts), [], 1.0
    for context, token in zip(contexts, drafts):
        accepted = min(1.0, float(target[context, token] / draft[context, token]))
        stops.append(reached * (1 - accepted))
        reached *= accepted
    return [*stops, reached], [1.0] * (len(drafts) + 1)


def jointly(target: Tensor, draft: Tensor, drafts: tuple[int, ...]) -> tuple[list[float], list[float]]:
    """Sun et al. 2024, as written there; what is returned is as in `token_by_token`."""
    contexts, shares, acceptance = (START, *drafts), [1.0], [1.0]
    for depth, (context, token) in enumerate(zip(contexts, drafts), start=1):
        share = min(shares[-1] * float(target[context, token] / draft[context, token]), 1.0)
        mass = float((share * target[token] - draft[token]).clamp(min=0).sum())
        shares.append(share)
        acceptance.append(share if depth == len(drafts) or share == 1 else mass / (mass + 1 - share))
    stops = [h * float(np.prod([1 - later for later in acceptance[i + 1 :]])) for i, h in enumerate(acceptance)]
    return stops, shares


def cycles(target: Tensor, draft: Tensor, depth: int, judge: Judge) -> Iterator[tuple[tuple[int, ...], int, float]]:
    """Every outcome of a cycle: drafts, how many are accepted, and its probability."""
    for drafts in product(range(len(target)), repeat=depth):
        drafted = sequence_probability(draft, drafts)
        if drafted > 0:
            stops, _ = judge(target, draft, drafts)
            yield from ((drafts, accepted, drafted * stop) for accepted, stop in enumerate(stops))


def expected_length(target: Tensor, draft: Tensor, depth: int, judge: Judge) -> float:
    """How many drafts are accepted on average."""
    return sum(accepted * probability for _, accepted, probability in cycles(target, draft, depth, judge))


def sequence_probability(table: Tensor, tokens: tuple[int, ...]) -> float:
    return float(np.prod([float(table[pair]) for pair in zip((START, *tokens), tokens)]))


def sequence_distribution(table: Tensor, num_tokens: int, start: int = START) -> Tensor:
    """The probability of every sequence [V ** num_tokens] after a token, in the order of its tokens as digits."""
    probs, last = torch.ones(1, dtype=torch.float64), torch.tensor([start])
    for _ in range(num_tokens):
        probs = (probs[:, None] * table[last]).flatten()
        last = torch.arange(len(probs)) % len(table)
    return probs


def emitted_distribution(target: Tensor, draft: Tensor, depth: int, judge: Judge) -> Tensor:
    """The distribution of `depth` + 1 tokens: those of one cycle, continued by the target."""
    vocab_size = len(target)
    probs = torch.zeros((vocab_size,) * (depth + 1), dtype=torch.float64)
    for drafts, accepted, probability in cycles(target, draft, depth, judge):
        prefix = drafts[:accepted]
        last = (START, *prefix)[-1]
        weights = target[last]
        if accepted < depth and probability > 0:
            share = judge(target, draft, drafts)[1][accepted]
            weights = (share * target[last] - draft[last]).clamp(min=0)
            weights = weights / weights.sum()
        for token in range(vocab_size):
            continued = sequence_distribution(target, depth - accepted, token)
            probs[(*prefix, token)] += probability * weights[token] * continued.view_as(probs[(*prefix, token)])
    return probs.flatten()


# --- by many requests -------------------------------------------------------------------------------------------------


def by_position(positions: Tensor, depth: int) -> Tensor:
    """Keys for the numbers that draw drafts, which do for every rule but `block_verify`."""
    return positions + depth


def propose(
    draft: Tensor,
    last: Tensor,
    seeds: Tensor,
    positions: Tensor,
    max_drafts: int,
    keys: Keys = cycle_keys,
    stream: Stream = Stream.DRAFT,
) -> Tensor:
    """Draft tokens [N, K] after the tokens `last` [N]."""
    drafts = torch.empty(len(last), max_drafts, dtype=torch.int64)
    for depth in range(max_drafts):
        last = sample(draft[last].float(), uniform(seeds, keys(positions, depth), stream))
        drafts[:, depth] = last
    return drafts


def first_cycle(target: Tensor, draft: Tensor, verify: Verify, depth: int, num_requests: int) -> tuple[Tensor, Tensor]:
    """Drafts [N, K] of one cycle and what was emitted [N, K+1]."""
    seeds, positions = torch.arange(num_requests), torch.zeros(num_requests, dtype=torch.int64)
    last = torch.full_like(seeds, START)
    drafts = propose(draft, last, seeds, positions, depth)
    contexts = torch.cat([last[:, None], drafts], dim=1)
    return drafts, verify(drafts, draft[contexts[:, :-1]].float(), target[contexts].float(), seeds, positions)


def generate(
    target: Tensor,
    draft: Tensor,
    verify: Verify,
    num_requests: int,
    num_tokens: int,
    *,
    max_drafts: int = 3,
    vary_depth: bool = False,
    point_mass: bool = False,
    keys: Keys = cycle_keys,
    stream: Stream = Stream.DRAFT,
) -> Tensor:
    """Run cycles until every request has its tokens [N, num_tokens]; requests differ in nothing but their seeds."""
    seeds, requests, columns = torch.arange(num_requests) + 1000, torch.arange(num_requests), torch.arange(max_drafts)
    tokens = torch.full((num_requests, num_tokens + max_drafts + 1), START)
    lengths, last = torch.zeros_like(seeds), torch.full_like(seeds, START)
    while (lengths < num_tokens).any():
        drafts = propose(draft, last, seeds, lengths, max_drafts, keys, stream)
        contexts = torch.cat([last[:, None], drafts], dim=1)
        draft_probs = None if point_mass else draft[contexts[:, :-1]].float()
        if vary_depth:
            drafts = drafts.masked_fill(columns >= ((lengths + requests) % (max_drafts + 1))[:, None], -1)
        ids = verify(drafts, draft_probs, target[contexts].float(), seeds, lengths)
        is_emitted = (ids >= 0) & (lengths < num_tokens)[:, None]
        row, column = is_emitted.nonzero(as_tuple=True)
        tokens[row, lengths[row] + column] = ids[row, column]
        lengths = lengths + is_emitted.sum(dim=1)
        last = tokens[requests, lengths - 1]
    return tokens[:, :num_tokens]


def p_value(observed: Tensor, probs: Tensor) -> float:
    """Chi-square of counts against their probabilities; cells too rare for it are taken together."""
    expected = probs * observed.sum() / probs.sum()
    assert (observed[expected == 0] == 0).all(), "a token of probability 0 was emitted"
    is_rare = expected < 5
    counts, wanted = (torch.cat([t[~is_rare], t[is_rare].sum()[None]]).double().numpy() for t in (observed, expected))
    if wanted[-1] < 5:  # even together: then with the smallest of the others
        counts, wanted = (np.append(t[:-2], t[-2:].sum()) for t in (counts, wanted))
    return float(stats.chisquare(counts, wanted).pvalue) if len(wanted) > 1 else 1.0


def sequences_p_value(target: Tensor, tokens: Tensor) -> float:
    """How well whole sequences [N, L], taken as one outcome each, agree with the target's own."""
    vocab_size, num_tokens = len(target), tokens.shape[1]
    digits = vocab_size ** torch.arange(num_tokens - 1, -1, -1)
    counts = torch.bincount(tokens @ digits, minlength=vocab_size**num_tokens)
    return p_value(counts, sequence_distribution(target, num_tokens))
