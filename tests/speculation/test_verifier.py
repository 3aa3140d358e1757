"""Verification: the output is distributed as the target's own, whatever was drafted, and requests do not mix.

The toy models are tables: the next token's distribution given the last token, for a target and for a drafter that
differs from it. `generate` runs whole cycles of drafting and verifying with them, for many requests at once.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats  # type: ignore[import-untyped]
from torch import Tensor

from foredraft.sampling.philox import Stream, uniform
from foredraft.sampling.sampler import SamplingTensors, probabilities, sample
from foredraft.speculation.verifier import num_accepted, rejection_sample, verify_greedy

VOCAB_SIZE = 6
START = 0  # the token that every toy sequence continues
NUM_PAIRS = 20_000
MAX_DRAFTS = 3
ALIKE, BIASED = 1e-3, 1e-6  # p-values: above the first the distributions agree, below the second they do not

Verify = Callable[[Tensor, Tensor | None, Tensor, Tensor, Tensor], Tensor]


def table(seed: int, top_p: float = 1.0, temperature: float = 1.0) -> Tensor:
    """A toy model [V, V]: row t is the distribution after token t."""
    logits = torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)) * 1.5
    return probabilities(logits, SamplingTensors.from_params([(temperature, 0, top_p, 0)] * VOCAB_SIZE))


def one_hot(ids: Tensor, vocab_size: int = VOCAB_SIZE) -> Tensor:
    return torch.nn.functional.one_hot(ids, vocab_size).float()


def propose(
    draft: Tensor, last: Tensor, seeds: Tensor, positions: Tensor, is_greedy: bool, stream: Stream = Stream.DRAFT
) -> Tensor:
    """Draft MAX_DRAFTS tokens [N, K] after the tokens `last` [N]."""
    drafts = []
    for depth in range(MAX_DRAFTS):
        probs = draft[last]
        last = probs.argmax(dim=1) if is_greedy else sample(probs, uniform(seeds, positions + depth, stream))
        drafts.append(last)
    return torch.stack(drafts, dim=1)


def generate(
    target: Tensor,
    draft: Tensor,
    num_requests: int,
    num_tokens: int,
    *,
    is_greedy: bool = False,
    vary_depth: bool = False,
    verify: Verify = rejection_sample,
    draft_stream: Stream = Stream.DRAFT,
) -> Tensor:
    """Run cycles until every request has its tokens [N, num_tokens]; requests differ in nothing but their seeds."""
    seeds, requests = torch.arange(num_requests) + 1000, torch.arange(num_requests)
    columns = torch.arange(MAX_DRAFTS + 1)
    tokens = torch.full((num_requests, num_tokens + MAX_DRAFTS), -1)
    lengths = torch.zeros(num_requests, dtype=torch.int64)
    last = torch.full_like(lengths, START)
    while (lengths < num_tokens).any():
        drafts = propose(draft, last, seeds, lengths, is_greedy, draft_stream)
        contexts = torch.cat([last[:, None], drafts], dim=1)
        draft_probs = None if is_greedy else draft[contexts[:, :-1]]
        if vary_depth:
            drafts = drafts.masked_fill(columns[:-1] >= ((lengths + requests) % (MAX_DRAFTS + 1))[:, None], -1)
        ids = verify(drafts, draft_probs, target[contexts], seeds, lengths)
        is_emitted = (ids >= 0) & (lengths < num_tokens)[:, None]
        row, column = is_emitted.nonzero(as_tuple=True)
        tokens[row, lengths[row] + column] = ids[row, column]
        lengths = lengths + is_emitted.sum(dim=1)
        last = tokens[requests, lengths - 1]
    return tokens[:, :num_tokens]


def p_value(observed: Tensor, expected: Tensor) -> float:
    """Chi-square of counts against expected counts; cells too rare for it are taken together."""
    assert (observed[expected == 0] == 0).all(), "a token of probability 0 was emitted"
    is_rare = expected < 5
    counts, wanted = (torch.cat([t[~is_rare], t[is_rare].sum()[None]]).double().numpy() for t in (observed, expected))
    if wanted[-1] < 5:  # even together: then with the smallest of the others
        counts, wanted = (np.append(t[:-2], t[-2:].sum()) for t in (counts, wanted))
    return float(stats.chisquare(counts, wanted * (counts.sum() / wanted.sum())).pvalue)


def pair_p_value(target: Tensor, tokens: Tensor) -> float:
    """How well the first two tokens of every request [N, 2] agree with the target's distribution of pairs."""
    pairs = torch.bincount(tokens[:, 0] * VOCAB_SIZE + tokens[:, 1], minlength=VOCAB_SIZE**2)
    expected = (target[START][:, None] * target).flatten().double() * len(tokens)
    return p_value(pairs, expected)


# --- the distribution -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("vary_depth", [False, True], ids=["full_depth", "depths_vary"])
@pytest.mark.parametrize("is_greedy", [False, True], ids=["sampled_drafts", "greedy_drafts"])
@pytest.mark.parametrize(("top_p", "draft_top_p"), [(1.0, 1.0), (0.8, 0.8), (0.8, 1.0)])
def test_pairs_are_distributed_as_the_target(
    top_p: float, draft_top_p: float, is_greedy: bool, vary_depth: bool
) -> None:
    target, draft = table(1, top_p), table(2, draft_top_p)
    tokens = generate(target, draft, NUM_PAIRS, 2, is_greedy=is_greedy, vary_depth=vary_depth)
    assert pair_p_value(target, tokens) > ALIKE


@pytest.mark.parametrize("is_greedy", [False, True], ids=["sampled_drafts", "greedy_drafts"])
def test_long_sequences_are_distributed_as_the_target(is_greedy: bool) -> None:
    """Few seeds and many positions: a number used twice in a sequence, or a position counted wrongly, shows here."""
    target, draft = table(3, 0.9), table(4, 0.9)
    tokens = generate(target, draft, 100, NUM_PAIRS // 100 + 1, is_greedy=is_greedy, vary_depth=True)
    contexts, following = tokens[:, :-1].flatten(), tokens[:, 1:].flatten()
    for context in range(VOCAB_SIZE):
        counts = torch.bincount(following[contexts == context], minlength=VOCAB_SIZE)
        assert p_value(counts, target[context].double() * counts.sum()) > ALIKE


def target_in_place_of_residual(
    drafts: Tensor, draft_probs: Tensor | None, target_probs: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    ids = rejection_sample(drafts, draft_probs, target_probs, seeds, positions)
    accepted = num_accepted(ids)
    weights = target_probs[torch.arange(len(ids)), accepted]
    return ids.scatter(1, accepted[:, None], sample(weights, uniform(seeds, positions, Stream.RECOVER))[:, None])


def greedy_drafts_judged_as_sampled(
    drafts: Tensor, _: Tensor | None, target_probs: Tensor, seeds: Tensor, positions: Tensor
) -> Tensor:
    contexts = torch.cat([torch.full((len(drafts), 1), START), drafts[:, :-1]], dim=1)
    return rejection_sample(drafts, table(2)[contexts], target_probs, seeds, positions)


def test_the_chi_square_detects_wrong_rules() -> None:
    target, draft = table(1), table(2)
    wrong_residual = generate(target, draft, NUM_PAIRS, 2, verify=target_in_place_of_residual)
    wrong_ratio = generate(target, draft, NUM_PAIRS, 2, is_greedy=True, verify=greedy_drafts_judged_as_sampled)
    shared_numbers = generate(target, draft, NUM_PAIRS, 2, draft_stream=Stream.ACCEPT)
    for tokens in (wrong_residual, wrong_ratio, shared_numbers):
        assert pair_p_value(target, tokens) < BIASED


# --- acceptance -------------------------------------------------------------------------------------------------------


def first_cycle(target: Tensor, draft: Tensor, is_greedy: bool) -> tuple[Tensor, Tensor]:
    """Drafts [N, K] of one cycle and how many were accepted [N]."""
    seeds, positions = torch.arange(NUM_PAIRS), torch.zeros(NUM_PAIRS, dtype=torch.int64)
    last = torch.full_like(seeds, START)
    drafts = propose(draft, last, seeds, positions, is_greedy)
    contexts = torch.cat([last[:, None], drafts], dim=1)
    draft_probs = None if is_greedy else draft[contexts[:, :-1]]
    return drafts, num_accepted(rejection_sample(drafts, draft_probs, target[contexts], seeds, positions))


def assert_rate(num_hits: int, num_trials: int, rate: float) -> None:
    assert abs(num_hits / num_trials - rate) <= 4 * (rate * (1 - rate) / num_trials) ** 0.5


@pytest.mark.parametrize("top_p", [1.0, 0.8])
def test_acceptance_of_sampled_drafts_is_the_overlap(top_p: float) -> None:
    target, draft = table(1, top_p), table(2, top_p)
    overlap = torch.minimum(target, draft).double()
    drafts, accepted = first_cycle(target, draft, is_greedy=False)
    assert_rate(int((accepted >= 1).sum()), NUM_PAIRS, overlap[START].sum().item())
    # Depth by depth: the second draft is judged in the context of the first.
    for context in range(VOCAB_SIZE):
        is_judged = (accepted >= 1) & (drafts[:, 0] == context)
        if (num_judged := int(is_judged.sum())) > 100:
            assert_rate(int((accepted[is_judged] >= 2).sum()), num_judged, overlap[context].sum().item())


def test_acceptance_of_greedy_drafts_is_the_targets_probability() -> None:
    target, draft = table(1), table(2)
    drafts, accepted = first_cycle(target, draft, is_greedy=True)
    first, second = drafts[0, :2].tolist()
    assert_rate(int((accepted >= 1).sum()), NUM_PAIRS, target[START, first].item())
    assert_rate(int((accepted >= 2).sum()), NUM_PAIRS, (target[START, first] * target[first, second]).item())


@pytest.mark.parametrize("temperature", [0.0, 0.3, 0.7, 1.5])
def test_drafts_of_a_perfect_drafter_are_all_accepted(temperature: float) -> None:
    target = table(1, temperature=temperature)
    _, accepted = first_cycle(target, target, is_greedy=False)
    assert (accepted == MAX_DRAFTS).all()


# --- each request by itself -------------------------------------------------------------------------------------------


class Batch:
    """Random arguments of `rejection_sample`; rows beyond a request's drafts hold nan."""

    def __init__(self, num_drafts: list[int], max_drafts: int, vocab_size: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        batch_size = len(num_drafts)
        columns, counts = torch.arange(max_drafts + 1), torch.tensor(num_drafts)[:, None]

        def distributions(num_rows: int) -> Tensor:
            logits = torch.randn(batch_size, num_rows, vocab_size, generator=rng) * 2
            logits[torch.rand(logits.shape, generator=rng) < 0.3] = -torch.inf
            logits[..., 0] = 0.0  # at least one token is possible
            probs = logits.softmax(dim=-1)
            # A third of the rows is one-hot, as those of a greedy request are.
            is_one_hot = torch.rand(batch_size, num_rows, 1, generator=rng) < 0.3
            return torch.where(is_one_hot, one_hot(probs.argmax(dim=-1), vocab_size), probs)

        self.draft_probs = distributions(max_drafts)
        self.target_probs = distributions(max_drafts + 1)
        uniforms = torch.rand(batch_size * max_drafts, generator=rng, dtype=torch.float64)
        ids = sample(self.draft_probs.view(-1, vocab_size), uniforms).view(batch_size, max_drafts)
        self.ids = ids.masked_fill(columns[:-1] >= counts, -1)
        self.draft_probs[columns[:-1] >= counts] = torch.nan
        self.target_probs[columns > counts] = torch.nan
        self.seeds = torch.randint(-(2**62), 2**62, (batch_size,), generator=rng)
        self.positions = torch.randint(0, 10_000, (batch_size,), generator=rng)
        self.num_drafts = num_drafts

    def verify(
        self, rows: slice = slice(None), start: int = 0, end: int | None = None, point_mass: bool = False
    ) -> Tensor:
        """Verify the drafts from `start` to `end` of some requests."""
        return rejection_sample(
            self.ids[rows, start:end],
            None if point_mass else self.draft_probs[rows, start:end],
            self.target_probs[rows, start : None if end is None else end + 1],
            self.seeds[rows],
            self.positions[rows] + start,
        )


BATCHES = st.builds(
    Batch,
    num_drafts=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    max_drafts=st.just(4),
    vocab_size=st.sampled_from([2, 5, 300]),
    seed=st.integers(0, 2**32),
)


@settings(deadline=None)
@given(BATCHES, st.booleans())
def test_emitted_are_the_accepted_drafts_and_one_possible_token(batch: Batch, point_mass: bool) -> None:
    ids = batch.verify(point_mass=point_mass)
    assert ids.shape == (len(batch.num_drafts), 5)
    for row, (num_drafts, accepted) in enumerate(zip(batch.num_drafts, num_accepted(ids).tolist(), strict=True)):
        assert 0 <= accepted <= num_drafts
        assert ids[row, :accepted].tolist() == batch.ids[row, :accepted].tolist()
        assert (ids[row, accepted + 1 :] == -1).all()
        for column in range(accepted + 1):
            assert batch.target_probs[row, column, ids[row, column]] > 0
        if point_mass and accepted < num_drafts:
            rejected = batch.ids[row, accepted]
            assert ids[row, accepted] != rejected or batch.target_probs[row, accepted, rejected] > 0.999


@settings(deadline=None)
@given(BATCHES, st.booleans())
def test_a_request_gets_the_same_alone_and_in_a_batch_and_without_padding(batch: Batch, point_mass: bool) -> None:
    together = batch.verify(point_mass=point_mass)
    for row, num_drafts in enumerate(batch.num_drafts):
        alone = batch.verify(slice(row, row + 1), end=num_drafts, point_mass=point_mass)
        assert together[row].tolist() == alone[0].tolist() + [-1] * (4 - num_drafts)


@settings(deadline=None)
@given(BATCHES, st.booleans())
def test_a_decision_depends_on_its_position_not_on_its_depth(batch: Batch, point_mass: bool) -> None:
    """Where the first draft is accepted, the rest is as if a cycle had begun with the second."""
    whole, rest = batch.verify(point_mass=point_mass), batch.verify(start=1, point_mass=point_mass)
    is_accepted = num_accepted(whole) > 0
    assert torch.equal(whole[is_accepted, 1:], rest[is_accepted])


@settings(deadline=None)
@given(BATCHES, st.booleans())
def test_a_greedy_target_makes_it_greedy_verification(batch: Batch, point_mass: bool) -> None:
    best = batch.target_probs.nan_to_num().argmax(dim=-1)
    batch.target_probs = one_hot(best, batch.target_probs.shape[-1])
    assert torch.equal(batch.verify(point_mass=point_mass), verify_greedy(batch.ids, best))


@settings(deadline=None)
@given(BATCHES)
def test_a_one_hot_draft_distribution_is_a_point_mass(batch: Batch) -> None:
    as_point_mass = batch.verify(point_mass=True)
    batch.draft_probs = one_hot(batch.ids.clamp(min=0), batch.draft_probs.shape[-1])
    assert torch.equal(batch.verify(), as_point_mass)


def test_seeded_requests_repeat_in_any_company() -> None:
    """A large vocabulary, where sums over it would differ in the last bits with the shape of the batch."""
    rng = torch.Generator().manual_seed(0)
    batch_size, vocab_size = 6, 49152
    draft_probs = torch.randn(batch_size, 2, vocab_size, generator=rng).softmax(dim=-1)
    target_probs = torch.randn(batch_size, 3, vocab_size, generator=rng).softmax(dim=-1)
    drafts = draft_probs.argmax(dim=-1)
    seeds, positions = torch.tensor([7, 7, 8, 0, -1, 2**62]), torch.tensor([5, 6, 5, 0, 3, 2**33])
    together = rejection_sample(drafts, draft_probs, target_probs, seeds, positions)
    for rows in (slice(0, 1), slice(0, 2), slice(3, 6)):
        part = rejection_sample(drafts[rows], draft_probs[rows], target_probs[rows], seeds[rows], positions[rows])
        assert torch.equal(part, together[rows])
    assert torch.equal(rejection_sample(drafts, draft_probs, target_probs, seeds, positions), together)
    others = [rejection_sample(drafts, draft_probs, target_probs, seeds + 1, positions)]
    others.append(rejection_sample(drafts, draft_probs, target_probs, seeds, positions + 1))
    assert all((other[:, 0] != together[:, 0]).any() for other in others)


# --- single rules -----------------------------------------------------------------------------------------------------


def test_greedy_verification() -> None:
    drafts = torch.tensor([[4, 5, 6], [4, 9, 6], [9, 5, 6], [4, 5, -1], [-1, -1, -1], [4, -1, 6]])
    targets = torch.tensor([[4, 5, 6, 7]]).expand(6, -1)
    expected = [[4, 5, 6, 7], [4, 5, -1, -1], [4, -1, -1, -1], [4, 5, 6, -1], [4, -1, -1, -1], [4, 5, -1, -1]]
    ids = verify_greedy(drafts, targets)
    assert ids.tolist() == expected
    assert num_accepted(ids).tolist() == [3, 1, 0, 2, 0, 1]
    assert verify_greedy(drafts[:, :0], targets[:, :1]).tolist() == [[4]] * 6


def test_greedy_and_sampled_requests_in_one_call() -> None:
    """Vocabulary ids come out, not ranks, and the greedy request is the same beside a sampled one as alone."""
    logits = torch.zeros(2, 3, 12)
    logits[0, :, 9] = 5.0
    params = SamplingTensors.from_params([(0.0, 0, 1.0, 1), (1.0, 4, 0.9, 2)]).rows(
        torch.arange(2).repeat_interleave(3)
    )
    target_probs = probabilities(logits.view(6, 12), params).view(2, 3, 12)
    drafts = torch.tensor([[9, 3], [3, 9]])
    seeds, positions = torch.tensor([1, 2]), torch.tensor([0, 40])
    ids = rejection_sample(drafts, None, target_probs, seeds, positions)
    assert ids[0].tolist() == [9, 9, -1]  # the right draft is accepted, the wrong one replaced
    assert 0 <= ids[1, 0] < 4
    alone = rejection_sample(drafts[:1], None, target_probs[:1], seeds[:1], positions[:1])
    assert torch.equal(alone, ids[:1])


def test_a_bonus_token_comes_from_the_row_after_the_last_draft() -> None:
    target_probs = one_hot(torch.tensor([[1, 2, 3], [1, 4, 5], [2, 5, 5]]))
    drafts = torch.tensor([[1, 2], [1, -1], [-1, -1]])
    zeros = torch.zeros(3, dtype=torch.int64)
    expected = [[1, 2, 3], [1, 4, -1], [2, -1, -1]]
    assert rejection_sample(drafts, None, target_probs, zeros, zeros).tolist() == expected
    assert rejection_sample(drafts, one_hot(drafts.clamp(min=0)), target_probs, zeros, zeros).tolist() == expected
    assert rejection_sample(drafts[:, :0], None, target_probs[:, :1], zeros, zeros).tolist() == [[1], [1], [2]]


def test_an_impossible_draft_is_never_accepted() -> None:
    """Not even where the drafter gave it next to nothing, or all."""
    num_requests = 5000
    seeds, positions = torch.arange(num_requests), torch.zeros(num_requests, dtype=torch.int64)
    target_probs = torch.tensor([0.0, 0.5, 0.5]).expand(num_requests, 2, 3)
    drafts = torch.zeros(num_requests, 1, dtype=torch.int64)
    for probability in (0.0, 1e-40, 0.5, 1.0):
        draft_probs = torch.tensor([probability, 1 - probability, 0.0]).expand(num_requests, 1, 3)
        ids = rejection_sample(drafts, draft_probs, target_probs, seeds, positions)
        assert (num_accepted(ids) == 0).all()
        assert set(ids[:, 0].tolist()) <= {1, 2}


def test_without_a_residual_the_target_decides() -> None:
    """Rounding can reject a draft where target and draft agree; here it is exaggerated to a factor of two."""
    num_requests = 2000
    seeds, positions = torch.arange(num_requests), torch.zeros(num_requests, dtype=torch.int64)
    target_probs = torch.tensor([0.0, 0.3, 0.0, 0.7]).expand(num_requests, 2, 4)
    drafts = torch.full((num_requests, 1), 3)
    ids = rejection_sample(drafts, 2 * target_probs[:, :1], target_probs, seeds, positions)
    rejected = ids[num_accepted(ids) == 0, 0]
    assert 800 < len(rejected) < 1200
    counts = torch.bincount(rejected, minlength=4)
    assert counts[0] == counts[2] == 0
    assert_rate(int(counts[1]), len(rejected), 0.3)

    # A point mass that the target shares but for a last digit: nothing else is left to recover from.
    target_probs = torch.tensor([0.0, 0.0, 0.0, 0.5]).expand(num_requests, 2, 4)
    ids = rejection_sample(drafts, None, target_probs, seeds, positions)
    assert (num_accepted(ids) == 0).any()
    assert (ids[:, 0] == 3).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_same_tokens_on_a_gpu() -> None:
    for point_mass in (False, True):
        batch = Batch([0, 1, 2, 3, 4, 4, 4], 4, 3000, seed=1)
        expected = batch.verify(point_mass=point_mass)
        for name in ("ids", "draft_probs", "target_probs", "seeds", "positions"):
            setattr(batch, name, getattr(batch, name).cuda())
        assert torch.equal(batch.verify(point_mass=point_mass).cpu(), expected)
